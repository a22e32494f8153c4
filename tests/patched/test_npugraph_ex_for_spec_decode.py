"""Options in the training script reach vLLM's engine arguments; contradictions end the start."""

from __future__ import annotations

import asyncio

import pytest
from hydra import compose, initialize_config_module

VLLM = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
NGRAM = [f"{VLLM}.speculative_config.method=ngram", f"{VLLM}.speculative_config.num_speculative_tokens=3"]
EX = [f"{VLLM}.additional_config.enable_npugraph_ex=True"]
PIECEWISE = [f"{VLLM}.compilation_config.cudagraph_mode=PIECEWISE"]
MTP = ["actor_rollout_ref.model.mtp.enable=True", "actor_rollout_ref.model.mtp.enable_rollout=True"]


@pytest.fixture
def launch(tiny, monkeypatch):
    """Run verl's launch_server up to the engine; returns the engine's arguments."""
    import verl.utils.device
    import verl.workers.rollout.vllm_rollout.vllm_async_server as server_module
    from verl.workers.rollout.replica import RolloutMode
    from vllm.engine.arg_utils import AsyncEngineArgs

    class Server(server_module.vLLMHttpServer):
        # launch_server has parsed the command line; vLLM would load the model now.
        async def run_server(self, args):
            self.engine_args = AsyncEngineArgs.from_cli_args(args)

    def launch(*overrides, device="npu"):
        monkeypatch.setattr(server_module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
        monkeypatch.setattr(verl.utils.device, "get_device_name", lambda: device)
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", overrides=[
                f"actor_rollout_ref.model.path={tiny}/model",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.enforce_eager=False",
                "actor_rollout_ref.rollout.max_model_len=64",
                *overrides,
            ])
        rollout = config.actor_rollout_ref
        server = Server(rollout.rollout, rollout.model, RolloutMode.HYBRID, [], 0, 0, 1, 1, "0")
        asyncio.run(server.launch_server())
        return server.engine_args

    return launch


def test_options_reach_the_engine(launch):
    args = launch(*NGRAM, *EX)
    assert args.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
    assert args.additional_config == {"enable_npugraph_ex": True}
    assert args.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"


def test_elsewhere_nothing_changes(launch):
    args = launch(*NGRAM, device="cpu")
    assert args.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
    assert args.compilation_config.cudagraph_mode.name == "FULL_AND_PIECEWISE"


@pytest.mark.parametrize("overrides", [
    [*EX, *PIECEWISE],
    [*NGRAM, *MTP],
    [f"{VLLM}.additional_config.enable_static_kernel=True"],
])  # fmt: skip
def test_contradictions_end_the_start(launch, overrides):
    where = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    with pytest.raises(ValueError, match=f"contradict each other:\n  {where}"):
        launch(*overrides)

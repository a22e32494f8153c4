"""verl's rollout server, up to the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_module

from ascend_rl.settings.stack import DEFAULT, NAME


@pytest.fixture
def launch(tiny, monkeypatch):
    """Run verl's launch_server up to the engine; returns the engine's arguments."""
    import verl.utils.device
    import verl.workers.rollout.vllm_rollout.vllm_async_server as server_module
    from verl.workers.rollout.replica import RolloutMode
    from vllm.engine.arg_utils import AsyncEngineArgs

    base = server_module.vLLMHttpServer
    if NAME != DEFAULT:
        from ascend_rl.glue.cann9_1.rollout_server import Server as base

    class Server(base):
        # launch_server has parsed the command line; vLLM would load the model now.
        async def run_server(self, args):
            self.engine_args = AsyncEngineArgs.from_cli_args(args)

    def launch(*overrides, model=tiny / "model", device="npu", dies=1):
        monkeypatch.setattr(server_module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
        # verl 0.9.1 asks for its job; without one, Ray would start here, with a dashboard of 12 processes.
        job = SimpleNamespace(get_job_id=lambda: "01000000")
        monkeypatch.setattr(server_module.ray, "get_runtime_context", lambda: job)
        monkeypatch.setattr(verl.utils.device, "get_device_name", lambda: device)
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose(
                "ppo_trainer",
                overrides=[
                    f"actor_rollout_ref.model.path={model}",
                    "actor_rollout_ref.rollout.name=vllm",
                    "actor_rollout_ref.rollout.enforce_eager=False",
                    "actor_rollout_ref.rollout.max_model_len=64",
                    *overrides,
                ],
            )
        rollout = config.actor_rollout_ref
        server = Server(rollout.rollout, rollout.model, RolloutMode.HYBRID, [None] * dies, 0, 0, dies, 1, "0")
        asyncio.run(server.launch_server())
        return server.engine_args

    return launch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A random Qwen3-MoE."""
    from ascend_rl.recipe.tiny import make_model, make_tokenizer

    path, tokenizer = tmp_path_factory.mktemp("moe"), make_tokenizer()
    tokenizer.save_pretrained(path)
    make_model(tokenizer, seed=0, moe=True).save_pretrained(path)
    return path

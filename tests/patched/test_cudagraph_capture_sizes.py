"""actor_rollout_ref.rollout.cudagraph_capture_sizes reaches vLLM's compilation config."""

from __future__ import annotations

import asyncio

import pytest
from hydra import compose, initialize_config_module


@pytest.mark.parametrize("sizes", [None, [1, 2, 4]])
def test_sizes_reach_vllm(tiny, monkeypatch, sizes):
    import verl.workers.rollout.vllm_rollout.vllm_async_server as server_module
    from verl.workers.rollout.replica import RolloutMode
    from vllm.engine.arg_utils import AsyncEngineArgs

    class Server(server_module.vLLMHttpServer):
        # launch_server has parsed the command line; vLLM would load the model now.
        async def run_server(self, args):
            self.engine_args = AsyncEngineArgs.from_cli_args(args)

    monkeypatch.setattr(server_module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[
            f"actor_rollout_ref.model.path={tiny}/model",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.enforce_eager=False",
            "actor_rollout_ref.rollout.max_model_len=64",
            f"actor_rollout_ref.rollout.cudagraph_capture_sizes={'null' if sizes is None else sizes}",
        ])
    rollout = config.actor_rollout_ref
    server = Server(rollout.rollout, rollout.model, RolloutMode.HYBRID, [], 0, 0, 1, 1, "0")
    asyncio.run(server.launch_server())
    assert server.engine_args.cudagraph_capture_sizes == sizes

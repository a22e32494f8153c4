"""verl's rollout server, up to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module


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

    def launch(*overrides, model=tiny / "model", device="npu", dies=1):
        monkeypatch.setattr(server_module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
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


@contextlib.contextmanager
def importing_from_here():
    """Processes started meanwhile import from here too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def start_ray():
    """Called with the arguments of ray.init: Ray, whose processes import from here too, for one module."""
    import ray

    def start(address: str = "local", **given):
        for again in (True, True, False):
            try:
                return ray.init(address, log_to_driver=False, **given)
            except Exception:  # a raylet ends if its agents, Python programs, take longer than 15 s to start
                ray.shutdown()
                if not again:
                    raise

    with importing_from_here():
        yield start
    ray.shutdown()


@pytest.fixture(scope="session")
def forked():
    """For ``runtime_env`` of start_ray: its processes, and vLLM's, are forks of one that imported vLLM."""
    import psutil

    from ascend_rl.launch import warm_start

    with tempfile.TemporaryDirectory(prefix="warm-") as folder:  # a socket's path is short
        with importing_from_here():
            program = str(warm_start.start(Path(folder), warm_start.MODULES))
        yield {"py_executable": program}
        for process in psutil.Process().children():
            if program in process.cmdline():
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A random Qwen3-MoE."""
    from ascend_rl.recipe.tiny import make_model, make_tokenizer

    path, tokenizer = tmp_path_factory.mktemp("moe"), make_tokenizer()
    tokenizer.save_pretrained(path)
    make_model(tokenizer, seed=0, moe=True).save_pretrained(path)
    return path

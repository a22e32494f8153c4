"""vllm-ascend's worker and model runner on the software NPU: a process that imported them runs tests' jobs.

    def job(path, method): ...           # top level of a test module; arguments and result are JSON
    def test_it(npu_ground, tiny):
        assert npu_ground.run(job, str(tiny / "model"), "ngram") == ...

Each job is forked from the process, so it starts at once with fresh state. The device is software_npu/, of
the series that the tree is compiled for; vLLM finds vllm-ascend by itself. ``generate`` is the job that most
tests need. VLLM_ASCEND_TREE selects another tree than the stack's frameworks/vllm_ascend. The process is
itself a fork where PyTorch has the software NPU (test_left_out.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from warm import PATIENCE_S, Warm
from wheels import CHIPS, sites, wheels_file

from ascend_rl.host.npu_tools import built_for
from ascend_rl.process.ports import free_port
from ascend_rl.settings.stack import DEFAULT, DIRECTORY, NAME

ROOT = Path(__file__).resolve().parents[1]
WEIGHT_SYNC = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"  # worker_extension_cls


class Ground:
    """The process; use it as a context manager."""

    def __enter__(self) -> Ground:
        tree = os.environ.get("VLLM_ASCEND_TREE", DIRECTORY / "frameworks/vllm_ascend")
        built = built_for(Path(tree, "vllm_ascend"))
        uncompiled = not built and any(Path(tree).glob("vllm_ascend-*.dist-info"))  # as in a rehearsal
        tests = [ROOT / "tests" / name for name in ("cann9_1", "patched")[NAME == DEFAULT :]]
        own = [ROOT, *tests, ROOT / "tests"]  # tests/ has files of the same names
        path = [*sites(), os.environ.get("PYTHONPATH"), tree, *own]
        self.warm = Warm(
            ["npu_ground:prepare"],
            os.pathsep.join(map(str, filter(None, path))),
            like="torch_npu",
            SOFTWARE_NPU_WHEELS=str(wheels_file()),
            SOFTWARE_NPU_CHIP=CHIPS[built or "A3"],
            SOFTWARE_NPU_VLLM_ASCEND=str(int(uncompiled)),
            VLLM_ASCEND_ENABLE_NZ="0",
            VLLM_USE_AOT_COMPILE="0",  # vLLM 0.23 wants torch.compile for it, which is off
            VLLM_DISABLE_REQUEST_ID_RANDOMIZATION="1",  # a name is how KV that moves is found
        )
        return self

    def __exit__(self, *error) -> None:
        self.warm.stop()

    def run(self, function, *args, seconds: float = PATIENCE_S, **kwargs):
        """What ``function(*args, **kwargs)`` returns in a process with vllm-ascend, through JSON.

        Raises:
            AssertionError: it raised (with its traceback and output), died, or did not return in ``seconds``.
        """
        name = function.__module__.rpartition(".")[2], function.__name__
        return json.loads(self.warm.run(1, called, name, json.dumps([args, kwargs]), seconds=seconds)[0])


def called(_, name: tuple[str, str], given: str) -> str:
    module, function = name
    args, kwargs = json.loads(given)
    return json.dumps(getattr(importlib.import_module(module), function)(*args, **kwargs))


def prepare() -> None:
    """Import vllm-ascend, which vLLM finds.

    A tree from git that nobody compiled has no metadata to be found by, and names no series: A3.
    """
    import vllm.platforms

    if importlib.util.find_spec("vllm_ascend._build_info") is None:
        compiled_for("A3")
        from vllm_ascend.platform import NPUPlatform

        vllm.platforms._current_platform = NPUPlatform()
    assert vllm.platforms.current_platform.device_name == "npu"
    import ray  # noqa: F401

    import vllm.compilation.backends  # and with it torch._inductor, of engines with graphs
    import vllm.entrypoints.llm
    import vllm.plugins
    from vllm_ascend.worker import worker  # noqa: F401

    for name in ("compressed_tensors.compressed_tensors", "compressed_tensors_config"):  # of 0.13, of 0.23
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"vllm_ascend.quantization.{name}")

    if NAME != DEFAULT:  # jobs without an engine, too
        vllm.plugins.load_general_plugins()
    faulthandler.enable()
    gc.unfreeze = lambda: None  # an engine collects garbage often while it starts; imports stay frozen


def compiled_for(series: str) -> None:
    """Stands in for a tree that is compiled for a series of chips, on one of them; the wheel is for A2."""
    import types

    import vllm_ascend.utils

    build_info = types.ModuleType("vllm_ascend._build_info")
    build_info.__device_type__ = series
    sys.modules[build_info.__name__] = vllm_ascend._build_info = build_info
    vllm_ascend.utils._ascend_device_type = None
    os.environ["SOFTWARE_NPU_CHIP"] = CHIPS[series]


def save_random_model(path: Path, moe: bool = False, seed: int = 0) -> Path:
    """A tiny Qwen3 whose continuations are not as regular as those of the trained one, and its tokenizer."""
    from ascend_rl.recipe.tiny import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    for part in (tokenizer, make_model(tokenizer, seed=seed, moe=moe)):
        part.save_pretrained(path)
    return path


def make_llm(path: str, **options):
    """vLLM in this process on NPUWorker and NPUModelRunner, eager, float32, a small cache."""
    from vllm import LLM

    defaults = {"enforce_eager": True, "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8,
                "num_gpu_blocks_override": 64, "disable_log_stats": False}  # fmt: skip
    speculative = options.get("speculative_config") or {}
    if NAME != DEFAULT and speculative.get("method") == "sam":  # as stacks/cann9.1/recipe.sh says it
        own = {"method": "custom_class", "model": "ascend_rl.glue.cann9_1.sam.SamDrafter"}
        options |= {"speculative_config": speculative | own}
    return LLM(path, **defaults | options)


def generate(path: str, prompts: list[list[int]], sampling: dict, **options) -> dict:
    """Token ids by prompt, the calls of NPU operators by name, the class of the runner."""
    from software_npu.kernels.training import calls
    from vllm import SamplingParams

    llm = make_llm(path, **options)
    calls.clear()
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(requests, SamplingParams(**sampling), use_tqdm=False)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return {
        "ids": [list(output.outputs[0].token_ids) for output in outputs],
        "calls": dict(calls),
        "runner": f"{type(runner).__module__}.{type(runner).__name__}",
    }


def sync_weights(worker, weights: dict) -> None:
    """verl's weight sync to a worker with WEIGHT_SYNC, through shared memory."""
    import asyncio
    import threading

    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    sender = BucketedWeightSender(worker._get_zmq_handle(), bucket_size_mb=1, use_shm=True)
    sending = sender.async_send_weights(iter(weights.items()))
    thread = threading.Thread(target=asyncio.run, args=(sending,), daemon=True)
    thread.start()
    worker.update_weights_from_ipc(use_shm=True)
    thread.join()


def on_ranks(series: str, world: int, function, *args):
    """In a job: what ``function`` returns on rank 0 of ``world``, as vLLM's external_launcher wants them.

    The tree counts as compiled for ``series``, A2 or A3. A rank that fails ends all.
    """
    compiled_for(series)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    first, others = os.getpid(), []
    for rank in range(1, world):
        others.append(os.fork())
        if not others[-1]:
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                function(*args)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os.kill(first, signal.SIGKILL)
                os._exit(1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    try:
        return function(*args)
    finally:
        for pid in others:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

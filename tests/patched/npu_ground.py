"""vllm-ascend's worker and model runner on the software NPU: a process that imported them runs tests' jobs.

    def job(path, method): ...           # top level of a test module; arguments and result are JSON
    def test_it(npu_ground, tiny):
        assert npu_ground.run(job, str(tiny / "model"), "ngram") == ...

Each job is forked from the process, so it starts at once with fresh state. The device is software_npu/, of
the series that the tree is compiled for; vLLM finds vllm-ascend by itself. ``generate`` is the job that most
tests need. VLLM_ASCEND_TREE selects another tree than frameworks/vllm_ascend. The process is itself a fork
where PyTorch has the software NPU (test_left_out.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from warm import PATIENCE_S, cpu_s
from wheels import CHIPS, wheels_file

from ascend_rl.host.npu_tools import built_for
from ascend_rl.process.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
WEIGHT_SYNC = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"  # worker_extension_cls


class Ground:
    """The process; use it as a context manager."""

    cpu_s = 0.0

    def __enter__(self) -> Ground:
        tree = os.environ.get("VLLM_ASCEND_TREE", ROOT / "frameworks/vllm_ascend")
        own = [ROOT, ROOT / "tests/patched", ROOT / "tests"]  # tests/ has files of the same names
        path = [ROOT / "software_npu/site", os.environ.get("PYTHONPATH"), tree, *own]
        settings = {
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, path))),
            "SOFTWARE_NPU_WHEELS": str(wheels_file()),
            "SOFTWARE_NPU_CHIP": CHIPS[built_for(Path(tree, "vllm_ascend")) or "A3"],
            "VLLM_ASCEND_ENABLE_NZ": "0",
        }
        self.directory = tempfile.TemporaryDirectory(prefix="npu-ground-")
        self.log = Path(self.directory.name, "log")
        (given, jobs), (answers, taken) = os.pipe(), os.pipe()
        self.jobs, self.answers = os.fdopen(jobs, "w"), os.fdopen(answers)
        with open(given) as given, open(taken, "w") as taken, self.log.open("a") as log:
            if "torch_npu" in sys.modules:
                self.process = fork(settings, given, taken, log, [jobs, answers])
                self.wait = self.process.join
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "npu_ground"], env=os.environ | settings, start_new_session=True,
                    stdin=given, stdout=taken, stderr=log,
                )  # fmt: skip
                self.wait = self.process.wait
        return self

    def __exit__(self, *error) -> None:
        self.process.terminate()
        self.wait()
        with contextlib.suppress(BrokenPipeError), self.answers:
            self.jobs.close()
        cpu_s[0] -= self.cpu_s  # they count with the process
        self.directory.cleanup()

    def run(self, function, *args, seconds: float = PATIENCE_S, **kwargs):
        """What ``function(*args, **kwargs)`` returns in a process with vllm-ascend, through JSON.

        Raises:
            AssertionError: it raised (with its traceback and output), died, or did not return in ``seconds``.
        """
        result, name = Path(self.directory.name, "result"), function.__name__
        result.unlink(missing_ok=True)
        job = [function.__module__.rpartition(".")[2], name, args, kwargs, str(result), seconds]
        with contextlib.suppress(BrokenPipeError):
            self.jobs.write(json.dumps(job) + "\n")
            self.jobs.flush()
        used_s = float(self.answers.readline() or 0)
        self.cpu_s += used_s
        cpu_s[0] += used_s
        value, error = None, f"it died, or did not return in {seconds:.0f} s"
        if result.exists():
            value, error = json.loads(result.read_text())
        if error:
            raise AssertionError(f"{name}: ...{self.log.read_text()[-4000:]}\n{error}")
        return value


def fork(settings: dict[str, str], given, taken, log, others: list[int]) -> multiprocessing.Process:
    """``python -m npu_ground`` as a fork of this process, less the files ``others``."""

    def live() -> None:
        os.setsid()
        for file in others:
            os.close(file)
        for number, file in enumerate((given, taken, log)):
            os.dup2(file.fileno(), number)
        os.environ |= settings
        sys.path[:0] = settings["PYTHONPATH"].split(os.pathsep)
        main()

    faulthandler.cancel_dump_traceback_later()  # a fork that inherits one can set none
    process = multiprocessing.get_context("fork").Process(target=live)
    process.start()
    return process


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
    from vllm_ascend.quantization.compressed_tensors import compressed_tensors  # noqa: F401
    from vllm_ascend.worker import worker  # noqa: F401


def compiled_for(series: str) -> None:
    """Stands in for a tree that is compiled for a series of chips, on one of them; the wheel is for A2."""
    import types

    import vllm_ascend.utils

    build_info = types.ModuleType("vllm_ascend._build_info")
    build_info.__device_type__ = series
    sys.modules[build_info.__name__] = vllm_ascend._build_info = build_info
    vllm_ascend.utils._ascend_device_type = None
    os.environ["SOFTWARE_NPU_CHIP"] = CHIPS[series]


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed goes to the log
    prepare()
    faulthandler.enable()
    # An engine collects garbage many times while it starts: what is imported here is none.
    gc.freeze()
    gc.unfreeze = lambda: None
    for line in open(0):
        module, name, args, kwargs, result, seconds = json.loads(line)
        os.truncate(2, 0)  # the log is the job's
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()  # so that its ranks and planners end with it, however it ends
            faulthandler.dump_traceback_later(seconds, exit=True)
            try:
                answer = json.dumps([getattr(importlib.import_module(module), name)(*args, **kwargs), None])
            except BaseException:
                answer = json.dumps([None, traceback.format_exc()])
            Path(result).write_text(answer)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        try:
            used = os.wait4(pid, 0)[2]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        print(used.ru_utime + used.ru_stime, file=answers, flush=True)


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


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    serve()


if __name__ == "__main__":
    main()

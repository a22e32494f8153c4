"""vllm-ascend's own worker and model runner on a CPU: a process that has imported them runs the tests' jobs.

    def job(path, method): ...           # top level of a test module; arguments and result are JSON
    def test_it(npu_ground, tiny):
        assert npu_ground.run(job, str(tiny / "model"), "ngram") == ...

Each job is forked from the process, so it starts at once with fresh state. tests/stubs/npu replaces the
driver; the schemas of its operators come from the released torch-npu and vllm-ascend. ``generate`` is the
job that most tests need. VLLM_ASCEND_TREE selects another tree than frameworks/vllm_ascend.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import zipfile
from dataclasses import replace
from pathlib import Path

from warm import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
OPTION = re.compile(rb"\0(hccl_\w+)\0")
TEXT = re.compile(rb"[\t\n\x20-\x7e]{8,}")
SCHEMA = re.compile(r"(_?[a-z]\w*(?:\.\w+)?) ?\(.*\) ?-> ?\(?.*", re.S)


def top_level_names(module: ast.Module) -> set[str]:
    """What a module defines, assigns or imports at its top level."""
    names = set()
    for node in module.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def schemas_in(library: bytes) -> list[str]:
    """Operator schemas among the strings of a compiled library."""
    texts = (" ".join(text.decode().split()) for text in TEXT.findall(library))
    return sorted({text for text in texts if SCHEMA.fullmatch(text)})


def wheels_file() -> Path:
    """data/npu_wheels_VERSIONS.json: what the tests need to know of the pinned wheels, written once.

    Operator schemas by namespace; "names" that modules of torch_npu have; options of HCCL process groups.
    The compiled part of vllm-ascend is in its tree, or in its wheel where the tree was cloned from git.
    """
    import yaml

    from sources import Project, machine, pip_download

    project = Project.load(ROOT)
    ascend, vllm_ascend = project.tables["ascend"], project.framework("vllm_ascend")
    path = ROOT / f"data/npu_wheels_{ascend['torch_npu']}_{vllm_ascend.version}.json"
    if path.exists():
        return path
    torch_npu = replace(project.framework("torch_npu"), version=ascend["torch_npu"])
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        wheel = zipfile.ZipFile(pip_download(project, torch_npu, machine(), Path(scratch, "npu"), 600))
        listed = yaml.load(
            wheel.read("torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"),
            getattr(yaml, "CSafeLoader", yaml.SafeLoader),
        )
        names = {}
        for member in wheel.namelist():
            if re.fullmatch(r"torch_npu/(npu/\w+|__init__)\.py", member):
                module = member.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                names[module] = sorted(top_level_names(ast.parse(wheel.read(member))))
        atb = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse(wheel.read("torch_npu/op_plugin/atb/_atb_ops.py")).body
            if isinstance(node, ast.Assign) and node.targets[0].id in ("API_LIST", "ATB_API_LIST")
        }
        compiled = [*project.tree("vllm_ascend").glob("vllm_ascend/vllm_ascend_C*.so")]
        if compiled:
            library = compiled[0].read_bytes()
        else:
            own = zipfile.ZipFile(pip_download(project, vllm_ascend, machine(), Path(scratch, "own"), 600))
            (member,) = [name for name in own.namelist() if "/vllm_ascend_C" in name]
            library = own.read(member)
        written = {
            "npu": [entry["func"] for entry in listed["custom"]],
            "atb": schemas_in(wheel.read("torch_npu/lib/libop_plugin_atb.so")),
            "_C_ascend": schemas_in(library),
            "atb names": {"torch_npu": atb["API_LIST"], "torch_npu.atb": atb["ATB_API_LIST"]},
            "names": names,
            "HCCL options": sorted(
                {name.decode() for name in OPTION.findall(wheel.read("torch_npu/lib/libtorch_npu.so"))}
            ),
        }
        Path(scratch, "written").write_text(json.dumps(written, indent=1))
        os.replace(Path(scratch, "written"), path)
    return path


class Ground:
    """The process; use it as a context manager."""

    def __enter__(self) -> Ground:
        tree = os.environ.get("VLLM_ASCEND_TREE", ROOT / "frameworks/vllm_ascend")
        own = [ROOT, ROOT / "tests/patched", ROOT / "tests"]  # tests/ has files of the same names
        path = [ROOT / "tests/stubs/npu", os.environ.get("PYTHONPATH"), tree, *own]
        settings = {
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, path))),
            "NPU_OPERATORS": str(wheels_file()),
            "VLLM_PLUGINS": "",  # the platform is set by name: a tree cloned from git has no metadata
            "VLLM_ASCEND_ENABLE_NZ": "0",
        }
        self.directory = tempfile.TemporaryDirectory(prefix="npu-ground-")
        self.log = Path(self.directory.name, "log")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "npu_ground"], env=os.environ | settings, start_new_session=True,
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("a"),
        )  # fmt: skip
        return self

    def __exit__(self, *error) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.directory.cleanup()

    def run(self, function, *args, seconds: float = PATIENCE_S, **kwargs):
        """What ``function(*args, **kwargs)`` returns in a process with vllm-ascend, through JSON.

        Raises:
            AssertionError: it raised (with its traceback and output), or did not return in ``seconds``; then
                the process is ended.
        """
        result, name = Path(self.directory.name, "result"), function.__name__
        result.unlink(missing_ok=True)
        job = [function.__module__.rpartition(".")[2], name, args, kwargs, str(result)]
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        answered = select.select([self.process.stdout], [], [], seconds)[0] and self.process.stdout.readline()
        if answered and result.exists():
            value, error = json.loads(result.read_text())
        else:
            os.killpg(self.process.pid, signal.SIGKILL)
            error = f"no answer in {seconds} s, or the process died"
        if error:
            raise AssertionError(f"{name}: ...{self.log.read_text()[-4000:]}\n{error}")
        return value


def prepare() -> None:
    """Import vllm-ascend as vLLM's platform, built for the device of tests/stubs/npu."""
    import types

    import torch_npu.device  # noqa: F401

    import vllm.platforms

    sys.modules["vllm_ascend._build_info"] = types.ModuleType("vllm_ascend._build_info")
    sys.modules["vllm_ascend._build_info"].__device_type__ = "A3"
    from vllm_ascend.platform import NPUPlatform

    vllm.platforms._current_platform = NPUPlatform()
    import ray  # noqa: F401

    import vllm.entrypoints.llm
    from vllm_ascend.quantization.compressed_tensors import compressed_tensors  # noqa: F401
    from vllm_ascend.worker import worker  # noqa: F401


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed goes to the log
    prepare()
    faulthandler.enable()
    gc.freeze()  # an engine collects garbage many times while it starts
    for line in sys.stdin:
        module, name, args, kwargs, result = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                answer = json.dumps([getattr(importlib.import_module(module), name)(*args, **kwargs), None])
            except BaseException:
                answer = json.dumps([None, traceback.format_exc()])
            Path(result).write_text(answer)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        print("done", file=answers, flush=True)


def save_random_model(path: Path, moe: bool = False) -> Path:
    """A tiny Qwen3 whose continuations are not as regular as those of the trained one, and its tokenizer."""
    from ascend_rl.recipe.tiny import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    for part in (tokenizer, make_model(tokenizer, seed=0, moe=moe)):
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
    from torch_npu.kernels import calls

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


def on_ranks(device: str, world: int, function, *args):
    """In a job: what ``function`` returns on rank 0 of ``world``, as vLLM's external_launcher wants them.

    ``device`` is A2 or A3. A rank that fails ends all.
    """
    import torch

    import vllm_ascend.utils

    sys.modules["vllm_ascend._build_info"].__device_type__ = device
    vllm_ascend.utils._ascend_device_type = None
    torch.npu.get_soc_version = lambda: {"A2": 220, "A3": 250}[device]
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = ",".join(map(str, range(world)))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
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


if __name__ == "__main__":
    serve()

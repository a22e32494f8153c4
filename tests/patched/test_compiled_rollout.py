"""vLLM compiles although MindSpeed replaces torch.compile: since verl 0.7.1 they share no process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from mindspeed_tree import needs_mindspeed
from wheels import wheels_file

pytestmark = needs_mindspeed

PROGRAM = """
import importlib.util, sys
import torch
original = torch.compile
assert importlib.util.find_spec("mindspeed")
{imports}
foreign = sorted(name for name in sys.modules if name.startswith({others}))
print("ANSWER", torch.compile is original, foreign)
"""
ROLLOUT = """
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm_ascend.worker.worker import NPUWorker
"""
TRAINER = """
import mindspeed.megatron_adaptor
replaced = torch.compile is not original
from verl.workers.rollout.base import get_rollout_class
assert replaced and get_rollout_class("vllm", "async").__name__ == "ServerAdapter"
"""


def answer(root, imports: str, others: tuple[str, ...]) -> str:
    """What a process with these imports says, on the software NPU with MindSpeed within reach."""
    frameworks = [
        root / "software_npu/site",
        *(root / "frameworks" / name for name in ("vllm_ascend", "mindspeed")),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, frameworks)),
        "SOFTWARE_NPU_WHEELS": str(wheels_file()),
        "SOFTWARE_NPU_VLLM_ASCEND": "1",
        "VLLM_ASCEND_ENABLE_NZ": "0",
    }
    program = PROGRAM.format(imports=imports, others=others)
    ran = subprocess.run([sys.executable, "-c", program], env=environment, text=True, capture_output=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.partition("ANSWER ")[2].strip()


def test_the_processes_of_a_rollout_keep_torch_compile(root):
    assert answer(root, ROLLOUT, ("mindspeed", "megatron")) == "True []"


@pytest.mark.long
def test_a_trainer_with_mindspeed_has_no_engine(root):
    assert answer(root, TRAINER, ("vllm.v1.worker.gpu_model_runner", "vllm_ascend.worker")) == "False []"

"""vllm-ascend's own NPUWorker and NPUModelRunner, unmodified, on the software NPU: Hugging Face's tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import ascend_build
import pytest
import torch
from device_job import ROOT, SITE
from wheels import CHIPS, wheels_file

pytestmark = pytest.mark.long

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [2] * 20]
NEW_TOKENS = 8
PROGRAM = """
import json, sys
import torch
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], enforce_eager=True, dtype="float32", max_model_len=512, num_gpu_blocks_override=64)
requests = [{"prompt_token_ids": prompt} for prompt in json.loads(sys.argv[2])]
sampling = SamplingParams(temperature=0, max_tokens=int(sys.argv[3]), ignore_eos=True)
outputs = llm.generate(requests, sampling, use_tqdm=False)
worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
print("ANSWER", json.dumps({
    "ids": [list(output.outputs[0].token_ids) for output in outputs],
    "runner": type(worker.model_runner).__module__,
    "weights": str(next(worker.model_runner.model.parameters()).device),
    "bytes": torch.npu.memory_allocated(),
}))
"""


def run(tiny, chip: str) -> subprocess.CompletedProcess[str]:
    """PROGRAM, with only the device and the tree on its path: vLLM has to find its platform itself."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([SITE, str(ROOT / "frameworks/vllm_ascend")]),
        "SOFTWARE_NPU_WHEELS": str(wheels_file()),
        "SOFTWARE_NPU_CHIP": chip,
        "VLLM_ASCEND_ENABLE_NZ": "0",
    }
    arguments = [str(tiny / "model"), json.dumps(PROMPTS), str(NEW_TOKENS)]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=False)


@pytest.fixture(scope="module")
def series() -> str:
    """What frameworks/vllm_ascend is compiled for."""
    found = ascend_build.built_for(ROOT / "frameworks/vllm_ascend/vllm_ascend")
    return found or pytest.skip("frameworks/vllm_ascend is not compiled")


def test_greedy_tokens_equal_hugging_face(tiny, series):
    from transformers import AutoModelForCausalLM

    ran = run(tiny, CHIPS[series])
    answers = [line for line in ran.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, ran.stdout[-2000:] + ran.stderr[-4000:]
    result = json.loads(answers[0].removeprefix("ANSWER "))
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    for prompt, ids in zip(PROMPTS, result["ids"], strict=True):
        whole = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                whole = torch.cat([whole, model(whole).logits[:, -1].argmax(-1, keepdim=True)], 1)
        assert ids == whole[0, len(prompt) :].tolist()
    assert (result["runner"], result["weights"]) == ("vllm_ascend.worker.model_runner_v1", "npu:0")
    assert result["bytes"] > sum(p.numel() * 4 for p in model.parameters())


def test_what_is_compiled_for_another_series_is_refused(tiny, series):
    """As an Atlas A3 refuses the released wheel."""
    (other,) = CHIPS.keys() - {series}
    ran = run(tiny, CHIPS[other])
    assert ran.returncode and "ANSWER" not in ran.stdout
    assert f"{other} does not match the installed version's device type" in ran.stdout + ran.stderr

"""vllm-ascend's own NPUWorker and NPUModelRunner, unmodified, on the software NPU: Hugging Face's tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch
from device_job import ROOT, SITE
from npu_ground import wheels_file

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [2] * 20]
NEW_TOKENS = 8
PROGRAM = """
import json, sys
import types, torch, vllm.platforms
info = sys.modules["vllm_ascend._build_info"] = types.ModuleType("vllm_ascend._build_info")
info.__device_type__ = "A3"  # the wheel says A2, which an A3 refuses
from vllm_ascend.platform import NPUPlatform
vllm.platforms._current_platform = NPUPlatform()
import npu_ground
from vllm import SamplingParams
llm = npu_ground.make_llm(sys.argv[1])
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


def test_greedy_tokens_equal_hugging_face(tiny):
    from transformers import AutoModelForCausalLM

    own = [ROOT, ROOT / "tests/patched", ROOT / "tests"]
    path = [SITE, ROOT / "frameworks/vllm_ascend", *own]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "SOFTWARE_NPU_WHEELS": str(wheels_file()),
        "VLLM_ASCEND_ENABLE_NZ": "0",
    }
    arguments = [str(tiny / "model"), json.dumps(PROMPTS), str(NEW_TOKENS)]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    run = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    answers = [line for line in run.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, run.stdout[-2000:] + run.stderr[-4000:]
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

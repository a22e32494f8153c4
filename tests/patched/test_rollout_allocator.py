"""ROLL's rollout switches expandable segments off in the allocator of the platform it runs on."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, json, sys
import transformers.modeling_utils, vllm  # before the stand-in, which has no operators for them
sys.path += sys.argv[1:]  # after PYTHONPATH, where a variant of the tree may be
import torch_npu
import roll.third_party.vllm as rollout
from roll.platforms import current_platform

class Reached(Exception):
    pass

def next_step(**arguments):
    raise Reached

rollout.AsyncEngineArgs = next_step
try:
    asyncio.run(rollout.create_async_llm([]))
except Reached:
    print(json.dumps([current_platform.device_type, torch_npu.allocator_settings]))
"""


def test_npu_allocator_is_switched(root, tmp_path):
    if not (root / "frameworks/roll").is_dir():
        pytest.skip("no roll checkout")
    command = [sys.executable, "-c", PROGRAM, root / "tests/stubs/npu", root / "frameworks/roll"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == ["npu", ["expandable_segments:False"]]

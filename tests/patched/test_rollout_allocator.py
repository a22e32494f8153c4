"""ROLL's rollout switches expandable segments off in the allocator of the platform it runs on."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from ranks import SITE
from wheels import wheels_file

PROGRAM = """
import asyncio, json, sys
sys.path += sys.argv[1:]  # after PYTHONPATH, where a variant of the tree may be
import torch
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
    print(json.dumps([current_platform.device_type, torch.npu.memory.allocator_options()]))
"""


def test_npu_allocator_is_switched(root, tmp_path):
    if not (root / "frameworks/roll").is_dir():
        pytest.skip("no roll checkout")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(SITE)]))
    command = [sys.executable, "-c", PROGRAM, root / "frameworks/roll"]
    environment = os.environ | {
        "PYTHONPATH": path,
        "VLLM_PLUGINS": "",
        "SOFTWARE_NPU_WHEELS": str(wheels_file()),
    }
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == ["npu", {"expandable_segments": "False"}]

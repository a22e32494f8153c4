"""Every benchmark starts, comes to its end and stores its bars; its times say little on a busy machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ascend_host import needs_git

from ascend_rl.settings.stack import DEFAULT, NAME

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

ROOT = Path(__file__).resolve().parent.parent
# Whose bars are no times: they are the test of what they measure.
EXACT = {"faults", "router_replay", "vllm_ascend_tests"}
STACKS = {"router_replay": "cann9.1"}  # the others run on the default one


def params() -> list:
    names = sorted(path.stem.removeprefix("bench_") for path in ROOT.glob("bench/bench_*.py"))
    names = [name for name in names if STACKS.get(name, DEFAULT) == NAME]
    return [pytest.param(name, marks=[needs_git] * (name == "vllm_ascend_tests")) for name in names]


@pytest.mark.parametrize("name", params())
def test_a_benchmark_runs_quickly(name):
    """Status 1 is a bar that was missed, which a busy machine may do, unless nothing was measured."""
    started = time.time()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, ROOT / f"bench/bench_{name}.py", "--quick"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    said = ran.stdout[-3000:] + ran.stderr[-3000:]
    assert ran.returncode in ([0] if name in EXACT else [0, 1]) and "Traceback" not in ran.stderr, said
    results = [file for file in ROOT.glob("bench/results/*.json") if file.stat().st_mtime >= started]
    assert any(json.loads(file.read_text())["bars"] for file in results), said

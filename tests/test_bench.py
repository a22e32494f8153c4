"""Every benchmark starts, comes to its end and stores its bars; its figures say little on a busy machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = sorted(ROOT.glob("bench/bench_*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem.removeprefix("bench_"))
def test_a_benchmark_runs_quickly(path):
    """Status 1 is a bar that was missed, which a busy machine may do, unless nothing was measured."""
    started = time.time()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, path, "--quick"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    said = ran.stdout[-3000:] + ran.stderr[-3000:]
    assert ran.returncode in (0, 1) and "Traceback" not in ran.stderr, said
    results = [file for file in ROOT.glob("bench/results/*.json") if file.stat().st_mtime >= started]
    assert any(json.loads(file.read_text())["bars"] for file in results), said

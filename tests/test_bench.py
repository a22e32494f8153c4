"""Every benchmark starts, comes to its end and stores its bars; its times say little on a busy machine.

Most run only with --weekly: what they measure has tests of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ascend_host import needs_git
from runs import run_benchmark

from ascend_rl.settings.stack import DEFAULT, NAME

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

ROOT = Path(__file__).resolve().parent.parent
# Whose bars are no times: they are the test of what they measure.
EXACT = {"faults", "router_replay", "vllm_ascend_tests"}
STACKS = {"router_replay": "cann9.1"}  # the others run on the default one
ELSEWHERE = {"dapo", "slow_ranks"}  # test_quickstart.py has a run for them
SHORT = {"length_scheduler", "preflight"}


def params() -> list:
    names = {path.stem.removeprefix("bench_") for path in ROOT.glob("bench/bench_*.py")} - ELSEWHERE
    assert names >= SHORT
    return [
        pytest.param(
            name,
            marks=[needs_git] * (name == "vllm_ascend_tests") + [pytest.mark.weekly] * (name not in SHORT),
        )
        for name in sorted(names)
        if STACKS.get(name, DEFAULT) == NAME
    ]


@pytest.mark.parametrize("name", params())
def test_a_benchmark_runs_quickly(name):
    run_benchmark(name, statuses=[0] if name in EXACT else [0, 1])

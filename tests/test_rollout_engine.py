"""What bench/bench_rollout_engine.py compares, and what it refuses; its servers start in a benchmark only."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest


@pytest.fixture
def bench(root, monkeypatch):
    monkeypatch.syspath_prepend(root / "bench")
    import bench_rollout_engine

    return bench_rollout_engine


@pytest.mark.parametrize(("arguments", "status", "said"), [
    (["-h"], 0, "--switches"),
    (["--servers", "5"], 2, "--servers must be 1 to 4"),
    (["--switches", "speed"], 2, "invalid choice: 'speed'"),
    (["--devices", "gpu"], 2, "invalid choice: 'gpu'"),
])  # fmt: skip
def test_arguments(root, arguments, status, said):
    command = [sys.executable, root / "bench/bench_rollout_engine.py", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == status and said in ran.stdout + ran.stderr


def test_each_switch_is_compared_and_all_that_go_together(bench):
    everything = [*bench.SWITCHES]
    npu, cpu = (bench.rows_of(everything, device) for device in ("npu", "cpu"))
    assert [*npu] == [*everything, "all but async", "all but sam"]
    assert {*everything} - cpu.keys() == {"async", "no_graphs"} and [*cpu][-1] == "all"
    for row, left in (("all but async", "ahead"), ("all but sam", "drafted")):
        counts = {count for name in everything for count in bench.SWITCHES[name].counts}
        assert {*npu[row].counts} == counts - {left}
        assert npu[row].moves and npu[row].placed and npu[row].variables == {"ROLLOUT_DISABLE_GC": "1"}
        options = " ".join(npu[row].options)
        assert ("async_scheduling" in options) != ("speculative_config" in options)
        assert "enforce_eager" not in options
    assert [*bench.rows_of(["gc"], "npu")] == ["gc"]


def test_lengths_have_a_long_tail_and_prompts_in_common(bench):
    tokens = bench.lengths(5)
    assert tokens.shape == (5, bench.PROMPTS * bench.SAMPLES) and tokens.min() > 0
    assert (tokens == bench.lengths(5)).all()
    assert tokens.max() <= bench.LONGEST and tokens.max() > 3 * np.median(tokens)
    logs = np.log(tokens.reshape(5, bench.PROMPTS, bench.SAMPLES))
    assert logs.std(2).mean() < 0.5 * logs.mean(2).std()


def test_a_row_has_the_speed_of_all_its_rollouts(bench):
    runs = [
        {"tokens": 100, "seconds": seconds, "running": []} | dict.fromkeys(bench.COLUMNS, count)
        for seconds, count in ((1.0, 2), (4.0, 4))
    ]
    found = bench.row("sam", runs, 1.5, 1.2, 1.6)
    assert (found["tokens/s"], found["ratio"], found["of epochs"]) == (40, 1.5, (1.2, 1.6))
    assert found["drafted"] == 3

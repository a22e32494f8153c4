"""What the times of the ranks cost, and how well they tell a slow die.

Usage:    python bench/bench_slow_ranks.py [--quick] [--run DIR]
DAPO on the tiny Qwen3 with two FSDP ranks, of which one computes 30% longer (tests/e2e/slow_rank.py). Printed
is what measuring costs as a share of a step: spans of a rank, counted in the run, each with the time that one
takes here; and how long the trainer waits for the ranks' answers, as ranks.jsonl has it. A span on an NPU is
two events, whose cost this cannot measure. Bars: below 0.5% of a step, and the slow rank is the one named.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path

from bars import ROOT, bar, finish, parser_of

from ascend_rl.process.logs import records
from ascend_rl.process.rank_times import Clock
from ascend_rl.recipe.report_figures import read_metrics, series
from ascend_rl.rollout import slow_ranks

SLOW, OTHER = 1, 0


def span_s() -> float:
    """Seconds that a span adds to a call."""

    def nothing() -> None:
        pass

    timed, count = Clock().collective(nothing), 20_000
    return (min(timeit.repeat(timed, number=count)) - min(timeit.repeat(nothing, number=count))) / count


def train(output: Path, steps: int) -> None:
    variables = {
        "NPUS_PER_NODE": "2", "STEPS": str(steps), "OUTPUT_DIR": str(output), "SKIP_REPORT": "1",
        "PYTHONPATH": str(ROOT / "tests/e2e"),
    }  # fmt: skip
    command = ["bash", "ray_start_npu.sh", "internal/train_dapo_qwen3_tiny_cpu.sh", "internal/cpu_env.sh"]
    options = ["actor_rollout_ref.model.external_lib=slow_rank", "trainer.val_before_train=False"]
    ran = subprocess.run(
        [*command, *options, "trainer.test_freq=-1"],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
    )
    if ran.returncode:
        sys.exit(f"the run failed:\n{(ran.stdout + ran.stderr).decode(errors='replace')[-3000:]}")


def main() -> int:
    parser = parser_of(__doc__, "6 steps, not 30")
    parser.add_argument("--run", type=Path, metavar="DIR", help="a finished run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = arguments.run or Path(folder, "run")
        if not arguments.run:
            train(output, 6 if arguments.quick else 30)
        log = (output / "train.log").read_text(errors="replace")
        lines = [line for line in records(output / slow_ranks.FILE) if line["ranks"]]
        times = dict(zip(*series(read_metrics(output / "metrics.jsonl"), "timing_s/step"), strict=True))
    each = span_s()
    spans = [max(rank["calls"] + 2 * rank["micro_batches"] for rank in line["ranks"]) for line in lines]
    step_s = statistics.median(times[line["step"]] for line in lines)
    asked_s = statistics.median(line["asked_s"] for line in lines)
    of_spans, of_asking = 100 * each * statistics.median(spans) / step_s, 100 * asked_s / step_s
    print(
        f"median step {step_s:.2f} s; spans per step {statistics.median(spans):.0f}, each {1e6 * each:.1f} us"
    )
    print(f"{'spans':<12}{of_spans:8.3f} % of a step\n{'answers':<12}{of_asking:8.3f} % of a step")
    print(f"\n{'rank':<6}{'forward':>10}{'backward':>10}{'collectives':>13}{'ratio':>8}   medians, s")
    for rank in (OTHER, SLOW):
        medians = [
            statistics.median(line["ranks"][rank][name] for line in lines)
            for name in ("forward_s", "backward_s", "collectives_s", "ratio")
        ]
        print(f"{rank:<6}{medians[0]:10.3f}{medians[1]:10.3f}{medians[2]:13.3f}{medians[3]:8.2f}")
    named = re.findall(r"rank (\d+) \(\S+, device \d*\) computes", log)
    bars = [
        bar("spans and answers", of_spans + of_asking, "% of a step", "< 0.5"),
        bar("ranks named", len(named), "", "= 1"),
        bar("named rank", int(named[0]) if named else -1, "", f"= {SLOW}"),
    ]
    return finish("slow_ranks", bars, spans=spans, span_s=each, step_s=step_s, asked_s=asked_s)


if __name__ == "__main__":
    sys.exit(main())

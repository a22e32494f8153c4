"""DAPO's dynamic sampling against GSPO on the tiny task: held-out accuracy per trained and generated sample.

Usage:    python bench/bench_dapo.py [--quick] [--steps 40] [--runs DAPO GSPO]
Example:  python bench/bench_dapo.py --runs outputs/dapo outputs/gspo      # existing runs
          python bench/bench_dapo.py                                       # about 6 minutes on 2 idle cores
Both recipes start from the same weights, train on 64 responses per step with the same learning rates, and
answer the same held-out prompts greedily every 10 steps. Bar: at the end, and on average over the run, DAPO
is not more than 0.02 below GSPO at equal numbers of trained samples. One run each: a difference below 0.03
may be chance.
Before that it draws random groups and counts, for several shares of groups that differ, the prompts and
batches that a step takes with sized batches and with whole ones. Bar: sized batches never take more prompts.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from bars import ROOT, bar, canvas, finish, parser_of, save

from ascend_rl.recipe.report_figures import read_metrics
from ascend_rl.rollout.dapo import DynamicSampling

BATCH, SAMPLES = 16, 4
RECIPES = {"DAPO": "train_dapo_qwen3_tiny_cpu.sh", "GSPO": "train_gspo_qwen3_tiny_cpu.sh"}
ACCURACY = "val-core/tiny/addition/acc/mean@1"


def cost_of_steps(share: float, prompts: int, steps: int) -> dict[str, float]:
    """Mean prompts and batches of a step with batches as large as a training batch, sized and whole."""
    rng = np.random.default_rng(0)
    took = {"sized prompts": 0, "sized batches": 0, "whole prompts": 0, "whole batches": 0}
    for _ in range(steps):
        varies = rng.random(30 * prompts) < share
        metric = np.stack([np.zeros(len(varies)), varies], axis=1)
        search = DynamicSampling(prompts, 2, prompts, 1, max_batches=0, data=len(varies))
        size = prompts
        while not search.complete:
            drawn = metric[search.drawn : search.drawn + size].ravel()
            search.add(drawn, drawn)
            size = search.next_size() if not search.complete else 0
        batches = int(np.flatnonzero(varies)[prompts - 1]) // prompts + 1
        found = (search.drawn, search.batches, batches * prompts, batches)
        took = {key: value + more for (key, value), more in zip(took.items(), found, strict=True)}
    return {key: value / steps for key, value in took.items()}


def train(name: str, steps: int) -> Path:
    """Run a recipe and return the path of its metrics."""
    output = ROOT / f"outputs/bench_dapo_{name.lower()}"
    command = ["bash", "ray_start_npu.sh", f"internal/{RECIPES[name]}", "internal/cpu_env.sh"]
    variables = {"STEPS": str(steps), "OUTPUT_DIR": str(output), "SKIP_REPORT": "1"}
    tested = f"trainer.test_freq={min(10, steps)}"
    subprocess.run([*command, tested], cwd=ROOT, check=True, env=os.environ | variables)
    return output


def curve(run: Path) -> dict:
    """Held-out accuracy of a run, the samples trained and generated up to then, and the cost of filtering."""
    rows = read_metrics(run / "metrics.jsonl")
    training = [row for row in rows if "critic/rewards/mean" in row]
    prompts = np.cumsum([0] + [row.get("dapo/generated_prompts", BATCH) for row in training])
    points = [row for row in rows if ACCURACY in row]
    steps = [row["step"] for row in points]
    return {
        "steps": len(training),
        "trained": [step * BATCH * SAMPLES for step in steps],
        "generated": [int(prompts[step]) * SAMPLES for step in steps],
        "accuracy": [row[ACCURACY] for row in points],
        "gen_batches": [row.get("dapo/num_gen_batches", 1) for row in training],
        "kept_share": [row.get("dapo/kept_share", 1.0) for row in training],
        "step_s": float(np.median([row["timing_s/step"] for row in training[1:]])),
        "rollout_s": float(np.median([row["timing_s/gen"] for row in training[1:]])),
    }


def draw(curves: dict[str, dict]) -> None:
    figure, (trained, generated, batches) = canvas(1, 3, figsize=(12, 3.6))
    for name, data in curves.items():
        trained.plot(data["trained"], data["accuracy"], "o-", markersize=4, label=name)
        generated.plot(data["generated"], data["accuracy"], "o-", markersize=4, label=name)
        batches.plot(range(1, data["steps"] + 1), data["gen_batches"], label=name)
    for axes, label in ((trained, "responses trained on"), (generated, "responses generated")):
        axes.set(xlabel=label, title="held-out accuracy, greedy", ylim=(0, 1.02))
    batches.set(xlabel="step", title="generation batches of a step")
    for axes in (trained, generated, batches):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    save(figure, "dapo")


def main() -> int:
    parser = parser_of(__doc__, "2 steps of DAPO, next to themselves")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--runs", type=Path, nargs=2, metavar=("DAPO", "GSPO"), help="finished runs")
    args = parser.parse_args()
    steps = 2 if args.quick else args.steps
    costs = []
    print("groups  share  prompts of a step: sized  whole  fewest   batches: sized  whole")
    for prompts, share in itertools.product((BATCH, 512), (0.9, 0.7, 0.5, 0.25, 0.125)):
        cost = cost_of_steps(share, prompts, 40 if args.quick else 400)
        costs.append({"groups": prompts, "share": share, "fewest": prompts / share, **cost})
        print(
            f"{prompts:6} {share:6} {cost['sized prompts']:25.1f} {cost['whole prompts']:6.1f} "
            f"{prompts / share:7.1f} {cost['sized batches']:16.2f} {cost['whole batches']:6.2f}"
        )
    most = max(cost["sized prompts"] / cost["whole prompts"] for cost in costs)

    runs = args.runs or [train(name, steps) for name in [*RECIPES][: 1 if args.quick else 2]]
    runs *= 2 // len(runs)
    curves = {name: curve(run) for name, run in zip(RECIPES, runs, strict=True)}
    dapo, gspo = curves["DAPO"], curves["GSPO"]
    if dapo["trained"] != gspo["trained"]:
        sys.exit(f"the runs were measured at different steps: {dapo['trained']} and {gspo['trained']}")

    print(f"{'trained':>8} {'DAPO':>6} {'GSPO':>6}   generated by DAPO, GSPO")
    columns = (dapo["trained"], dapo["accuracy"], gspo["accuracy"], dapo["generated"], gspo["generated"])
    for row in zip(*columns, strict=True):
        print("{:8} {:6.3f} {:6.3f}   {} {}".format(*row))
    for name, data in curves.items():
        batches, kept = np.mean(data["gen_batches"]), np.mean(data["kept_share"])
        print(f"{name}: {batches:.2f} generation batches per step, {kept:.2f} kept, median step "
              f"{data['step_s']:.2f} s, of it rollout {data['rollout_s']:.2f} s")  # fmt: skip
    # GSPO with as many generated responses as DAPO at each of its points, as far as GSPO went.
    within = np.array(dapo["generated"]) <= gspo["generated"][-1]
    same = np.interp(dapo["generated"], gspo["generated"], gspo["accuracy"])
    by_generated = float(np.mean((np.array(dapo["accuracy"]) - same)[within]))
    print(f"DAPO - GSPO, held out, mean by generated samples: {by_generated:+.3f}")
    end = dapo["accuracy"][-1] - gspo["accuracy"][-1]
    mean = float(np.mean(np.subtract(dapo["accuracy"], gspo["accuracy"])))
    bars = [bar("prompts of a step, sized over whole batches, most", most, "", "<= 1")]
    if not args.quick:
        bars += [
            ("DAPO - GSPO, held out, at the end", end, "", ">= -0.02", end >= -0.02),
            ("DAPO - GSPO, held out, mean by trained samples", mean, "", ">= -0.02", mean >= -0.02),
        ]
    status = finish("dapo", bars, costs=costs, mean_by_generated=by_generated, curves=curves)
    draw(curves)
    return status


if __name__ == "__main__":
    sys.exit(main())

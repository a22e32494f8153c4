"""GRPO, GRPO with router replay, and GSPO on the tiny MoE: curves, routes, the gap to the rollout.

Usage:    python bench/bench_router_replay.py [--quick] [--steps 80] [--seeds 2] [--read]
Example:  python bench/bench_router_replay.py            # 9 runs of about 4 minutes on 2 cores
          python bench/bench_router_replay.py --read     # the tables of those runs again
The tiny MoE's recipes on STACK=cann9.1, which must be built: two updates per step, Megatron EP2, two vLLM
servers. All start from the same weights; a seed decides the order of the prompts and what vLLM draws. They
run in bfloat16, with the trainer's router in float32 as in the recipe of Qwen3-30B-A3B; GRPO with R3 also
once in float32.
A route is the experts of a token in a layer. What was replayed is compared with what the trainer's router
chooses itself: with the rollout's weights where log-probs are computed (R3), and in updates.
Bars: replayed are all routes but the last of each response (R3), or all (R2); in bfloat16 R3 changes some;
and with it the mean gap is smaller than without.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from bars import ROOT, bar, canvas, finish, parser_of, save
from tqdm import tqdm

from ascend_rl.process.counts import VARIABLE, counted
from ascend_rl.recipe.report_figures import finite, read_metrics, series
from ascend_rl.settings.metrics import CLIPPED, ENTROPY, GAP_MAX, GAP_MEAN, LOG_GAP, REWARD

OUTPUT = ROOT / "outputs/bench_router_replay"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
HELD_OUT, GRAD_NORM, TOKENS = "val-core/tiny/addition/acc/mean@1", "actor/grad_norm", "perf/total_num_tokens"
ALGORITHMS = {  # name: (recipe, ROUTER_REPLAY)
    "GRPO": ("grpo", ""),
    "GRPO + R2": ("grpo", "R2"),
    "GRPO + R3": ("grpo", "R3"),
    "GSPO": ("gspo", ""),
}
OVERRIDES = {
    "float32": [],
    "bfloat16": [
        f"{ROLLOUT}.dtype=bfloat16",
        f"{ACTOR}.megatron.dtype=bfloat16",
        f"+{ACTOR}.megatron.override_transformer_config.moe_router_dtype=fp32",
    ],
}
LAYERS, RESPONSES = 2, 16 * 4  # of the model; of a step
LAST = 5  # steps that stand for the end of a run
WIDE = 0.1  # a gap between the probabilities of a token that stands out


class Run(NamedTuple):
    algorithm: str
    dtype: str
    seed: int
    directory: Path = OUTPUT

    @property
    def output(self) -> Path:
        name = "_".join((*self.algorithm.lower().split(" + "), self.dtype, str(self.seed)))
        return self.directory / name

    @property
    def counts(self) -> Path:
        return self.output.with_suffix(".counts")


def train(run: Run, steps: int) -> None:
    """Start the recipe as a user does. Its output goes to a file beside the run's directory."""
    recipe, replay = ALGORITHMS[run.algorithm]
    script = f"internal/train_{recipe}_qwen3_moe_tiny_cpu.sh"
    seeds = [f"data.seed={run.seed}", f"{ROLLOUT}.seed={run.seed}"]
    overrides = [*OVERRIDES[run.dtype], *seeds, f"trainer.test_freq={min(10, steps)}"]
    variables = {
        "STACK": "cann9.1",
        "STEPS": str(steps),
        "NPUS_PER_NODE": "2",
        "OUTPUT_DIR": str(run.output),
        "SKIP_REPORT": "1",
        "ROUTER_REPLAY": replay,
        VARIABLE: str(run.counts),
    }
    run.counts.parent.mkdir(parents=True, exist_ok=True)
    run.counts.write_text("")
    with run.output.with_suffix(".console").open("w") as console:
        command = ["bash", "ray_start_npu.sh", script, "internal/cpu_megatron_env.sh", *overrides]
        failed = subprocess.run(command, cwd=ROOT, env=os.environ | variables, stdout=console, stderr=console)
    if failed.returncode:
        sys.exit(f"{run.output.name} failed; see {console.name}")


def measure(run: Run) -> dict:
    """What a run's metrics and counts say. Shares of routes are None where nothing was replayed."""
    rows = read_metrics(run.output / "metrics.jsonl")
    counts = counted(run.counts)
    steps, held_out = series(rows, HELD_OUT)
    trained = [row for row in rows if REWARD in row]
    tokens = sum(row[TOKENS] for row in trained)
    replay = ALGORITHMS[run.algorithm][1]
    updates, log_probs = replay != "", replay == "R3"  # whether they replay
    routes = LAYERS * (tokens - (RESPONSES * len(trained) if log_probs else 0))

    def share(name: str, passes: int) -> float | None:
        return counts[name] / (passes * routes) if passes else None

    return {
        "algorithm": run.algorithm,
        "dtype": run.dtype,
        "seed": run.seed,
        "steps": len(trained),
        "held out at": steps,
        "held out": held_out,
        "reward": finite(rows, REWARD),
        "gap": finite(rows, GAP_MAX),
        "replayed": share("router_replay", updates + log_probs),
        "others with the rollout's weights": share("other_routes", log_probs),
        "others in updates": share("other_routes_in_updates", updates),
        "final reward": statistics.fmean(finite(rows, REWARD)[-LAST:]),
        "final held out": held_out[-1],
        "clipped": statistics.fmean(finite(rows, CLIPPED)),
        "grad norm": statistics.fmean(finite(rows, GRAD_NORM)),
        "largest grad norm": max(finite(rows, GRAD_NORM)),
        "entropy": statistics.fmean(finite(rows, ENTROPY)[-LAST:]),
        "mean gap": statistics.fmean(finite(rows, GAP_MEAN)),
        "largest gap": max(finite(rows, GAP_MAX)),
        f"steps with a gap above {WIDE}": sum(gap > WIDE for gap in finite(rows, GAP_MAX)),
        "log-prob gap": statistics.fmean(finite(rows, LOG_GAP)),
    }


CURVES = {
    "final reward": "{:.3f}",
    "final held out": "{:.3f}",
    "clipped": "{:.4f}",
    "grad norm": "{:.2f}",
    "largest grad norm": "{:.1f}",
    "entropy": "{:.3f}",
}
GAPS = {
    "mean gap": "{:.1e}",
    "largest gap": "{:.1e}",
    f"steps with a gap above {WIDE}": "{}",
    "log-prob gap": "{:.1e}",
    "replayed": "{:.0%}",
    "others with the rollout's weights": "{:.2%}",
    "others in updates": "{:.2%}",
}


def table(results: list[dict], columns: dict[str, str]) -> None:
    """In Markdown, a row for each algorithm and dtype: a column's values by seed."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for result in results:
        groups.setdefault((result["dtype"], result["algorithm"]), []).append(result)
    print(f"\n| run | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}")
    for (dtype, algorithm), of in groups.items():
        cells = []
        for column, form in columns.items():
            values = [one[column] for one in of]
            cells.append("-" if values[0] is None else "; ".join(map(form.format, values)))
        print(f"| {algorithm}, {dtype} | {' | '.join(cells)} |")


def draw(results: list[dict]) -> None:
    """Rewards and gaps by step; seeds of a run have its colour."""
    figure, axes = canvas(1, 3, figsize=(13, 3.8))
    colours = dict(zip(ALGORITHMS, ("C0", "C2", "C1", "C3"), strict=True))
    seen = set()
    for result in results:
        name = f"{result['algorithm']}, {result['dtype']}"
        style = {
            "color": colours[result["algorithm"]],
            "linestyle": "-" if result["dtype"] == "bfloat16" else ":",
            "label": None if name in seen else name,
            "linewidth": 1,
        }
        seen.add(name)
        reward = result["reward"]
        smooth = [statistics.fmean(reward[max(0, i - LAST + 1) : i + 1]) for i in range(len(reward))]
        axes[0].plot(range(1, len(reward) + 1), smooth, **style)
        axes[1].plot(result["held out at"], result["held out"], **style)
        axes[2].semilogy(range(1, len(result["gap"]) + 1), result["gap"], **style)
    axes[0].set_title(f"reward in training, mean of {LAST} steps")
    axes[1].set_title("held-out reward, greedy")
    axes[2].set_title("largest rollout/trainer probability gap")
    for each in axes:
        each.set(xlabel="step")
        each.grid(alpha=0.3)
    axes[1].legend(fontsize="small")
    save(figure, "router_replay")


def plan(quick: bool, seeds: int) -> list[Run]:
    if quick:
        return [Run("GRPO + R3", "bfloat16", 0, OUTPUT / "quick")]
    runs = [Run(name, "bfloat16", seed) for seed in range(seeds) for name in ALGORITHMS]
    return [*runs, Run("GRPO + R3", "float32", 0)]


def main() -> int:
    parser = parser_of(__doc__, "2 steps of GRPO with R3 in bfloat16")
    parser.add_argument("--steps", type=int, default=80, help="of each run (%(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each in bfloat16 (%(default)s)")
    parser.add_argument("--read", action="store_true", help="run nothing, read the runs that there are")
    args = parser.parse_args()
    runs = plan(args.quick, args.seeds)
    for run in [] if args.read else tqdm(runs, unit="run"):
        train(run, 2 if args.quick else args.steps)
    results = [measure(run) for run in runs if (run.output / "metrics.jsonl").exists()]

    for columns in (CURVES, GAPS):
        table(results, columns)
    bars, mean = [], {}
    for result in results:
        name = f"{result['algorithm']}, {result['dtype']}, seed {result['seed']}"
        mean.setdefault((result["algorithm"], result["dtype"]), []).append(result["mean gap"])
        if result["replayed"] is not None:
            bars.append(bar(f"{name}: replayed of all routes", result["replayed"], "", "= 1"))
        if result["algorithm"] == "GRPO + R3" and result["dtype"] == "bfloat16":
            others = result["others with the rollout's weights"]
            bars.append(bar(f"{name}: of these, others than the trainer's", others, "", "> 0"))
    if ("GRPO", "bfloat16") in mean and ("GRPO + R3", "bfloat16") in mean:
        with_r3, without = (statistics.fmean(mean[name, "bfloat16"]) for name in ("GRPO + R3", "GRPO"))
        bars.append(bar("bfloat16: mean gap with R3 over that without", with_r3 / without, "", "< 1"))
    status = finish("router_replay", bars, runs=results)
    draw(results)
    return status


if __name__ == "__main__":
    sys.exit(main())

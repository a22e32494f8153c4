"""Report what a run did, from verl's metrics.jsonl: a table, report.json and report.png.

python -m ascend_rl.report outputs/gspo_qwen3_tiny_cpu [--compare outputs/grpo_qwen3_tiny_cpu]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from ascend_rl.settings.logs import parts
from ascend_rl.settings.numbers import real

FINAL_STEPS = 5
PHASES = {
    "gen": "rollout",
    "old_log_prob": "old log-prob",
    "ref": "reference log-prob",
    "reward": "reward",
    "adv": "advantage",
    "update_actor": "update",
    "update_weights": "weight sync",
}
# With dynamic sampling (ascend_rl/loss/dapo.py) every trained group has right and wrong responses.
UNFILTERED = "dapo/reward_before_filter/mean"
REWARD, LENGTH, CLIPPED = "critic/rewards/mean", "response_length/mean", "actor/pg_clipfrac"
# Shortest and longest, and what 80% and half of the responses are between.
LENGTH_RANGES = [
    (f"response_length/{low}", f"response_length/{high}")
    for low, high in (("min", "max"), ("p10", "p90"), ("p25", "p75"))
]
EVALUATED = "evaluation/"
SPEED = "perf/throughput"  # prompt and response tokens of a step by its time and the number of dies
PROBS_DIFF = "training/rollout_probs_diff_max"
# Metrics of ascend_rl/rollout/engine_stats.py.
USAGE, PREEMPTED = "rollout/kv_cache_usage/max", "rollout/num_preempted"
ACCEPTANCE, GRAPH_SHARE = "rollout/spec_acceptance", "rollout/graph_share"
# Where the engines or the trainer say it (docs/watching.md): name of the figure, digits, unit.
DETAILED = {
    USAGE: ("KV cache use, highest of a step", 0, "%"),
    PREEMPTED: ("preemptions a step", 0, ""),
    ACCEPTANCE: ("drafted tokens that were accepted", 0, "%"),
    GRAPH_SHARE: ("engine steps that replay a graph", 0, "%"),
    "perf/mfu/actor": ("MFU of the update", 1, "%"),
    "perf/mfu/actor_infer": ("MFU of old log-probs", 1, "%"),
    "perf/mfu/rollout": ("MFU of the rollout", 1, "%"),
}


def read_metrics(path: Path) -> list[dict]:
    """The records of verl's file logger as {"step": int, **metrics}; the logger writes NaN as null.

    With those of earlier starts, which the launcher set aside beside it (metrics.1.jsonl and so on): each
    start replaces what came before from its own first step on, so that one from the beginning replaces all.

    Raises:
        SystemExit: the file is missing, damaged or holds no training step.
    """
    rows: list[dict] = []
    if not path.exists():
        sys.exit(f"{path} is missing: did the run reach its first step? Its output is in train.log beside it")
    for part in (*parts(path), path):
        new = read_part(part)
        if new:
            first = new[0]["step"]
            if REWARD not in new[0]:  # it validated what it goes on from
                first += 1
            rows = [row for row in rows if row["step"] < first > 1] + new
    if not any(REWARD in row for row in rows):
        sys.exit(f"{path} holds no training step; the run's output is in train.log beside it")
    return rows


def read_run(run: Path) -> list[dict]:
    """Its metrics, and avg@n and pass@n of `python -m ascend_rl.evaluate --out RUN/evaluation/STEP`."""
    rows = read_metrics(run / "metrics.jsonl")
    for file in sorted(run.glob("evaluation/*/report.json"), key=lambda file: file.parent.name.zfill(9)):
        if file.parent.name.isdigit():
            row = {"step": int(file.parent.name)}
            for data, figures in json.loads(file.read_text())["results"].items():
                kinds = dict.fromkeys((f"avg@{figures['n']}", f"pass@{figures['n']}"))
                row |= {f"{EVALUATED}{data} {kind}": figures[kind] for kind in kinds if kind in figures}
            rows.append(row)
    return rows


def evaluated(rows: list[dict]) -> list[str]:
    """The keys of `read_run`'s evaluations."""
    return sorted({key for row in rows for key in row if key.startswith(EVALUATED)})


def number(value: object) -> float:
    """A metric as it can be averaged and drawn: NaN for what is none, or too large for that.

    >>> number(1), number(None), number("off"), number(1e308)
    (1, nan, nan, nan)
    """
    return value if isinstance(value, int | float) and abs(value) < 1e100 else math.nan


def read_part(path: Path) -> list[dict]:
    """The records of one start; the last line of one that was killed while writing is left out."""
    rows: list[dict] = []
    *lines, last = path.read_text().split("\n")
    try:
        for line in lines:
            record = json.loads(line)
            data = {key: number(value) for key, value in record["data"].items()}
            rows.append({"step": record["step"], **data})
    except (ValueError, KeyError, TypeError, AttributeError):
        sys.exit(f"{path}, line {len(rows) + 1} is damaged; remove it")
    return rows


def series(rows: list[dict], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have ``key``."""
    return [row["step"] for row in rows if key in row], [row[key] for row in rows if key in row]


def finite(rows: list[dict], key: str) -> list[float]:
    return [value for value in series(rows, key)[1] if math.isfinite(value)]


def rewards(rows: list[dict]) -> tuple[list[int], list[float]]:
    """Steps and mean rewards over all generated responses."""
    return series(rows, UNFILTERED if any(UNFILTERED in row for row in rows) else REWARD)


def validation(rows: list[dict]) -> tuple[list[int], list[float]]:
    """The mean validation reward, over data sources."""
    steps, values = [], []
    for row in rows:
        found = [v for k, v in row.items() if k.startswith("val-") and k.endswith("/reward/mean@1")]
        if found:
            steps.append(row["step"])
            values.append(statistics.fmean(found))
    return steps, values


def predicted(run: Path, rows: list[dict], of_run: Callable) -> dict[str, float]:
    """Seconds by phase that ascend_rl.step_time predicts for the run's response lengths; or nothing."""
    lengths = series(rows, LENGTH)[1]
    if not lengths or not (run / "run.json").exists():
        return {}
    found = of_run(run, statistics.median(lengths))
    return {"step": found.seconds} | found.phases if found else {}


def summarise(rows: list[dict], wall_s: float | None, prediction: dict[str, float] | None = None) -> dict:
    """The figures of report.json; times are in seconds and leave out the first step, which warms up."""
    training = [row for row in rows if REWARD in row]
    steady = training[1:] or training
    phases = {
        name: statistics.median(row.get(f"timing_s/{key}", 0.0) for row in steady)
        for key, name in PHASES.items()
        if any(f"timing_s/{key}" in row for row in steady)
    }
    step_s = statistics.median(finite(steady, "timing_s/step") or [math.nan])
    phases["other"] = max(0.0, step_s - sum(phases.values()))
    speed = series(steady, SPEED)[1]

    def during(*keys: str) -> float | None:
        """Tokens per second and die, as if only these phases took time."""
        found = [
            row[SPEED] * row["timing_s/step"] / spent
            for row in steady
            if {SPEED, "timing_s/step"} <= row.keys()
            and (spent := sum(row.get(f"timing_s/{key}", 0.0) for key in keys)) > 0
        ]
        return statistics.median(found) if found else None

    _, val = validation(rows)
    diffs = series(rows, PROBS_DIFF)[1]
    return {
        "steps": len(training),
        "final_reward": statistics.fmean(rewards(rows)[1][-FINAL_STEPS:]),
        "val_reward": val[-1] if val else None,
        "val_reward_before": val[0] if len(val) > 1 else None,
        "evaluated": {key.removeprefix(EVALUATED): series(rows, key)[1] for key in evaluated(rows)},
        "max_rollout_probs_diff": max(diffs, key=lambda d: math.inf if math.isnan(d) else d, default=None),
        "mean_clip_share": statistics.fmean(series(rows, CLIPPED)[1] or [0.0]),
        "tokens_per_s_die": statistics.median(speed) if speed else None,
        "rollout_tokens_per_s_die": during("gen"),
        "update_tokens_per_s_die": during("update_actor"),
        "median_step_s": step_s,
        "median_phase_s": phases,
        "median_detail": {
            key: statistics.median(found) for key in DETAILED if (found := finite(steady, key))
        },
        "predicted_s": prediction or {},
        "wall_s": wall_s,
    }


def as_json(report: dict) -> str:
    """The report as JSON, which has no NaN: figures that are not finite become null, as verl writes them."""

    def finite(value):
        if isinstance(value, dict):
            return {key: finite(one) for key, one in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(report), indent=2, allow_nan=False) + "\n"


def shortfalls(report: dict, min_reward: float, max_probs_diff: float | None) -> list[str]:
    """Why a run is not a success; NaN counts as a failure."""
    problems = [
        f"{key} is {report[key]:.3f}, expected at least {min_reward}"
        for key in ("final_reward", "val_reward")
        if report[key] is not None and not report[key] >= min_reward
    ]
    gap = report["max_rollout_probs_diff"]
    if max_probs_diff is not None and (gap is None or not gap <= max_probs_diff):
        problems.append(
            f"rollout and trainer probabilities differ by {gap}, expected at most "
            f"{max_probs_diff}: vLLM does not compute what the trainer computes"
        )
    return problems


def seconds(value: float) -> str:
    """In three digits at least.

    >>> seconds(0.0514), seconds(7795.574)
    ('0.051', '7796')
    """
    return f"{value:.{3 if value < 10 else 1 if value < 100 else 0}f}"


def lines(report: dict) -> list[tuple[str, str]]:
    """The figures for people, (name, value)."""

    def show(value, digits=3):
        return "-" if value is None else f"{value:.{digits}f}"

    def detail(value, digits, unit):
        return f"{value:.{digits}%}" if unit else f"{value:.{digits}f}"

    diff, details = report["max_rollout_probs_diff"], report["median_detail"]
    return [
        ("training steps", str(report["steps"])),
        (f"reward, mean of the last {FINAL_STEPS} steps", show(report["final_reward"])),
        ("held-out reward, greedy, before", show(report["val_reward_before"])),
        ("held-out reward, greedy, after", show(report["val_reward"])),
        *(
            (f"evaluated: {name}", " to ".join(map(show, values)))
            for name, values in report["evaluated"].items()
        ),
        ("largest rollout/trainer probability gap", "-" if diff is None else f"{diff:.1e}"),
        ("clipped share", show(report["mean_clip_share"])),
        ("prompt and response tokens/s and die", show(report["tokens_per_s_die"], 1)),
        ("  in the time of the rollout", show(report["rollout_tokens_per_s_die"], 1)),
        ("  in the time of the update", show(report["update_tokens_per_s_die"], 1)),
        ("median step (s)", seconds(report["median_step_s"])),
        *((f"  {name}", seconds(value)) for name, value in report["median_phase_s"].items()),
        *((f"predicted: {name} (s)", show(value, 0)) for name, value in report["predicted_s"].items()),
        *((name, detail(details[key], *how)) for key, (name, *how) in DETAILED.items() if key in details),
        ("whole run (s)", show(report["wall_s"], 0)),
    ]


def table(report: dict) -> str:
    """The figures in two columns."""
    width = max(len(name) for name, _ in lines(report))
    return "\n".join(f"{name:<{width}}  {value:>10}" for name, value in lines(report))


def draw_reward(axes, runs: list[tuple[str, list[dict]]]) -> None:
    for name, rows in runs:
        (line,) = axes.plot(*rewards(rows), label=f"{name}, training", linewidth=1.2)
        axes.plot(*validation(rows), "o--", color=line.get_color(), label=f"{name}, held out", markersize=5)
        for mark, key in zip("^vsD" * 9, evaluated(rows), strict=False):
            label = f"{name}, {key.removeprefix(EVALUATED)}"
            axes.plot(*series(rows, key), mark, color=line.get_color(), label=label, markersize=5)
    axes.set(title="reward", ylim=(-0.02, 1.02))


def draw_length(axes, runs: list[tuple[str, list[dict]]]) -> None:
    """The mean, and behind it how lengths are distributed: all of them, 80% and half."""
    for name, rows in runs:
        (line,) = axes.plot(*series(rows, LENGTH), label=name, linewidth=1.2)
        for bounds in LENGTH_RANGES:
            whole = [row for row in rows if set(bounds) <= row.keys()]
            steps, low, high = ([row[key] for row in whole] for key in ("step", *bounds))
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(title="response length (tokens): mean; half, 80%, all of them")


def draw_times(axes, runs: list[tuple[str, list[dict]]]) -> None:
    """The phases of the first run, without its first step, which warms up."""
    first = [row for row in runs[0][1] if REWARD in row][1:]
    present = {
        name: [row.get(f"timing_s/{key}", 0.0) for row in first]
        for key, name in PHASES.items()
        if any(f"timing_s/{key}" in row for row in first)
    }
    axes.set(title="step time (s)")
    if present:
        axes.stackplot([row["step"] for row in first], *present.values(), labels=present)
        typical = statistics.median(finite(first, "timing_s/step") or [math.nan])
        whole = filter(math.isfinite, map(sum, zip(*present.values(), strict=True)))
        top = 1.05 * min(max(whole, default=1), 3 * typical)  # a step that saves may take long
        axes.set(title=f"step time (s), median {seconds(typical)}", ylim=(0, top if top > 0 else 1))


def draw_requests(axes, runs: list[tuple[str, list[dict]]]) -> None:
    """Of each engine the most requests it held at a time: the range over engines."""
    for name, rows in runs:
        steps, low, high = [], [], []
        for row in rows:
            if held := [value for key, value in row.items() if key.startswith(REQUESTS)]:
                steps.append(row["step"])
                low.append(min(held))
                high.append(max(held))
        (line,) = axes.plot(steps, high, label=name, linewidth=1.2)
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.25, linewidth=0)
    axes.set(title="requests of an engine at a time: range over engines", ylim=(0, None))


def draw_mfu(axes, runs: list[tuple[str, list[dict]]]) -> None:
    """The phases of the first run."""
    for key, (name, *_) in DETAILED.items():
        if key.startswith("perf/mfu/") and any(key in row for row in runs[0][1]):
            axes.plot(*series(runs[0][1], key), label=name.removeprefix("MFU of "), linewidth=1.2)
    axes.set(title="MFU", ylim=(0, None))
    as_percent(axes)


def curve(title: str, key: str, scale: str = "linear", percent: bool = False):
    def draw(axes, runs: list[tuple[str, list[dict]]]) -> None:
        for name, rows in runs:
            axes.plot(*series(rows, key), label=name, linewidth=1.2)
        axes.set(title=title, yscale=scale)
        if percent:
            as_percent(axes)

    return draw


def as_percent(axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1))


SUMMARY = (
    draw_reward,
    draw_length,
    curve("clipped share (GSPO: of sequences, GRPO: of tokens)", CLIPPED),
    draw_times,
)
DETAILS = (
    curve("largest rollout/trainer probability gap", PROBS_DIFF, "log"),
    curve("prompt and response tokens/s and die", SPEED),
    curve("entropy (nats a token)", "actor/entropy"),
    curve("KL, old to new policy (nats a token)", "actor/ppo_kl"),
)

REQUESTS = "rollout/requests/"
# Drawn if the first run has a metric that begins so.
ENGINES = {
    USAGE: curve("KV cache use, highest of a step", USAGE, percent=True),
    PREEMPTED: curve("preemptions a step", PREEMPTED),
    REQUESTS: draw_requests,
    "perf/mfu/": draw_mfu,
    ACCEPTANCE: curve("drafted tokens that were accepted", ACCEPTANCE, percent=True),
    GRAPH_SHARE: curve("engine steps that replay a graph", GRAPH_SHARE, percent=True),
}


def of_engines(rows: list[dict]) -> list:
    """The panels of ENGINES that have something to show."""
    keys = {key for row in rows for key in row}
    return [draw for start, draw in ENGINES.items() if any(key.startswith(start) for key in keys)]


def plot(runs: list[tuple[str, list[dict]]], file: Path | BinaryIO, panels: Sequence = SUMMARY) -> None:
    """Draw the panels, two in a row, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    plt.rcParams["text.parse_math"] = False  # a "$" in a name is a "$"
    runs = [
        (name if name[:1] != "_" else f" {name}", of) for name, of in runs
    ]  # "_x" would not be in a legend
    rows = -(-len(panels) // 2)
    figure, grid = plt.subplots(rows, 2, figsize=(10, 3.25 * rows), layout="constrained", squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, draw in zip(grid.flat, panels, strict=False):
        draw(axes, runs)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.savefig(file, dpi=110, format="png")
    plt.close(figure)


def main(of_run: Callable = lambda run, mean: None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_rl.report",
        description="Table, report.json and report.png of a run, with --html also report.html.",
        epilog="""Examples:
  python -m ascend_rl.report outputs/gspo_qwen3_tiny_cpu
  python -m ascend_rl.report outputs/new --compare outputs/old      # both in one picture
  python -m ascend_rl.report outputs/new outputs/old --html         # one page, also with warnings

Writes report.json, report.png and, with --html, report.html into the directory of the (first) run.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", type=Path, nargs="+", help="directory with metrics.jsonl; more to compare it with"
    )
    parser.add_argument(
        "--compare", type=Path, nargs="*", default=[], metavar="RUN", help="the same as more runs"
    )
    parser.add_argument("--html", action="store_true", help="write one page that needs no other file")
    parser.add_argument("--wall", type=real(), metavar="S", help="how long the whole run took")
    parser.add_argument(
        "--min-reward",
        type=real(-1e12),
        default=0,
        metavar="R",
        help="fail below this final or held-out reward",
    )
    parser.add_argument(
        "--max-probs-diff", type=real(), metavar="D", help="fail if rollout and trainer differed by more"
    )
    args = parser.parse_args()
    directories = [*args.run, *args.compare]
    run = directories[0]
    runs = [(one.resolve().name, read_run(one)) for one in directories]
    report = summarise(runs[0][1], args.wall, predicted(run, runs[0][1], of_run))
    (run / "report.json").write_text(as_json(report))
    plot(runs, run / "report.png")
    print(table(report))
    print(f"\n{run / 'report.png'}\n{run / 'report.json'}")
    if args.html:
        from ascend_rl.recipe import report_page  # which imports this module

        page = report_page.page(directories, [rows for _, rows in runs], args.wall, report["predicted_s"])
        (run / "report.html").write_text(page)
        print(run / "report.html")
    if problems := shortfalls(report, args.min_reward, args.max_probs_diff):
        sys.exit("\n".join(f"FAILED: {problem}" for problem in problems))

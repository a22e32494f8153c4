"""Pictures of runs: one panel a figure, the runs in it side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from ascend_rl.recipe.report_figures import (
    EVALUATED,
    PHASES,
    evaluated,
    finite,
    rewards,
    seconds,
    series,
    validation,
)
from ascend_rl.rollout import slow_ranks
from ascend_rl.settings.metrics import (
    ACCEPTANCE,
    CLIPPED,
    ENTROPY,
    GAP_MAX,
    GRAPH_SHARE,
    KL,
    LENGTH,
    MFU_LOG_PROBS,
    MFU_ROLLOUT,
    MFU_UPDATE,
    PREEMPTED,
    REQUESTS,
    REWARD,
    SHOWN,
    SPEED,
    USAGE,
)

# Shortest and longest, and what 80% and half of the responses are between.
LENGTH_RANGES = [
    (f"response_length/{low}", f"response_length/{high}")
    for low, high in (("min", "max"), ("p10", "p90"), ("p25", "p75"))
]


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
    for key in (MFU_UPDATE, MFU_LOG_PROBS, MFU_ROLLOUT):
        if any(key in row for row in runs[0][1]):
            label = SHOWN[key].title.removeprefix("MFU of ")
            axes.plot(*series(runs[0][1], key), label=label, linewidth=1.2)
    axes.set(title="MFU", ylim=(0, None))
    as_percent(axes)


def curve(key: str, scale: str = "linear"):
    def draw(axes, runs: list[tuple[str, list[dict]]]) -> None:
        for name, rows in runs:
            axes.plot(*series(rows, key), label=name, linewidth=1.2)
        axes.set(title=SHOWN[key].title, yscale=scale)
        if "%" in SHOWN[key].number:
            as_percent(axes)

    return draw


def as_percent(axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1))


SUMMARY = (draw_reward, draw_length, curve(CLIPPED), draw_times)
DETAILS = (curve(GAP_MAX, "log"), curve(SPEED), curve(ENTROPY), curve(KL))
# Drawn if the first run has a metric that begins so.
ENGINES = {
    USAGE: curve(USAGE),
    PREEMPTED: curve(PREEMPTED),
    REQUESTS: draw_requests,
    "perf/mfu/": draw_mfu,
    ACCEPTANCE: curve(ACCEPTANCE),
    GRAPH_SHARE: curve(GRAPH_SHARE),
}


def of_engines(rows: list[dict]) -> list:
    """The panels of ENGINES that have something to show."""
    keys = {key for row in rows for key in row}
    return [draw for start, draw in ENGINES.items() if any(key.startswith(start) for key in keys)]


def heat_map(steps: Sequence[dict], kind: str):
    """Who is slow, by step: the time of each rank or engine in units of the median.

    Args:
        steps: lines of ranks.jsonl (ascend_rl/rollout/slow_ranks.py).
        kind: "ranks" or "engines".
    """
    found = {line["step"]: slow_ranks.ratios(line, kind) for line in steps}
    names = sorted(set().union(*found.values()), key=lambda name: [int(part) for part in name.split(".")])
    every = range(min(found), max(found) + 1)
    values = [[found.get(step, {}).get(name, math.nan) for step in every] for name in names]

    def draw(axes, runs: list[tuple[str, list[dict]]]) -> None:
        extent = (every[0] - 0.5, every[-1] + 0.5, len(names) - 0.5, -0.5)
        options = {"aspect": "auto", "cmap": "coolwarm", "vmin": 0.7, "vmax": 1.3, "interpolation": "nearest"}
        image = axes.imshow(values, extent=extent, **options)
        shown = range(0, len(names), max(1, len(names) // 16))
        axes.set(title=f"time of {kind} (1: the median)")
        axes.set_yticks(shown, [names[i] for i in shown])
        axes.figure.colorbar(image, ax=axes, extend="both")

    return draw


def heat_maps(steps: Sequence[dict]) -> list:
    """Of ranks and of engines, where there are several."""
    kinds = ("ranks", "engines")
    return [
        heat_map(steps, kind) for kind in kinds if any(len(slow_ranks.ratios(s, kind)) > 1 for s in steps)
    ]


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

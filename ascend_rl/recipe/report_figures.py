"""The figures of a run, from verl's metrics.jsonl: read, summed up for report.json, worded for people."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from pathlib import Path

from ascend_rl.process.logs import parts, records
from ascend_rl.recipe import step_time
from ascend_rl.settings.metrics import (
    ACCEPTANCE,
    CLIPPED,
    GAP_MAX,
    GRAPH_SHARE,
    LENGTH,
    MFU_LOG_PROBS,
    MFU_ROLLOUT,
    MFU_UPDATE,
    PREEMPTED,
    REWARD,
    SHOWN,
    SPEED,
    UNFILTERED,
    USAGE,
)

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
EVALUATED = "evaluation/"
# Where the engines or the trainer say it (docs/watching.md).
DETAILED = (USAGE, PREEMPTED, ACCEPTANCE, GRAPH_SHARE, MFU_UPDATE, MFU_LOG_PROBS, MFU_ROLLOUT)


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
            if REWARD not in new[0]:  # it validated what it continues from
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


def predicted(run: Path, rows: list[dict]) -> dict[str, float]:
    """Seconds by phase that ascend_rl.step_time predicts for the run's response lengths; or nothing."""
    lengths = series(rows, LENGTH)[1]
    if not lengths or not (run / "run.json").exists():
        return {}
    found = step_time.of_run(run, statistics.median(lengths))
    return {"step": found.seconds} | found.phases if found else {}


def dies(run: Path) -> dict:
    """What all starts in a directory read of their dies: each node's highest temperature, the warnings."""
    path = run / "dies.jsonl"
    hottest: dict[str, float] = {}
    warnings: list[str] = []
    for part in (*parts(path), path):
        for row in records(part):
            celsius = [one for one in row.get("temperature_c", ()) if one is not None]
            hottest[row["node"]] = max([hottest.get(row["node"], -math.inf), *celsius])
            for text in row.get("warnings", ()):
                warnings.append(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(row['time']))} {text}")
    hottest = {node: celsius for node, celsius in sorted(hottest.items()) if math.isfinite(celsius)}
    return {"highest_temperature_c": hottest, "warnings": warnings} if hottest or warnings else {}


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
    diffs = series(rows, GAP_MAX)[1]
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

    def titled(key, value):
        return SHOWN[key].title, "-" if value is None else SHOWN[key].number.format(value)

    return [
        ("training steps", str(report["steps"])),
        (f"reward, mean of the last {FINAL_STEPS} steps", show(report["final_reward"])),
        ("held-out reward, greedy, before", show(report["val_reward_before"])),
        ("held-out reward, greedy, after", show(report["val_reward"])),
        *(
            (f"evaluated: {name}", " to ".join(map(show, values)))
            for name, values in report["evaluated"].items()
        ),
        titled(GAP_MAX, report["max_rollout_probs_diff"]),
        ("clipped share", show(report["mean_clip_share"])),
        titled(SPEED, report["tokens_per_s_die"]),
        ("  in the time of the rollout", show(report["rollout_tokens_per_s_die"], 1)),
        ("  in the time of the update", show(report["update_tokens_per_s_die"], 1)),
        ("median step (s)", seconds(report["median_step_s"])),
        *((f"  {name}", seconds(value)) for name, value in report["median_phase_s"].items()),
        *((f"predicted: {name} (s)", show(value, 0)) for name, value in report["predicted_s"].items()),
        *(titled(*pair) for pair in report["median_detail"].items()),
        ("whole run (s)", show(report["wall_s"], 0)),
    ]


def table(report: dict) -> str:
    """The figures in two columns."""
    width = max(len(name) for name, _ in lines(report))
    return "\n".join(f"{name:<{width}}  {value:>10}" for name, value in lines(report))

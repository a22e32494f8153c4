"""Which checkpoint is the best so far by a figure that verl logged in its step (``KEEP_BEST``,
docs/resilience.md).

verl validates a step after it saved it, so a checkpoint is judged when the next one is complete.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Sequence
from pathlib import Path

from ascend_rl.process.logs import parts, records

SWITCH = "KEEP_BEST"


def best(steps: Sequence[int]) -> int | None:
    """The best of these steps by the metric that KEEP_BEST names, with "-" before it the lowest is best.

    Of equals the latest; None without KEEP_BEST, or where none of the steps has the metric.
    """
    wanted, metrics = os.environ.get(SWITCH, ""), os.environ.get("VERL_FILE_LOGGER_PATH")
    if not wanted or not metrics:
        return None
    name, sign = wanted.removeprefix("-"), -1 if wanted.startswith("-") else 1
    logged = read(Path(metrics))
    values = {step: value for step in steps if (value := logged.get(step, {}).get(name)) is not None}
    if not values:
        names = {key for data in logged.values() for key in data}
        if names and name not in names:
            close = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.3)
            print(f"WARNING: {SWITCH}={wanted}: no step has it; close to it: {', '.join(close)}", flush=True)
        return None
    found = max(values, key=lambda step: (sign * values[step], step))
    print(f"the best checkpoint by {name} is global_step_{found} ({values[found]:g})", flush=True)
    return found


def read(path: Path) -> dict[int, dict[str, float]]:
    """step -> its numbers, of verl's metrics.jsonl after what earlier starts left beside it."""
    found: dict[int, dict[str, float]] = {}
    for part in (*parts(path), path):
        for record in records(part):
            numbers = {
                key: float(value)
                for key, value in record["data"].items()
                if isinstance(value, (int, float)) and math.isfinite(value)
            }
            found.setdefault(record["step"], {}).update(numbers)
    return found

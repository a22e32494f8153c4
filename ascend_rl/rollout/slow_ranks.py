"""Which training rank, and which engine of the rollout, is slower than the others (docs/watching.md).

All ranks of a pipeline stage compute the same, of batches that verl balances, and all engines decode the
same model. So the time of each is compared with the median: of a rank without collectives (rank_times), of an
engine for steps of the same size (rollout/engine_times). One that takes FACTOR times the median in STEPS
steps in a row gets a line in the log. ``ranks.jsonl`` beside verl's metrics.jsonl has all times of each step.

Of an even number the median is the lower one of the two in the middle: of two ranks the faster.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from typing import Any

from ascend_rl.process import rank_times
from ascend_rl.process.logs import add_record
from ascend_rl.rollout.engine_times import PREFIX, SUMS
from ascend_rl.settings.metrics import SLOWEST_ENGINE, SLOWEST_RANK
from ascend_rl.settings.switch import switched_on

FILE, SWITCH = "ranks.jsonl", "RANK_TIMES"
FACTOR, STEPS = 1.15, 3
FEWEST_STEPS = 8  # of an engine and size: fewer are too noisy to compare
SHORTEST_S = 0.5  # in a step: what takes less is not called slow
ANSWER_S = 60.0


def own_s(rank: Mapping[str, Any]) -> float:
    """What a rank computes, without waiting."""
    return rank["forward_s"] + rank["backward_s"]


def over_median(ranks: Sequence[Mapping[str, Any]], of: Callable[[Mapping[str, Any]], float]) -> list[float]:
    """A value of each rank, divided by the median of its stage; 1 where that is 0.

    Args:
        ranks: of rank_times.take.

    >>> ranks = [{"forward_s": f, "backward_s": 2.0, "stage": 0} for f in (1.0, 1.0, 1.9)]
    >>> over_median(ranks, own_s)
    [1.0, 1.0, 1.3]
    """
    stages: dict[int, list[float]] = defaultdict(list)
    for each in ranks:
        stages[each["stage"]].append(of(each))
    medians = {stage: statistics.median_low(values) for stage, values in stages.items()}
    return [round(of(each) / medians[each["stage"]], 4) if medians[each["stage"]] else 1.0 for each in ranks]


def engine_ratios(engines: Mapping[str, Mapping[int, Sequence[float]]]) -> dict[str, float]:
    """Of each engine the time of its steps, divided by what the median engine takes for steps of their sizes.

    Args:
        engines: engine -> size -> (steps, seconds, tokens). Engines that share no size with another are left
            out.

    >>> engine_ratios({"0": {3: (10, 1.0, 80)}, "1": {3: (20, 2.6, 160), 5: (9, 9.0, 200)}})
    {'0': 1.0, '1': 1.3}
    """
    rates: dict[int, list[float]] = defaultdict(list)
    for sizes in engines.values():
        for size, (steps, seconds, _) in sizes.items():
            if steps >= FEWEST_STEPS:
                rates[size].append(seconds / steps)
    found = {}
    for engine, sizes in engines.items():
        compared = [
            (seconds, steps * statistics.median_low(rates[size]))
            for size, (steps, seconds, _) in sizes.items()
            if steps >= FEWEST_STEPS and len(rates[size]) > 1
        ]
        if expected := sum(usual for _, usual in compared):
            found[engine] = round(sum(seconds for seconds, _ in compared) / expected, 4)
    return found


class Streaks:
    """For how many steps in a row something was slow; says so once per streak.

    >>> streaks = Streaks()
    >>> [streaks.add({"a": ratio}) for ratio in (1.3, 1.3, 1.4, 1.3, 1.0)]
    [[], [], ['a'], [], []]
    """

    def __init__(self):
        self.counts: dict[Hashable, int] = {}

    def add(self, ratios: Mapping[Any, float]) -> list[Any]:
        slow = [key for key, ratio in ratios.items() if ratio >= FACTOR]
        self.counts = {key: self.counts.get(key, 0) + 1 for key in slow}
        return [key for key, count in self.counts.items() if count == STEPS]


_ranks, _engines = Streaks(), Streaks()


def of_workers(group: Any) -> list[dict[str, Any]]:
    """What each rank of verl's worker group did since the last call, by rank; nothing if one fails."""
    import ray

    asked = [worker.__ray_call__.remote(rank_times.take) for worker in getattr(group, "_workers", ())]
    try:
        found = ray.get(asked, timeout=ANSWER_S) if asked else []  # which would start Ray
        return sorted(found, key=lambda each: each["rank"])
    except ray.exceptions.RayError as error:  # what hinders the run, the run itself reports
        print(f"WARNING: no times of the ranks in this step: {error}", flush=True)
        return []


def of_engines(timing: MutableMapping[str, float]) -> dict[str, dict[int, list[float]]]:
    """Takes them out of verl's timing, where engine_stats.merged has put them."""
    engines: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0.0, 0]))
    for key in [key for key in timing if key.startswith(PREFIX)]:
        engine, size, what = key.removeprefix(PREFIX).split("/")
        engines[engine][int(size)][SUMS.index(what)] = timing.pop(key)
    return {engine: dict(sizes) for engine, sizes in engines.items()}


def step_times(step: int, group: Any, timing: MutableMapping[str, float]) -> dict[str, float]:
    """Record the times of a step and name what is slow; called at its end.

    Args:
        group: verl's worker group that trains.
        timing: of the step; gives up what is known of the engines.

    Returns:
        SLOWEST_RANK and SLOWEST_ENGINE: the largest ratio to the median, where there are several.
    """
    engines = of_engines(timing)
    if not os.environ.get("VERL_FILE_LOGGER_PATH") or not switched_on(SWITCH, {SWITCH: "1"} | os.environ):
        return {}
    began_s = time.perf_counter()
    ranks = of_workers(group)
    asked_s = round(time.perf_counter() - began_s, 6)
    if not any(each["micro_batches"] for each in ranks):
        ranks = []  # the step in which they began to measure
    totals = {
        engine: dict(zip(SUMS, map(sum, zip(*sizes.values(), strict=True)), strict=True))
        for engine, sizes in engines.items()
    }
    for each, ratio in zip(ranks, over_median(ranks, own_s), strict=True):
        each["ratio"] = ratio
    for engine, ratio in engine_ratios(engines).items():
        totals[engine]["ratio"] = ratio
    long = {each["rank"]: each["ratio"] for each in ranks if own_s(each) >= SHORTEST_S}
    tokens = over_median(ranks, lambda each: each["tokens"])
    for rank in _ranks.add(long):
        who = f"rank {rank} ({ranks[rank]['node']}, device {ranks[rank]['device']})"
        tell(f"{who} computes", long[rank], f", on {tokens[rank]:.2f} times as many tokens")
    long = {name: of["ratio"] for name, of in totals.items() if "ratio" in of and of["seconds"] >= SHORTEST_S}
    for engine in _engines.add(long):
        tell(f"engine {engine} of the rollout takes", long[engine])
    line = {"step": step, "asked_s": asked_s, "ranks": ranks, "engines": totals}
    if ranks or totals:
        add_record(FILE, line)
    found = {}
    for kind, key in (("ranks", SLOWEST_RANK), ("engines", SLOWEST_ENGINE)):
        if len(of := ratios(line, kind)) > 1:
            found[key] = max(of.values())
    return found


def ratios(line: Mapping[str, Any], kind: str) -> dict[str, float]:
    """Of a line of ranks.jsonl the ratios to the median by name; kind is "ranks" or "engines"."""
    named = {str(each["rank"]): each for each in line["ranks"]} if kind == "ranks" else line["engines"]
    return {name: each["ratio"] for name, each in named.items() if "ratio" in each}


def tell(what: str, ratio: float, of: str = "") -> None:
    print(
        f"[{time.strftime('%H:%M:%S')}] WARNING: {what} {ratio:.2f} times as long as the median{of}, "
        f'in each of the last {STEPS} steps; see docs/watching.md, "The slow die"',
        flush=True,
    )

"""Metrics of the dies for each step: temperature, power, and how much the counters have grown.

The launcher writes readings (host/die_reading.py) of all nodes to a file beside verl's metrics.jsonl, one
JSON line each, those of each start to a new file (launch/die_watch.py). The trainer asks `step_metrics`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

FILE, PREFIX = "dies.jsonl", "dies/"
COUNTED = ("single_bit", "double_bit", "isolated_pages", "pages_to_isolate", "link_ups", "link_downs",
           "packet_errors")  # fmt: skip
OF_A_READING = {"time", "node", "failed", "warnings", "die"}  # all else in one are lists of figures


def by_die(row: Mapping) -> dict[int, dict]:
    """The figures of each die that are there.

    >>> by_die({"time": 0.0, "die": [0, 3], "power_w": [165.2, None], "health": ["OK", "Alarm"]})
    {0: {'power_w': 165.2, 'health': 'OK'}, 3: {'health': 'Alarm'}}
    """
    return {
        die: {name: row[name][i] for name in row if name not in OF_A_READING and row[name][i] is not None}
        for i, die in enumerate(row.get("die", ()))
    }


class Growth:
    """Of the counters of one node's dies, over readings in their order; one that was reset starts at 0.

    Attributes:
        last: the last value of each figure, by die.
        grown: since the first reading, by die; also how often a link was seen going down.
    """

    def __init__(self):
        self.last: dict[int, dict] = {}
        self.grown: dict[int, Counter] = defaultdict(Counter)

    def add(self, die: int, now: Mapping) -> None:
        last = self.last.setdefault(die, {})
        for name in COUNTED:
            if name in now and name in last:
                more = now[name] - last[name]
                self.grown[die][name] += more if more >= 0 else now[name]
        for name in ("link", "vnic_link"):  # one that was never up is not used, as RoCE of a single A3 node
            if last.get(name) == "UP" and now.get(name) == "DOWN":
                self.grown[die][f"{name}_lost"] += 1
        last |= now


class Metrics:
    """Of one file of readings.

    >>> Metrics(Path("absent.jsonl")).take()
    {}
    """

    def __init__(self, file: Path):
        self.file, self.position = file, 0
        self.nodes: dict[str, Growth] = defaultdict(Growth)

    def take(self) -> dict[str, float]:
        """Metrics from the readings of all nodes since the last call; empty if there are none.

        The highest temperature in Celsius, the mean power of a die in W, and the growth of each counter since
        the start, summed over all dies.
        """
        lines: list[bytes] = []
        with contextlib.suppress(OSError), self.file.open("rb") as file:
            file.seek(self.position)
            lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()  # it is being written
        self.position += sum(map(len, lines))
        heat, power = [], []
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError, IndexError):  # no reading
                row = json.loads(line)
                growth = self.nodes[row["node"]]
                for die, now in by_die(row).items():
                    growth.add(die, now)
                    heat += [now["temperature_c"]] if "temperature_c" in now else []
                    power += [now["power_w"]] if "power_w" in now else []
        found = {f"{PREFIX}temperature_c/max": max(heat)} if heat else {}
        if power:
            found[f"{PREFIX}power_w/mean"] = statistics.fmean(power)
        nodes = self.nodes.values()
        for name in COUNTED if lines else ():
            if any(name in last for node in nodes for last in node.last.values()):
                found[PREFIX + name] = sum(grown[name] for node in nodes for grown in node.grown.values())
        return found


@functools.cache
def _of_run(metrics: str) -> Metrics:
    return Metrics(Path(metrics).with_name(FILE))


def step_metrics() -> dict[str, float]:
    """Metrics.take for the file beside verl's metrics.jsonl, if there is one."""
    metrics = os.environ.get("VERL_FILE_LOGGER_PATH")
    return _of_run(metrics).take() if metrics else {}

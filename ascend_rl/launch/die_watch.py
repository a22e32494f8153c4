"""Watch the dies of a run and warn before one fails: temperature, HBM errors, links, health.

A die that ends a run after days has often announced it: it ran hot, HBM corrected more and more errors, a
link went down for seconds. The driver's tools say so, and nobody looks. So each node's launcher reads them
every WATCH_DIES_S seconds (host/die_reading.py), in a thread beside the run. The head gets all readings over
the connection of the launchers, appends them to OUTPUT_DIR/dies.jsonl, and judges each node's:

- counters by how much they have grown since the start of the run; a counter that was reset starts at 0;
- a warning for each die and reason, and the next one only when it is AGAIN times as bad;
- dies of a node with the same reason are one warning. What is not in a reading is not judged.

The limits are of this repository: no published ones were found. Nothing here ends or delays a run.

    python -m ascend_rl.launch.die_watch      # a reading of this node, and what it costs
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import resource
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from ascend_rl.host import npu_tools
from ascend_rl.host.die_reading import FIGURES, Reader
from ascend_rl.process.die_metrics import Growth, by_die
from ascend_rl.process.logs import LogFile

HOT_C = 85.0
ABOVE_MEDIAN_C, WARM_C = 25.0, 65.0  # much hotter than the other dies of the node, and not just busier
STEP_C = 5.0  # over HOT_C that are twice as bad
SINGLE_BITS_A_DAY, PACKET_ERRORS_A_DAY = 24.0, 1000.0
DAY_S = 86400.0
LEVELS = {"Warning": 1.0, "Alarm": 2.0, "Critical": 4.0}  # of health
MISSED = 2  # readings without a die, or without any, before it counts
AGAIN = {"single_bit": 10.0, "packet_errors": 10.0}  # else 2
MOST_SHOWN = 4
LEAVE = (
    "save and end the run (SAVE_BY), and start it again without this node (spare nodes: docs/resilience.md)"
)
ADVICE = {
    "health": f"if it is an error of the hardware, {LEAVE}",
    "temperature": "look at fans, airflow and inlet temperature; too hot, a die slows down, then stops",
    "single_bit": "corrected so far, but such HBM may fail next: keep a recent checkpoint (SAVE_FREQ), and "
    "have the NPU checked after the run",
    "double_bit": f"results of this die may be wrong: {LEAVE}, and reset the NPU",
    "link": "look at cable, optical module and switch port; HCCL gives up when a link stays down",
    "packet_errors": "they are sent again, slowly: look at cable, optical module and switch port",
    "gone": f"npu-smi does not show it any more: {LEAVE}",
    "silent": "the driver may hang, look at dmesg and at npu-smi info on that node",
}


class Judge:
    """Of one node's readings, which come in their order."""

    def __init__(self):
        self.began_s: float | None = None
        self.growth = Growth()
        self.missed: Counter = Counter()  # readings in a row, by die; None: all of them
        self.told: dict[tuple[int | None, str], float] = {}

    def take(self, row: Mapping) -> list[str]:
        """What to tell the user about this reading, mostly nothing: one sentence for each reason."""
        self.began_s = row["time"] if self.began_s is None else self.began_s
        days = max(1.0, (row["time"] - self.began_s) / DAY_S)
        found: dict[str, list[str]] = defaultdict(list)

        def find(die: int | None, reason: str, severity: float, what: str) -> None:
            if severity > 0 and severity >= AGAIN.get(reason, 2.0) * self.told.get((die, reason), 0.0):
                self.told[die, reason] = severity
                found[reason].append(f"{self._name(die)} {what}" if die is not None else what)

        self.missed[None] = self.missed[None] + 1 if "failed" in row else 0
        if "failed" in row:
            find(None, "silent", self.missed[None] >= MISSED, f"there are no readings: {row['failed']}")
        else:
            dies = by_die(row)
            for die, now in dies.items():
                self.growth.add(die, now)
            temperatures = [now["temperature_c"] for now in dies.values() if "temperature_c" in now]
            median = statistics.median(temperatures) if temperatures else 0.0
            for die, now in dies.items():
                for reason, severity, what in judged(now, self.growth.grown[die], median, days):
                    find(die, reason, severity, what)
            for die in self.growth.last:
                self.missed[die] = 0 if die in dies else self.missed[die] + 1
                find(die, "gone", self.missed[die] >= MISSED, "is gone")
        return [f"{listed(whats)}: {ADVICE[reason]}" for reason, whats in found.items()]

    def _name(self, die: int) -> str:
        last = self.growth.last[die]
        rank = f", rank {last['rank']}" if "rank" in last else ""
        return f"die {die} (NPU {last.get('npu')} chip {last.get('chip')}{rank})"


def judged(now: Mapping, grown: Counter, median_c: float, days: float) -> list[tuple[str, float, str]]:
    """What is wrong with a die: (reason, how bad, in words); how bad has meaning within a reason only.

    Args:
        now: its figures, as by_die gives them.
        grown: of its counters since the start, and link_lost, vnic_link_lost: how often seen going down.
        median_c: temperature of the node's dies, Celsius.
        days: since the start, at least 1.
    """
    found = []
    health = now.get("health", "OK")
    if health not in ("OK", "NA", "-"):
        error = f" ({now['error']})" if "error" in now else ""
        found.append(("health", LEVELS.get(health, 1.0), f"has health {health}{error}"))
    heat = now.get("temperature_c", 0.0)
    if heat >= min(HOT_C, max(WARM_C, median_c + ABOVE_MEDIAN_C)):
        what = f"is at {heat:.0f} C, the median of its node at {median_c:.0f} C"
        found.append(("temperature", STEP_C + max(0.0, heat - HOT_C), what))
    if (count := grown["single_bit"]) >= SINGLE_BITS_A_DAY * days:
        found.append(("single_bit", count / days, f"has single-bit errors of HBM: {count} since the start"))
    pages = grown["isolated_pages"] + grown["pages_to_isolate"]
    if count := max(grown["double_bit"], pages):
        what = f"has double-bit errors of HBM: {grown['double_bit']} since the start, isolated pages: {pages}"
        found.append(("double_bit", count, what))
    changes = grown["link_downs" if "link_downs" in now else "link_ups"]
    down = max(changes, grown["link_lost"], grown["vnic_link_lost"])
    if down:
        which = [name for name in ("link", "vnic_link") if now.get(name) == "DOWN" and grown[f"{name}_lost"]]
        state = ", and is down" * bool(which)
        found.append(("link", down, f"has link losses: {down} since the start{state}"))
    if (count := grown["packet_errors"]) >= PACKET_ERRORS_A_DAY * days:
        found.append(("packet_errors", count / days, f"has bad packets: {count} since the start"))
    return found


def listed(whats: list[str]) -> str:
    more = f"; and {len(whats) - MOST_SHOWN} more dies" * (len(whats) > MOST_SHOWN)
    return "; ".join(whats[:MOST_SHOWN]) + more


class Book:
    """Of the head, for one start: takes the readings of all nodes, from any thread, without waiting.

    Args:
        file: gets a line for each; made with the first.
        tell: gets each warning.
    """

    def __init__(self, file: Path, tell: Callable[[str], None]):
        self.file, self.tell = file, tell
        self.rows: queue.SimpleQueue = queue.SimpleQueue()
        self.judges: dict[str, Judge] = defaultdict(Judge)
        self.thread = threading.Thread(target=self._write, daemon=True)
        self.thread.start()

    def take(self, node: str, row: dict) -> None:
        """A reading of a node, by its address."""
        self.rows.put((node, row))

    def _write(self) -> None:
        log = None
        while entry := self.rows.get():
            node, row = entry
            try:
                warnings = [f"node {node}: {what}" for what in self.judges[node].take(row)]
                line = json.dumps({"node": node} | row | ({"warnings": warnings} if warnings else {}))
            except (ValueError, TypeError, KeyError, IndexError):  # no reading
                continue
            with contextlib.suppress(OSError):  # the disk is full, or gone
                log = log or LogFile(self.file, whole=True)
                log.write(f"{line}\n".encode())
            for warning in warnings:
                self.tell(warning)
        if log:
            log.close()

    def close(self) -> None:
        """Write what is there, and nothing that comes later."""
        self.rows.put(None)


class DieWatch:
    """Of one node's launcher, for one start.

    Args:
        every_s: between the beginnings of two readings; 0: none. None are made without npu-smi either.
        take: gets each reading.
        ranks: die -> training rank, as far as known.
    """

    def __init__(
        self,
        every_s: float,
        take: Callable[[dict], None],
        ranks: Callable[[], dict[int, str]] = dict,
        env: Mapping[str, str] | None = None,
    ):
        self.every_s, self.take = every_s, take
        self.reader = Reader(env, ranks)

    def start(self) -> None:
        if self.every_s and npu_tools.find("npu-smi", self.reader.env):
            threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """No call of a tool begins after this, and no reading arrives: what runs is ended now."""
        self.reader.stopped.set()

    def _watch(self) -> None:
        due = time.monotonic()
        while not self.reader.stopped.wait(max(0.0, due - time.monotonic())):
            due = max(due, time.monotonic()) + self.every_s
            with contextlib.suppress(OSError):  # no process could be started; the connection, as the run ends
                row = self.reader.read()
                if not self.reader.stopped.is_set():
                    self.take(row)


def main() -> int:
    text = "Print the state of this node's dies as a run would read it, and what a reading costs."
    argparse.ArgumentParser(prog="python -m ascend_rl.launch.die_watch", description=text).parse_args()
    reader = Reader()

    def spent_s() -> list[float]:
        kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
        return [usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds)]

    reader.read()  # finds out which options there are
    reader.calls, began_s, before = 0, time.monotonic(), spent_s()
    row = reader.read()
    took_s, (own_s, tools_s) = (
        time.monotonic() - began_s,
        (b - a for a, b in zip(before, spent_s(), strict=True)),
    )
    if "failed" in row:
        print(f"ERROR: {row['failed']}", file=sys.stderr)
        return 1
    names = ["die", *(name for name in FIGURES if name in row)]
    lines = [
        names,
        *(
            ["-" if v is None else f"{v}" for v in each]
            for each in zip(*(row[n] for n in names), strict=True)
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True)))
    print(
        f"\n{len(row['die'])} dies in {took_s:.2f} s by {reader.calls} calls; processor time: "
        f"{own_s * 1e3:.0f} ms in this process, {tools_s * 1e3:.0f} ms in the tools; "
        f"a line of {len(json.dumps(row))} bytes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a run shows on its terminal: one line that says where it is, made from verl's metrics.jsonl.

A terminal gets a line that is drawn over itself and fits its width; a file or pipe gets one line per step, at
most one in 10 seconds. All figures are of the newest step, times are predicted from the last steps' median.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from ascend_rl.settings.metrics import (
    GAP_MEAN,
    LENGTH,
    LOG_GAP,
    PREEMPTED,
    REWARD,
    SHOWN,
    SPEED,
    UNFILTERED,
    USAGE,
)

LATEST = 5  # steps whose median predicts the next one
FILE_PERIOD_S, TERMINAL_PERIOD_S = 10.0, 0.25


class Metrics:
    """The records of verl's file logger, read as they are written."""

    def __init__(self, path: Path | None):
        self.path, self.position, self.rest = path, 0, b""
        self.steps: deque[dict] = deque(maxlen=LATEST)
        self.first: dict | None = None  # training step of this start
        self.step = self.saved = 0  # the last one, and the last one that was saved
        self.new: list[tuple[int, dict]] = []  # steps that nobody has taken yet

    def read(self) -> None:
        """Take what is new; a missing file and cut or foreign lines are no errors."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                new = file.read()
        except (OSError, AttributeError):
            return
        self.position += len(new)
        *lines, self.rest = (self.rest + new).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                row = record["data"]
                if REWARD in row:  # no validation alone
                    self.first = self.first or row
                    self.steps.append(row)
                    self.step = int(record["step"])
                    self.new.append((self.step, row))
                    self.saved = self.step if "timing_s/save_checkpoint" in row else self.saved

    def step_s(self) -> float | None:
        """The median time of the last steps, without the first, which warms up, if there are others."""
        times = [row["timing_s/step"] for row in self.steps if row.get("timing_s/step")]
        if len(times) > 1 and self.steps[0] is self.first:
            times = times[1:]
        return statistics.median(times) if times else None

    def figures(self) -> list[str]:
        """Reward, response length, probability gap, speed, KV cache of the newest step, where it has them."""
        row = self.steps[-1] if self.steps else {}
        found = {
            REWARD: row.get(UNFILTERED, row.get(REWARD)),
            LENGTH: row.get(LENGTH),
            GAP_MEAN: row.get(GAP_MEAN, row.get(LOG_GAP)),
            SPEED: row.get(SPEED),
            USAGE: row.get(USAGE) or None,
            PREEMPTED: row.get(PREEMPTED) or None,
        }
        shown = {key: value for key, value in found.items() if value is not None and math.isfinite(value)}
        return [SHOWN[key].brief.format(value) for key, value in shown.items()]


def clock(seconds: float) -> str:
    """Seconds as people write them.

    >>> clock(62), clock(7833), clock(-5)
    ('1:02', '2:10:33', '-0:05')
    """
    minutes, s = divmod(round(abs(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return "-" * (seconds <= -0.5) + (f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}")


def fit(parts: list[str], columns: int) -> str:
    """The parts in one line, without the last ones that do not fit.

    >>> fit(["step 2/9", "reward 0.31", "length 7"], 24)
    'step 2/9  reward 0.31'
    """
    line = parts[0][:columns]
    for part in parts[1:]:
        if len(line) + 2 + len(part) > columns:
            break
        line += f"  {part}"
    return line


def state(step: int, total: int, metrics: Metrics, since_s: float, more: str) -> list[str]:
    """The parts of the line, the most important first.

    Args:
        step, total: done, and of the run.
        since_s: seconds since the last step ended.
        more: what the rollout says of itself.
    """
    parts = [f"step {step}/{total}", *metrics.figures()]
    if step < total:
        if (expected_s := metrics.step_s()) is None:
            parts.append(f"first step {clock(since_s)}")
        else:
            left_s = max(expected_s - since_s, 0) + (total - step - 1) * expected_s
            parts += [f"next {clock(expected_s - since_s)}", f"end {clock(left_s)}"]
    return parts + [more] * bool(more)


@contextlib.contextmanager
def unless_gone(descriptor: int) -> Iterator[None]:
    """Send the output to /dev/null once the terminal, or the reader of the pipe, is gone."""
    try:
        yield
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


class Line:
    """The line on stderr; two threads may use it."""

    def __init__(self, title: str):
        self.terminal = sys.stderr.isatty()
        self.lock = threading.Lock()
        self.shown, self.again = "", 0.0
        self.say(title)

    def say(self, text: str) -> None:
        """A line that stays, above the one that moves."""
        with self.lock, unless_gone(2):
            print("\r\x1b[K" * self.terminal + text, file=sys.stderr, flush=True)
            if self.terminal and self.shown:
                print(self.shown, end="", file=sys.stderr, flush=True)

    def show(self, parts: list[str], last: bool = False) -> None:
        """Draw a state; in a file only if its step is new."""
        now = time.monotonic()
        if now < self.again and not last:
            return
        with self.lock, unless_gone(2):
            if self.terminal:
                self.again = now + TERMINAL_PERIOD_S
                columns = os.get_terminal_size(2).columns or 80  # 0: it does not know
                self.shown = fit(parts, columns - 1)
                end = "\n" if last else ""
                print(f"\r\x1b[K{self.shown}", end=end, file=sys.stderr, flush=True)
                self.shown *= not last
            elif parts[0] != self.shown:
                self.shown, self.again = parts[0], now + FILE_PERIOD_S
                print(f"[{time.strftime('%H:%M:%S')}] {'  '.join(parts)}", file=sys.stderr, flush=True)

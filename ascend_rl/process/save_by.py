"""By when a run must have saved: the trainer saves a step and ends if the next one would not fit.

The launcher (launch/time_limit.py) writes the time into a file beside the one of process/progress.py, on each
node, and may bring it forward while the run goes on. The trainer makes a `SaveBy` at its first step and asks
it once per step, where it would save. A run that fits is not changed: nothing is saved or left out.

What the next step takes is the longest step of this start so far, the first one aside, which compiles; what a
save takes, the longest one, with what is written while the trainer trains on; both and a tenth. A save that
was not seen yet counts like a step, at most 600 s.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from ascend_rl.process.progress import FILE

SUFFIX = ".save_by"
MARGIN = 1.1
UNSEEN_SAVE_S = 600.0


def write(path: str, by: float, stop: bool) -> None:
    """The launcher's side of `told`; ``path`` is what it put into the environment (progress.FILE)."""
    new = Path(f"{path}{SUFFIX}.new")
    new.write_text(f"{by!r} {int(stop)}")
    new.rename(f"{path}{SUFFIX}")


def told() -> tuple[float, bool]:
    """By when this run must have saved (seconds since 1970), and whether to end after this step anyway."""
    with contextlib.suppress(OSError, ValueError):
        by, stop = Path(os.environ.get(FILE, "") + SUFFIX).read_text().split()
        return float(by), stop == "1"
    return math.inf, False


def decide(
    left_s: float, step_s: float, save_s: float | None, due: bool, stop: bool = False
) -> tuple[bool, bool]:
    """At the end of a step: whether to end the run after it, and whether to save first.

    Args:
        left_s: until everything must be saved.
        step_s, save_s: what the next step and a save take; None: no save was seen.
        due: whether this step is saved in any case.
        stop: whether the run has to end after this step however much is left.

    >>> decide(100, 40, 20, due=False), decide(50, 40, 20, due=False), decide(10, 40, 20, due=False)
    ((False, False), (True, True), (True, False))
    >>> decide(70, 40, 20, due=False), decide(70, 40, 20, due=True)
    ((False, False), (True, True))
    """
    cost_s = min(step_s, UNSEEN_SAVE_S) if save_s is None else save_s
    ends = stop or left_s < due * cost_s + step_s + cost_s
    return ends, ends and (due or save_s is None or cost_s <= left_s)


class SaveBy:
    """Of one start of a trainer; made when its first step begins.

    Args:
        written_s: for how many seconds the save of a step has been written so far, also after the trainer
            went on (weights/checkpoints.py).

    Attributes:
        over: whether the run ends after this step.
    """

    def __init__(self, written_s: Callable[[int], float]):
        self.written_s = written_s
        self.over, self.step = False, 0
        self.asked_s, self.saving_s = time.monotonic(), 0.0  # since the last question
        self.steps: list[float] = []
        self.saves: list[float] = []

    @contextlib.contextmanager
    def saving(self):
        """Around each save."""
        began_s = time.monotonic()
        yield
        self.saves.append(time.monotonic() - began_s)
        self.saved = self.step
        self.saving_s += self.saves[-1]

    def ends(self, step: int, due: bool) -> bool:
        """Whether to save this step though it is not due; asked at the end of each step but the last."""
        now = time.monotonic()
        if self.saves:
            self.saves[-1] = max(self.saves[-1], self.written_s(self.saved))
        self.steps.append(now - self.asked_s - self.saving_s)
        self.asked_s, self.saving_s, self.step = now, 0.0, step
        by, stop = told()
        left_s = by - time.time()
        step_s = MARGIN * max(self.steps[1:] or self.steps)
        save_s = MARGIN * max(self.saves) if self.saves else None
        self.over, save = decide(left_s, step_s, save_s, due, stop)
        if self.over:
            why = "it was asked to stop" if stop else f"the next step ({step_s:.0f} s) would not fit"
            then = "saves" if save else "ends without a save, which would not fit"
            print(
                f"[{time.strftime('%H:%M:%S')}] {left_s:.0f} s are left, and {why}: "
                f"the run {then} after step {step}",
                flush=True,
            )
        return save

"""By when a run has to end, with its last step saved: SAVE_BY, and SIGTERM where SAVE_GRACE_S is given.

Each node's launcher tells its own processes (process/save_by.py), since the trainer may be on any node. The
head's limit counts, and a worker that gets SIGTERM asks the head to bring it forward. If the time comes and
the trainer has not ended the run, the head does.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import datetime

from ascend_rl.process import save_by
from ascend_rl.settings.switch import CannotWork

EXIT_RESUMES = 75  # as EX_TEMPFAIL in sysexits.h: try again
WORKERS_S = 15.0  # in which the head ends before a worker ends by itself


def moment(text: str, now: float) -> float:
    """SAVE_BY in seconds since 1970; never, if it is empty.

    Args:
        text: seconds from now, or a time: ``2026-11-27T18:00`` of this node's time zone, or ``@`` and seconds
            since 1970, as date(1) takes them.

    Raises:
        CannotWork: it is none of these, or over.

    >>> moment("3600", 100.0), moment("@4000", 100.0), moment("", 100.0)
    (3700.0, 4000.0, inf)
    """
    if not text:
        return math.inf
    try:
        if text.startswith("@"):
            by = float(text[1:])
        elif text.replace(".", "", 1).isdigit():
            by = now + float(text)
        else:
            by = datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise CannotWork(
            "SAVE_BY must be seconds from now, a time such as 2026-11-27T18:00, or @ and seconds since 1970, "
            f"it is '{text}'"
        ) from error
    if not by > now:
        raise CannotWork(f"SAVE_BY={text} is over")
    return by


class TimeLimit:
    """Of the run, as known to this node's launcher.

    Args:
        by: seconds since 1970; inf: none.
        grace_s: how long a first SIGTERM leaves the run; 0: nothing.
        head: whether this node ends the run.
    """

    def __init__(self, by: float = math.inf, grace_s: float = 0.0, head: bool = True):
        self.by, self.grace_s, self.head = by, grace_s, head
        self.stop = self.termed = False
        self.path = ""
        self.tell: Callable[[float, bool], None] = lambda by, stop: None  # the other nodes
        self.lock = threading.Lock()

    def attach(self, path: str) -> None:
        """Begin to tell this node's processes, which have ``path`` as progress.FILE, and the other nodes."""
        self.path = path
        self._say()

    def _say(self) -> None:
        if self.by < math.inf:
            if self.path:
                save_by.write(self.path, self.by, self.stop)
            if self.head:
                self.tell(self.by, self.stop)

    def shorten(self, by: float, stop: bool) -> None:
        """What another node, or a signal, says; a limit is never put off."""
        with self.lock:
            if by < self.by or (stop and not self.stop):
                self.by, self.stop = min(by, self.by), stop or self.stop
                self._say()

    def term(self) -> bool:
        """A SIGTERM came: whether to go on until the grace time is over. A second one ends the run."""
        if not self.grace_s or self.termed:
            return False
        self.termed = True
        self.shorten(time.time() + self.grace_s, True)
        if not self.head:
            self.tell(self.by, True)
        return True

    def passed(self) -> bool:
        """Whether this node has to end the run now."""
        if not self.head and not self.termed:
            return False
        return time.time() > self.by + (0.0 if self.head else WORKERS_S)

"""A process whose work has failed ends, whatever is left in it."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable


def end_if_it_fails(main: Callable) -> Callable:
    """What a process does, but an exception is printed and ends the process at once, with status 1.

    Otherwise Python frees what is left first, and a zmq context waits forever for a message that nobody
    takes: to those who started the process it is alive.
    """

    @functools.wraps(main)
    def call(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except Exception:
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    return call

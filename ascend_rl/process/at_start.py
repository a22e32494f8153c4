"""What every Python process of a run does at its start: it can be asked for the stacks of its threads.

The launcher puts a directory with this file, as ``sitecustomize.py``, at the beginning of PYTHONPATH; another
module of that name runs after it. `SIGNAL` then makes faulthandler add the stacks to the file that
ASCEND_RL_STACKS names, also while all threads wait in C (a collective). Forks inherit that. It imports what
Python has loaded anyway, for a run starts hundreds of processes.
"""

import _signal
import faulthandler
import os
import sys

VARIABLE = "ASCEND_RL_STACKS"
SIGNAL = _signal.SIGRTMIN + 9  # nobody else's; without a handler it would end a process


def register() -> None:
    try:
        file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND)
        faulthandler.register(SIGNAL, file, all_threads=True)
    except (KeyError, OSError, RuntimeError, ValueError):  # never a reason to end a process
        pass


def run_the_next() -> None:
    """The sitecustomize that this one hides."""
    this = sys.modules.pop(__name__)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != here]
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = this


if __name__ == "sitecustomize":
    register()
    run_the_next()

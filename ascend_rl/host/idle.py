"""How long a worker process of vLLM looks for its next call in a loop before it sleeps between two looks."""

from __future__ import annotations

import math
import os

from ascend_rl.settings.switch import CannotWork

VARIABLE = "ROLLOUT_SPIN_S"
SLEEP_S = 0.1  # at most, as in vLLM


def spin_and_sleep() -> tuple[float, float]:
    """Seconds in the loop, and of each sleep after it, for vLLM's SpinSleepTimer (VLLM_SLEEP_WHEN_IDLE=1).

    A sleep is as long as the loop, at most 0.1 s: a call waits no longer than what the loop has cost.

    Raises:
        CannotWork: ROLLOUT_SPIN_S is not a number of seconds > 0.
    """
    text = os.environ.get(VARIABLE) or "3"  # vLLM's own
    try:
        spin = float(text)
    except ValueError:
        spin = math.nan
    if not 0 < spin < math.inf:
        raise CannotWork(f"{VARIABLE}={text}: give seconds > 0, such as 0.002")
    return spin, min(spin, SLEEP_S)

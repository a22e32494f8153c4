"""Draft only when the batch is small enough for drafts to pay.

Problem: k drafted tokens make a decode step compute k + 1 tokens for each request. With few requests the chip
waits for weights, so this costs little; with many it is busy computing, and speculation slows it down.
Idea: draft while a step has at most ``threshold`` requests. A rollout starts with a full batch and ends with
a small one, so speculation is on in the tail, where the time goes. Once off, it comes back only at 7/8 of the
threshold, so that a batch whose size varies by a few requests does not toggle it, and with it the graph
shapes, at every step.
Invariants: the output does not depend on it, as drafts never change the output; without a threshold the gate
is always open.
Cost: O(1) a step.

    python -m ascend_rl.speculation.bs_threshold_for_spec_decode 4:15 32:19 128:23 256:32 --draft-tokens 7
"""

from __future__ import annotations

import argparse
import os

import numpy as np
from numpy.typing import ArrayLike

from ascend_rl.process.counts import count
from ascend_rl.settings.numbers import real, whole
from ascend_rl.settings.switch import CannotWork

VARIABLE = "VLLM_SPECULATIVE_BATCH_SIZE_THRE"
KEY = "bs_threshold_for_spec_decode"
STATELESS = ("ngram", "sam")
"""Methods whose drafter may skip steps: it keeps no state, or catches up on the missed tokens by itself."""


class DraftGate:
    """Whether to draft in a step, asked once in each.

    Args:
        threshold: most requests in a step with drafts; None for any number.
    """

    def __init__(self, threshold: int | None):
        self.threshold = threshold
        self.open = True

    def __call__(self, requests: int) -> bool:
        """
        >>> gate = DraftGate(16)
        >>> [gate(requests) for requests in (16, 17, 16, 15, 14, 16, 17)]
        [True, False, False, False, True, True, False]
        """
        if self.threshold is not None:
            self.open = requests <= (self.threshold if self.open else self.threshold * 7 // 8)
            count("draft_gate", int(not self.open))
        return self.open


def draft_gate(method: str | None, configured: int | None) -> DraftGate:
    """The gate of an engine: the environment's threshold, else the configured one, else none.

    Raises:
        CannotWork: a threshold that is not a positive integer, or a method that must see every token.
    """
    given = os.environ.get(VARIABLE, "" if configured is None else str(configured)).strip()
    if not given or method is None:
        return DraftGate(None)
    if not given.isdecimal() or int(given) < 1:
        raise CannotWork(
            f"{VARIABLE} or additional_config.{KEY} is {given!r}: give a batch size of 1 or more, or unset it"
        )
    if method not in STATELESS:
        raise CannotWork(
            f"{VARIABLE} or additional_config.{KEY} is set, but the drafter of method {method} would miss "
            f"the tokens generated while it is off: unset it, or use {' or '.join(STATELESS)}"
        )
    return DraftGate(int(given))


def step_time(measured: dict[int, float], tokens: ArrayLike) -> np.ndarray:
    """Time of a step of ``tokens``, by linear interpolation and extrapolation of {tokens: time}."""
    sizes, times = map(np.array, zip(*sorted(measured.items()), strict=True))
    right = np.clip(np.searchsorted(sizes, tokens), 1, len(sizes) - 1)
    slope = (times[right] - times[right - 1]) / (sizes[right] - sizes[right - 1])
    return times[right - 1] + (tokens - sizes[right - 1]) * slope


def threshold(measured: dict[int, float], draft_tokens: int, emitted: float) -> int:
    """The largest batch up to which drafts lower the time of a step for each emitted token.

    Args:
        measured: {tokens of a decode step: its time}, any unit, at least two sizes.
        draft_tokens: tokens drafted for each request.
        emitted: mean number of tokens a request gets in a step with drafts, the accepted ones plus one.

    >>> threshold({4: 15, 32: 19, 128: 23, 256: 32}, draft_tokens=7, emitted=1.7)
    32
    """
    batch = 0
    while batch < max(measured) and (
        step_time(measured, (batch + 1) * (draft_tokens + 1)) < emitted * step_time(measured, batch + 1)
    ):
        batch += 1
    return batch


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=f"A value for {VARIABLE} from measured decode steps.")
    parser.add_argument(
        "steps", nargs="+", metavar="TOKENS:TIME", help="time of a step with this many tokens"
    )
    parser.add_argument("--draft-tokens", type=whole(), required=True, metavar="K")
    parser.add_argument("--emitted", type=real(1), required=True, help="tokens a request gets in a step")
    args = parser.parse_args(argv)
    measured = {int(tokens): float(time) for tokens, time in (step.split(":") for step in args.steps)}
    if len(measured) < 2:
        parser.error("give at least two sizes")
    print(f"{VARIABLE}={threshold(measured, args.draft_tokens, args.emitted)}")


if __name__ == "__main__":
    main()

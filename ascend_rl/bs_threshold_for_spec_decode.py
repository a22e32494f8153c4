"""Draft only in batches small enough for it to pay.

Problem: k drafted tokens make a decode step compute k + 1 tokens for each request. Few requests leave the
chip waiting for weights, so this costs little; many keep it computing: speculation is slower than none.
Idea: draft while at most ``threshold`` requests are in the step. A rollout begins with a full batch and ends
with a thin one, so speculation comes on where the time goes: in the tail. Once off, it comes on again at 7/8
of the threshold only, so that a batch that varies by a few requests does not switch it, and the shapes of the
graphs, at each step.
Invariants: the output does not depend on it, as no draft changes it; without a threshold it is always open.
Cost: O(1) a step.

    python -m ascend_rl.bs_threshold_for_spec_decode 4:15 32:19 128:23 256:32 --draft-tokens 7 --emitted 1.7
"""

from __future__ import annotations

import argparse
import os

VARIABLE = "VLLM_SPECULATIVE_BATCH_SIZE_THRE"
KEY = "bs_threshold_for_spec_decode"
STATELESS = ("ngram", "sam")
"""Methods whose drafter may be passed over: it needs no tokens, or reads the missed ones later by itself."""


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
        return self.open


def draft_gate(method: str | None, configured: int | None) -> DraftGate:
    """The gate of an engine: the environment's threshold, else the configured one, else none.

    Raises:
        ValueError: a threshold that is no positive integer, or a method that must see each token.
    """
    given = os.environ.get(VARIABLE, "" if configured is None else str(configured)).strip()
    if not given or method is None:
        return DraftGate(None)
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(
            f"{VARIABLE} or additional_config.{KEY} is {given!r}: give a batch size from 1, or unset it"
        )
    if method not in STATELESS:
        raise ValueError(
            f"{VARIABLE} or additional_config.{KEY} is set, but the drafter of method {method} would miss "
            f"the tokens generated without it: unset it, or use {' or '.join(STATELESS)}"
        )
    return DraftGate(int(given))


def step_time(measured: dict[int, float], tokens: int) -> float:
    """Time of a step of ``tokens`` from {tokens: time}, linear between and beyond the measured sizes."""
    sizes = sorted(measured)
    right = next((i for i, size in enumerate(sizes) if size >= tokens and i), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    return measured[low] + (tokens - low) * (measured[high] - measured[low]) / (high - low)


def threshold(measured: dict[int, float], draft_tokens: int, emitted: float) -> int:
    """The largest batch up to which a step with drafts costs less for each emitted token than one without.

    Args:
        measured: time of a decode step by the number of its tokens, any unit, two sizes at least.
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
    parser.add_argument("steps", nargs="+", metavar="TOKENS:TIME", help="time of a step of so many tokens")
    parser.add_argument("--draft-tokens", type=int, required=True, metavar="K")
    parser.add_argument("--emitted", type=float, required=True, help="tokens a request gets in a step")
    args = parser.parse_args(argv)
    measured = {int(tokens): float(time) for tokens, time in (step.split(":") for step in args.steps)}
    if len(measured) < 2:
        parser.error("give two sizes at least")
    print(f"{VARIABLE}={threshold(measured, args.draft_tokens, args.emitted)}")


if __name__ == "__main__":
    main()

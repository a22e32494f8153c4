"""Which rank generates which sample, before a rollout starts.

The samples of one prompt have similar lengths. Placed next to each other (verl's order), the ranks with easy
prompts end early and wait. Interleaving, the published answer, deals the first samples of all prompts, then
the second ones, and so on; whether the longest prompts are in one half of the batch is left to chance.

Idea: where lengths are known, from earlier steps or from siblings that have ended, deal the samples longest
first in rounds, one to each rank; in a round the longest goes to the rank with least so far. Then about
as many samples on each rank reach any length, and all ranks change to smaller graphs together. If nothing is
known, the result is the interleaved order.

Invariants (tests/test_data_rebalance.py): ranks get equal counts, the first ones one more where it does not
divide; ``order`` and ``inverse`` undo each other exactly; if all lengths are known, no two ranks differ by
more than one in how many of their samples are longer than any length, so the fullest rank's batch, summed
over steps, is the least there is.
Cost: O(n log n).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Placement(NamedTuple):
    """Where samples go.

    Attributes:
        rank: [N] the rank of each sample.
        order: [N] samples by rank, on a rank longest first: cut ``batch[order]`` into parts of ``sizes``.
        inverse: [N] ``batch[order][inverse]`` is the batch as it came.
        sizes: [ranks] samples of each rank.
    """

    rank: np.ndarray
    order: np.ndarray
    inverse: np.ndarray
    sizes: np.ndarray


def predict(
    groups: Sequence[Hashable],
    earlier: Mapping[Hashable, Sequence[float]],
    finished: Iterable[tuple[Hashable, float]] = (),
) -> np.ndarray:
    """[N] expected response tokens of each sample; nan where nothing is known of its prompt.

    Args:
        groups: [N] the prompt of each sample (verl's ``uid``, or an id that lasts over epochs).
        earlier: response lengths of a prompt in its last epoch.
        finished: (prompt, length) of samples that have ended in this step. They replace earlier ones, which
            came from another policy.

    >>> predict(["a", "a", "b", "c"], {"a": [10, 20]}, [("c", 7)]).tolist()
    [15.0, 15.0, nan, 7.0]
    """
    now = defaultdict(list)
    for group, tokens in finished:
        now[group].append(tokens)
    both = (*earlier.items(), *now.items())
    known = {group: float(np.mean(lengths)) for group, lengths in both if len(lengths)}
    return np.array([known.get(group, np.nan) for group in groups], dtype=float)


def place(groups: Sequence[Hashable], ranks: int, predicted: np.ndarray | None = None) -> Placement:
    """Deal samples to ranks.

    Args:
        groups: [N] the prompt of each sample, in any order; prompts may have different numbers of samples.
        predicted: [N] tokens, nan where unknown; None if nothing is known.

    >>> place(["a", "a", "b", "b"], 2).rank.tolist()
    [0, 1, 0, 1]
    >>> place(["a", "a", "b", "b"], 2, np.array([9, 9, 1, 1])).rank.tolist()
    [0, 1, 0, 1]
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    count = len(groups)
    sizes = np.full(ranks, count // ranks) + (np.arange(ranks) < count % ranks)
    column = _columns(groups)
    expected = np.full(count, np.nan) if predicted is None else np.asarray(predicted, dtype=float)
    if expected.shape != (count,):
        raise ValueError(f"predicted has shape {expected.shape}, there are {count} samples")
    if np.isnan(expected).all():
        # A stable sort by column is the interleaved order.
        order = np.argsort(column, kind="stable")
        rank = np.empty(count, dtype=np.int64)
        rank[order] = np.repeat(np.arange(ranks), sizes)
    else:
        expected = np.where(np.isnan(expected), np.nanmean(expected), expected)
        longest_first = np.argsort(-expected, kind="stable")
        rank = _deal(expected, longest_first, sizes)
        order = longest_first[np.argsort(rank[longest_first], kind="stable")]
    inverse = np.empty(count, dtype=np.int64)
    inverse[order] = np.arange(count)
    return Placement(rank, order, inverse, sizes)


def _columns(groups: Sequence[Hashable]) -> np.ndarray:
    """[N] how many samples of the same prompt came before each."""
    seen: defaultdict[Hashable, int] = defaultdict(int)
    column = np.empty(len(groups), dtype=np.int64)
    for index, group in enumerate(groups):
        column[index] = seen[group]
        seen[group] += 1
    return column


def _deal(expected: np.ndarray, order: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[N] ranks: rounds of one sample each, in ``order``."""
    rank = np.empty(len(order), dtype=np.int64)
    load, left = np.zeros(len(sizes)), sizes.copy()
    while len(order):
        turn = np.flatnonzero(left)
        turn = turn[np.argsort(load[turn], kind="stable")]  # the longest of a round to the least loaded
        part = order[: len(turn)]
        rank[part] = turn
        load[turn] += expected[part]
        left[turn] -= 1
        order = order[len(part) :]
    return rank

"""Which waiting requests an engine admits next, from what is known of the lengths of their responses.

vLLM admits first come, first served, and fills the KV cache with requests that are still short. As they grow
it runs full, and the youngest are preempted: their KV is dropped and recomputed. With experts spread over all
data-parallel ranks, every recomputation also stops all other ranks.

Idea. The length of a response is log-logistic about the median of its prompt: earlier epochs, siblings that
have ended in this step, and the other prompts of the engine say where that is, each as far as it can be
trusted. Given the tokens that a request has already, this yields for each later step the probability that it
still runs, hence mean and variance of the KV of all requests together, the profile.

1. The longest goes first. It is admitted if the profile with it stays below the capacity, ``margin`` standard
   deviations included, at every step. If it does not fit, room is kept for it from the first step at which it
   does, and shorter ones may use what is free until then (EASY backfilling, Lifka 1995).
2. If KV rather than the longest response decides how long the rollout takes, and until the profile's peak
   more than a share of it would be free, that is lent to the shortest of the others. Some of them will be
   preempted, but recomputing tokens is cheaper than not having made them. Where all are alike, no shorter one
   will ever fill it, and all of it is lent.

Trust is learned from the responses that end: how far those of a prompt differ, how far they are from the
earlier epoch, and the factor by which all have grown since. A preemption that was not to be expected raises
the margin, each response that ends lowers it, so that wrong predictions cost little.

Invariants (tests/test_length_scheduler.py): only the order of requests changes; at least one is admitted
where none runs; without a known length the order is that of arrival. Cost: O((R + W) * POINTS) per decision
for R running and W waiting requests.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

# Standard deviations of the logarithm of a length: between the samples of a prompt, between the mean of a
# prompt and that of its earlier epoch, between prompts. Recorded on GSM8K: 0.24, 0.35, 0.39; fitted to the
# published runs: 0.11, 0.15, 0.56 (docs/rollout_rebalance.md).
WITHIN, DRIFT, BETWEEN = 0.2, 0.25, 0.5
PRIOR = 16  # they count as much as so many responses
COLD = 1 / 5  # of max_tokens: the median where no length is known
POINTS = 40  # of the profile
# The share of KV that may stay free: of engines that step together and know lengths of an earlier epoch, of
# others; and the first margin: of engines that step together, of one alone.
HOLE, MARGIN = (0.25, 0.1), (2.0, 1.0)
MOST_MARGIN, RAISE, LOWER = 4.0, 0.2, 0.02
ALIKE = 0.3  # standard deviation of the logarithm of all lengths


class Lengths:
    """What is known of the lengths of responses, in logarithms of tokens."""

    def __init__(self) -> None:
        self.earlier: dict[Hashable, tuple[float, int]] = {}  # prompt -> mean, number
        self.ended: dict[Hashable, tuple[float, int]] = {}
        self.pool = 0.0, 0.0, 0  # sum of the prompts' means, of their squares, number
        self.within = PRIOR * WITHIN**2, float(PRIOR)  # squares, degrees of freedom
        self.drift = PRIOR * DRIFT**2, float(PRIOR)
        self.grown = 0.0, float(PRIOR)

    def expect(self, prompt: Hashable, lengths: Sequence[float]) -> None:
        """Take in the tokens of the responses of a prompt in an earlier epoch."""
        if len(lengths) == 0 or prompt in self.earlier:
            return
        logs = np.log(np.maximum(lengths, 1))
        self.earlier[prompt] = float(logs.mean()), len(logs)
        self.within = (
            self.within[0] + float(((logs - logs.mean()) ** 2).sum()),
            self.within[1] + len(logs) - 1,
        )
        self._take_in(float(logs.mean()))

    def learn(self, prompt: Hashable, tokens: int) -> None:
        """Take in a response that has ended in this step."""
        log = math.log(max(tokens, 1))
        mean, number = self.ended.get(prompt, (0.0, 0))
        if number:
            self.within = self.within[0] + (log - mean) ** 2 * number / (number + 1), self.within[1] + 1
        if prompt in self.earlier:
            off = log - self.earlier[prompt][0]
            self.drift = self.drift[0] + (off - self.grown[0] / self.grown[1]) ** 2, self.drift[1] + 1
            self.grown = self.grown[0] + off, self.grown[1] + 1
        elif not number:
            self._take_in(log)
        self.ended[prompt] = (mean * number + log) / (number + 1), number + 1

    def _take_in(self, mean: float) -> None:
        self.pool = self.pool[0] + mean, self.pool[1] + mean**2, self.pool[2] + 1

    def alike(self) -> bool:
        """Whether all responses have about the same length."""
        total, squares, number = self.pool
        between = max(0.0, squares / number - (total / number) ** 2) if number > 1 else BETWEEN**2
        return between + self.within[0] / self.within[1] < ALIKE**2

    def guess(self, prompt: Hashable, most: float) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm of a response's tokens.

        Args:
            most: tokens that the response can have.
        """
        within = self.within[0] / self.within[1]
        pool = (self.pool[0] + math.log(most * COLD)) / (self.pool[2] + 1)
        known = [(pool, BETWEEN**2 * (1 if self.pool[2] else 2))]
        if prompt in self.earlier:
            mean, number = self.earlier[prompt]
            known.append(
                (mean + self.grown[0] / self.grown[1], self.drift[0] / self.drift[1] + within / number)
            )
        if prompt in self.ended:
            mean, number = self.ended[prompt]
            known.append((mean, within / number))
        weights = [1 / variance for _, variance in known]
        mean = sum(weight * mean for weight, (mean, _) in zip(weights, known, strict=True)) / sum(weights)
        return mean, math.sqrt(1 / sum(weights) + within)


@dataclass(frozen=True)
class Request:
    """An unfinished request of an engine.

    Attributes:
        prompt: what its siblings have in common.
        prompt_tokens, done: tokens of the prompt, of the response so far.
        most: tokens that the response can have.
    """

    prompt: Hashable
    prompt_tokens: int
    done: int
    most: int


class LengthScheduler:
    """The decisions of one engine.

    Args:
        capacity: tokens that its KV cache holds.
        alone: no other engine waits while this one recomputes.
    """

    def __init__(self, capacity: int, alone: bool = False):
        self.capacity, self.alone, self.lengths, self.lent = capacity, alone, Lengths(), 0
        self.margin = self.least_margin = MARGIN[alone]

    def expect(self, prompt: Hashable, lengths: Sequence[float]) -> None:
        """A request has come, whose prompt had responses of these lengths in an earlier epoch."""
        self.lengths.expect(prompt, lengths)

    def ended(self, prompt: Hashable, tokens: int) -> None:
        """A response has ended."""
        self.lengths.learn(prompt, tokens)
        self.margin = max(self.least_margin, self.margin - LOWER)

    def preempted(self) -> None:
        """A request lost its KV: what was predicted was too little."""
        if self.lent:
            self.lent -= 1
        else:
            self.margin = min(MOST_MARGIN, self.margin + RAISE)

    def choose(
        self, running: Sequence[Request], waiting: Sequence[Request], places: int
    ) -> tuple[list[int], int]:
        """What to admit now.

        Args:
            places: how many more requests may run.

        Returns:
            the waiting requests by number, those to admit first, then the longest; how many to admit.
        """
        run, wait = self._arrays(running), self._arrays(waiting)
        kinds: dict[Hashable, int] = {}
        kind = np.array(
            [kinds.setdefault((w.prompt, w.done, w.prompt_tokens, w.most), len(kinds)) for w in waiting]
        )
        hole = 0.0 if self.lengths.alike() else HOLE[self.alone or not self.lengths.earlier]
        order, count, lent = _choose(run, wait, kind, float(self.capacity), places, self.margin, hole)
        self.lent += int(lent)
        return order.tolist(), int(count)

    def _arrays(self, requests: Sequence[Request]) -> np.ndarray:
        """[5, N]: prompt tokens, done, most, and of the log-logistic distribution log median and power."""
        found: dict[tuple, tuple[float, float]] = {}
        rows = []
        for each in requests:
            name = each.prompt, each.most
            if name not in found:
                mean, deviation = self.lengths.guess(*name)
                found[name] = mean, math.pi / math.sqrt(3) / deviation
            rows.append((each.prompt_tokens, each.done, each.most, *found[name]))
        return np.array(rows, dtype=float).reshape(-1, 5).T.copy()


@njit(cache=True)
def _runs(request, times, out):
    """[T] probability that a request, column of `_arrays`, still runs after so many more steps."""
    _, done, most, middle, power = request
    so_far = 0.0
    if done > 0:
        so_far = np.log1p(np.exp(min(power * (np.log(done) - middle), 500.0)))
    for k in range(len(times)):
        tokens = done + times[k]
        if tokens >= most:
            out[k] = 0.0
        elif tokens <= 0:
            out[k] = 1.0
        else:
            out[k] = np.exp(so_far - np.log1p(np.exp(min(power * (np.log(tokens) - middle), 500.0))))


@njit(cache=True)
def _fits(mean, variance, more, more_variance, start, capacity, margin):
    for k in range(start, len(mean)):
        total = mean[k] + more[k - start]
        if total + margin * np.sqrt(variance[k] + more_variance[k - start]) > capacity:
            return False
    return True


@njit(cache=True)
def _choose(run, wait, kind, capacity, places, margin, hole):
    """See `LengthScheduler.choose`; the profile has POINTS equal steps."""
    horizon = 1.0
    for side in (run, wait):
        for i in range(side.shape[1]):
            done, most, middle, power = side[1, i], side[2, i], side[3, i], side[4, i]
            long = np.exp(middle + 4.0 / power)
            horizon = max(horizon, min(most, max(long, 1.3 * done)) - done)
    pause = horizon / POINTS
    times = pause * np.arange(POINTS)
    longest = 0.0
    mean, variance, alive = np.zeros(POINTS), np.zeros(POINTS), np.zeros(POINTS)
    for i in range(run.shape[1]):
        _runs(run[:, i], times, alive)
        for k in range(POINTS):
            held = run[0, i] + run[1, i] + times[k]
            mean[k] += alive[k] * held
            variance[k] += alive[k] * (1 - alive[k]) * held**2
        longest = max(longest, pause * alive.sum())
    work = pause * mean.sum()
    count = wait.shape[1]
    needs, spreads, left = np.zeros((count, POINTS)), np.zeros((count, POINTS)), np.zeros(count)
    for i in range(count):
        _runs(wait[:, i], times, alive)
        for k in range(POINTS):
            held = wait[0, i] + wait[1, i] + times[k]
            needs[i, k] = alive[k] * held
            spreads[i, k] = alive[k] * (1 - alive[k]) * held**2
            left[i] -= alive[k]
        work += pause * needs[i].sum()
        longest = max(longest, -pause * left[i])
    longest_first = np.argsort(left, kind="mergesort")
    chosen, rest = np.zeros(count, np.int64), np.zeros(count, np.int64)
    admitted = passed = 0
    refused = np.zeros(count, np.bool_)  # by kind
    real = mean.copy()
    kept = False
    for i in longest_first:
        fits = False
        if admitted < places and not refused[kind[i]]:
            alone = run.shape[1] == 0 and admitted == 0
            fits = alone or _fits(mean, variance, needs[i], spreads[i], 0, capacity, margin)
            start = 0
            if not fits:
                refused[kind[i]] = True
                if kept:
                    start = POINTS
                else:
                    kept = True
                    start = 1
                    while start < POINTS and not _fits(
                        mean, variance, needs[i], spreads[i], start, capacity, margin
                    ):
                        start += 1
            for k in range(start, POINTS):
                mean[k] += needs[i, k - start]
                variance[k] += spreads[i, k - start]
        if fits:
            real += needs[i]
            chosen[admitted] = i
            admitted += 1
        else:
            rest[passed] = i
            passed += 1
    lent = 0
    while (
        work > longest * capacity
        and passed > 0
        and admitted < places
        and real[: real.argmax() + 1].mean() < (1 - hole) * capacity
    ):
        passed -= 1
        real += needs[rest[passed]]
        chosen[admitted] = rest[passed]
        admitted += 1
        lent += 1
    chosen[admitted:] = rest[:passed]
    return chosen, admitted, lent

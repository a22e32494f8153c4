"""Which waiting requests an engine admits next, from what is known of the lengths of their responses.

vLLM admits first come, first served, and fills the KV cache with requests that are still short. As they grow
it runs full, and the youngest are preempted: their KV is dropped and recomputed. With experts spread over all
data-parallel ranks, every recomputation also stops all other ranks.

Idea. The length of a response is log-logistic about the median of its prompt: earlier epochs, siblings that
have ended in this step, and the other prompts of the engine say where that is, each as far as it can be
trusted. Given the tokens that a request has already, this yields for each later step the probability that it
still runs, hence mean and variance of the KV of all requests together, the profile.

Where lengths of an earlier epoch are known, and prompts differ more than the samples of one, a linear program
plans when the waiting requests start, CLASSES of similar length at a time: at no step may the profile exceed
the capacity, ``margin`` standard deviations included, and late ends cost most. Those start now that the plan
starts now. Unlike a greedy rule, it starts requests one after another if they would all peak together.

Where less is known:

1. The longest goes first. It is admitted if the profile with it stays below the capacity at every step. If it
   does not fit, room is kept for it from the first step at which it does, and shorter ones may use what is
   free until then (EASY backfilling, Lifka 1995).
2. If KV rather than the longest response decides how long the rollout takes, and until the profile's peak
   more than a share of it would be free, that is lent to the shortest of the others. Some of them will be
   preempted, but recomputing tokens is cheaper than not having made them. A plan lends like this in an engine
   that steps alone, where recomputing stops no other.

Where all lengths are alike, there is nothing to order: as many are admitted as vLLM has room for.

Trust is learned from the responses that end: how far those of a prompt differ and how far they are from the
earlier epoch, both kept from one rollout to the next, and the factor by which all have grown since. A
preemption that was not to be expected raises the margin, each response that ends lowers it, so that wrong
predictions cost little.

Invariants (tests/test_length_scheduler.py): only the order of requests changes; what is admitted and not lent
fits at every step; at least one is admitted where none runs; without a known
length the order is that of arrival. Cost of a decision: O((R + W) * POINTS) for R running and W waiting
requests; of a plan, which is made where one of them fits, 10 ms.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from scipy.optimize import linprog

# Standard deviations of the logarithm of a length: between the samples of a prompt, between the mean of a
# prompt and that of its earlier epoch, between prompts. Recorded on GSM8K: 0.24, 0.35, 0.39; fitted to the
# published runs: 0.11, 0.15, 0.56 (docs/rollout_rebalance.md).
WITHIN, DRIFT, BETWEEN = 0.2, 0.25, 0.5
PRIOR = 16  # they count as much as so many responses
COLD = 1 / 5  # of max_tokens: the median where no length is known
KEPT = 64  # the trust from earlier rollouts, at most
POINTS = 40  # of the profile
HOLE = 0.25, 0.1  # the share of KV that may stay free, with lengths of an earlier epoch and without
MARGIN = 1.75, 1.0  # the first: of engines that step together, of one alone
MOST_MARGIN, RAISE, LOWER = 4.0, 0.05, 0.02
# Of a plan; it may take LONGER times what the KV would need if it were always full, and costs end**LATE.
CLASSES, TIMES, LONGER, LATE = 12, 44, 1.6, 8
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

    def forget(self) -> Lengths:
        """For the next rollout: only the trust is left."""
        left = Lengths()
        for name in ("within", "drift"):
            total, number = getattr(self, name)
            setattr(left, name, (total * min(1.0, KEPT / number), min(number, KEPT)))
        return left

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

    def between(self) -> float:
        """Variance of the prompts' means."""
        total, squares, number = self.pool
        return max(0.0, squares / number - (total / number) ** 2) if number > 1 else BETWEEN**2

    def alike(self) -> bool:
        """Whether all responses have about the same length."""
        return self.between() + self.within[0] / self.within[1] < ALIKE**2

    def telling(self) -> bool:
        """Whether a prompt, known from an earlier epoch, says how long its responses will be."""
        return bool(self.earlier) and self.between() > self.within[0] / self.within[1]

    def guess(self, prompt: Hashable, most: float) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm of a response's tokens.

        Args:
            most: tokens that the response can have.
        """
        within = self.within[0] / self.within[1]
        pool = (self.pool[0] + math.log(most * COLD)) / (self.pool[2] + 1)
        number = self.pool[2]
        between = (PRIOR * BETWEEN**2 + number * self.between()) / (PRIOR + number)
        known = [(pool, between * (1 if number else 2))]
        if prompt in self.earlier:
            mean, number = self.earlier[prompt]
            mean += self.grown[0] / self.grown[1]
            known.append((mean, self.drift[0] / self.drift[1] + within / number))
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

    def forget(self) -> None:
        """A new rollout begins: other weights."""
        self.lengths = self.lengths.forget()

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
        elif not self.alone:
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
        places = min(max(places, 0), len(waiting))
        if places == 0 or self.lengths.alike():
            return list(range(len(waiting))), places
        run, wait = self._arrays(running), self._arrays(waiting)
        if self.lengths.telling():
            return self._plan(run, wait, places)
        kinds: dict[Hashable, int] = {}
        kind = np.array(
            [kinds.setdefault((w.prompt, w.done, w.prompt_tokens, w.most), len(kinds)) for w in waiting]
        )
        hole = HOLE[not self.lengths.earlier]
        order, count, lent = _choose(run, wait, kind, float(self.capacity), places, self.margin, hole)
        self.lent += int(lent)
        return order.tolist(), int(count)

    def _plan(self, run: np.ndarray, wait: np.ndarray, places: int) -> tuple[list[int], int]:
        """As `choose`."""
        ages = np.linspace(0, _horizon(run, wait), POINTS)
        alive, needs, spreads = _profiles(wait, ages)
        order = np.argsort(-alive.sum(1), kind="stable")
        chosen, due = [], 0.0
        classes = np.array_split(order, min(CLASSES, len(order)))
        for members, number in zip(classes, self._starting(run, wait, ages, classes), strict=True):
            due += number
            now = min(int(due + 0.5), len(members))
            due -= now
            chosen.extend(members[:now].tolist())
        numbers = np.array(chosen, np.int64)
        chosen = chosen[: _that_fit(run, needs, spreads, ages, numbers, self.capacity, places, self.margin)]
        if not chosen and not run.shape[1]:
            chosen = order[:1].tolist()
        rest = order[~np.isin(order, chosen)]
        if self.alone:
            held = _profiles(run, ages)[1].sum(0) + needs[chosen].sum(0)
            lent = _lend(held, needs, rest, self.capacity, places - len(chosen), HOLE[0])
            self.lent += lent
            rest, shortest = np.split(rest, [len(rest) - lent])
            chosen += shortest[::-1].tolist()
        return chosen + rest.tolist(), len(chosen)

    def _starting(
        self, run: np.ndarray, wait: np.ndarray, ages: np.ndarray, classes: list[np.ndarray]
    ) -> np.ndarray:
        """[C] how many of each class, in fractions, start now in the best plan; 0 if there is none."""
        alive, needs, spreads = _profiles(wait, ages)
        work = ages[1] * (needs.sum() + _profiles(run, ages)[1].sum()) / self.capacity
        end = ages[-1] + LONGER * work
        times = np.linspace(0, end, TIMES)
        starts = times[times <= LONGER * work]
        since = times[:, None] - starts
        # [T, C * S]: KV at each time, and its variance, of one request per class and start.
        kv = np.concatenate([_shifted(since, ages, needs[members]) for members in classes], 1)
        kv_variance = np.concatenate([_shifted(since, ages, spreads[members]) for members in classes], 1)
        ending = -np.diff(alive, axis=1, append=0.0)
        late = ((starts[:, None] + ages + ages[1]) / end) ** LATE
        cost = np.concatenate([late @ ending[members].mean(0) for members in classes])
        whole = np.kron(np.eye(len(classes)), np.ones(len(starts)))
        sizes = [len(members) for members in classes]
        _, held, variance = (profile.sum(0) for profile in _profiles(run, times))
        started = np.zeros(kv.shape[1])
        for _ in range(2):  # the second time with the variance of those that the first has started
            room = self.capacity - held - self.margin * np.sqrt(variance + kv_variance @ started)
            if run.shape[1] and not (kv[:, :: len(starts)] <= room[:, None]).all(0).any():
                return np.zeros(len(classes))  # not even one fits
            plan = linprog(cost, A_ub=kv, b_ub=np.maximum(room, 0), A_eq=whole, b_eq=sizes).x
            if plan is None:
                break
            started = plan
        return started[:: len(starts)]

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
def _horizon(run, wait):
    """Steps after which all will have ended, were they all to run."""
    horizon = 1.0
    for side in (run, wait):
        for i in range(side.shape[1]):
            done, most, middle, power = side[1, i], side[2, i], side[3, i], side[4, i]
            long = np.exp(middle + 4.0 / power)
            horizon = max(horizon, min(most, max(long, 1.3 * done)) - done)
    return horizon


@njit(cache=True)
def _profiles(requests, times):
    """[N, T] each: probability that a request still runs, mean and variance of its KV."""
    count = requests.shape[1]
    alive, mean = np.zeros((count, len(times))), np.zeros((count, len(times)))
    variance = np.zeros((count, len(times)))
    for i in range(count):
        _runs(requests[:, i], times, alive[i])
        held = requests[0, i] + requests[1, i] + times
        mean[i] = alive[i] * held
        variance[i] = alive[i] * (1 - alive[i]) * held**2
    return alive, mean, variance


@njit(cache=True)
def _that_fit(run, needs, spreads, times, chosen, capacity, places, margin):
    """How many of the chosen, in this order, fit at every step."""
    _, held, variances = _profiles(run, times)
    mean, variance = held.sum(0), variances.sum(0)
    for fit in range(min(len(chosen), places)):
        i = chosen[fit]
        if not _fits(mean, variance, needs[i], spreads[i], 0, capacity, margin):
            return fit
        mean += needs[i]
        variance += spreads[i]
    return min(len(chosen), places)


@njit(cache=True)
def _lend(held, needs, rest, capacity, places, hole):
    """How many of the rest, the shortest last, get KV that would be free until the peak of what is held."""
    lent = 0
    while lent < min(len(rest), places) and held[: held.argmax() + 1].mean() < (1 - hole) * capacity:
        lent += 1
        held += needs[rest[len(rest) - lent]]
    return lent


def _shifted(since, ages, profiles):
    """[T, S] mean of profiles over ages at so many steps since a start; 0 before it."""
    return np.where(since < 0, 0.0, np.interp(since, ages, profiles.mean(0), right=0.0))


@njit(cache=True)
def _choose(run, wait, kind, capacity, places, margin, hole):
    """See `LengthScheduler.choose`; the profile has POINTS equal steps."""
    horizon = _horizon(run, wait)
    pause = horizon / POINTS
    times = pause * np.arange(POINTS)
    alive, held, variances = _profiles(run, times)
    left, needs, spreads = _profiles(wait, times)
    mean, variance = held.sum(0), variances.sum(0)
    longest = 0.0
    for i in range(len(alive)):
        longest = max(longest, pause * alive[i].sum())
    for i in range(len(left)):
        longest = max(longest, pause * left[i].sum())
    work = pause * (mean.sum() + needs.sum())
    count = len(left)
    longest_first = np.argsort(-left.sum(1), kind="mergesort")
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
    if work > longest * capacity:
        lent = _lend(real, needs, rest[:passed], capacity, places - admitted, hole)
    for _ in range(lent):
        passed -= 1
        chosen[admitted] = rest[passed]
        admitted += 1
    chosen[admitted:] = rest[:passed]
    return chosen, admitted, lent

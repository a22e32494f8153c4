"""Simulate synchronous rollout: which rank decodes what and when, and how long the others wait.

Requests (prompt and response lengths) sit on ``ranks`` servers: DP ranks of one large-EP engine, which all
step together (``lockstep``), or servers with their own clocks. As in vLLM, a server admits its queue in order
while slots and KV last, pays for the prefill of admitted requests, and when KV runs out preempts its youngest
request, to be recomputed. A decode step takes

    base + gear * graph + batch * m + context * S / 1000 + padded * graph * L / 1000      ms:

with m running requests, S their tokens, L the longest of them, ``graph`` the smallest captured size that
holds m. In lockstep all wait for the largest graph and the largest attention. Requests move by replay (their
tokens are prefilled again) or with their KV over a link, while the step waits. A step with a prefill has no
graph, in lockstep on no rank: it takes ``eager`` times as long, besides the prefill.

Events are exact: between completions, admissions and preemptions only S and L change, and they grow
linearly. In lockstep, the rank with the slowest attention is determined once per event, at its midpoint.
Invariants (tests/test_sim_rollout.py, against a step-by-step simulation): each request generates exactly its
response; KV and slots are never exceeded; the makespan is at least ``lower_bound``.
Cost: O(events * (ranks + requests of a rank)), 10 ms for 4096 requests on 32 ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numba import njit

from ascend_rl.rollout.rollout_rebalance import Request, Server

MAX_RESPONSE = 32768


@dataclass(frozen=True)
class Cost:
    """Cost of a step in ms, see the module docstring; the rest per DP rank.

    Attributes:
        prefill_ms: for one token.
        kv_bytes: for one token, on each of the rank's dies.
        link_bytes_per_ms: from one die to another.
        check_ms: time to collect the state of all ranks and plan.
        eager: a step without a graph takes so many times one with.
    """

    base_ms: float
    gear_ms: float
    batch_ms: float
    context_ms: float
    padded_ms: float
    prefill_ms: float
    kv_bytes: int
    link_bytes_per_ms: float
    check_ms: float
    eager: float = 1.0


# Fitted, see docs/rollout_rebalance.md. Prefill: 5000 tokens/s per rank of four dies. KV: 94 layers, one KV
# head of 128 per die at TP4, bf16 (the published 1.47 GB of 32K tokens). Link: 20 GB/s.
QWEN3_235B = Cost(65.6, 0.494, 0.0, 0.137, 0.0, 0.2, 48128, 20e6, 2.0)
# The first three come from the published table of graph sizes, the padded attention from the gain by gears.
# KV: 61 layers of 576, bf16.
DEEPSEEK_V3 = Cost(54.0, 0.265, 0.078, 0.0, 0.12, 0.2, 70272, 20e6, 2.0)


@dataclass(frozen=True)
class Cluster:
    """Servers of equal size; ``gears`` are the captured batch sizes, at least up to ``max_num_seqs``."""

    cost: Cost
    ranks: int = 32
    gears: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    max_num_seqs: int = 256
    kv_capacity_tokens: int = 900_000
    lockstep: bool = True


@dataclass(frozen=True)
class Batch:
    """Requests of one rollout.

    Attributes:
        group: [N] int64, index of the prompt.
        prompt: [N] int64, tokens.
        response: [N] int64, tokens.
        earlier: [G] lists of response lengths seen in earlier epochs; empty if there are none.
    """

    group: np.ndarray
    prompt: np.ndarray
    response: np.ndarray
    earlier: list[list[float]]


def draw_lengths(
    prompts: int,
    samples: int,
    seed: int,
    *,
    median: float = 6025,
    between: float = 0.564,
    within: float = 0.110,
    drift: float = 0.15,
    history: int = 16,
) -> Batch:
    """Log-normal response lengths, correlated within a group, capped at 32K; defaults fit the published data.

    Args:
        between, within: standard deviations of log length, between prompts and within the samples of one.
        drift: standard deviation by which a prompt's log length differs from the earlier epoch's.
        history: earlier responses of each prompt.
    """
    rng = np.random.default_rng(seed)
    middle = np.log(median) + between * rng.standard_normal(prompts)
    logs = middle[:, None] + within * rng.standard_normal((prompts, samples))
    past = (middle + drift * rng.standard_normal(prompts))[:, None]
    past = past + within * rng.standard_normal((prompts, history))
    return _batch(logs, past, rng)


def draw_bimodal(prompts: int, samples: int, seed: int) -> Batch:
    """A quarter of the prompts are hard (16K tokens); the others take 2K."""
    rng = np.random.default_rng(seed)
    hard = rng.random(prompts)[:, None] < 0.25
    spread = 0.2 * rng.standard_normal((2, prompts, samples))
    logs = np.where(hard, np.log(16000), np.log(2000)) + spread
    return _batch(logs[0], logs[1], rng)


def draw_equal(prompts: int, samples: int, seed: int) -> Batch:
    """Every response has 4096 tokens."""
    logs = np.full((prompts, samples), np.log(4096.0))
    return _batch(logs, logs, np.random.default_rng(seed))


def _batch(logs: np.ndarray, past: np.ndarray, rng: np.random.Generator) -> Batch:
    prompts, samples = logs.shape
    lengths = np.clip(np.rint(np.exp(logs)), 1, MAX_RESPONSE).astype(np.int64)
    earlier = np.clip(np.exp(past), 1, MAX_RESPONSE).tolist()
    prompt = np.clip(np.rint(rng.gamma(4.0, 73.7 / 4, prompts)), 8, 2048).astype(np.int64)
    return Batch(np.repeat(np.arange(prompts), samples), np.repeat(prompt, samples), lengths.ravel(), earlier)


def read_lengths(path: str | Path) -> Batch:
    """Recorded lengths: one JSON line per prompt, ``{"prompt": 74, "response": [..], "earlier": [..]}``.

    ``earlier`` is optional.
    """
    rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    if not rows:
        raise ValueError(f"{path} has no lines; write one JSON object a prompt")
    counts = [len(row["response"]) for row in rows]
    return Batch(
        np.repeat(np.arange(len(rows)), counts),
        np.repeat([row["prompt"] for row in rows], counts),
        np.concatenate([np.asarray(row["response"], np.int64) for row in rows]),
        [row.get("earlier", []) for row in rows],
    )


WAITING, RUNNING, DONE = 0, 1, 2
TRACE_STEPS = 50
SCHEDULE_STEPS = 200


@njit(cache=True)
def _gear(count, gears):
    for gear in gears:
        if gear >= count:
            return gear
    return gears[-1]


@njit(cache=True)
def _next(rank, born, running, n_running, prompt, response):
    """For a rank: the step at which its next request ends, and the largest ``prompt - born``."""
    end, oldest = 1 << 60, -(1 << 60)
    for slot in range(n_running[rank]):
        i = running[rank, slot]
        end = min(end, born[i] + response[i])
        oldest = max(oldest, prompt[i] - born[i])
    return end, oldest


@njit(cache=True)
def _advance(
    lo,
    hi,
    steps,
    until_ms,
    levels,
    clock,
    prompt,
    response,
    group,
    done,
    state,
    cached,
    running,
    n_running,
    queue,
    head,
    tail,
    used,
    seen,
    fresh,
    pending_ms,
    last_ms,
    ended_ms,
    cost,
    gears,
    limits,
    asks,
    preempted,
    capacity,
    totals,
    gear_ms,
):
    """Run ranks lo..hi, which share a clock, for some steps, to a time, or until requests can go to free
    places or, spread evenly, to a lower one of ``levels``; with ``asks``, until a queue's scheduler is due.

    limits: [ranks] requests that may run. asks: [ranks] set where a queue's rank gets room; or empty.
    totals: decoded tokens, prefilled tokens, preemptions, tokens of those preempted. Returns the steps made.
    """
    base, gear_cost, batch_cost, context, padded, prefill, eager = cost
    ranks, step = hi - lo, 0
    born = np.zeros(len(done), np.int64)  # the step at which a running request would have had no token
    ends, oldest = np.zeros(hi, np.int64), np.zeros(hi, np.int64)
    for r in range(lo, hi):
        for slot in range(n_running[r]):
            born[running[r, slot]] = -done[running[r, slot]]
        ends[r], oldest[r] = _next(r, born, running, n_running, prompt, response)
    while step < steps and clock[lo] < until_ms:
        alive, most, waiting, free, due = 0, 0, 0, 0, False
        for r in range(lo, hi):
            changed = False
            while head[r] < tail[r] and n_running[r] < limits[r]:
                i = queue[r, head[r]]
                tokens = prompt[i] + done[i]
                if used[r] + tokens + n_running[r] + 1 > capacity:  # not even for one step
                    if n_running[r] == 0:
                        raise ValueError("a request is larger than the KV of a server")
                    break
                head[r] += 1
                new = 0 if cached[i] else done[i] + (1 if seen[group[i], r] else prompt[i])
                cached[i] = False
                seen[group[i], r] = True
                fresh[r] += new
                pending_ms[r] += new * prefill
                totals[1] += new
                running[r, n_running[r]] = i
                n_running[r] += 1
                used[r] += tokens
                state[i] = RUNNING
                born[i] = step - done[i]
                changed = True
            if changed:
                ends[r], oldest[r] = _next(r, born, running, n_running, prompt, response)
            alive += n_running[r]
            most = max(most, n_running[r])
            waiting += tail[r] - head[r]
            free += limits[r] - n_running[r] if head[r] == tail[r] else 0
        if (
            alive == 0
            or len(levels)
            and (
                (waiting > 0 and free > 0)
                or (waiting == 0 and _gear(-(-alive // ranks), levels) < _gear(most, levels))
            )
        ):
            break
        k = steps - step
        for r in range(lo, hi):
            if n_running[r] == 0:
                continue
            room = (capacity - used[r]) // n_running[r]
            if room == 0:  # preempt the youngest; a lone request has room, or it would not have been admitted
                if n_running[r] == 1:
                    raise ValueError("a request outgrows the KV of a server")
                n_running[r] -= 1
                i = running[r, n_running[r]]
                done[i] = step - born[i]
                used[r] -= prompt[i] + done[i]
                head[r] -= 1
                queue[r, head[r]] = i
                state[i] = WAITING
                ends[r], oldest[r] = _next(r, born, running, n_running, prompt, response)
                totals[2] += 1
                totals[3] += prompt[i] + done[i]
                if len(asks):
                    limits[r], asks[r], due = n_running[r], True, True
                    preempted[r] += 1
                k = 0
                break
            k = min(k, room, ends[r] - step)
        if due:
            break
        if k == 0:
            continue
        graph = _gear(most, gears)
        wait, longest, slower = 0.0, -(1 << 60), 1.0
        for r in range(lo, hi):
            wait = max(wait, pending_ms[r])
            pending_ms[r] = 0.0
            if fresh[r] > 0 and eager != 1.0:
                slower, k = eager, 1
            fresh[r] = 0
            longest = max(longest, oldest[r])
        longest += step
        step_ms = 0.0
        for _ in range(2):  # the second time with fewer steps, if time runs out first
            slowest = 0.0
            for r in range(lo, hi):
                m = n_running[r]
                slowest = max(slowest, batch_cost * m + context / 1000 * (used[r] + m * (k - 1) / 2))
            step_ms = base + gear_cost * graph + slowest + padded / 1000 * graph * (longest + (k - 1) / 2)
            step_ms *= slower
            fits = max(1, int(min((until_ms - clock[lo] - wait) / step_ms + 1, 1e15)))
            if fits >= k:
                break
            k = fits
        elapsed = wait + k * step_ms
        step += k
        for g in range(len(gears)):
            if gears[g] == graph:
                gear_ms[g] += elapsed
        for r in range(lo, hi):
            clock[r] += elapsed
            used[r] += k * n_running[r]
            totals[0] += k * n_running[r]
            if ends[r] == step:
                kept = 0
                for slot in range(n_running[r]):
                    i = running[r, slot]
                    if born[i] + response[i] == step:
                        done[i] = response[i]
                        state[i] = DONE
                        ended_ms[i] = clock[r]
                        used[r] -= prompt[i] + done[i]
                    else:
                        running[r, kept] = i
                        kept += 1
                n_running[r] = kept
                last_ms[r] = clock[r]
                ends[r], oldest[r] = _next(r, born, running, n_running, prompt, response)
                if len(asks) and head[r] < tail[r]:
                    asks[r], due = True, True
        if due:
            break
    for r in range(lo, hi):
        for slot in range(n_running[r]):
            done[running[r, slot]] = step - born[running[r, slot]]
    return step


@dataclass(frozen=True)
class Result:
    """Seconds, tokens, counts of one rollout.

    Attributes:
        first_done_s: when the first rank to finish for good runs out of work.
        gear_s: time in each graph, by size.
        trace: (seconds, [ranks] running requests) samples, if requested.
        preempted_tokens: whose KV preemptions dropped.
    """

    makespan_s: float
    first_done_s: float
    decoded_tokens: int
    prefilled_tokens: int
    preemptions: int
    moves: int
    moved_bytes: int
    gear_s: dict[int, float]
    trace: list[tuple[float, np.ndarray]] = field(repr=False)
    preempted_tokens: int = 0

    @property
    def idle_share(self) -> float:
        """Share of the rollout for which the first rank to finish waits, as in the published table."""
        return 1 - self.first_done_s / self.makespan_s


class Simulation:
    """One rollout. A policy sees it between events and calls ``move``.

    Args:
        rank: [N] where each request starts; -1 for requests the policy places later with ``move``.
        order: [N] the order in which requests are queued; None: by number.
        scheduler: sorts the queue of a rank, ``waiting``, in place and returns how many to admit; asked when
            a rank gets room or requests, and every SCHEDULE_STEPS. None: all that fit, as they came.
    """

    def __init__(
        self,
        batch: Batch,
        cluster: Cluster,
        rank: np.ndarray,
        order: np.ndarray | None = None,
        scheduler: Callable[[Simulation, int], int] | None = None,
    ):
        cost, ranks, count = cluster.cost, cluster.ranks, len(batch.response)
        if max(cluster.gears) < cluster.max_num_seqs:
            raise ValueError("the largest gear is below max_num_seqs: steps without a graph are not modelled")
        self.batch, self.cluster = batch, cluster
        self.done = np.zeros(count, np.int64)
        self.state = np.zeros(count, np.int64)
        self.rank = rank.astype(np.int64).copy()
        self.cached = np.zeros(count, np.bool_)
        self.running = np.zeros((ranks, cluster.max_num_seqs), np.int64)
        self.n_running = np.zeros(ranks, np.int64)
        self.queue = np.zeros((ranks, 6 * count + 1), np.int64)
        self.head = np.full(ranks, 2 * count, np.int64)  # preempted requests go in front
        self.tail = self.head.copy()
        self.used = np.zeros(ranks, np.int64)
        self.seen = np.zeros((len(batch.earlier), ranks), np.bool_)
        self.fresh = np.zeros(ranks, np.int64)  # tokens to prefill in the next step
        self.pending_ms = np.zeros(ranks)
        self.clock = np.zeros(ranks)
        self.last_ms = np.zeros(ranks)
        self.ended_ms = np.full(count, np.inf)
        self.totals = np.zeros(4, np.int64)
        self.scheduler = scheduler
        self.limits = np.full(ranks, cluster.max_num_seqs)
        self.preempted = np.zeros(ranks, np.int64)
        self.asks = np.zeros(ranks if scheduler else 0, np.bool_)
        self.gear_ms = np.zeros(len(cluster.gears))
        self.moves = self.moved_bytes = 0
        self._cost = (
            cost.base_ms,
            cost.gear_ms,
            cost.batch_ms,
            cost.context_ms,
            cost.padded_ms,
            cost.prefill_ms,
            cost.eager,
        )
        self._gears = np.asarray(sorted(cluster.gears), np.int64)
        for i in np.arange(count) if order is None else order:
            if rank[i] >= 0:
                self._enqueue(i, rank[i])

    def step_ms(self, most: int, tokens: float) -> float:
        """Time of a step: ``most`` requests and ``tokens`` on the fullest rank, without padded attention."""
        base, gear, batch, context = self._cost[:4]
        return base + gear * _gear(most, self._gears) + batch * most + context / 1000 * tokens

    @property
    def now_ms(self) -> float:
        return float(self.clock.max())

    def waiting(self, rank: int) -> np.ndarray:
        """Queued requests of a rank, in order."""
        return self.queue[rank, self.head[rank] : self.tail[rank]]

    def active(self, rank: int) -> np.ndarray:
        """Running requests of a rank, oldest first."""
        return self.running[rank, : self.n_running[rank]]

    def servers(self) -> list[Server]:
        """What a planner sees; as in an engine, all that does not run waits, be it new or preempted."""
        tokens, cluster = self.batch.prompt + self.done, self.cluster
        return [
            Server(
                str(rank),
                tuple(
                    Request(str(i), int(tokens[i]), waiting)
                    for requests, waiting in ((self.active(rank), False), (self.waiting(rank), True))
                    for i in requests
                ),
                cluster.kv_capacity_tokens,
                cluster.max_num_seqs,
            )
            for rank in range(cluster.ranks)
        ]

    def _enqueue(self, request: int, rank: int) -> None:
        if self.tail[rank] == self.queue.shape[1]:  # make room: entries before the head are done
            size, start = self.tail[rank] - self.head[rank], self.queue.shape[1] // 3
            self.queue[rank, start : start + size] = self.waiting(rank).copy()
            self.head[rank], self.tail[rank] = start, start + size
        self.queue[rank, self.tail[rank]] = request
        self.tail[rank] += 1
        self.asks[rank : rank + 1] = True
        self.rank[request] = rank
        self.state[request] = WAITING

    def move(self, moves: Sequence[tuple[int, int]], carry_kv: bool) -> None:
        """Carry out (request, rank) moves; ``carry_kv`` sends the KV of running ones, else they recompute."""
        sent, now_ms = np.zeros((2, self.cluster.ranks)), self.now_ms
        for request, target in moves:
            source = self.rank[request]
            if source >= 0:
                self.moves += 1
                if self.state[request] == RUNNING:
                    tokens = self.batch.prompt[request] + self.done[request]
                    active = self.active(source)
                    kept = active[active != request]
                    self.running[source, : len(kept)] = kept
                    self.n_running[source] = len(kept)
                    self.asks[source : source + 1] = True
                    self.used[source] -= tokens
                    if carry_kv:
                        sent[0, source] += tokens
                        sent[1, target] += tokens
                        self.cached[request] = True
                    if not len(kept) and self.head[source] == self.tail[source]:
                        self.last_ms[source] = self.clock[source]
                else:
                    left = self.waiting(source)
                    left = left[left != request]
                    self.head[source] = self.tail[source] - len(left)
                    self.queue[source, self.head[source] : self.tail[source]] = left
                    self.cached[request] = False  # KV that was sent here is left behind
            if not self.cluster.lockstep and not self.n_running[target]:
                self.clock[target] = max(self.clock[target], now_ms)  # it was idle until now
            self._enqueue(request, target)
        bytes_ = sent * self.cluster.cost.kv_bytes
        self.moved_bytes += int(bytes_[0].sum())
        self.pending_ms += bytes_.max(axis=0) / self.cluster.cost.link_bytes_per_ms

    def send(self, requests: Sequence[int], at_ms: float) -> None:
        """New requests, each to the server with fewest; one that was idle begins at that time."""
        held = self.n_running + self.tail - self.head
        idle = held == 0 if not self.cluster.lockstep else held.sum() == 0
        self.clock[...] = np.where(idle, np.maximum(self.clock, at_ms), self.clock)
        for request in requests:
            rank = int(held.argmin())
            self._enqueue(request, rank)
            held[rank] += 1

    def interrupt(self, until_ms: float) -> None:
        """New weights: what runs or waits goes on at a time, without its KV and the prompts' common one."""
        for rank in range(self.cluster.ranks):
            active = self.active(rank)
            self.head[rank] -= len(active)
            self.queue[rank, self.head[rank] : self.head[rank] + len(active)] = active
            self.state[active] = WAITING
        self.n_running[...] = self.used[...] = self.fresh[...] = 0
        self.pending_ms[...] = 0.0
        self.cached[...] = self.seen[...] = False
        self.clock[...] = np.maximum(self.clock, until_ms)

    def advance(self, steps: int, until_ms: float = np.inf, levels: Sequence[int] = ()) -> None:
        """Run for some steps or up to a time; with ``levels``, in lockstep, stop early once moves can help.

        That is when waiting requests can go to free places, or the largest batch to a lower level.
        """
        domains = (
            [(0, self.cluster.ranks)]
            if self.cluster.lockstep
            else [(r, r + 1) for r in range(self.cluster.ranks)]
        )
        for lo, hi in domains:
            left = steps
            while left > 0:
                for rank in range(lo, hi) if self.scheduler else ():
                    if self.asks[rank] and self.head[rank] < self.tail[rank]:
                        self.limits[rank] = self.n_running[rank] + self.scheduler(self, rank)
                    self.asks[rank] = False
                size = min(left, SCHEDULE_STEPS) if self.scheduler else left
                made = self._run(lo, hi, size, until_ms, np.asarray(levels, np.int64))
                left -= made
                if self.scheduler and made == size:
                    self.asks[lo:hi] = True
                elif not self.asks[lo:hi].any():
                    break

    def _run(self, lo: int, hi: int, steps: int, until_ms: float, levels: np.ndarray) -> int:
        return _advance(
            lo,
            hi,
            steps,
            until_ms,
            levels,
            self.clock,
            self.batch.prompt,
            self.batch.response,
            self.batch.group,
            self.done,
            self.state,
            self.cached,
            self.running,
            self.n_running,
            self.queue,
            self.head,
            self.tail,
            self.used,
            self.seen,
            self.fresh,
            self.pending_ms,
            self.last_ms,
            self.ended_ms,
            self._cost,
            self._gears,
            self.limits,
            self.asks,
            self.preempted,
            self.cluster.kv_capacity_tokens,
            self.totals,
            self.gear_ms,
        )

    @property
    def finished(self) -> bool:
        return bool((self.state == DONE).all())

    def result(self, trace: list) -> Result:
        decoded, prefilled, preemptions, preempted = (int(total) for total in self.totals)
        end = self.last_ms.max()
        gear_s = {int(g): float(ms) / 1e3 for g, ms in zip(self._gears, self.gear_ms, strict=True)}
        return Result(
            end / 1e3,
            self.last_ms.min() / 1e3,
            decoded,
            prefilled,
            preemptions,
            self.moves,
            self.moved_bytes,
            gear_s,
            trace,
            preempted,
        )


def simulate(
    batch: Batch,
    cluster: Cluster,
    rank: np.ndarray,
    order: np.ndarray | None = None,
    policy: Callable[[Simulation], None] | None = None,
    interval: int = 1000,
    levels: Sequence[int] = (),
    trace: bool = False,
    scheduler: Callable[[Simulation, int], int] | None = None,
) -> Result:
    """Run a rollout to its end.

    Args:
        rank, order, scheduler: as in ``Simulation``.
        policy: checks the simulation every ``interval`` steps (with servers on their own clocks: every
            ``interval`` times ``cost.base_ms``) and moves requests. A check takes ``cost.check_ms``.
        levels: in lockstep, skip checks at which ``Simulation.advance`` would see nothing to gain.
        trace: in lockstep, record how many requests each rank runs.
    """
    simulation, samples = Simulation(batch, cluster, rank, order, scheduler), []
    cost, chunk = cluster.cost, interval if policy else 1 << 60
    while not simulation.finished:
        if policy:
            policy(simulation)
            simulation.pending_ms[simulation.n_running > 0] += cost.check_ms
        if not cluster.lockstep:
            simulation.advance(1 << 60, simulation.now_ms + chunk * cost.base_ms)
            continue
        left = chunk
        while left > 0 and not simulation.finished:
            made = min(left, TRACE_STEPS) if trace else left
            begun_s = simulation.now_ms / 1e3
            simulation.advance(made)
            left -= made
            if trace:
                samples.append((begun_s, simulation.n_running.copy()))
        if levels and not trace:
            simulation.advance(1 << 60, levels=levels)
    return simulation.result(samples)


@dataclass(frozen=True)
class Training:
    """What follows a rollout, on the ranks that train.

    Attributes:
        ms_per_token: of all ranks together, for one trained token, prompts included.
        updates: of a step, each of as many prompts.
        sync_ms: to send new weights to the rollout, which meanwhile waits.
    """

    ms_per_token: float
    updates: int
    sync_ms: float

    def step_ms(self, batch: Batch, ranks: int) -> float:
        return self.ms_per_token * float((batch.prompt + batch.response).sum()) / ranks


@dataclass(frozen=True)
class Steps:
    """Steps of an asynchronous run.

    Attributes:
        end_s: [S] end of each step, new weights included.
        trained: [S] lists of prompts.
        staleness: [S] lists: steps from when a prompt was sent to when it was trained.
        waited_s: for which the trainer had nothing to do.
        recomputed_tokens: prefilled, beyond the prompts.
    """

    end_s: np.ndarray
    trained: list[list[int]]
    staleness: list[list[int]]
    waited_s: float
    recomputed_tokens: int


def simulate_async(
    batches: Sequence[Batch],
    cluster: Cluster,
    training_ranks: int,
    training: Training,
    ahead: float,
    bound: int,
    partial: bool,
) -> Steps:
    """verl's separate_async with strategy `wait`: `cluster` rolls out while `training_ranks` train.

    A step sends a batch of prompts and trains as many, the oldest first, in equal updates. An update waits
    until enough are answered, and until no prompt is unanswered that was sent `bound` - 1 steps ago.

    Args:
        batches: of equal size; as many steps are simulated as there are, less those that are ahead.
        ahead: batches that are sent before the first step.
        bound: max_off_policy_threshold; staleness is below it.
        partial: unfinished responses go on after new weights; else a step ends when all are finished.
    """
    size, whole = len(batches[0].earlier), joined(batches)
    each = size // training.updates
    first = np.unique(whole.group, return_index=True)[1]
    tokens = np.add.reduceat(whole.prompt + whole.response, first)
    requests = np.split(np.arange(len(whole.group)), first[1:])
    simulation = Simulation(whole, cluster, np.full(len(whole.group), -1))
    sent_at = np.full(len(first), 1 << 30)
    trained = np.zeros(len(first), bool)
    now_ms, waited_ms, sent = 0.0, 0.0, 0
    result = Steps([], [], [], 0.0, 0)
    look_ms = training.ms_per_token * tokens.min() * each / training_ranks  # no update is shorter

    def send(count: int, step: int) -> None:
        nonlocal sent
        for prompt in range(sent, sent + count):
            sent_at[prompt] = step
            simulation.send(requests[prompt], now_ms)
        sent += count

    def ended() -> np.ndarray:
        return np.maximum.reduceat(simulation.ended_ms, first)

    def run_until(time_of: Callable[[np.ndarray], float]) -> float:
        """The first time at which what is asked for was there."""
        until_ms = now_ms
        while not (found := time_of(ended())) < np.inf:
            until_ms += look_ms
            simulation.advance(1 << 60, until_ms)
        return max(now_ms, found)

    send(round(ahead * size), 1)
    for step in range(1, len(batches) - int(np.ceil(ahead)) + 1):
        send(size, step)
        chosen = []
        due = sent_at <= step - bound + 1
        for _ in range(training.updates):
            start_ms = run_until(
                lambda ends, due=due: max(np.sort(ends[~trained])[each - 1], ends[due].max(initial=0.0))
            )
            ends = ended()
            there = np.flatnonzero(~trained & (ends <= start_ms))
            taken = there[np.lexsort((ends[there], sent_at[there]))][:each]
            trained[taken] = True
            chosen += taken.tolist()
            waited_ms += start_ms - now_ms
            now_ms = start_ms + training.ms_per_token * float(tokens[taken].sum()) / training_ranks
            simulation.advance(1 << 60, now_ms)
        if not partial:
            now_ms = run_until(lambda ends: ends[:sent].max())
        now_ms += training.sync_ms
        simulation.interrupt(now_ms)
        result.end_s.append(now_ms / 1e3)
        result.trained.append(chosen)
        result.staleness.append((step - sent_at[chosen]).tolist())
    prompts = int(whole.prompt[first][:sent].sum())
    recomputed = max(0, int(simulation.totals[1]) - prompts)
    return Steps(np.array(result.end_s), result.trained, result.staleness, waited_ms / 1e3, recomputed)


def trained(batches: Sequence[Batch], steps: Steps) -> Batch:
    """What an asynchronous run has trained."""
    whole = joined(batches)
    mine = np.isin(whole.group, np.concatenate(steps.trained))
    return Batch(whole.group[mine], whole.prompt[mine], whole.response[mine], whole.earlier)


def async_bound(taken: Batch, count: int, cluster: Cluster, ranks: int, training: Training) -> float:
    """Seconds that steps with these responses take at least, on ranks for the rollout and others to train."""
    updates = training.step_ms(taken, ranks) + training.sync_ms * count
    return max(updates / 1e3, lower_bound(taken, replace(cluster, max_num_seqs=0)))


def joined(batches: Sequence[Batch]) -> Batch:
    """One after the other."""
    starts = np.cumsum([0, *(len(batch.earlier) for batch in batches)])
    return Batch(
        np.concatenate([batch.group + start for batch, start in zip(batches, starts, strict=False)]),
        np.concatenate([batch.prompt for batch in batches]),
        np.concatenate([batch.response for batch in batches]),
        [earlier for batch in batches for earlier in batch.earlier],
    )


def lower_bound(batch: Batch, cluster: Cluster) -> float:
    """Seconds: the largest of four bounds, without any cost of prefill or moves.

    1. Work: all tokens at the best throughput of any gear. 2. The longest request alone in the smallest gear.
    3. The gear floor, if all requests fit together: every unfinished request takes part in every step, evenly
    spread. The first two hold for every schedule; the third only where no request waits, be it for KV cache,
    for a place in the batch, or to fill a graph exactly. 4. KV: of what requests hold over all their steps, a
    step holds no more than the capacity, which says how many steps there are; in lockstep, no fewer than the
    longest response has. It holds for every schedule.
    """
    cost, ranks, gears = cluster.cost, cluster.ranks, np.asarray(sorted(cluster.gears))
    prompt, response = batch.prompt.astype(float), batch.response.astype(float)
    attention = cost.context_ms / 1000 / ranks * (prompt * response + response * (response - 1) / 2).sum()
    per_token = min((cost.base_ms + cost.gear_ms * g) / g + cost.batch_ms for g in gears) / ranks
    work = per_token * response.sum() + attention
    i = int(np.argmax(response))
    contexts = prompt[i] + (response[i] - 1) / 2
    alone = response[i] * (
        cost.base_ms
        + cost.gear_ms * gears[0]
        + cost.batch_ms
        + (cost.context_ms + cost.padded_ms * gears[0]) / 1000 * contexts
    )
    held = (prompt * response + response * (response - 1) / 2).sum()
    fewest = max(held / (ranks * cluster.kv_capacity_tokens), response.max() if cluster.lockstep else 0)
    each_token = (cost.gear_ms + cost.batch_ms) / ranks
    bounds = [work, alone, cost.base_ms * fewest + each_token * response.sum() + attention]
    active = np.bincount(batch.response, minlength=int(response.max()) + 1)[::-1].cumsum()[::-1][1:]
    if active[0] <= ranks * cluster.max_num_seqs:
        each = -(-active // ranks)
        graph = gears[np.searchsorted(gears, each)]
        steps = np.arange(len(active))
        shortest_prompt = prompt.min()
        bounds.append(
            (
                cost.base_ms
                + cost.gear_ms * graph
                + cost.batch_ms * each
                + cost.padded_ms / 1000 * graph * (steps + shortest_prompt)
            ).sum()
            + attention
        )
    return max(bounds) / 1e3

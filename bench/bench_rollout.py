"""Placement and migration policies for rollouts, in the simulator, against published figures.

Usage:    python bench/bench_rollout.py [--quick] [--lengths FILE.jsonl]
Example:  python bench/bench_rollout.py            # 3 to 6 minutes; --quick under one
1. The model against the published tables: fitted rows and held-out rows.
2. Placement, by how much is known about the prompts.
3. All policies on five length models, on the same requests.
4. Queues sorted by siblings that have ended. Servers with their own clocks.
5. The planner's time.
6. Training and rollout at the same time, on ranks of their own: at which staleness it is faster, on which.
The constants are those of bench/sim_rollout.py; docs/rollout_rebalance.md explains how they were fitted.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from bars import ROOT, bar, canvas, finish, parser_of, save
from sim_rollout import (
    DEEPSEEK_V3,
    DONE,
    QWEN3_235B,
    RUNNING,
    Batch,
    Cluster,
    Result,
    Simulation,
    Training,
    async_bound,
    draw_bimodal,
    draw_equal,
    draw_lengths,
    joined,
    lower_bound,
    read_lengths,
    simulate,
    simulate_async,
    trained,
)

from ascend_rl.rollout.data_rebalance import place, predict
from ascend_rl.rollout.rollout_rebalance import Request, Server, gear_of, plan

QWEN = Cluster(QWEN3_235B)
DEEPSEEK = Cluster(DEEPSEEK_V3, ranks=128, gears=(4, 8, 16, 32, 64), max_num_seqs=64)
CARDS = 64  # tokens/s per card, as published
LOOK_STEPS = 20  # how often ours looks, about every two seconds; the published practice: 1000 steps
LEVELS = [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
PATIENCE = 2
EAGER = (1, 1.2, 2, 7.5)  # published: graphs save 15 to 20%; vllm-ascend#16049: 7.5 times
STEP_S = 0.1  # the shortest decode step takes 0.07 s; smaller differences do not count
SEER_CHUNK = 8192


# Placements: [N] ranks.


def adjacent(batch: Batch, ranks: int) -> np.ndarray:
    """verl's order in equal parts."""
    return np.arange(len(batch.group)) * ranks // len(batch.group)


def interleaved(batch: Batch, ranks: int) -> np.ndarray:
    """The published data rebalance: all first samples, all second ones, ..., in equal parts."""
    _, first = np.unique(batch.group, return_index=True)
    column = np.arange(len(batch.group)) - first[np.searchsorted(batch.group[first], batch.group)]
    rank = np.empty(len(batch.group), np.int64)
    rank[np.argsort(column, kind="stable")] = adjacent(batch, ranks)
    return rank


def verl(batch: Batch, ranks: int, workers: int = 8) -> np.ndarray:
    """verl 0.7.1: each agent loop worker sends its adjacent part, each request goes to the server with fewest
    in flight. Nothing ends before the last is sent, so the workers' requests take turns over the servers."""
    parts = np.array_split(np.arange(len(batch.group)), workers)
    arrival = [part[turn] for turn in range(len(parts[0])) for part in parts if turn < len(part)]
    rank = np.empty(len(batch.group), np.int64)
    rank[arrival] = np.arange(len(arrival)) % ranks
    return rank


def earlier(batch: Batch) -> np.ndarray:
    return predict(batch.group.tolist(), dict(enumerate(batch.earlier)))


def fewer_at_a_time(batch: Batch, cluster: Cluster) -> Cluster:
    """max_num_seqs set to the graph size with which, by simulation, the last epoch would have ended first.

    The odd ones of a prompt's earlier responses predict and the even ones play the outcome: lengths that are
    part of the prediction would make it look too good. With one earlier response all may run. Waiting
    requests, longest first, fill the slots that become free: ranks stay level, and graphs full, without
    moving running requests.
    """
    if min(map(len, batch.earlier)) < 2:
        return cluster
    rng = np.random.default_rng(0)
    came = np.array([rng.choice(batch.earlier[group][::2]) for group in batch.group])
    last = replace(batch, response=np.maximum(1, np.rint(came)).astype(np.int64))
    seen = {group: lengths[1::2] for group, lengths in enumerate(batch.earlier)}
    placed = place(batch.group.tolist(), cluster.ranks, predict(batch.group.tolist(), seen))
    clusters = [replace(cluster, max_num_seqs=gear) for gear in cluster.gears if gear <= cluster.max_num_seqs]
    return min(clusters, key=lambda one: simulate(last, one, placed.rank, placed.order).makespan_s)


# Policies that move requests.


def gear_policy(simulation: Simulation) -> None:
    """The published two-phase policy: counts only, KV moves with the request.

    The target is the smallest graph that holds the mean. Ranks more than 80% full take nothing, others as
    many requests of their mean size as fit. Waiting requests go to the emptiest rank; while any are left
    nothing else moves. Then donors' youngest requests go to the ranks with most room.
    """
    ranks, gears = simulation.cluster.ranks, sorted(simulation.cluster.gears)
    limit, capacity = simulation.cluster.max_num_seqs, simulation.cluster.kv_capacity_tokens
    running = simulation.n_running.copy()
    waiting = {r: simulation.waiting(r).tolist() for r in range(ranks)}
    counts = np.array([running[r] + len(waiting[r]) for r in range(ranks)])
    before = gear_of(int(counts.max()), gears)
    target = min(before, gears[-1], limit)
    target = next((g for g in gears if counts.mean() <= g < target), target)
    room = {}
    for r in range(ranks):
        usage = simulation.used[r] / capacity
        if not waiting[r] and usage <= 0.8 and running[r] < target:
            fits = int(running[r] * (1 - usage) / usage) if usage > 0 else limit
            room[r] = min(target - int(running[r]), fits)
    moves = []
    for r in range(ranks):
        while waiting[r] and any(room.values()):
            best = min((q for q in room if room[q]), key=lambda q: running[q])
            moves.append((waiting[r].pop(), best))
            room[best] -= 1
            running[best] += 1
    if not any(waiting.values()) and target < before:
        donors = deque(simulation.active(r)[target:].tolist() for r in range(ranks) if running[r] > target)
        while donors and any(room.values()):
            for receiver in sorted((q for q in room if room[q]), key=lambda q: -room[q]):
                if not donors:
                    break
                surplus = donors.popleft()
                part, rest = surplus[-room[receiver] :], surplus[: -room[receiver]]
                moves += [(i, receiver) for i in part]
                room[receiver] -= len(part)
                if rest:
                    donors.append(rest)
    simulation.move(moves, carry_kv=True)


class Ours:
    """ascend_rl.rollout.rollout_rebalance on the state of the servers.

    Attention follows the fullest rank's tokens, not the graph, so LEVELS are finer than the gears. Running
    requests move once the time lost by not moving them reaches PATIENCE times the cost of moving (the
    rent-or-buy rule: without knowing how long an imbalance lasts, the loss stays within a small factor of the
    best).
    """

    def __init__(self, carry_kv: bool):
        self.carry_kv, self.lost_ms, self.looked_ms = carry_kv, 0.0, 0.0

    def __call__(self, simulation: Simulation) -> None:
        cluster, counts = simulation.cluster, simulation.n_running
        queued = simulation.tail > simulation.head
        if queued.any() and not (~queued & (counts < cluster.max_num_seqs)).any():
            return  # all are full
        if counts.any() and not queued.any():
            most = int(counts.max())
            now = simulation.step_ms(most, simulation.used.max())
            even = int(gear_of(-(-int(counts.sum()) // cluster.ranks), LEVELS))
            gain = now - simulation.step_ms(min(even, most), simulation.used.max() * min(even / most, 1))
            self.lost_ms += max(0, gain) / now * (simulation.now_ms - self.looked_ms)
            self.looked_ms = simulation.now_ms
            if even >= most or self.lost_ms < self.worth_ms(simulation, self.lightest(simulation)):
                return
        moves = [(int(move.request), int(move.target)) for move in plan(simulation.servers(), LEVELS)]
        if not queued.any():
            tokens, received = simulation.batch.prompt + simulation.done, np.zeros(cluster.ranks)
            for request, target in moves:
                received[target] += tokens[request]
            if self.lost_ms < self.worth_ms(simulation, received.max()):
                return
            self.lost_ms = 0.0
        simulation.move(moves, self.carry_kv)

    def worth_ms(self, simulation: Simulation, tokens: float) -> float:
        cost = simulation.cluster.cost
        each = cost.kv_bytes / cost.link_bytes_per_ms if self.carry_kv else cost.prefill_ms
        step_ms = simulation.step_ms(int(simulation.n_running.max()), simulation.used.max())
        eager_ms = 0.0 if self.carry_kv else (cost.eager - 1) * step_ms
        return PATIENCE * (cost.check_ms + tokens * each + eager_ms)

    def lightest(self, simulation: Simulation) -> float:
        """Tokens of the smallest request on the fullest rank: no plan can move less."""
        active = simulation.active(int(simulation.n_running.argmax()))
        return float((simulation.batch.prompt + simulation.done)[active].min())


def seer(batch: Batch) -> Callable[[Simulation], None]:
    """Seer-style (arXiv 2511.14617): one sample of each prompt first, then prompts with the longest finished
    sample; in chunks of 8K tokens, after which a request moves, with its KV, to the server with fewest."""
    first = np.zeros(len(batch.group), bool)
    first[np.unique(batch.group, return_index=True)[1]] = True
    sent_at = np.zeros(len(batch.group), np.int64)

    def policy(simulation: Simulation) -> None:
        cluster, done = simulation.cluster, simulation.done
        longest = np.zeros(len(batch.earlier))
        ended = simulation.state == DONE
        np.maximum.at(longest, batch.group[ended], batch.response[ended])
        expected = np.where(longest > 0, longest, np.inf)[batch.group]
        running = simulation.state == RUNNING
        pool = np.flatnonzero((simulation.rank < 0) & ~ended | running & (done - sent_at >= SEER_CHUNK))
        counts, used = simulation.n_running.copy(), simulation.used.copy()
        tokens = batch.prompt + done
        for i in pool[running[pool]]:
            counts[simulation.rank[i]] -= 1
            used[simulation.rank[i]] -= tokens[i]
        moves = []
        for i in pool[np.lexsort((-expected[pool], ~first[pool], ~running[pool]))]:
            fits = (counts < cluster.max_num_seqs) & (used + tokens[i] <= 0.9 * cluster.kv_capacity_tokens)
            home = simulation.rank[i]
            if fits.any():
                best = int(np.argmin(np.where(fits, counts, 1 << 30)))
                if home >= 0 and fits[home] and counts[home] == counts[best]:
                    best = home
            elif home >= 0:
                best = home
            else:
                break  # the rest stays in the pool
            counts[best] += 1
            used[best] += tokens[i]
            sent_at[i] = done[i]
            if best != home:
                moves.append((int(i), best))
        simulation.move(moves, carry_kv=True)

    return policy


def by_siblings(batch: Batch, simulation: Simulation, predicted: np.ndarray | None = None) -> np.ndarray:
    """[N] tokens of each response, by the siblings that finished in this step.

    Where none has finished, they are assumed longer than the longest so far, by half if nothing else
    is known.
    """
    group, count = batch.group, len(batch.earlier)
    ended = simulation.state == DONE
    number = np.bincount(group[ended], minlength=count)
    total = np.bincount(group[ended], batch.response[ended], count)
    longest = np.zeros(count)
    np.maximum.at(longest, group, simulation.done)
    still = 1.5 * longest[group] if predicted is None else np.maximum(predicted, longest[group])
    return np.where(number[group] > 0, (total / np.maximum(number, 1))[group], still)


class ByWork:
    """Moves by remaining tokens, not by requests: from the server with most to the one with fewest, as long
    as that makes a tenth of a difference, each time the request nearest to half of it.

    Args:
        lengths: [N] tokens of each response where they are known, else the siblings say.
    """

    def __init__(self, batch: Batch, lengths: np.ndarray | None):
        self.batch, self.lengths = batch, lengths

    def __call__(self, simulation: Simulation) -> None:
        ranks = range(simulation.cluster.ranks)
        lengths = by_siblings(self.batch, simulation) if self.lengths is None else self.lengths
        rest = np.maximum(lengths, 1.1 * simulation.done) - simulation.done
        held = [np.concatenate([simulation.active(r), simulation.waiting(r)]).astype(int) for r in ranks]
        work, moves = np.array([rest[requests].sum() for requests in held]), []
        for _ in ranks:
            source, target = int(np.argmax(work)), int(np.argmin(work))
            half = (work[source] - work[target]) / 2
            if len(held[source]) < 2 or half < 0.1 * work[source]:
                break
            request = int(held[source][np.argmin(abs(rest[held[source]] - half))])
            if rest[request] > 1.5 * half or len(held[target]) >= simulation.cluster.max_num_seqs:
                break
            moves.append((request, target))
            work[source] -= rest[request]
            work[target] += rest[request]
            held[source] = held[source][held[source] != request]
            held[target] = np.append(held[target], request)
        if moves:
            simulation.move(moves, carry_kv=True)


class Siblings(Ours):
    """Ours by replay; it first sorts each queue by the siblings that finished in this step, longest first."""

    def __init__(self, batch: Batch, predicted: np.ndarray | None):
        super().__init__(carry_kv=False)
        self.batch, self.predicted = batch, predicted

    def __call__(self, simulation: Simulation) -> None:
        expected = by_siblings(self.batch, simulation, self.predicted)
        for rank in range(simulation.cluster.ranks):
            queue = simulation.waiting(rank)
            queue[:] = queue[np.argsort(-expected[queue], kind="stable")]
        super().__call__(simulation)


def run(name: str, batch: Batch, cluster: Cluster, trace: bool = False) -> Result:
    """A policy by name."""
    ranks = cluster.ranks
    groups = batch.group.tolist()
    if name == "verl 0.7.1":
        return simulate(batch, cluster, verl(batch, ranks), trace=trace)
    if name == "adjacent":
        return simulate(batch, cluster, adjacent(batch, ranks), trace=trace)
    if name == "interleaved":
        return simulate(batch, cluster, interleaved(batch, ranks), trace=trace)
    if name == "two-phase, adjacent":
        return simulate(batch, cluster, adjacent(batch, ranks), policy=gear_policy, trace=trace)
    if name.startswith("two-phase, interleaved"):
        interval = LOOK_STEPS if name.endswith("steps") else 1000
        rank = interleaved(batch, ranks)
        return simulate(batch, cluster, rank, policy=gear_policy, interval=interval, trace=trace)
    if name == "Seer-style":
        nowhere = np.full(len(groups), -1)
        return simulate(batch, cluster, nowhere, policy=seer(batch), interval=64, trace=trace)
    known = {"nothing known": None, "earlier lengths": earlier(batch), "oracle": batch.response.astype(float)}
    name, fewer, _ = name.partition(FEWER)
    cluster = fewer_at_a_time(batch, cluster) if fewer else cluster
    which, _, mover = name.removeprefix("ours: ").removeprefix("LPT, ").partition(" + ")
    placed = place(groups, ranks, known[which])
    if not mover:
        return simulate(batch, cluster, placed.rank, placed.order, trace=trace)
    return simulate(batch, cluster, placed.rank, placed.order, Ours(mover == "KV"), LOOK_STEPS, LEVELS, trace)


FEWER = ", fewer at a time"
PLACEMENTS = [
    "adjacent",
    "verl 0.7.1",
    "interleaved",
    "ours: nothing known",
    "ours: earlier lengths",
    "ours: earlier lengths" + FEWER,
    "LPT, oracle",
]
MOVERS = [
    "two-phase, adjacent",
    "two-phase, interleaved",
    "two-phase, interleaved, 20 steps",
    "Seer-style",
    "ours: nothing known + replay",
    "ours: nothing known + KV",
    "ours: earlier lengths + replay",
    "ours: earlier lengths + KV",
    "ours: earlier lengths + replay" + FEWER,
    "ours: earlier lengths + KV" + FEWER,
]

CHARGED = ["verl 0.7.1", "interleaved", "two-phase, interleaved", *PLACEMENTS[4:6], *MOVERS[6:]]


def models(path: Path) -> dict[str, Callable[[int], Batch]]:
    recorded = read_lengths(path)
    return {
        "published": lambda seed: draw_lengths(256, 16, seed),
        "uncorrelated": lambda seed: draw_lengths(256, 16, seed, between=0.0, within=0.567),
        "bimodal": lambda seed: draw_bimodal(256, 16, seed),
        "all equal": lambda seed: draw_equal(256, 16, seed),
        "from a file": lambda seed: shuffled(recorded, seed),
    }


def shuffled(batch: Batch, seed: int) -> Batch:
    """The prompts in another order, as a data loader gives them, and the samples of a prompt as well."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(batch.earlier))
    where = np.argsort(order)[batch.group]
    rows = np.lexsort((rng.random(len(where)), where))
    return Batch(where[rows], batch.prompt[rows], batch.response[rows], [batch.earlier[g] for g in order])


def mean(values) -> float:
    return float(np.mean(list(values)))


def spread(values) -> float:
    return float(np.std(list(values)))


def check_model(fit_seeds: int, bars: list, data: dict) -> None:
    """Fitted and held-out rows of the published tables."""
    published = [  # prompts, placement, batch per DP, fitted, total s, first DP s
        (256, adjacent, 256, True, 4698, 1652),
        (256, interleaved, 256, True, 3483, 2618),
        (384, interleaved, 256, False, 4200, 3437),
        (512, interleaved, 256, False, 4914, 4113),
        (256, adjacent, 64, False, 4952, 2457),
        (256, adjacent, 24, False, 8831, 4133),
    ]
    print(
        f"1. Model against published, mean of {fit_seeds} seeds (spread): idle share of the first DP, seconds"
    )
    data["published"] = []
    for prompts, where, batch_size, fitted, total, first in published:
        cluster = replace(QWEN, max_num_seqs=batch_size)
        batches = [draw_lengths(prompts, 16, seed) for seed in range(fit_seeds if batch_size == 256 else 4)]
        results = [simulate(batch, cluster, where(batch, 32)) for batch in batches]
        idle = 100 * mean(r.idle_share for r in results)
        wrong = sum(r.decoded_tokens != b.response.sum() for r, b in zip(results, batches, strict=True))
        target = 100 * (1 - first / total)
        row = {
            "prompts": prompts,
            "placement": where.__name__,
            "batch": batch_size,
            "fitted": fitted,
            "idle": idle,
            "idle_spread": 100 * spread(r.idle_share for r in results),
            "published_idle": target,
            "seconds": mean(r.makespan_s for r in results),
            "published_seconds": total,
        }
        data["published"].append(row)
        kind = "fitted" if fitted else "held back" if batch_size == 256 else "queueing, held back"
        print(
            f"  {prompts} {row['placement']:<12} batch {batch_size:<4} {kind:<20} idle {idle:5.2f}% "
            f"({row['idle_spread']:.1f}) published {target:5.2f}%  {row['seconds']:5.0f} s published {total}"
        )
        if batch_size == 256:
            what = f"{prompts} prompts, {row['placement']}: idle off the published share, {kind}"
            bars.append(bar(what, abs(idle - target), "points", "<= 1" if fitted else "<= 4"))
        what = f"{prompts} prompts, {row['placement']}, batch {batch_size}: rollouts with tokens lost"
        bars.append(bar(what, wrong, "", "= 0"))

    print("\n   gains as time ratios: one graph / gears / gears with the two-phase policy, verl's placement")
    seeds = range(8)
    table = {  # cluster, batches, published seconds, what was fitted
        "Qwen3-235B": (QWEN, [draw_lengths(512, 16, s) for s in seeds], (10213, 7841, 6102), "held back"),
        "DeepSeek-V3": (
            DEEPSEEK,
            [draw_lengths(512, 16, s, median=3000, between=0.6, within=0.6) for s in seeds],
            (6482, 2861, 2291),
            "fitted",
        ),
    }
    data["gears"] = {}
    for name, (cluster, batches, seconds, kind) in table.items():
        one = replace(cluster, gears=cluster.gears[-1:])
        times = [
            mean(run("adjacent", b, one).makespan_s for b in batches),
            mean(run("adjacent", b, cluster).makespan_s for b in batches),
            mean(run("two-phase, adjacent", b, cluster).makespan_s for b in batches),
        ]
        data["gears"][name] = {"seconds": times, "published": seconds}
        print(
            f"  {name:<12} {kind:<10}"
            + "  ".join(f"{a:6.0f} s (published {b})" for a, b in zip(times, seconds, strict=True))
        )
        for what, i in (("gears", 0), ("moves", 1)):
            gain, target = times[i] / times[i + 1], seconds[i] / seconds[i + 1]
            off = abs(gain / target - 1)
            what = f"{name}, gain by {what}: {gain:.2f}, published {target:.2f}; off by, {kind}"
            bars.append(bar(what, 100 * off, "%", "<= 15"))


def check_placement(fit_seeds: int, bars: list, data: dict) -> None:
    """Idle share by how much is known, on the requests of the fitted rows."""
    print(f"\n2. Placement, 256 prompts x 16 on 32 ranks, no moves, {fit_seeds} seeds: idle share, seconds")
    batches = [draw_lengths(256, 16, seed) for seed in range(fit_seeds)]
    rows = {name: [run(name, batch, QWEN) for batch in batches] for name in PLACEMENTS}
    for drift in (0.0, 0.3, 0.6):
        rows[f"ours: earlier lengths, drift {drift}"] = [
            run("ours: earlier lengths", draw_lengths(256, 16, seed, drift=drift), QWEN)
            for seed in range(fit_seeds)
        ]
    idle = {name: 100 * mean(r.idle_share for r in results) for name, results in rows.items()}
    data["placement"] = {}
    for name, results in rows.items():
        data["placement"][name] = (idle[name], mean(r.makespan_s for r in results))
        print(
            f"   {name:<36} {idle[name]:6.2f}% ({100 * spread(r.idle_share for r in results):.1f}) "
            f"{data['placement'][name][1]:6.0f} s"
        )
    gain = idle["interleaved"] - idle["ours: earlier lengths"]
    bars.append(bar("published, earlier lengths: idle below interleaved", gain, "points", ">= 3"))
    above = idle["ours: nothing known"] - idle["interleaved"]
    bars.append(bar("published, nothing known: idle above interleaved", above, "points", "<= 0"))


def compare(make: dict[str, Callable[[int], Batch]], seeds: int, placed: int, bars: list, data: dict) -> None:
    """All policies on all length models; pure placements are quick and get at least ``placed`` seeds."""
    data["policies"] = {}
    worse, slower = {}, {}
    for model, draw in make.items():
        drawn = [draw(seed) for seed in range(max(seeds, placed))]
        print(
            f"\n3. {model}: {len(drawn[0].group)} requests, 32 ranks in lockstep, {len(drawn)} seeds, "
            f"rows with moves {seeds}"
        )
        print(
            f"   {'':<32} {'s':>6} {'spread':>6} {'tok/s/card':>10} {'idle %':>7} {'moves':>6} {'GB':>6} "
            f"{'replayed':>9} {'% of bound':>10}"
        )
        rows = data["policies"][model] = {}
        for name in PLACEMENTS + MOVERS:
            batches = drawn if name in PLACEMENTS else drawn[:seeds]
            floor = [lower_bound(batch, QWEN) for batch in batches]
            results = [run(name, batch, QWEN) for batch in batches]
            prompts = int(mean(batch.prompt.sum() for batch in batches))
            rows[name] = row = {
                "seconds": mean(r.makespan_s for r in results),
                "spread": spread(r.makespan_s for r in results),
                "tokens_per_s_card": mean(r.decoded_tokens / r.makespan_s for r in results) / CARDS,
                "idle": 100 * mean(r.idle_share for r in results),
                "moves": mean(r.moves for r in results),
                "gb": mean(r.moved_bytes for r in results) / 1e9,
                "prefilled_tokens": mean(r.prefilled_tokens for r in results),
                "prompt_tokens": prompts,
                "bound": 100 * mean(f / r.makespan_s for f, r in zip(floor, results, strict=True)),
                "wrong": sum(
                    r.decoded_tokens != b.response.sum() for r, b in zip(results, batches, strict=True)
                ),
            }
            print(
                f"   {name:<32} {row['seconds']:6.0f} {row['spread']:6.0f} {row['tokens_per_s_card']:10.1f} "
                f"{row['idle']:7.2f} {row['moves']:6.0f} {row['gb']:6.1f} "
                f"{max(0, row['prefilled_tokens'] - prompts):9.0f} {row['bound']:10.1f}"
            )
        for name in ("ours: nothing known", "ours: earlier lengths"):
            best = min(rows["verl 0.7.1"]["seconds"], rows["interleaved"]["seconds"])
            worse[model, name] = 100 * (rows[name]["seconds"] / best - 1)
        for name in (name for name in MOVERS if name.startswith("ours")):
            best = min(rows["two-phase, adjacent"]["seconds"], rows["two-phase, interleaved"]["seconds"])
            more = rows[name]["seconds"] - best
            slower[model, name] = 100 * more / best if abs(more) > STEP_S else 0.0
    rows = data["policies"]["published"]
    most = max(worse.values())
    bars.append(
        bar("placement: longer than the better of verl and interleaved, worst of 5 models", most, "%", "<= 1")
    )
    for mover in ("KV", "replay"):
        most = max(value for (_, name), value in slower.items() if f"+ {mover}" in name)
        what = f"moves by {mover}: longer than the better two-phase row, worst of 5 models"
        bars.append(bar(what, most, "%", "<= 0"))
        for how in ("", FEWER):
            for where in ("adjacent", "interleaved"):
                mine, theirs = rows[f"ours: earlier lengths + {mover}{how}"], rows[f"two-phase, {where}"]
                less = 100 * (1 - mine["seconds"] / theirs["seconds"])
                print(f"   published, moves by {mover}{how}: {less:.1f}% shorter than two-phase, {where}")
                if where == "adjacent" and how:  # as published: verl's placement, 10213 -> 6102 s
                    name = f"published, moves by {mover}{how}: shorter than two-phase"
                    bars.append(bar(name, less, "%", ">= 8"))
        mine = rows[f"ours: earlier lengths + {mover}"]
        bars.append(bar(f"published, moves by {mover}: of the lower bound", mine["bound"], "%", ">= 95"))
    wrong = sum(row["wrong"] for model in data["policies"].values() for row in model.values())
    bars.append(bar("rollouts with tokens lost, all policies", wrong, "", "= 0"))


def trade_offs(seeds: int, data: dict) -> None:
    """Siblings that have ended; servers with their own clocks and queues; steps without a graph."""
    print("\n4. Replay, queues sorted by siblings that have ended in this step: seconds without, with")
    data["siblings"] = {}
    for places in (128, 96, 64):
        few = replace(QWEN, max_num_seqs=places)
        batches = [draw_lengths(256, 16, seed) for seed in range(seeds)]
        published = mean(run("two-phase, interleaved", batch, few).makespan_s for batch in batches)
        data["siblings"][f"{places} places, two-phase, interleaved"] = [published]
        print(f"   {places} places, two-phase, interleaved: {published:.0f} s")
        for known in (False, True):
            seconds = []
            for batch in batches:
                predicted = earlier(batch) if known else None
                placed = place(batch.group.tolist(), 32, predicted)
                seconds.append([
                    simulate(batch, few, placed.rank, placed.order, policy, LOOK_STEPS).makespan_s
                    for policy in (Ours(carry_kv=False), Siblings(batch, predicted))
                ])  # fmt: skip
            row = np.mean(seconds, axis=0).tolist()
            data["siblings"][f"{places} places, {'earlier lengths' if known else 'nothing known'}"] = row
            print(f"   {list(data['siblings'])[-1]:<32} {row[0]:6.0f} {row[1]:6.0f} s")
    cluster = replace(QWEN, lockstep=False, max_num_seqs=32, kv_capacity_tokens=300_000)
    print("\n   32 servers with their own clocks, 32 places and 300K tokens of KV each: requests queue")
    data["independent"] = {}
    for name in (
        "verl 0.7.1",
        "interleaved",
        "ours: earlier lengths",
        "LPT, oracle",
        "Seer-style",
        "two-phase, interleaved",
        "ours: earlier lengths + replay",
    ):
        results = [run(name, draw_lengths(256, 16, seed), cluster) for seed in range(seeds)]
        row = (
            mean(r.makespan_s for r in results),
            100 * mean(r.idle_share for r in results),
            mean(r.moves for r in results),
            mean(r.preemptions for r in results),
        )
        data["independent"][name] = row
        print(
            f"   {name:<32} {row[0]:6.0f} s, idle {row[1]:5.2f}%, {row[2]:4.0f} moves, {row[3]:.0f} preempted"
        )
    count_work(cluster, seeds, data)
    charge_eager(seeds, data)


def count_work(few: Cluster, seeds: int, data: dict) -> None:
    """What a mover would gain that counts remaining tokens and not requests, if it knew them."""
    print("\n   moves with KV by requests, by tokens that remain: seconds (moves); nothing known before")
    data["work"] = {}
    many = replace(few, max_num_seqs=QWEN.max_num_seqs, kv_capacity_tokens=QWEN.kv_capacity_tokens)
    for cluster in (few, many):
        name = f"{cluster.max_num_seqs} places, {cluster.kv_capacity_tokens // 1000}K tokens of KV"
        rows: dict[str, list] = {}
        for seed in range(seeds):
            batch = draw_lengths(256, 16, seed)
            placed = place(batch.group.tolist(), cluster.ranks, None)
            for how, policy in {
                "no moves": None,
                "by requests": Ours(carry_kv=True),
                "by tokens, siblings": ByWork(batch, None),
                "by tokens, true lengths": ByWork(batch, batch.response.astype(float)),
            }.items():
                result = simulate(batch, cluster, placed.rank, placed.order, policy, LOOK_STEPS, LEVELS)
                rows.setdefault(how, []).append((result.makespan_s, result.moves))
        data["work"][name] = {how: np.mean(of, axis=0).tolist() for how, of in rows.items()}
        cells = (f"{how} {s:.0f} ({moves:.0f})" for how, (s, moves) in data["work"][name].items())
        print(f"   {name}:", *cells, sep="   ")


def charge_eager(seeds: int, data: dict) -> None:
    """A prefill on one rank takes the graph from all: one step so many times as long as with its graph."""
    print("\n   a step with a prefill, times one with a graph: seconds (moves)")
    data["eager"] = {}
    for name in CHARGED:
        row = {}
        for times in EAGER:
            cluster = replace(QWEN, cost=replace(QWEN.cost, eager=times))
            results = [run(name, draw_lengths(256, 16, seed), cluster) for seed in range(seeds)]
            row[times] = (mean(r.makespan_s for r in results), mean(r.moves for r in results))
        data["eager"][name] = row
        cells = (f"{times:g}: {seconds:6.0f} ({moves:3.0f})" for times, (seconds, moves) in row.items())
        print(f"   {name:<48}", *cells)


def time_planner(bars: list, data: dict) -> None:
    """128 ranks x 256 requests, with and without a graph size to drop."""
    rng = np.random.default_rng(0)
    data["planner_ms"] = {}
    for name, counts in (("moves", rng.integers(150, 257, 128)), ("none", np.full(128, 256))):
        servers = [
            Server(
                str(r),
                tuple(
                    Request(f"{r}-{i}", int(t), False) for i, t in enumerate(rng.integers(100, 3000, count))
                ),
                900_000,
                256,
            )
            for r, count in enumerate(counts)
        ]
        times = []
        for _ in range(21):
            begun = time.perf_counter()
            moves = plan(servers, [32, 64, 128, 224, 256])
            times.append(1e3 * (time.perf_counter() - begun))
        middle = statistics.median(times)
        data["planner_ms"][name] = times
        bars.append(bar(f"planner, 128 ranks x 256 requests, {len(moves)} moves", middle, "ms", "< 10"))


# Published for GRPO 235B on 128 dies: 798 s for the update with 8192 responses, 58.2M tokens. Four updates a
# step. Weights are broadcast over one link: 470 GB at 20 GB/s.
UPDATE_MS, UPDATES, SYNC_MS = 798e3 * 32 / 58.2e6, 4, 24e3
ASYNC = {  # name: (ahead, bound, partial rollout)
    "staleness 0": (0, 1, True),
    "staleness 1": (1, 2, True),
    "staleness 1, whole responses": (1, 2, False),
    "staleness 2": (1, 3, True),
    "staleness 3": (1, 4, True),
}


def asynchronous(path: Path, quick: bool, bars: list, data: dict) -> None:
    """32 ranks with their own clocks, divided between training and rollout, against turns with moves."""
    recorded, cluster, ranks = read_lengths(path), replace(QWEN, lockstep=False), QWEN.ranks
    batches = [shuffled(recorded, seed) for seed in range(4 if quick else 20)]
    few, tokens = batches[:2], int((recorded.prompt + recorded.response).sum())
    print(
        f"\n6. {len(recorded.group)} recorded responses a step, 32 ranks with their own clocks, "
        f"{len(batches)} steps from the first: seconds a step, ranks that roll out + train, % of the bound, "
        "M tokens prefilled again"
    )
    data["async"] = {}
    for times in (1,) if quick else (1, 3):
        training = Training(times * UPDATE_MS, UPDATES, SYNC_MS)
        update_s = training.step_ms(recorded, ranks) / 1e3
        movers = [f"ours: earlier lengths + {mover}" for mover in ("KV", "replay")]
        turns = {  # in the second, both batches are one rollout
            "taking turns": min(mean(run(name, one, cluster).makespan_s for one in few) for name in movers),
            "taking turns, twice the batch": run(movers[0], joined(few), cluster).makespan_s / 2,
        }
        rows = data["async"][f"updates x {times}"] = {"update_s": update_s}
        print(f"   updates of {update_s:.0f} s on all ranks")
        for name, rollout_s in turns.items():
            rows[name] = rollout_s + update_s + SYNC_MS / 1e3
            print(f"   {name:<32} {rows[name]:6.0f} s")
        for name, how in ASYNC.items():
            tried: dict[int, tuple[float, float, float]] = {}

            def step_s(rollout: int, how=how, training=training, tried=tried) -> float:
                if rollout not in tried:
                    mine = replace(cluster, ranks=rollout)
                    steps = simulate_async(batches, mine, ranks - rollout, training, *how)
                    taken, count = trained(batches, steps), len(steps.end_s)
                    seconds = float(steps.end_s[-1])
                    bound = 100 * async_bound(taken, count, mine, ranks - rollout, training) / seconds
                    share = (taken.prompt + taken.response).sum() / tokens  # of a step, by tokens
                    tried[rollout] = seconds / share, bound, steps.recomputed_tokens / count / 1e6
                return tried[rollout][0]

            best = min(range(8, ranks, 8 if quick else 4), key=step_s)
            for distance in () if quick else (2, 1):
                best = min((best - distance, best, best + distance), key=step_s)
            rows[name] = best_s, of_bound, again = tried[best]
            data["async"][f"updates x {times}"][f"{name}: by ranks that roll out"] = tried
            print(
                f"   {name:<32} {best_s:6.0f} s  {best:>2} + {ranks - best:<2} {of_bound:6.1f}% {again:6.1f}"
            )
            most = max(bound for _, bound, _ in tried.values())
            bars.append(
                bar(f"async, updates x {times}, {name}: of the bound, any split", most, "%", "<= 100")
            )
        for name, least in (("staleness 1", 5), ("staleness 2", 15)):
            gain = 100 * (1 - rows[name][0] / rows["taking turns"])
            what = f"async, updates x {times}, {name}: shorter than taking turns"
            bars.append(bar(what, gain, "%", f">= {least}"))
        loss = 100 * (rows["staleness 0"][0] / rows["taking turns"] - 1)
        bars.append(
            bar(f"async, updates x {times}, staleness 0: longer than taking turns", loss, "%", ">= 0")
        )


def draw_figure() -> None:
    """Running requests of each rank over time, one panel per policy."""
    from matplotlib.colors import LogNorm

    batch = draw_lengths(256, 16, 0)
    names = [
        "verl 0.7.1",
        "adjacent",
        "interleaved",
        "LPT, oracle",
        "two-phase, adjacent",
        "Seer-style",
        "ours: earlier lengths",
        "ours: earlier lengths + replay",
        "ours: earlier lengths + KV",
    ]
    figure, axes = canvas(len(names), 1, figsize=(8, 1.15 * len(names) + 0.8), sharex=True)
    for axis, name in zip(axes, names, strict=True):
        result = run(name, batch, QWEN, trace=True)
        seconds = np.array([s for s, _ in result.trace] + [result.makespan_s])
        counts = np.array([c for _, c in result.trace]).T
        image = axis.pcolormesh(
            seconds,
            np.arange(33),
            np.where(counts > 0, counts, np.nan),
            cmap="viridis",
            norm=LogNorm(1, 128),
            rasterized=True,
        )
        axis.set_title(
            f"{name}: {result.makespan_s:.0f} s, first rank waits {result.idle_share:.0%}",
            fontsize=8,
            loc="left",
            pad=2,
        )
        axis.set_yticks([])
        axis.set_facecolor("0.93")
    axes[-1].set_xlabel(
        "seconds (simulated; 256 prompts x 16, 32 ranks in lockstep, one row per rank)", fontsize=8
    )
    figure.colorbar(image, ax=axes, label="running requests of a rank; grey: waits", pad=0.01)
    save(figure, "rollout")


def main() -> int:
    parser = parser_of(__doc__, "fewer seeds; under a minute")
    parser.add_argument(
        "--lengths",
        type=Path,
        default=ROOT / "bench/lengths_gsm8k.jsonl",
        help="recorded lengths for the fifth model; see bench/sim_rollout.py.read_lengths",
    )
    args = parser.parse_args()
    seeds, placed, fit_seeds = (1, 4, 8) if args.quick else (16, 16, 64)
    bars: list[tuple[str, float, str, str, bool]] = []
    data: dict = {"seeds": seeds, "fit_seeds": fit_seeds}
    begun = time.monotonic()
    check_model(fit_seeds, bars, data)
    check_placement(fit_seeds, bars, data)
    compare(models(args.lengths), seeds, placed, bars, data)
    trade_offs(1 if args.quick else 4, data)
    time_planner(bars, data)
    asynchronous(args.lengths, args.quick, bars, data)
    draw_figure()
    return finish("rollout", bars, quick=args.quick, seconds=time.monotonic() - begun, **data)


if __name__ == "__main__":
    sys.exit(main())

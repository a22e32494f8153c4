"""Schedulers of an engine's queue where KV is short, in the simulator of bench/sim_rollout.py.

Usage:    python bench/bench_length_scheduler.py [--quick] [--first-seed N]
Example:  python bench/bench_length_scheduler.py        # 15 minutes on 2 idle cores; --quick one
1024 requests on 8 engines, interleaved, with KV for 200K tokens each: vLLM's order of arrival, the rule of
vllm-ascend#12240 as its page describes it, and ascend_rl.rollout.length_scheduler by what it knows: nothing,
an earlier epoch, the siblings' lengths, and lengths that are wrong (of another prompt, doubled, halved). The
engines step together, as with large EP, where each recomputed token stops all of them; then on their own.
Each policy sees the same requests. With the right lengths ours has had a rollout of other requests before;
with wrong or no lengths this is its first. The rule of #12240 takes a prompt for a job. `deciding`: the
scheduler's own time in an engine, with both cores busy.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
from bars import ROOT, bar, finish, parser_of
from bench_rollout import QWEN, interleaved, mean, shuffled
from sim_rollout import (
    DONE,
    MAX_RESPONSE,
    Batch,
    Cluster,
    Result,
    Simulation,
    draw_bimodal,
    draw_equal,
    draw_lengths,
    lower_bound,
    read_lengths,
    simulate,
)

from ascend_rl.rollout.length_scheduler import LengthScheduler, Request

ENGINES, PROMPTS, SAMPLES, KV_TOKENS = 8, 64, 16, 200_000
BLOCK, JOB_SHARE = (
    128,
    0.3,
)  # of vllm-ascend; the share of the newest length in #12240's average is not published


class Scheduler:
    """Ours, one per engine.

    Args:
        known: [G] lists of earlier lengths of each prompt.
        before: the rollout before, and what was known of it.
    """

    def __init__(
        self,
        batch: Batch,
        cluster: Cluster,
        known: list[list[float]],
        before: tuple[Batch, list[list[float]]] | None = None,
    ):
        self.batch, self.learned = batch, np.zeros(len(batch.response), bool)
        alone = not cluster.lockstep
        self.engines = [LengthScheduler(cluster.kv_capacity_tokens, alone) for _ in range(cluster.ranks)]
        self.preempted = np.zeros(cluster.ranks, np.int64)
        self.deciding_s = 0.0  # of all engines
        for rank, engine in enumerate(self.engines):
            if before:
                for prompt, lengths in enumerate(before[1]):
                    engine.expect(prompt, lengths)
                for i in np.flatnonzero(interleaved(before[0], cluster.ranks) == rank):
                    engine.ended(int(before[0].group[i]), int(before[0].response[i]))
                engine.forget()
            for prompt, lengths in enumerate(known):
                engine.expect(prompt, lengths)

    def __call__(self, simulation: Simulation, rank: int) -> int:
        batch, engine = self.batch, self.engines[rank]
        for i in np.flatnonzero((simulation.state == DONE) & (simulation.rank == rank) & ~self.learned):
            engine.ended(int(batch.group[i]), int(batch.response[i]))
            self.learned[i] = True
        for _ in range(simulation.preempted[rank] - self.preempted[rank]):
            engine.preempted()
        self.preempted[rank] = simulation.preempted[rank]
        running, waiting = simulation.active(rank), simulation.waiting(rank)
        tokens = (batch.prompt + simulation.done)[running]
        running[:] = running[np.argsort(-tokens, kind="stable")]
        begun = time.perf_counter()
        order, admitted = engine.choose(
            self.requests(simulation, running),
            self.requests(simulation, waiting),
            simulation.cluster.max_num_seqs - len(running),
        )
        self.deciding_s += time.perf_counter() - begun
        waiting[:] = waiting[order]
        return admitted

    def requests(self, simulation: Simulation, which: np.ndarray) -> list[Request]:
        columns = self.batch.group[which], self.batch.prompt[which], simulation.done[which]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [Request(group, prompt, done, MAX_RESPONSE) for group, prompt, done in rows]


class JobAware:
    """vllm-ascend#12240: the average length of a job's ended requests, the newest weighing most, 128 before
    the first; running requests reserve what is left of it, at most 8 blocks, and 2; with more than 4096
    tokens available the longest jobs go first, else the shortest."""

    def __init__(self, batch: Batch, cluster: Cluster):
        self.batch, self.learned = batch, np.zeros(len(batch.response), bool)
        self.average = np.full((cluster.ranks, len(batch.earlier)), np.nan)

    def __call__(self, simulation: Simulation, rank: int) -> int:
        batch, cluster = self.batch, simulation.cluster
        for i in np.flatnonzero((simulation.state == DONE) & (simulation.rank == rank) & ~self.learned):
            of = self.average[rank, batch.group[i] : batch.group[i] + 1]
            of[...] = batch.response[i] if np.isnan(of) else of + JOB_SHARE * (batch.response[i] - of)
            self.learned[i] = True
        expected = np.nan_to_num(self.average[rank], nan=128.0)[batch.group]
        left = np.maximum(0, expected - simulation.done)
        reserved = (np.minimum(np.ceil(left / BLOCK), 8) + 2) * BLOCK
        running, waiting = simulation.active(rank), simulation.waiting(rank).copy()
        tokens = batch.prompt + simulation.done
        available = cluster.kv_capacity_tokens - simulation.used[rank] - reserved[running].sum()
        chosen: list[int] = []
        while len(chosen) < min(len(waiting), cluster.max_num_seqs - len(running)):
            sign = -1 if available > 4096 else 1
            rest = waiting[~np.isin(waiting, chosen)]
            fits = rest[tokens[rest] + reserved[rest] <= available]
            if not len(fits):
                if len(running) or chosen:
                    break
                fits = rest
            best = fits[np.argmin(sign * expected[fits])]
            chosen.append(int(best))
            available -= tokens[best] + reserved[best]
        rest = waiting[~np.isin(waiting, chosen)]
        simulation.waiting(rank)[:] = np.concatenate([np.array(chosen, np.int64), rest])
        return len(chosen)


def grown(batch: Batch, factor: float) -> list[list[float]]:
    return [[factor * tokens for tokens in lengths] for lengths in batch.earlier]


def of_others(batch: Batch) -> list[list[float]]:
    order = np.random.default_rng(0).permutation(len(batch.earlier))
    return [batch.earlier[prompt] for prompt in order]


def of_siblings(batch: Batch) -> list[list[float]]:
    return [batch.response[batch.group == prompt].tolist() for prompt in range(len(batch.earlier))]


def of_earlier(batch: Batch) -> list[list[float]]:
    return batch.earlier


def first(known: Callable[[Batch], list]) -> Callable:
    """Ours, in its first rollout."""
    return lambda batch, cluster, before: Scheduler(batch, cluster, known(batch))


def later(known: Callable[[Batch], list]) -> Callable:
    """Ours, after a rollout."""
    return lambda batch, cluster, before: Scheduler(batch, cluster, known(batch), (before, known(before)))


FCFS, JOBS, EARLIER, SIBLINGS = "arrival (vLLM)", "#12240's rule", "ours: earlier lengths", "ours: siblings"
POLICIES: dict[str, Callable[[Batch, Cluster, Batch], Callable | None]] = {
    FCFS: lambda batch, cluster, before: None,
    JOBS: lambda batch, cluster, before: JobAware(batch, cluster),
    "ours: nothing known": first(lambda batch: []),
    EARLIER: later(of_earlier),
    SIBLINGS: later(of_siblings),
    "ours: of other prompts": first(of_others),
    "ours: earlier x 2": first(lambda batch: grown(batch, 2)),
    "ours: earlier / 2": first(lambda batch: grown(batch, 0.5)),
}


def part(batch: Batch, seed: int, prompts: int) -> Batch:
    mixed = shuffled(batch, seed)
    mine = mixed.group < prompts
    columns = mixed.group[mine], mixed.prompt[mine], mixed.response[mine]
    return Batch(*columns, mixed.earlier[:prompts])


def draw_truncated(seed: int) -> Batch:
    """Prompts of up to 2K tokens, responses of up to 32K: one in ten reaches the limit."""
    return draw_lengths(PROMPTS, SAMPLES, seed, median=8000, between=0.9, within=0.3)


def mixes() -> dict[str, Callable[[int], Batch]]:
    recorded = read_lengths(ROOT / "bench/lengths_gsm8k.jsonl")
    return {
        "DeepScaleR-like": lambda seed: draw_lengths(PROMPTS, SAMPLES, seed),
        "GSM8K, recorded": lambda seed: part(recorded, seed, PROMPTS * 4),
        "2K + 32K": draw_truncated,
        "2K and 16K": lambda seed: draw_bimodal(PROMPTS, SAMPLES, seed),
        "uncorrelated": lambda seed: draw_lengths(PROMPTS, SAMPLES, seed, between=0.0, within=0.567),
        "all equal": lambda seed: draw_equal(PROMPTS, SAMPLES, seed),
    }


def run(mix: str, seed: int, lockstep: bool, policy: str) -> tuple[Result, float, int, float]:
    """A rollout, its bound in seconds, its tokens, and the seconds that an engine spent deciding."""
    batch, before = mixes()[mix](seed), mixes()[mix](seed + 1000)
    cluster = replace(QWEN, ranks=ENGINES, kv_capacity_tokens=KV_TOKENS, lockstep=lockstep)
    scheduler = POLICIES[policy](batch, cluster, before)
    result = simulate(batch, cluster, interleaved(batch, ENGINES), scheduler=scheduler)
    deciding_s = getattr(scheduler, "deciding_s", 0.0) / ENGINES
    return result, lower_bound(batch, cluster), int(batch.response.sum()), deciding_s


def row_of(runs: list[tuple[Result, float, int, float]]) -> dict[str, float]:
    return {
        "seconds": mean(result.makespan_s for result, *_ in runs),
        "preemptions": mean(result.preemptions for result, *_ in runs),
        "recomputed": mean(result.preempted_tokens for result, *_ in runs),
        "bound": 100 * mean(bound / result.makespan_s for result, bound, *_ in runs),
        "deciding": mean(deciding_s for *_, deciding_s in runs),
        "wrong": sum(int(result.decoded_tokens != tokens) for result, _, tokens, _ in runs),
    }


def main() -> int:
    parser = parser_of(__doc__, "one mix, one seed")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="requests drawn from here on")
    args = parser.parse_args()
    seeds, bars, data = 1 if args.quick else 4, [], {}
    wrong, begun = 0.0, time.monotonic()
    pool = ProcessPoolExecutor()
    for lockstep in (True, False):
        how = "together" if lockstep else "on their own"
        for mix in ["GSM8K, recorded"] if args.quick else mixes():
            print(f"\n{mix}, engines step {how}, {seeds} seeds")
            print(
                f"   {'':<24} {'s':>6} {'to vLLM':>8} {'preempted':>9} {'recomputed':>10} {'% of bound':>10} "
                "deciding, s"
            )
            rows = data[f"{mix}, {how}"] = {}
            for policy in POLICIES if lockstep else (FCFS, JOBS, EARLIER):
                drawn = range(args.first_seed, args.first_seed + seeds)
                runs = [pool.submit(run, mix, seed, lockstep, policy) for seed in drawn]
                row = rows[policy] = row_of([each.result() for each in runs])
                base, wrong = rows[FCFS], wrong + row["wrong"]
                longer = 100 * (row["seconds"] / base["seconds"] - 1)
                print(
                    f"   {policy:<24} {row['seconds']:6.0f} {longer:+7.1f}% {row['preemptions']:9.0f} "
                    f"{row['recomputed']:10.0f} {row['bound']:10.1f} {row['deciding']:11.2f}",
                    flush=True,
                )
            mine = rows[EARLIER]
            longer = 100 * (mine["seconds"] / base["seconds"] - 1)
            bars.append(bar(f"{mix}, {how}: longer than in order of arrival", longer, "%", "<= 1"))
            if lockstep:
                fewer = 100 * (1 - mine["recomputed"] / max(base["recomputed"], 1))
                bars.append(bar(f"{mix}: fewer tokens preempted", fewer, "%", ">= 90"))
                bars.append(
                    bar(f"{mix}: of the bound, siblings known", rows[SIBLINGS]["bound"], "%", ">= 97")
                )
    bars.append(bar("rollouts with tokens lost, all policies", wrong, "", "= 0"))
    return finish("length_scheduler", bars, quick=args.quick, seconds=time.monotonic() - begun, rows=data)


if __name__ == "__main__":
    sys.exit(main())

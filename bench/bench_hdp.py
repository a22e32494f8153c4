"""Step makespans of hybrid data parallelism in the cost model: the planner, plain CP and other packers.

Usage:    python bench/bench_hdp.py [--quick]
Example:  python bench/bench_hdp.py            # about a minute; --quick takes fewer sequences
1. Calibration: the greedy packer reproduces the published gains, plain CP8 -> CP4 the published ratio. The
   cost models are the fixed ones of ascend_rl/hdp/hdp.py; docs/hdp.md explains how they were derived.
2. Four length mixes, five ways to plan, against the lower bound; a sixth by megatron-core 0.16's own
   scheduler if the sources of STACK=cann9.1 are there.
3. How much the results depend on what the published figures leave open.
4. The planner's time on one core.
"""

from __future__ import annotations

import heapq
import importlib.util
import math
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from bars import Bar, bar, canvas, finish, parser_of, save
from numba import njit
from sim_rollout import draw_bimodal, draw_lengths

from ascend_rl.hdp.hdp import DEEPSEEK_V3, QWEN3_235B, CostModel, plan

LONGEST = 2048 + 32768
OVERLOAD = 2.0  # of the greedy packer
CORE = Path(__file__).parents[1] / "stacks/cann9.1/frameworks/megatron/megatron/core"
HYBRID = CORE / "pipeline_parallel/hybrid_cp_schedule.py"


@dataclass(frozen=True)
class Mix:
    lengths: np.ndarray
    cp: int
    dp: int
    model: CostModel

    @property
    def cap(self) -> int:
        return LONGEST // self.cp


def mixes(share: int) -> dict[str, Mix]:
    """Sequences of one step: 1 / ``share`` of the published number."""
    rng = np.random.default_rng(0)
    short = np.exp(math.log(1400) + 0.62 * rng.standard_normal(1024)).astype(np.int64) + 74
    batch = draw_lengths(512 // share, 16, seed=0)
    uniform = rng.integers(8192, 32768, 8192 // share)
    bimodal = draw_bimodal(512 // share, 16, seed=0)
    return {
        "short, CP8": Mix(short, 8, 1, DEEPSEEK_V3),
        "reasoning, CP4": Mix(batch.prompt + batch.response, 4, 2, QWEN3_235B),
        "uniform long, CP4": Mix(uniform, 4, 2, QWEN3_235B),
        "bimodal, CP4": Mix(bimodal.prompt + bimodal.response, 4, 2, QWEN3_235B),
    }


@njit(cache=True)
def _first_fit(lengths, rings, ranks, cap, token, pair, ring_step, ring_token, micro_batch):
    """Put each sequence into the first micro-batch and the first aligned ranks that have room."""
    most = len(lengths) + 1
    tokens, seconds, has = np.zeros((most, ranks)), np.zeros((most, ranks)), np.zeros((most, ranks, 4))
    used = 0
    for i in range(len(lengths)):
        g, length, m, placed = rings[i], lengths[i], 0, False
        power = int(np.log2(g) + 0.5)
        while not placed:
            for r in range(0, ranks, g):
                if (tokens[m, r : r + g] + length / g).max() <= cap:
                    work = (token * length + pair * length * length) / g + (g - 1) * ring_token * length / g
                    if g > 1 and not has[m, r, power]:
                        work += (g - 1) * ring_step
                    has[m, r, power] = 1
                    tokens[m, r : r + g] += length / g
                    seconds[m, r : r + g] += work
                    placed = True
                    break
            m += 1
        used = max(used, m)
    total = used * micro_batch
    for m in range(used):
        total += seconds[m].max()
    return total


def greedy(mix: Mix) -> float:
    """The published kind: the smallest power-of-two ring in which a sequence takes at most 1 / OVERLOAD of a
    rank's cap (all ranks of the group at most), then first fit, longest first."""
    rings = 2 ** np.ceil(np.log2(np.maximum(1, np.ceil(mix.lengths * OVERLOAD / mix.cap))))
    order, m = np.argsort(-mix.lengths, kind="stable"), mix.model
    rings = np.minimum(rings, mix.cp).astype(np.int64)[order]
    return _first_fit(mix.lengths[order].astype(float), rings, mix.cp * mix.dp, mix.cap, m.token, m.pair,
                      m.ring_step, m.ring_token, m.micro_batch)  # fmt: skip


def karmarkar_karp(work: list[float], parts: int) -> list[list[int]]:
    """The largest differencing method: combine the two states with the largest differences, crosswise."""
    heap: list = []
    for i, value in enumerate(work):  # a state: its non-empty parts, largest sum first
        heapq.heappush(heap, (-value, i, [(value, [i])]))
    count = len(work)
    while len(heap) > 1:
        (_, _, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        keep = max(0, parts - len(b))  # parts of a that meet an empty part of b
        joined = a[:keep] + b[: max(0, parts - len(a))]
        first = b[max(0, parts - len(a)) :]
        joined += [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a[keep:], reversed(first), strict=True)]
        joined.sort(key=lambda part: -part[0])
        least = joined[-1][0] if len(joined) == parts else 0.0
        heapq.heappush(heap, (least - joined[0][0], count, joined))
        count += 1
    found = [members for _, members in heap[0][2]]
    return found + [[] for _ in range(parts - len(found))]


def rings_of_all(mix: Mix, balance_dp: bool) -> tuple[float, float]:
    """verl: sequences to DP ranks by count (or balanced by work), then as many micro-batches as the tokens
    need, balanced by work, slowest first; every sequence over the whole CP group. Also
    the fullest micro-batch, in caps: verl counts micro-batches by tokens but does not keep the cap."""
    work = 24576.0 * mix.lengths + mix.lengths.astype(float) ** 2
    if balance_dp:
        parts = [np.array(part) for part in karmarkar_karp(work.tolist(), mix.dp)]
    else:
        parts = np.array_split(np.arange(len(mix.lengths)), mix.dp)
    count = max(math.ceil(mix.lengths[part].sum() / (mix.cap * mix.cp)) for part in parts)
    times, fullest = [], 0.0
    for part in parts:
        groups = karmarkar_karp(work[part].tolist(), count)
        chosen = [mix.lengths[part[group]].astype(float) for group in groups]
        seconds = [mix.model.seconds(c.sum(), (c**2).sum(), mix.cp) for c in chosen]
        times.append(sorted(seconds, reverse=True))
        fullest = max(fullest, max(c.sum() for c in chosen) / (mix.cap * mix.cp))
    return float(np.max(times, axis=0).sum() + count * mix.model.micro_batch), fullest


def hybrid(mix: Mix) -> float:
    """hybrid_context_parallel of megatron-core 0.16: rings of powers of two over all ranks, each sequence in
    a pass of its own, and a barrier after each of a few groups of passes."""
    spec = importlib.util.spec_from_file_location("hybrid_cp_schedule", HYBRID)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    scheduler = module.BalancedCPScheduler(mix.cap, SimpleNamespace(size=lambda: mix.cp * mix.dp))
    lengths = [(i, int(length)) for i, length in enumerate(mix.lengths)]
    m, total = mix.model, 0.0
    for group in scheduler.get_groups_and_subsamples(lengths, None)[1]:
        sizes = Counter(i for members in group for i in members)
        seconds = {
            i: m.micro_batch + m.seconds(*mix.lengths[i] ** np.array([1.0, 2.0]), g) for i, g in sizes.items()
        }
        total += max(sum(seconds[i] for i in members) for members in group)
    return total


def compare(all_mixes: dict[str, Mix], bars: list[Bar], data: dict) -> None:
    print(
        f"\n{'makespan / lower bound':<22} {'plain CP':>9} {'verl':>7} {'KK DP':>7} {'greedy':>7} {'ours':>7}"
        + " megatron-core 0.16" * HYBRID.exists()
    )
    for name, mix in all_mixes.items():
        plain = plan(mix.lengths, mix.cp, mix.dp, mix.cap, mix.model, rings=False)
        ours = plan(mix.lengths, mix.cp, mix.dp, mix.cap, mix.model)
        (verl, verl_caps), (kk, kk_caps) = rings_of_all(mix, False), rings_of_all(mix, True)
        times = {
            "plain CP": plain.makespan,
            "verl": verl,
            "KK DP": kk,
            "greedy": greedy(mix),
            "ours": ours.makespan,
        }
        sizes = {
            int(g): float(mix.lengths[ours.size == g].sum() / mix.lengths.sum()) for g in np.unique(ours.size)
        }
        if HYBRID.exists():
            times["megatron-core 0.16"] = hybrid(mix)
        gain = {k: plain.makespan / v - 1 for k, v in times.items()}
        data[name] = {
            "makespan": times, "bound": ours.bound, "gain over plain CP": gain, "tokens by ring size": sizes,
            "micro-batches": ours.micro_batches, "mean length": float(mix.lengths.mean()),
            "below 3000": float((mix.lengths < 3000).mean()),
        }  # fmt: skip
        row = " ".join(f"{v / ours.bound:>{7 + 2 * (k == 'plain CP')}.3f}" for k, v in times.items())
        print(
            f"{name:<22} {row}   greedy {gain['greedy']:+.1%}, ours {gain['ours']:+.1%}; "
            f"fullest micro-batch: verl {verl_caps:.2f}, KK DP {kk_caps:.2f} caps"
        )
        over = ours.makespan / ours.bound - 1
        bars.append((f"{name}: ours over the lower bound", 100 * over, "%", "0 to 1.5", 0 <= over <= 0.015))
        bars.append(bar(f"{name}: ours over plain CP", 100 * gain["ours"], "%", ">= 0"))
    short, reasoning = data["short, CP8"], data["reasoning, CP4"]
    of = "gain over plain CP"
    at = 100 * short[of]["greedy"]
    bars.append(("calibration: greedy on the short mix", at, "%", "published 39, +- 2", abs(at - 39) <= 2))
    at = 100 * reasoning[of]["greedy"]
    bars.append(
        ("calibration: greedy on reasoning lengths", at, "%", "published about 5, +- 1", abs(at - 5) <= 1)
    )
    at = 100 * short[of]["ours"]
    bars.append(bar("ours on the short mix", at, "%", ">= 45"))
    at = 100 * reasoning[of]["ours"]
    bars.append(bar("ours on reasoning lengths", at, "%", ">= 12"))
    mix = all_mixes["reasoning, CP4"]
    cp8 = plan(mix.lengths, 8, 1, LONGEST // 8, mix.model, rings=False).makespan
    ratio = cp8 / reasoning["makespan"]["plain CP"]
    bars.append(
        (
            "calibration: plain CP8 / plain CP4",
            ratio,
            "",
            "published 1.565, +- 0.05",
            abs(ratio - 1.565) <= 0.05,
        )
    )


# micro_batch, ring_step, ring_token with which the published figures come out nearly as well.
OTHERS = [(0.0, 550.0, 0.02), (800.0, 550.0, 0.03), (1600.0, 600.0, 0.03), (2400.0, 600.0, 0.04)]


def vary(mix: Mix, data: dict) -> None:
    print("\nreasoning lengths with other constants")
    for micro_batch, ring_step, ring_token in OTHERS:
        model = replace(mix.model, micro_batch=micro_batch, ring_step=ring_step, ring_token=ring_token)
        other = replace(mix, model=model)
        plain = plan(mix.lengths, mix.cp, mix.dp, mix.cap, model, rings=False).makespan
        cp8 = plan(mix.lengths, 8, 1, LONGEST // 8, model, rings=False).makespan / plain
        ours = plain / plan(mix.lengths, mix.cp, mix.dp, mix.cap, model).makespan - 1
        packed = plain / greedy(other) - 1
        print(
            f"micro_batch {micro_batch:4.0f}, ring_step {ring_step:.0f}, ring_token {ring_token:.2f}: "
            f"CP8 / CP4 {cp8:.3f}, greedy {packed:+.1%}, ours {ours:+.1%}"
        )
        data.setdefault("other constants", []).append([vars(model), cp8, packed, ours])


def time_planner(bars: list[Bar], data: dict) -> None:
    for name, mix in mixes(1).items():
        lengths = np.resize(mix.lengths, 8192)
        plan(lengths, mix.cp, mix.dp, mix.cap, mix.model)
        times = []
        for _ in range(5):
            begun = time.process_time()
            plan(lengths, mix.cp, mix.dp, mix.cap, mix.model)
            times.append(1000 * (time.process_time() - begun))
        data[f"{name}: planning 8192 sequences, ms of CPU"] = times
        middle = statistics.median(times)
        bars.append(bar(f"{name}: planning 8192 sequences", middle, "ms of CPU", "< 200"))


def draw_figure(all_mixes: dict[str, Mix], data: dict) -> None:
    figure, (left, right) = canvas(1, 2, figsize=(11, 3.8), gridspec_kw={"width_ratios": [3, 2]})
    ways = list(data["short, CP8"]["makespan"])[:5]
    for i, way in enumerate(ways):
        heights = [data[name]["makespan"][way] / data[name]["bound"] for name in all_mixes]
        left.bar(np.arange(len(all_mixes)) + 0.16 * (i - 2), heights, 0.15, label=way)
    left.axhline(1, color="black", lw=0.8)
    left.set(ylim=(0.9, 1.6), ylabel="step makespan / lower bound", title="cost model, one step")
    left.set_xticks(range(len(all_mixes)), list(all_mixes), fontsize=8)
    left.legend(fontsize=8)
    bottom = np.zeros(len(all_mixes))
    for size in range(1, 9):
        shares = np.array([data[name]["tokens by ring size"].get(size, 0) for name in all_mixes])
        if shares.any():
            right.bar(
                range(len(all_mixes)), shares, 0.6, bottom=bottom, label=f"{size} rank" + "s" * (size > 1)
            )
            bottom += shares
    right.set(ylabel="share of tokens", title="ring sizes chosen")
    right.set_xticks(range(len(all_mixes)), [name.replace(", ", "\n") for name in all_mixes], fontsize=8)
    right.legend(fontsize=8)
    save(figure, "hdp")


def main() -> int:
    parser = parser_of(__doc__, "a sixteenth of the sequences")
    args = parser.parse_args()
    all_mixes = mixes(16 if args.quick else 1)
    bars: list[Bar] = []
    data: dict = {"models": {"Qwen3-235B": vars(QWEN3_235B), "DeepSeek-V3": vars(DEEPSEEK_V3)}}
    compare(all_mixes, bars, data)
    vary(all_mixes["reasoning, CP4"], data)
    time_planner(bars, data)
    draw_figure(all_mixes, data)
    return finish("hdp", bars, quick=args.quick, **data)


if __name__ == "__main__":
    sys.exit(main())

"""Hybrid data parallelism: plan which sequences share a context-parallel ring and which need none.

Plain context parallelism (CP) splits every sequence over all C ranks of a CP group. Each attention layer then
takes C - 1 ring steps, each with the same latency however short the sequences are. But most sequences fit on
one rank.

Idea, in four steps:
1. units: a sequence longer than the memory cap gets a ring of the fewest ranks that hold it; the others are
   packed, longest first, into the unit with the least sufficient room, or into a new unit of one rank;
2. columns: units, slowest first, are placed side by side until all ranks of a CP group are busy, so the ranks
   of a column take about equally long; leftover ranks widen a ring or take over a sequence;
3. micro-batches: columns, slowest first, are dealt one to each CP group (DP rank) of a micro-batch;
4. of four ways to choose and fill rings, and plain CP, the one that the cost model finds fastest is taken.

Slowest first keeps the sum over micro-batches of the slowest rank close to the mean: in a sorted list the
differences between neighbours add up to the range of the list only once.

Invariants (tests/test_hdp.py, against brute force): every sequence is in one place; no rank holds more tokens
than the cap; every CP group has the same number of micro-batches, a multiple as requested; no rank is idle in
any; `order` and `inverse` undo each other; `weights` leave the loss unchanged; never slower than plain CP.
Cost: O(n log n) and at most O(n * units) short moves, compiled; 8192 sequences in well under 0.2 s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit


@dataclass(frozen=True)
class CostModel:
    """Time of a rank in one micro-batch; linear, so that `fit` can derive it from timings, in their unit.

    A rank in a ring of g ranks that holds T tokens in sequences of l_1, l_2, .. takes
    ``micro_batch + (token * T + pair * sum(l ** 2)) / g + (g - 1) * (ring_step + ring_token * T / g)``.

    Attributes:
        token: linear layers, per token.
        pair: causal attention, per token times the length of its sequence.
        ring_step: latency of a ring step that computation does not hide.
        ring_token: exposed transfer, per token received in a ring step.
        micro_batch: overhead of a micro-batch.
    """

    token: float
    pair: float
    ring_step: float
    ring_token: float
    micro_batch: float

    def seconds(self, tokens, squares, size):
        """Time of a unit of ``size`` ranks, without the micro-batch's overhead; numbers or arrays."""
        return (self.token * tokens + self.pair * squares) / size + (size - 1) * (
            self.ring_step + self.ring_token * tokens / size
        )


# The unit is the linear layers' time for one token. Attention is from FLOPs, the rest from three published
# runs, see docs/hdp.md. Qwen3-235B-A22B at TP4 PP4, and DeepSeek-V3 at TP4 PP8, whose layers compute 2.6
# times as much per token.
QWEN3_235B = CostModel(token=1.0, pair=3.56e-5, ring_step=600.0, ring_token=0.025, micro_batch=800.0)
QWEN3_235B_SIZES = (55_574_528, 2048, 128)  # of `scaled`: linear, attention, kv of a rank at TP4
DEEPSEEK_V3 = CostModel(token=1.0, pair=3.38e-5, ring_step=232.0, ring_token=0.028, micro_batch=309.0)


def scaled(linear: float, attention: float, kv: float) -> CostModel:
    """The cost model of another model, from QWEN3_235B's by what a layer computes on a rank; not timed.

    The unit is the time of a token's linear layers, so whatever takes the same time in both is fewer units
    where these compute more. Sizes are divided by TP.

    Args:
        linear: weights of a layer that a token meets: projections of attention, FFN or its experts.
        attention: heads times their width.
        kv: KV heads times their width.

    >>> scaled(*QWEN3_235B_SIZES) == QWEN3_235B
    True
    """
    base_linear, base_attention, base_kv = QWEN3_235B_SIZES
    less = base_linear / linear
    return CostModel(
        token=QWEN3_235B.token,
        pair=QWEN3_235B.pair * attention / base_attention * less,
        ring_step=QWEN3_235B.ring_step * less,
        ring_token=QWEN3_235B.ring_token * kv / base_kv * less,
        micro_batch=QWEN3_235B.micro_batch * less,
    )


def fit(lengths: Sequence[Sequence[int]], sizes: Sequence[int], seconds: Sequence[float]) -> CostModel:
    """Fit the cost model to timings of micro-batches, by least squares with no negative term.

    Args:
        lengths: for each timing, the lengths of its unit's sequences, in tokens.
        sizes: ranks of the ring.
        seconds: measured, of a rank.

    Raises:
        ValueError: the timings are of one ring size, or fewer than five, so do not tell the terms apart.
    """
    from scipy.optimize import nnls

    size, seconds = np.asarray(sizes, float), np.asarray(seconds, float)
    tokens = np.array([sum(unit) for unit in lengths], float)
    squares = np.array([sum(x * x for x in unit) for unit in lengths], float)
    terms = np.stack(
        [tokens / size, squares / size, size - 1, (size - 1) * tokens / size, np.ones_like(size)], 1
    )
    scale = terms.max(0)
    if not scale.all() or np.linalg.matrix_rank(terms / scale) < 5:
        raise ValueError(
            f"{len(size)} timings at ring sizes {sorted(set(sizes))} do not determine five terms; time at "
            "least two ring sizes, each with short and long sequences and with few and many tokens"
        )
    relative = terms / scale / seconds[:, None]
    found, _ = nnls(relative, np.ones_like(seconds))
    return CostModel(*(found / scale))


@dataclass(frozen=True)
class Plan:
    """Where sequences go.

    Attributes:
        micro_batch, group: [N] the micro-batch of a sequence, and the CP group (DP rank) it is in.
        first, size: [N] it is split over ranks ``first .. first + size - 1`` of that CP group.
        micro_batches: how many each CP group has.
        cp, dp: number of ranks in a CP group, and of CP groups.
        makespan: seconds of the step by the cost model: the sum over micro-batches of the slowest rank.
        bound: seconds that no plan can beat.
    """

    micro_batch: np.ndarray
    group: np.ndarray
    first: np.ndarray
    size: np.ndarray
    micro_batches: int
    cp: int
    dp: int
    makespan: float
    bound: float


@njit(cache=True)
def _pack(lengths, needs, cap, limits, token, pair, ring_step, ring_token):
    """Pack sequences, longest first, into units: unit of each, then size, tokens and squares of each unit.

    A ring of g ranks takes further sequences only while its ranks stay below ``limits[g]`` seconds.
    """
    n = len(lengths)
    unit = np.empty(n, np.int64)
    size, tokens, squares = np.empty(n, np.int64), np.zeros(n), np.zeros(n)
    by_room, rooms = np.empty(n, np.int64), np.empty(n, np.int64)  # units, least room first
    count = 0
    for i in range(n):
        length = lengths[i]
        at = np.searchsorted(rooms[:count], length)
        while at < count:  # the least sufficient room, unless that ring is too slow already
            u = by_room[at]
            g, t, s = size[u], tokens[u] + length, squares[u] + length * length
            if (token * t + pair * s) / g + (g - 1) * (ring_step + ring_token * t / g) <= limits[g]:
                break
            at += 1
        if at == count:
            u = count
            size[u] = needs[i]
            room = needs[i] * cap - length
            count += 1
        else:
            u = by_room[at]
            room = rooms[at] - length
        to = np.searchsorted(rooms[:at], room, "right")
        for k in range(at, to, -1):
            rooms[k], by_room[k] = rooms[k - 1], by_room[k - 1]
        rooms[to], by_room[to] = room, u
        unit[i] = u
        tokens[u] += length
        squares[u] += length * length
    return unit, size[:count], tokens[:count], squares[:count]


@njit(cache=True)
def _columns(size, cp):
    """Place units, slowest first, side by side: the column of each, and the ranks each column has left."""
    n = len(size)
    column, free = np.empty(n, np.int64), np.empty(n, np.int64)
    count = 0
    start = np.zeros(cp + 1, np.int64)  # columns before it have no room for a unit of this size
    for u in range(n):
        c = start[size[u]]
        while c < count and free[c] < size[u]:
            c += 1
        start[size[u]] = c
        if c == count:
            free[c] = cp
            count += 1
        column[u] = c
        free[c] -= size[u]
    return column, free[:count]


def fewest_bins(lengths: np.ndarray, capacity: int) -> int:
    """A lower bound of bin packing, Martello and Toth's L2: no fewer bins of ``capacity`` hold these lengths.

    >>> fewest_bins(np.array([6, 6, 6, 4]), 10)
    3
    """
    sizes = np.sort(lengths)[::-1].astype(np.int64)
    before = np.r_[0, np.cumsum(sizes)]
    small = np.r_[0, np.unique(sizes[2 * sizes <= capacity])]  # each in turn as the least length considered
    alone = np.searchsorted(-sizes, small - capacity, "left")  # longer than capacity - small
    half = np.maximum(np.searchsorted(-2 * sizes, -capacity, "left"), alone)
    counted = np.searchsorted(-sizes, -small, "right")
    room = (half - alone) * capacity - (before[half] - before[alone])
    return int((half + np.maximum(0, -((room - (before[counted] - before[half])) // capacity))).max())


def lower_bound(
    lengths: np.ndarray, cp: int, dp: int, cap_tokens: int, model: CostModel, at_least: int = 1
) -> float:
    """Seconds that no plan can beat in which a rank is in one ring per micro-batch.

    The slowest rank of a micro-batch takes at least the mean over ranks, so the makespan is at least all
    work, spread over all ranks, plus the overheads. Linear work and attention do not depend on rings. A
    sequence that needs n ranks is longer than (n - 1) caps, so the (n - 1) of the sequences in a ring of g
    add up to at most g - 1; the ring's g * (g - 1) steps are therefore at least the sum of n * (n - 1), and
    the transfers at least that of (n - 1) * length. There are at least ``at_least`` micro-batches, and at
    least as many as bins of a whole CP group's cap require. `_alone_in_its_column` adds what this misses.
    """
    need, tokens = np.ceil(lengths / cap_tokens), lengths.astype(float)
    work = model.token * tokens + model.pair * tokens**2
    work = work + need * (need - 1) * model.ring_step + (need - 1) * tokens * model.ring_token
    count = max(at_least, math.ceil(fewest_bins(lengths, cp * cap_tokens) / dp))
    more = _alone_in_its_column(need, tokens, work, cp, cap_tokens, model, count * dp)
    return float((work.sum() + more) / (cp * dp) + count * model.micro_batch)


def _alone_in_its_column(need, tokens, work, cp, cap, model, columns) -> float:
    """Rank-seconds beyond ``work`` that sequences longer than half a CP group's cap cause in any plan.

    No two of them share a column. In the column of one that needs n ranks, let its ring have g ranks and
    hold x further tokens. Then, beyond ``work``,
    - the ring takes 2 * (n - 1) * (g - n) steps, since the (n - 1) of its other sequences add up to at most
      g - n, and transfers g - n times its own tokens and at least n - 1 times the others;
    - the other cp - g ranks wait for the ring's time less ``full`` each, where their sequences take at most
      ``full`` per cap of tokens; what denser sequences take in excess is subtracted, once for each;
    - room for g * cap - length - x tokens stays empty, at a ``price`` each. The price is subtracted for
      all room that ``columns`` leave empty; up to the cost of a column per token, more columns gain nothing.
    The column takes at least the least of this over g and x: terms are linear in x, so the ends decide.
    Each ``full`` and price gives a bound; the highest of some is taken.
    """
    alone = 2 * tokens > cp * cap
    if not alone.any():
        return 0.0
    n, own = need[alone], tokens[alone]
    beside = ~alone & (need <= cp - n.min())  # may be on the other ranks
    beside_work, beside_caps = work[beside], tokens[beside] / cap
    fulls = np.linspace(0, (beside_work / beside_caps).max(initial=0), 25)
    denser = np.maximum(0, beside_work - fulls[:, None] * beside_caps).sum(1)
    empty = columns * cp * cap - tokens.sum()
    most = 0.0
    for price in (0, model.micro_batch / cap):
        least = np.full((len(fulls), len(n)), math.inf)
        for g in range(int(n.min()), cp + 1):
            steps = 2 * (n - 1) * (g - n) * model.ring_step + (g - n) * own * model.ring_token
            room = g * cap - own
            time = model.seconds(own, own**2, g)
            slower = room * (model.token + (g - 1) * model.ring_token) / g
            ring = np.stack([steps + price * room, steps + (n - 1) * room * model.ring_token])  # x: 0, room
            waits = ring + (cp - g) * (np.stack([time, time + slower]) - fulls[:, None, None])
            found = np.maximum(ring.min(0), waits.min(1))
            least = np.where(n <= g, np.minimum(least, found), least)
        most = max(most, float((least.sum(1) - denser).max() - price * empty))
    return most


class _Column:
    """The rings of one CP group in one micro-batch while a plan is made: (ranks, sequences) of each."""

    def __init__(
        self, rings: list[tuple[int, list[int]]], lengths: list[int], cp: int, cap: int, model: CostModel
    ):
        self.rings, self.lengths, self.cp, self.cap, self.model = rings, lengths, cp, cap, model

    def seconds_of(self, ring: tuple[int, list[int]]) -> float:
        size, members = ring
        chosen = [self.lengths[i] for i in members]
        return self.model.seconds(sum(chosen), sum(x * x for x in chosen), size)

    @property
    def seconds(self) -> float:
        return max(map(self.seconds_of, self.rings))

    @property
    def sequences(self) -> int:
        return sum(len(members) for _, members in self.rings)

    def fill(self) -> _Column:
        """Occupy idle ranks one by one: widen a ring, or move one of a ring's several sequences there."""
        while (free := self.cp - sum(size for size, _ in self.rings)) > 0:
            choices = []
            for i, (size, members) in enumerate(self.rings):
                others = self.rings[:i] + self.rings[i + 1 :]
                choices.append([*others, (size + 1, members)])
                for one in members if len(members) > 1 else ():
                    need = -(-self.lengths[one] // self.cap)
                    if need <= free:
                        rest = [member for member in members if member != one]
                        choices.append([*others, (size, rest), (need, [one])])
            self.rings = min(choices, key=lambda rings: sorted(map(self.seconds_of, rings), reverse=True))
        return self

    def split(self) -> _Column:
        """Move the longest sequence of this column to a new one."""
        one = max((i for _, members in self.rings for i in members), key=self.lengths.__getitem__)
        rings = [(size, [i for i in members if i != one]) for size, members in self.rings]
        self.rings = [ring for ring in rings if ring[1]]
        self.fill()
        return _Column([(self.cp, [one])], self.lengths, self.cp, self.cap, self.model)


@dataclass
class _Draft:
    """A plan before its columns are dealt to micro-batches.

    Attributes:
        unit, column: [N] where a sequence is.
        first, size: [N] as in `Plan`.
        seconds, free: [columns] seconds of the slowest ring; number of idle ranks.
    """

    unit: np.ndarray
    column: np.ndarray
    first: np.ndarray
    size: np.ndarray
    seconds: np.ndarray
    free: np.ndarray


def _side_by_side(lengths, needs, cp, cap, model, limits) -> _Draft:
    """Pack sequences into units, and these into as many columns as they need."""
    longest_first = np.argsort(-lengths, kind="stable")
    unit_of = np.empty(len(lengths), np.int64)
    unit_of[longest_first], size, tokens, squares = _pack(
        lengths[longest_first], needs[longest_first], cap, limits,
        model.token, model.pair, model.ring_step, model.ring_token,
    )  # fmt: skip
    seconds = model.seconds(tokens, squares, size)
    slowest_first = np.argsort(-seconds, kind="stable")
    column = np.empty(len(size), np.int64)
    column[slowest_first], free = _columns(size[slowest_first], cp)
    column_seconds = np.zeros(len(free))
    np.maximum.at(column_seconds, column, seconds)

    first = np.empty(len(size), np.int64)
    by_column = np.lexsort((-size, column))  # wide rings first, for fewer different groups of ranks
    before = np.cumsum(size[by_column]) - size[by_column]
    heads = np.searchsorted(column[by_column], np.arange(len(free)))
    first[by_column] = before - before[heads][column[by_column]]
    return _Draft(unit_of, column[unit_of], first[unit_of], size[unit_of], column_seconds, free)


def _occupy(draft: _Draft, count: int, lengths, cp, cap, model) -> None:
    """Make ``count`` columns without idle ranks: fill columns that have some, split slow ones."""
    there = len(draft.free)
    missing = count - there
    single = np.bincount(draft.column) == 1  # the common case if most sequences are long: widen all together
    chosen = np.flatnonzero(single[draft.column])
    own = lengths[chosen].astype(float)
    draft.first[chosen], draft.size[chosen] = 0, cp
    draft.seconds[draft.column[chosen]] = model.seconds(own, own**2, cp)
    touched = set(np.flatnonzero((draft.free > 0) & ~single).tolist())
    if missing:
        spare = np.bincount(draft.column, minlength=there) - 1
        slowest = np.argsort(-draft.seconds, kind="stable")
        slowest = slowest[spare[slowest] > 0]
        enough = np.searchsorted(np.cumsum(spare[slowest]), missing) + 1
        touched.update(slowest[:enough].tolist())
    members_of: dict[int, dict[int, list[int]]] = {c: {} for c in sorted(touched)}
    for i in np.flatnonzero(np.isin(draft.column, list(touched))).tolist():
        members_of[int(draft.column[i])].setdefault(int(draft.unit[i]), []).append(i)
    plain = lengths.tolist()
    rebuilt = {}
    for c, units in members_of.items():
        rings = [(int(draft.size[members[0]]), members) for members in units.values()]
        rebuilt[c] = _Column(rings, plain, cp, cap, model).fill()
    for new in range(there, count):
        splittable = [c for c, col in rebuilt.items() if col.sequences > 1]
        rebuilt[new] = rebuilt[max(splittable, key=lambda c: rebuilt[c].seconds)].split()
    draft.seconds = np.r_[draft.seconds, np.zeros(missing)]
    for c, col in rebuilt.items():
        draft.seconds[c], at = col.seconds, 0
        for ring_size, members in sorted(col.rings, key=lambda r: -r[0]):
            draft.column[members], draft.first[members], draft.size[members] = c, at, ring_size
            at += ring_size


def _plan_with(lengths, needs, limits, cp, dp, cap, model, multiple, at_least, bound) -> Plan:
    """One way to plan: give sequences rings of ``needs`` ranks and fill these up to ``limits``."""
    draft = _side_by_side(lengths, needs, cp, cap, model, limits)
    micro_batches = max(math.ceil(len(draft.free) / dp), at_least)
    micro_batches = math.ceil(micro_batches / multiple) * multiple
    if micro_batches * dp > len(lengths):
        raise ValueError(
            f"{len(lengths)} sequences for {dp} CP groups x {micro_batches} micro-batches; lower the minimum "
            f"({at_least}) or the multiple ({multiple}), or train on more sequences"
        )
    _occupy(draft, micro_batches * dp, lengths, cp, cap, model)
    place = np.empty(len(draft.seconds), np.int64)  # by micro-batch, then CP group
    place[np.argsort(-draft.seconds, kind="stable")] = np.arange(len(place))
    slowest = np.zeros(micro_batches)
    np.maximum.at(slowest, place // dp, draft.seconds)
    makespan = float(slowest.sum() + micro_batches * model.micro_batch)
    micro_batch, group = np.divmod(place[draft.column], dp)
    return Plan(micro_batch, group, draft.first, draft.size, micro_batches, cp, dp, makespan, bound)


def plan(
    lengths: Sequence[int],
    cp: int,
    dp: int,
    cap_tokens: int,
    model: CostModel = QWEN3_235B,
    *,
    multiple: int = 1,
    at_least: int = 1,
    rings: bool = True,
) -> Plan:
    """Place sequences on the ranks of ``dp`` CP groups of ``cp`` ranks.

    Args:
        lengths: [N] tokens of each sequence.
        cap_tokens: tokens a rank can hold in a micro-batch.
        multiple, at_least: the number of micro-batches is a multiple of one and at least the other, for
            pipeline schedules.
        rings: False gives plain CP, every sequence over all ranks of a group.

    Raises:
        ValueError: a sequence does not fit, or there are fewer sequences than micro-batches.

    >>> p = plan([100, 100, 300], cp=2, dp=1, cap_tokens=200)
    >>> p.size.tolist(), p.micro_batches
    ([1, 1, 2], 2)
    """
    lengths = np.asarray(lengths, np.int64)
    if not len(lengths) or lengths.min() < 1:
        raise ValueError("there are no sequences, or one is without tokens; leave empty ones out")
    if lengths.max() > cp * cap_tokens:
        raise ValueError(
            f"a sequence of {lengths.max()} tokens does not fit {cp} ranks of {cap_tokens}; raise the cap "
            f"(ppo_max_token_len_per_gpu) to {math.ceil(lengths.max() / cp)}, or context_parallel_size"
        )
    needs = np.ceil(lengths / cap_tokens).astype(np.int64)
    unlimited = np.full(cp + 1, math.inf)
    ways = [(np.full_like(lengths, cp), unlimited)]
    if rings and cp > 1:
        short = lengths[lengths <= cap_tokens].astype(float)
        mean, typical = float(lengths.mean()), float((short**2).sum() / max(short.sum(), 1.0))
        of_mean, of_typical = (float(model.seconds(cap_tokens, cap_tokens * x, 1)) for x in (mean, typical))
        low = np.where(np.arange(cp + 1) > 1, 1.1 * of_mean, math.inf)
        paired = cp % np.maximum(np.arange(cp + 1), 1) == 0  # others of their size beside them
        alone = 2 * needs > cp  # rings that leave fewer ranks than they take
        middle = np.median(lengths[alone]) if alone.any() else 0
        ways += [
            (needs, low),
            (needs, unlimited),
            (np.where(alone, cp, needs), unlimited),
            (np.where(alone & (lengths > middle), cp, needs), np.where(paired, math.inf, of_typical)),
        ]
    fewest = math.ceil(max(at_least, 1) / multiple) * multiple
    bound = lower_bound(lengths, cp, dp, cap_tokens, model, fewest)
    settings = cp, dp, cap_tokens, model, multiple, at_least, bound
    return min((_plan_with(lengths, *way, *settings) for way in ways), key=lambda found: found.makespan)

"""The searches behind eplb.py: how many copies of each expert, and on which ranks.

Idea, for each layer, until it reaches a lower bound: (1) count copies by the min-max greedy and place them by
longest processing time first; (2) take load off the fullest rank by the best swap, copy or removal; (3) if
that does not reach the bound, search over the counts, then place as in (1) and do (2) again. A search moves
copies from one expert to another and keeps any result that is not worse: dealt in rounds (the largest to the
least loaded rank), by the excess over a goal; with two slots on many ranks, where the best places follow
from the counts, by the copies that lack a partner small enough. In the incremental mode (2) starts from the
current placement and takes the moves with the highest gain per expert copied.

Arrays: w[experts] is the load of a layer, counts[experts] the copies of each expert, place[ranks, slots] the
expert in each slot. Cost for P = R S slots: O(P S) per step of (2), O(P) to O(P R) per step of (3), O(BINS)
by partners.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

TOLERANCE = 1e-4  # of the lower bound: getting nearer is not worth a step
SEARCH_STEPS = 125
PAIR_SEARCHES = 3  # with two slots per rank: so many searches by pairs come before those by rounds
PAIR_RANKS = 32  # with fewer ranks moves of one copy get stuck: only searches by rounds
PAIR_STEPS = 3000
GOAL_STEP = 0.03  # by how much of its distance to the target a goal reached is lowered
BINS = 256
LOCAL_PAIRS = 100_000  # pairs of slots that the local search examines
MOVES = 4  # the most copies that a step of the search moves
SHAKES = 4
FIRST_RANDOM = 88172645463325252
UNLIMITED = 1 << 40


@njit(cache=True)
def solve_layers(load, target, above, work, placement):
    layers, experts = load.shape
    _, ranks, slots = placement.shape
    steps = LOCAL_PAIRS // (ranks * slots * slots) + 20
    counts = np.empty(experts, np.int64)
    trial = np.empty((ranks, slots), np.int64)
    nothing = np.ones((ranks, experts), np.int64)  # all at home: moves are free
    dealt, peaks = np.empty(layers), np.empty(layers)
    for layer in range(layers):
        min_max_counts(load[layer], ranks, slots, counts)
        dealt[layer] = _deal_longest(load[layer], counts, placement[layer])
        peaks[layer] = _improve(load[layer], placement[layer], target[layer], steps, nothing, UNLIMITED)
    # Layers that are near enough to the bound leave their attempts to the others.
    step = ranks * slots if slots == 2 else ranks * slots * 3 // 2  # ranks are sorted between rounds
    left = layers * max(1, work // (SEARCH_STEPS * step))
    pairs = slots == 2 and ranks >= PAIR_RANKS
    for attempt in range(8 * left // layers):
        for layer in range(layers):
            if peaks[layer] > target[layer] * above and left > 0:
                left -= 1
                w, goal = load[layer], target[layer]
                if ranks * slots == experts or attempt % 4 == 3:
                    trial[:] = placement[layer]
                    _shake(trial, counts, attempt)
                else:
                    _count(placement[layer], counts)
                    if not pairs or attempt >= PAIR_SEARCHES:
                        _search_counts(w, counts, ranks, slots, goal, peaks[layer], attempt)
                    elif attempt > 0:
                        _search_pairs(w, counts, ranks, goal, peaks[layer], attempt)
                    else:
                        min_max_counts(w, ranks, slots, counts)
                        _search_pairs(w, counts, ranks, goal, dealt[layer], attempt)
                    _deal_longest(w, counts, trial)
                reached = _improve(w, trial, goal, steps, nothing, UNLIMITED)
                if reached < peaks[layer]:
                    peaks[layer] = reached
                    placement[layer] = trial


@njit(cache=True)
def _shake(place, counts, seed):
    """Swap or replace a few copies at random, to leave a local minimum."""
    ranks, slots = place.shape
    random = _next(np.uint64(FIRST_RANDOM + seed))
    _count(place, counts)
    for _ in range(SHAKES):
        random = _next(random)
        r = int((random >> np.uint64(8)) % np.uint64(ranks))
        q = int((random >> np.uint64(24)) % np.uint64(ranks))
        i = int((random >> np.uint64(40)) % np.uint64(slots))
        j = int((random >> np.uint64(52)) % np.uint64(slots))
        a, b = place[r, i], place[q, j]
        if _holds(place, q, a):
            continue
        if counts[b] > 1 and (random & np.uint64(64)):
            place[q, j] = a
            counts[a] += 1
            counts[b] -= 1
        elif not _holds(place, r, b):
            place[r, i], place[q, j] = b, a


@njit(cache=True)
def _holds(place, rank, expert):
    for i in range(place.shape[1]):
        if place[rank, i] == expert:
            return True
    return False


@njit(cache=True)
def improve_layers(load, placement, target, budget):
    layers, experts = load.shape
    _, ranks, slots = placement.shape
    for layer in range(layers):
        home = np.zeros((ranks, experts), np.int64)  # signed: moves that lead home have a negative cost
        for r in range(ranks):
            for i in range(slots):
                home[r, placement[layer, r, i]] = 1
        _improve(load[layer], placement[layer], target[layer], 4 * ranks * slots, home, budget)


@njit(cache=True)
def min_max_counts(w, ranks, slots, counts):
    """Counts that minimise the largest copy: the next copy always goes to the expert with the largest one."""
    counts[:] = 1
    for _ in range(ranks * slots - len(w)):
        best, largest = -1, -1.0
        for e in range(len(w)):
            if counts[e] < ranks and w[e] / counts[e] > largest:
                best, largest = e, w[e] / counts[e]
        counts[best] += 1


@njit(cache=True)
def _count(place, counts):
    counts[:] = 0
    for r in range(place.shape[0]):
        for i in range(place.shape[1]):
            counts[place[r, i]] += 1


@njit(cache=True)
def _sort_descending(share, order):
    """Stable insertion sort: a library sort takes longer to compile than this takes to run."""
    for i in range(1, len(order)):
        e, j = order[i], i - 1
        while j >= 0 and share[order[j]] < share[e]:
            order[j + 1] = order[j]
            j -= 1
        order[j + 1] = e


@njit(cache=True)
def _deal_longest(w, counts, place):
    """Longest processing time first: each copy to the least loaded rank with room and without the expert.

    Returns the peak.
    """
    ranks, slots = place.shape
    share = w / counts
    load = np.zeros(ranks)
    used = np.zeros(ranks, np.int64)
    has = np.zeros((ranks, len(w)), np.uint8)
    order = np.arange(len(w))
    _sort_descending(share, order)
    for e in order:
        for _ in range(counts[e]):
            best, open_rank = -1, -1
            for r in range(ranks):
                if used[r] < slots:
                    open_rank = r
                    if not has[r, e] and (best < 0 or load[r] < load[best]):
                        best = r
            if best < 0:
                # Only ranks that hold e have slots: a full rank without e gives one of its experts away.
                for r in range(ranks):
                    if not has[r, e]:
                        best = r
                        break
                for i in range(slots):
                    f = place[best, i]
                    if not has[open_rank, f]:
                        place[open_rank, used[open_rank]] = f
                        used[open_rank] += 1
                        load[open_rank] += share[f]
                        load[best] -= share[f]
                        has[open_rank, f], has[best, f] = 1, 0
                        place[best, i] = e
                        break
            else:
                place[best, used[best]] = e
                used[best] += 1
            has[best, e] = 1
            load[best] += share[e]
    return load.max()


class _Layer(NamedTuple):
    """A layer while it is being improved: its placement, and what follows from it."""

    w: np.ndarray  # [experts] load of an expert, all copies together
    place: np.ndarray  # [ranks, slots] the expert in each slot
    home: np.ndarray  # [ranks, experts] 1 where the rank had the expert at the start
    has: np.ndarray  # [ranks, experts] 1 where it has the expert now
    load: np.ndarray  # [ranks]
    counts: np.ndarray  # [experts] c, the copies of an expert
    share: np.ndarray  # [experts] load of a copy: w / c
    grows: np.ndarray  # [experts] g, by how much a copy grows with one fewer: w / (c - 1) - w / c
    shrinks: np.ndarray  # [experts] x, by how much a copy shrinks with one more: w / c - w / (c + 1)
    carriers: np.ndarray  # [experts] summed load of the ranks that hold a copy


class _Move(NamedTuple):
    """A change of one slot, or of two: ``expert`` moves into a slot of ``rank``.

    ``source`` is the slot of the fullest rank that takes the previous expert, -1 if none does: in a swap two
    experts change places, else ``expert`` gains a copy and the previous one loses a copy.
    """

    worth: float  # 0: no move
    cost: int  # experts to fetch that were not at home; below 0 where experts return
    rank: int
    slot: int
    expert: int
    source: int


@njit(cache=True)
def _improve(w, place, target, steps, home, budget):
    """Take load off the fullest rank until it is at most ``target``; returns the peak.

    A step is the swap, copy or removal that lowers the sum of squared loads most per expert that a rank then
    holds but did not at the start (``home``). ``place`` ends as the best placement found.
    """
    layer = _follow(w, place, home)
    best_place, best_peak = place.copy(), layer.load.max()
    spent = 0
    for _ in range(steps):
        full = np.argmax(layer.load)
        if layer.load[full] <= target:
            break
        move = _best_move(layer, full, budget - spent)
        if move.worth == 0.0:
            break
        if move.source >= 0:
            _swap(layer, full, move.source, move.rank, move.slot)
        else:
            _replace(layer, move.rank, move.slot, move.expert)
        spent += move.cost
        peak = layer.load.max()
        if peak < best_peak:
            best_peak = peak
            best_place[:] = place
    place[:] = best_place
    return best_peak


@njit(cache=True)
def _follow(w, place, home):
    """The `_Layer` that follows from a placement."""
    ranks, slots = place.shape
    experts = len(w)
    layer = _Layer(
        w, place, home, np.zeros((ranks, experts), np.uint8), np.zeros(ranks), np.zeros(experts, np.int64),
        np.empty(experts), np.empty(experts), np.empty(experts), np.empty(experts),
    )  # fmt: skip
    _count(place, layer.counts)
    for e in range(experts):
        _shares(layer, e)
    for r in range(ranks):
        for i in range(slots):
            layer.has[r, place[r, i]] = 1
            layer.load[r] += layer.share[place[r, i]]
    return layer


@njit(cache=True)
def _shares(layer, e):
    w, count = layer.w[e], layer.counts[e]
    layer.share[e] = w / count
    layer.grows[e] = w / (count - 1) - w / count if count > 1 else np.inf
    layer.shrinks[e] = w / count - w / (count + 1)


# The gain of a move is by how much it lowers the sum of load^2 over all ranks. A rank of load L that gets d
# more adds (L + d)^2 - L^2 = 2 d L + d^2 to the sum; the rest follows. F is the load of the fullest rank.


@njit(cache=True, inline="always")
def _loss(load, d):
    return 2 * d * load + d * d


@njit(cache=True, inline="always")
def _gain_of_swap(full_load, load, d):
    """Moving d from the fullest rank to one of load L: -(-2 d F + d^2) - (2 d L + d^2) = 2 d (F - L - d)."""
    return 2 * d * (full_load - load - d)


@njit(cache=True, inline="always")
def _relief(layer, e):
    """One more copy of e: each of its c copies shrinks by x, in total 2 x (their ranks' load) - c x^2."""
    x = layer.shrinks[e]
    return 2 * x * layer.carriers[e] - layer.counts[e] * x * x


@njit(cache=True, inline="always")
def _burden(layer, e, load):
    """One copy of e fewer, on a rank of this load: each of the c - 1 others grows by g."""
    g = layer.grows[e]
    return 2 * g * (layer.carriers[e] - load) + (layer.counts[e] - 1) * g * g


@njit(cache=True, inline="always")
def _gain_of_replacement(layer, relief, burden, load, into, out):
    """A copy of ``into`` in place of one of ``out``, on a rank of this load.

    That rank gets the new copy and loses the old one. A rank that holds both experts is counted as if they
    were on two ranks, which understates the gain by 2 g x.
    """
    d = layer.share[into] - layer.shrinks[into] - layer.share[out]
    return relief - burden - _loss(load, d)


@njit(cache=True)
def _best_move(layer, full, budget):
    """The move with the highest gain per expert to fetch, of those that lower the load of rank ``full``."""
    place, home, has, load, counts = layer.place, layer.home, layer.has, layer.load, layer.counts
    ranks, slots = place.shape
    layer.carriers[:] = 0
    for r in range(ranks):
        for i in range(slots):
            layer.carriers[place[r, i]] += load[r]
    best = _Move(0.0, 0, 0, 0, 0, -1)
    least_gain = 1e-9 * load[full] * load[full]
    for i in range(slots):
        a = place[full, i]
        relief = _relief(layer, a)
        for r in range(ranks):
            if has[r, a]:
                continue
            for j in range(slots):
                b = place[r, j]
                d = layer.share[a] - layer.share[b]
                if not has[full, b] and d > 0:
                    gain = _gain_of_swap(load[full], load[r], d)
                    if gain > least_gain:
                        cost = home[full, a] + home[r, b] - home[r, a] - home[full, b]
                        worth = gain / max(cost, 0.5)
                        if worth > best.worth and cost <= budget:
                            best = _Move(worth, cost, r, j, a, i)
                if counts[b] > 1 and counts[a] < ranks:  # a copy: a takes the place of b there
                    burden = _burden(layer, b, load[r])
                    gain = _gain_of_replacement(layer, relief, burden, load[r], a, b)
                    if gain > least_gain:
                        cost = home[r, b] - home[r, a]
                        worth = gain / max(cost, 0.5)
                        if worth > best.worth and cost <= budget:
                            best = _Move(worth, cost, r, j, a, -1)
        if counts[a] > 1:  # a removal: any expert takes the place of a here
            burden = _burden(layer, a, load[full])
            for b in range(len(counts)):
                if has[full, b] or counts[b] >= ranks:
                    continue
                gain = _gain_of_replacement(layer, _relief(layer, b), burden, load[full], b, a)
                if gain > least_gain:
                    cost = home[full, a] - home[full, b]
                    worth = gain / max(cost, 0.5)
                    if worth > best.worth and cost <= budget:
                        best = _Move(worth, cost, full, i, b, -1)
    return best


@njit(cache=True)
def _swap(layer, full, i, rank, j):
    place, has = layer.place, layer.has
    a, b = place[full, i], place[rank, j]
    d = layer.share[a] - layer.share[b]
    layer.load[full] -= d
    layer.load[rank] += d
    place[full, i], place[rank, j] = b, a
    has[full, a], has[full, b], has[rank, a], has[rank, b] = 0, 1, 1, 0


@njit(cache=True)
def _replace(layer, rank, slot, into):
    has, load = layer.has, layer.load
    out = layer.place[rank, slot]
    load[rank] -= layer.share[out]
    has[rank, out] = 0
    for r in range(len(load)):  # the copies that stay
        load[r] += has[r, out] * layer.grows[out] - has[r, into] * layer.shrinks[into]
    layer.counts[out] -= 1
    layer.counts[into] += 1
    _shares(layer, out)
    _shares(layer, into)
    load[rank] += layer.share[into]
    has[rank, into] = 1
    layer.place[rank, slot] = into


@njit(cache=True)
def _search_counts(w, counts, ranks, slots, target, peak, seed):
    """Find counts with less excess over ``target``, when dealt in rounds, by moving single copies at random.

    The goal starts half way between ``peak`` and ``target`` and is halved whenever it is reached: a goal too
    far away would relieve the fullest ranks at the cost of many others.
    """
    experts = len(w)
    share = w / counts
    order = np.arange(experts)
    _sort_descending(share, order)
    load = np.empty(ranks)
    items = np.empty(ranks * slots)
    goal = (peak + target) / 2
    now = _excess(share, counts, order, slots, goal, load, items, np.inf)
    random = np.uint64(FIRST_RANDOM + seed)
    moves = np.empty((MOVES, 2), np.int64)
    for _ in range(SEARCH_STEPS):
        while now <= 0 and goal > target:
            goal = max(target, (goal + target) / 2 - 1e-7)
            now = _excess(share, counts, order, slots, goal, load, items, np.inf)
        if now <= 0:
            break
        made = 0
        for _ in range(MOVES):
            random = _next(random)
            a = int((random >> np.uint64(8)) % np.uint64(experts))
            b = int((random >> np.uint64(36)) % np.uint64(experts))
            if a != b and counts[a] > 1 and counts[b] < ranks:
                _set_count(w, counts, share, order, a, -1)
                _set_count(w, counts, share, order, b, 1)
                moves[made] = a, b
                made += 1
            if (random >> np.uint64(60)) & np.uint64(1):
                break
        new = _excess(share, counts, order, slots, goal, load, items, now)
        if new <= now:
            now = new
        else:
            for m in range(made - 1, -1, -1):
                _set_count(w, counts, share, order, moves[m, 0], 1)
                _set_count(w, counts, share, order, moves[m, 1], -1)


@njit(cache=True)
def _search_pairs(w, counts, ranks, target, peak, seed):
    """Find counts for two slots per rank with a lower peak than ``peak``, by moving single copies at random.

    No pairs have a lower peak than the largest copy with the smallest, the next with the next. So counts can
    reach a peak T if for each d > 0 there are no fewer copies of at most T/2 - d than of T/2 + d or more,
    since these need those beside them. ``lack`` is how many are missing for each d, by `_set_goal`, and
    ``fewer[e]`` and ``more[e]`` are what it gains with one copy of e fewer or more. So judging a move takes
    one pass over the bins, however many ranks there are. A goal T is lowered whenever nothing is missing.
    """
    experts = len(w)
    lack = np.empty(BINS, np.float32)  # whole numbers: their sums are exact in any order
    fewer, more = np.empty((experts, BINS), np.float32), np.empty((experts, BINS), np.float32)
    known = np.empty(experts, np.bool_)  # fewer[e] and more[e] are up to date
    several = np.empty(experts, np.int64)
    best, goal = counts.copy(), peak
    missing = _set_goal(w, counts, goal, lack, known)
    choices = _with_copies(counts, several)
    random = np.uint64(FIRST_RANDOM + seed)
    for _ in range(PAIR_STEPS):
        while missing == 0 and goal > target:
            best[:] = counts
            goal = max(target, goal - GOAL_STEP * (goal - target) - TOLERANCE * target)
            missing = _set_goal(w, counts, goal, lack, known)
        if missing == 0:
            best[:] = counts
            break
        random = _next(random)
        a = several[_below(random >> np.uint64(32), choices)]
        b = _below(random & np.uint64(0xFFFFFFFF), experts)
        if a == b or counts[b] == ranks:
            continue
        if not known[a]:
            _set_changes(w, counts, goal, a, known, fewer, more)
        if not known[b]:
            _set_changes(w, counts, goal, b, known, fewer, more)
        new = _missing_after(lack, fewer, a, more, b)
        if new <= missing:
            missing = new
            for k in range(BINS):
                lack[k] += fewer[a, k] + more[b, k]
            counts[a] -= 1
            counts[b] += 1
            known[a] = known[b] = False
            choices = _with_copies(counts, several)
    counts[:] = best


@njit(cache=True)
def _reach(copies, share, goal):
    """The last bin in which copies of this share count, and what they add to the lack there.

    Bin k stands for d = k T / (2 BINS - 4). A copy above T/2 counts as the next bin above it, one below as
    the next towards T/2: so pairs that fit in bins fit. The last bin is for copies above T, which never do.
    """
    d = (2 * share / goal - 1) * (BINS - 2)
    if d > 0:
        return int(min(np.ceil(d), BINS - 1)), np.float32(copies)
    return int(-d), np.float32(-copies)


@njit(cache=True)
def _set_goal(w, counts, goal, lack, known):
    """Set what is missing for a goal in each bin; returns the sum over the bins."""
    known[:] = False
    lack[:] = 0
    for e in range(len(w)):
        last, change = _reach(counts[e], w[e] / counts[e], goal)
        lack[last] += change
    missing = total = np.float32(0)
    for k in range(BINS - 1, -1, -1):  # copies count in all bins up to their last
        total += lack[k]
        lack[k] = total
        missing += max(total, np.float32(0))
    return missing


@njit(cache=True)
def _set_changes(w, counts, goal, e, known, fewer, more):
    c, zero = counts[e], np.float32(0)
    last, gone = _reach(-c, w[e] / c, goal)
    last_fewer, come_fewer = _reach(c - 1, w[e] / max(c - 1, 1), goal)
    last_more, come_more = _reach(c + 1, w[e] / (c + 1), goal)
    for k in range(BINS):
        change = gone if k <= last else zero
        fewer[e, k] = change + (come_fewer if k <= last_fewer else zero)
        more[e, k] = change + (come_more if k <= last_more else zero)
    known[e] = True


@njit(cache=True, fastmath=True)
def _missing_after(lack, fewer, a, more, b):
    """What is missing, summed over the bins, after a copy moved from a to b."""
    missing = np.float32(0)
    for k in range(BINS):
        missing += max(lack[k] + fewer[a, k] + more[b, k], np.float32(0))
    return missing


@njit(cache=True)
def _with_copies(counts, several):
    """List the experts with more than one copy; returns how many there are."""
    found = 0
    for e in range(len(counts)):
        several[found] = e
        found += counts[e] > 1
    return found


@njit(cache=True)
def _below(bits, limit):
    """A number below ``limit`` from 32 random bits."""
    return np.int64((bits * np.uint64(limit)) >> np.uint64(32))


@njit(cache=True)
def _next(state):
    """Marsaglia's xorshift: random enough, and the same everywhere."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    return state ^ (state << np.uint64(17))


@njit(cache=True)
def _set_count(w, counts, share, order, e, change):
    """Change an expert's count and bring it to its place in ``order``, largest share first."""
    counts[e] += change
    share[e] = w[e] / counts[e]
    i = 0
    while order[i] != e:
        i += 1
    while i > 0 and share[order[i - 1]] < share[e]:
        order[i] = order[i - 1]
        i -= 1
    while i < len(order) - 1 and share[order[i + 1]] > share[e]:
        order[i] = order[i + 1]
        i += 1
    order[i] = e


@njit(cache=True)
def _excess(share, counts, order, slots, target, load, items, enough):
    """Sum of squared load over ``target``, copies dealt in rounds: the largest to the least loaded rank.

    Copies of one expert may meet on a rank here; ``_deal_longest`` separates them later.
    """
    ranks = len(load)
    k = 0
    for e in order:
        for _ in range(counts[e]):
            items[k] = share[e]
            k += 1
    load[:] = items[:ranks]  # kept in descending order
    for s in range(1, slots):
        for r in range(ranks):
            load[ranks - 1 - r] += items[s * ranks + r]
        if s < slots - 1:
            for i in range(1, ranks):
                value, j = load[i], i - 1
                while j >= 0 and load[j] < value:
                    load[j + 1] = load[j]
                    j -= 1
                load[j + 1] = value
    excess = 0.0
    for r in range(ranks):
        if load[r] > target:
            excess += (load[r] - target) ** 2
            if excess > enough:
                break
    return excess

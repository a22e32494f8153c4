"""Choose which experts to copy, and the rank of each copy, to minimise the load of the fullest rank.

With expert parallelism a layer is as slow as its fullest rank. Published balancers first copy the hottest
experts, then place the copies. Equal copies of middling size then meet on one rank, while cold experts share
another. Counts and places have to be chosen together.

Idea, for each layer, until it reaches a lower bound: (1) count copies by the min-max greedy and place them by
longest processing time first; (2) take load off the fullest rank by the best swap, copy or removal; (3) if
that does not reach the bound, search over the counts, then place as in (1) and do (2) again. A search moves
copies from one expert to another and keeps what is no worse: dealt in rounds (the largest to the least loaded
rank), by the excess over a goal; with two slots on many ranks, where the best places follow from the counts,
by the copies that lack a partner small enough. In the incremental mode (2) starts from the current placement
and takes the moves with the highest gain per expert copied.

Copies of an expert share its load equally, as in vLLM. Invariants (tests/test_eplb.py): every expert is
placed; no rank holds an expert twice; equal inputs give equal results; an expert that stays on its rank stays
in its slot. Cost for P = R S slots: O(P S) a step of (2), O(P) to O(P R) a step of (3), O(BINS) by partners.

>>> hot = [[600, 560, 120, 120, 20, 10, 10, 10]]
>>> round(float(rank_loads(hot, balance(hot, ranks=8, slots=2)).max()), 2)
196.67
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment

TOLERANCE = 1e-4  # of the lower bound: getting nearer is not worth a step
SEARCH_ABOVE = 4.5e-3  # of the lower bound: only layers that end further above it get a search over counts
SEARCH_STEPS = 125
DEALT_COPIES = 96_000  # in the searches of a layer, on average: 3 searches with 256 slots
PAIR_SEARCHES = 3  # with two slots a rank: so many searches by pairs come before those by rounds
PAIR_RANKS = 32  # with fewer ranks moves of one copy get stuck: only searches by rounds
PAIR_STEPS = 3000
GOAL_STEP = 0.03  # by how much of its distance to the target a goal reached is lowered
BINS = 256
LOCAL_PAIRS = 100_000  # pairs of slots that the local search examines
MOVES = 4  # the most copies that a step of the search moves
SHAKES = 4
FIRST_RANDOM = 88172645463325252
CHANCE = 5.0  # standard deviations of the fullest rank's tokens: a smaller gain may be chance
# What copying an expert costs. A token needs as many FLOPs in a bf16 expert as that has bytes, so this is
# FLOP/s over bytes/s into a die, whatever the model: here 2e14 over 2e11.
COPY_TOKENS = 1000.0
INTERVALS = 10.0  # rounds for which a placement is expected to serve
UNLIMITED = 1 << 40


class Maps(NamedTuple):
    """What vLLM's ``AbstractEplbPolicy.rebalance_experts`` returns.

    Attributes:
        physical_to_logical: [layers, P] the expert in each slot, slots rank by rank.
        logical_to_physical: [layers, experts, P - experts + 1] the slots of each expert, then -1.
        replicas: [layers, experts] copies of each expert.
    """

    physical_to_logical: np.ndarray
    logical_to_physical: np.ndarray
    replicas: np.ndarray


class Update(NamedTuple):
    """What ``update`` decided.

    Attributes:
        placement: [layers, ranks, slots] the placement to use from now on.
        copied: [layers] experts that a rank must fetch.
        gain_s: [layers] seconds saved in the next interval, predicted, whether the layer moves or not.
        cost_s: [layers] seconds to fetch what the proposal needs, whether the layer moves or not.
    """

    placement: np.ndarray
    copied: np.ndarray
    gain_s: np.ndarray
    cost_s: np.ndarray


def balance(
    load: ArrayLike,
    ranks: int,
    slots: int,
    *,
    nodes: int = 1,
    groups: int | None = None,
    current: ArrayLike | None = None,
    tolerance: ArrayLike = TOLERANCE,
    max_moves: int | None = None,
) -> np.ndarray:
    """[layers, ranks, slots] the expert in each slot.

    Without redundancy (``ranks * slots`` experts) experts are only reordered.

    Args:
        load: [layers, experts] tokens routed to each expert, any unit.
        nodes: more than 1: hierarchical; all copies of an expert stay on one node of ``ranks / nodes`` ranks.
        groups: this many groups of consecutive experts, each kept on one node (hierarchical only; default:
            each expert by itself).
        current: [layers, ranks, slots] the present placement. Few experts are then copied to come within
            ``tolerance``.
        tolerance: fraction by which the peak may exceed the lower bound, one number or one for each layer.
        max_moves: the most experts copied in a layer. Needs ``current``; global mode only.
    """
    load = _checked_load(load)
    layers, experts = load.shape
    _check_sizes(experts, ranks, slots, nodes, groups, current, max_moves)
    total = load.sum(1, keepdims=True)
    load = np.divide(load * ranks, total, out=np.zeros_like(load), where=total > 0)  # mean rank: 1
    target = lower_bound(load, ranks, slots) * (1 + np.broadcast_to(np.asarray(tolerance, float), layers))
    if current is not None:
        current = _checked_placement(current, layers, ranks, slots, experts)
    if nodes > 1:
        return _hierarchical(load, ranks, slots, nodes, groups or experts, current, target)
    return _place(load, ranks, slots, current, target, max_moves)


def lower_bound(load: ArrayLike, ranks: int, slots: int) -> np.ndarray:
    """[layers] a lower bound of the load of the fullest rank, whatever the placement.

    The maximum of: the mean rank; the largest copy when copies are spent to make it smallest; and, without
    redundancy, the largest expert with its ``slots - 1`` lightest companions, and the ``slots``-fold
    pigeonhole (of the ``k ranks + 1`` largest experts some rank holds ``k + 1``).
    """
    load = np.asarray(load, dtype=float)
    experts = load.shape[1]
    counts = _counts(load, ranks, slots)
    bound = np.maximum(load.sum(1) / ranks, (load / counts).max(1))
    if ranks * slots == experts:
        ordered = np.sort(load, 1)[:, ::-1]
        bound = np.maximum(bound, ordered[:, 0] + ordered[:, experts - slots + 1 :].sum(1))
        for k in range(1, slots):
            # The k + 1 lightest of the k ranks + 1 largest, and the slots - k - 1 lightest of all.
            crowd = ordered[:, k * ranks - k : k * ranks + 1].sum(1)
            bound = np.maximum(bound, crowd + ordered[:, experts - (slots - k - 1) :].sum(1))
    return bound


def rank_loads(load: ArrayLike, placement: np.ndarray) -> np.ndarray:
    """[layers, ranks] load of each rank when the copies of an expert share its load equally."""
    load = np.asarray(load, dtype=float)
    share = load / replica_counts(placement, load.shape[1])
    layer = np.arange(len(load))[:, None, None]
    return share[layer, placement].sum(-1)


def replica_counts(placement: np.ndarray, experts: int) -> np.ndarray:
    """[layers, experts] copies of each expert."""
    counts = np.zeros((len(placement), experts), dtype=np.int64)
    for row, layer in zip(counts, placement, strict=True):
        row[:] = np.bincount(layer.ravel(), minlength=experts)
    return counts


def copied(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """[layers, ranks] how many experts a rank holds after but not before, so must fetch."""
    return (~(after[..., None] == before[..., None, :]).any(-1)).sum(-1)


def align(current: np.ndarray, placement: np.ndarray) -> np.ndarray:
    """``placement`` with ranks renamed and slots reordered to keep as much of ``current`` as possible."""
    renamed = np.empty_like(placement)
    for layer, (old, new) in enumerate(zip(current, placement, strict=True)):
        experts = int(max(old.max(), new.max())) + 1
        old_has, new_has = (np.zeros((len(old), experts), np.int32) for _ in range(2))
        np.put_along_axis(old_has, old, 1, 1)
        np.put_along_axis(new_has, new, 1, 1)
        rank, source = linear_sum_assignment(old_has @ new_has.T, maximize=True)
        renamed[layer, rank] = new[source]
    _keep_slots(current, renamed)
    return renamed


def update(
    windows: ArrayLike,
    current: ArrayLike,
    *,
    token_s: float,
    expert_bytes: float,
    bytes_per_s: float,
    intervals: float = 1.0,
    tolerance: float = 0.01,
) -> Update:
    """Rebalance the layers for which it pays off.

    The mean of the windows decides where experts go. The gain is the load that the fullest rank would have
    been spared in each of the windows: a layer whose hot experts change from window to window gains little. A
    layer moves only if the gain over the next interval exceeds the time to fetch the experts by more than the
    load of the fullest rank varies by chance: a proposal fits the noise of the windows it was made from.

    Args:
        windows: [windows, layers, experts] tokens of each expert in equally long windows, the latest last.
        current: [layers, ranks, slots].
        token_s: seconds of the fullest rank for each token in one layer.
        expert_bytes: weights of one expert of one layer.
        bytes_per_s: bandwidth into one rank.
        intervals: length of the next interval, in windows.
    """
    windows = np.asarray(windows, dtype=float)
    if windows.ndim != 3 or not len(windows):
        raise ValueError(f"windows has shape {windows.shape}: give [windows, layers, experts], one or more")
    if min(token_s, expert_bytes, bytes_per_s, intervals) <= 0:
        raise ValueError("token_s, expert_bytes, bytes_per_s and intervals must be positive")
    now = np.asarray(current)
    if now.ndim != 3:
        raise ValueError(f"current has shape {now.shape}: give [layers, ranks, slots]")
    proposal = balance(windows.mean(0), *now.shape[1:], current=now, tolerance=tolerance)
    peaks = np.array([[rank_loads(load, place).max(1) for place in (now, proposal)] for load in windows])
    gain_s = (peaks[:, 0] - peaks[:, 1]).mean(0) * token_s * intervals
    fetched = copied(now, proposal)
    cost_s = fetched.max(1) * expert_bytes / bytes_per_s
    chance_s = CHANCE * np.sqrt(peaks[:, 0].mean(0) / len(windows)) * token_s * intervals
    pays = gain_s > cost_s + chance_s
    placement = np.where(pays[:, None, None], proposal, now)
    return Update(placement, np.where(pays, fetched.sum(1), 0), gain_s, cost_s)


def vllm_maps(placement: np.ndarray, experts: int) -> Maps:
    """The placement as vLLM's maps.

    >>> vllm_maps(np.array([[[0, 1], [2, 0]]]), 3).logical_to_physical.tolist()
    [[[0, 3], [1, -1], [2, -1]]]
    """
    flat = placement.reshape(len(placement), -1)
    slots = np.full((len(flat), experts, flat.shape[1] - experts + 1), -1, dtype=np.int64)
    replicas = replica_counts(placement, experts)
    for layer, row in enumerate(flat):
        order = np.argsort(row, kind="stable")
        nth = np.arange(len(row)) - np.repeat(np.cumsum(replicas[layer]) - replicas[layer], replicas[layer])
        slots[layer, row[order], nth] = order
    return Maps(flat.copy(), slots, replicas)


def ascend_expert_maps(placement: np.ndarray, experts: int) -> np.ndarray:
    """[layers, ranks, experts] the slot of each expert on each rank, or -1: vllm-ascend's expert maps.

    >>> ascend_expert_maps(np.array([[[0, 1], [2, 0]]]), 3).tolist()
    [[[0, 1, -1], [1, -1, 0]]]
    """
    maps = np.full((*placement.shape[:2], experts), -1, dtype=np.int64)
    slots = np.broadcast_to(np.arange(placement.shape[2]), placement.shape)
    np.put_along_axis(maps, placement, slots, 2)
    return maps


def rebalance_table(table: ArrayLike, slot_load: ArrayLike) -> tuple[bool, np.ndarray, np.ndarray]:
    """The return value of a vllm-ascend policy: whether anything changed, layers by gain, the new table.

    `update` decides, with times in tokens of the fullest rank, which layers change.

    Args:
        table: [layers, ranks, slots] the expert in each slot.
        slot_load: [layers, ranks, slots] tokens routed to each slot in the last round.
    """
    table, slot_load = np.asarray(table), np.asarray(slot_load, dtype=float)
    if table.ndim != 3 or table.shape != slot_load.shape:
        raise ValueError(f"table {table.shape} and slot_load {slot_load.shape}: give [layers, ranks, slots]")
    load = np.zeros((len(table), int(table.max()) + 1))
    np.add.at(load, (np.arange(len(table))[:, None, None], table), slot_load)
    costs = {"token_s": 1.0, "expert_bytes": COPY_TOKENS, "bytes_per_s": 1.0}
    new = update(load[None], table, **costs, intervals=INTERVALS).placement
    before, after = (rank_loads(load, placement).max(1) for placement in (table, new))
    ratio = np.divide(after, before, out=np.ones_like(after), where=before > 0)
    return bool((new != table).any()), np.argsort(ratio, kind="stable"), new


def _checked_load(load: ArrayLike) -> np.ndarray:
    load = np.asarray(load, dtype=float)
    if load.ndim != 2 or 0 in load.shape:
        raise ValueError(f"load has shape {load.shape}: give [layers, experts]; sum time windows first")
    if not (np.isfinite(load).all() and (load >= 0).all()):
        layer, expert = np.argwhere(~(np.isfinite(load) & (load >= 0)))[0]
        raise ValueError(f"load of layer {layer}, expert {expert} is {load[layer, expert]}: give counts >= 0")
    return load


def _check_sizes(experts, ranks, slots, nodes, groups, current, max_moves) -> None:
    if ranks < 1 or slots < 1:
        raise ValueError(f"ranks={ranks} and slots={slots} must be at least 1")
    if ranks * slots < experts:
        raise ValueError(f"{ranks} x {slots} slots hold {ranks * slots} of {experts} experts: add slots")
    if nodes < 1 or ranks % nodes or experts % nodes:
        raise ValueError(f"nodes={nodes} must divide {ranks} ranks and {experts} experts")
    if slots * nodes > experts:
        raise ValueError(
            f"{slots} slots a rank, {experts // nodes} experts to choose from: a rank would hold one twice"
        )
    if groups is not None and (experts % groups or groups % nodes):
        raise ValueError(f"groups={groups} must divide {experts} experts, and be divisible by nodes={nodes}")
    if max_moves is not None and (current is None or nodes > 1 or max_moves < 0):
        raise ValueError("max_moves >= 0 limits the change of a current placement in the global mode")


def _checked_placement(placement: ArrayLike, layers: int, ranks: int, slots: int, experts: int) -> np.ndarray:
    placement = np.array(placement, dtype=np.int64)
    if placement.shape != (layers, ranks, slots):
        raise ValueError(f"current has shape {placement.shape}, not {(layers, ranks, slots)}")
    if placement.min() < 0 or placement.max() >= experts:
        raise ValueError(f"current names experts outside 0 to {experts - 1}")
    if (replica_counts(placement, experts) == 0).any():
        layer, expert = np.argwhere(replica_counts(placement, experts) == 0)[0]
        raise ValueError(f"current has no copy of expert {expert} in layer {layer}")
    return placement


def _place(load, ranks, slots, current, target, max_moves) -> np.ndarray:
    """[layers, ranks, slots] Global mode, from scratch or from ``current``."""
    if current is None:
        return _solve(load, ranks, slots, target)
    placement = current.copy()
    ordered = np.sort(current, -1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any((1, 2))  # on one rank, which vLLM's policy may do
    if twice.any():
        if max_moves is not None:
            raise ValueError(f"layer {np.argmax(twice)} has an expert twice on a rank: leave max_moves out")
        fresh = _solve(load[twice], ranks, slots, target[twice])
        placement[twice] = align(current[twice], fresh)
    _improve_layers(load, placement, target, UNLIMITED if max_moves is None else max_moves)
    if max_moves is None:
        # A local minimum: take a fresh solution if that halves the excess over the target.
        peak = rank_loads(load, placement).max(1)
        stuck = np.flatnonzero(peak > target * (1 + 1e-9))
        if len(stuck):
            fresh = align(current[stuck], _solve(load[stuck], ranks, slots, target[stuck]))
            better = rank_loads(load[stuck], fresh).max(1) - target[stuck] < (peak[stuck] - target[stuck]) / 2
            placement[stuck[better]] = fresh[better]
    _keep_slots(current, placement)
    return placement


def _hierarchical(load, ranks, slots, nodes, groups, current, target) -> np.ndarray:
    """[layers, ranks, slots] Hierarchical mode: assign groups to nodes, then solve each node by itself."""
    layers, experts = load.shape
    size, share = experts // groups, groups // nodes
    group_load = load.reshape(layers, groups, size).sum(-1)
    # The groups of each node now, provided that every group is on one node.
    home = None
    if current is not None:
        held = np.sort(current.reshape(layers, nodes, ranks // nodes * slots) // size, -1)
        firsts = np.diff(held, axis=-1, prepend=-1) > 0
        if (firsts.sum(-1) == share).all():
            home = held[firsts].reshape(layers, nodes, share)
    node_target = np.maximum(group_load.sum(1) / nodes, target * ranks / nodes)
    of_node = _place(group_load, nodes, share, home, node_target, None)
    # members[layer, node]: the experts of a node, ascending; each node becomes a layer of its own.
    members = np.sort((of_node[..., None] * size + np.arange(size)).reshape(layers, nodes, -1), -1)
    part = np.take_along_axis(load[:, None], members, 2).reshape(layers * nodes, -1)
    local, node_slots = ranks // nodes, slots
    # The fullest node limits a layer; the others need not do better.
    bound = lower_bound(part, local, node_slots).reshape(layers, nodes).max(1)
    part_target = np.repeat(np.maximum(bound * (1 + TOLERANCE), target), nodes)
    placement = np.empty((layers, nodes, local, slots), dtype=np.int64)
    same = np.zeros((layers, nodes), dtype=bool)
    if home is not None:
        same = (np.sort(home, -1) == np.sort(of_node, -1)).all(-1)
    members, flat_same = members.reshape(layers * nodes, -1), same.ravel()
    flat = placement.reshape(layers * nodes, local, slots)
    for chosen, keep in ((flat_same, True), (~flat_same, False)):
        if chosen.any():
            now = None
            if keep:
                old = current.reshape(layers * nodes, local, slots)[chosen]
                now = np.array([np.searchsorted(m, o) for m, o in zip(members[chosen], old, strict=True)])
            found = _place(part[chosen], local, slots, now, part_target[chosen], None)
            flat[chosen] = np.take_along_axis(members[chosen][:, None], found, 2)
    if current is not None:
        changed = np.flatnonzero(~flat_same)
        old = current.reshape(layers * nodes, local, slots)
        flat[changed] = align(old[changed], flat[changed])
    return flat.reshape(layers, ranks, slots)


def _counts(load: np.ndarray, ranks: int, slots: int) -> np.ndarray:
    counts = np.empty(load.shape, dtype=np.int64)
    for row, layer in zip(counts, load, strict=True):
        _min_max_counts(layer, ranks, slots, row)
    return counts


def _keep_slots(current: np.ndarray, placement: np.ndarray) -> None:
    """Keep experts that stay on their rank in their slot; put the others into the free slots in order."""
    slots = current.shape[-1]
    for old, new in zip(current.reshape(-1, slots), placement.reshape(-1, slots), strict=True):
        if not np.array_equal(old, new):
            first = np.zeros(slots, dtype=bool)  # if an expert is there twice, only one copy stays
            first[np.unique(old, return_index=True)[1]] = True
            stays = np.isin(old, new) & first
            arriving = new[~np.isin(new, old)]
            new[stays] = old[stays]
            new[~stays] = arriving


def _solve(load: np.ndarray, ranks: int, slots: int, target: np.ndarray) -> np.ndarray:
    placement = np.empty((len(load), ranks, slots), dtype=np.int64)
    above = (1 + SEARCH_ABOVE) / (1 + TOLERANCE)
    _solve_layers(load, np.ascontiguousarray(target), above, DEALT_COPIES, placement)
    return placement


@njit(cache=True)
def _solve_layers(load, target, above, work, placement):
    layers, experts = load.shape
    _, ranks, slots = placement.shape
    steps = LOCAL_PAIRS // (ranks * slots * slots) + 20
    counts = np.empty(experts, np.int64)
    trial = np.empty((ranks, slots), np.int64)
    nothing = np.ones((ranks, experts), np.int64)  # all at home: moves are free
    dealt, peaks = np.empty(layers), np.empty(layers)
    for layer in range(layers):
        _min_max_counts(load[layer], ranks, slots, counts)
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
                        _min_max_counts(w, ranks, slots, counts)
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
def _improve_layers(load, placement, target, budget):
    layers, experts = load.shape
    _, ranks, slots = placement.shape
    for layer in range(layers):
        home = np.zeros((ranks, experts), np.int64)  # signed: moves that lead home have a negative cost
        for r in range(ranks):
            for i in range(slots):
                home[r, placement[layer, r, i]] = 1
        _improve(load[layer], placement[layer], target[layer], 4 * ranks * slots, home, budget)


@njit(cache=True)
def _min_max_counts(w, ranks, slots, counts):
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
    """Find counts for two slots a rank with a lower peak than ``peak``, by moving single copies at random.

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

"""Choose which experts to copy, and the rank of each copy, to minimise the load of the fullest rank.

With expert parallelism a layer is as slow as its fullest rank. Published balancers first copy the hottest
experts, then place the copies. Equal copies of middling size then meet on one rank, while cold experts share
another. Counts and places have to be chosen together.

Idea: deal copies by load, take load off the fullest rank, and search over the counts where the lower bound
is not reached (eplb_search.py). The incremental mode starts from the current placement and takes the moves
with the highest gain per expert copied.

Copies of an expert share its load equally, as in vLLM. Invariants (tests/test_eplb.py): every expert is
placed; no rank holds an expert twice; equal inputs give equal results; an expert that stays on its rank stays
in its slot.

>>> hot = [[600, 560, 120, 120, 20, 10, 10, 10]]
>>> round(float(rank_loads(hot, balance(hot, ranks=8, slots=2)).max()), 2)
196.67
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment

from ascend_rl.experts.eplb_search import TOLERANCE, UNLIMITED, improve_layers, min_max_counts, solve_layers

SEARCH_ABOVE = 4.5e-3  # of the lower bound: only layers that end further above it get a search over counts
DEALT_COPIES = 96_000  # in the searches of a layer, on average: 3 searches with 256 slots
CHANCE = 5.0  # standard deviations of the fullest rank's tokens: a smaller gain may be chance
# What copying an expert costs. A token needs as many FLOPs in a bf16 expert as that has bytes, so this is
# FLOP/s over bytes/s into a die, whatever the model: here 2e14 over 2e11.
COPY_TOKENS = 1000.0
INTERVALS = 10.0  # rounds for which a placement is expected to serve


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
    current: ArrayLike | None = None,
    tolerance: ArrayLike = TOLERANCE,
    max_moves: int | None = None,
) -> np.ndarray:
    """[layers, ranks, slots] the expert in each slot.

    Without redundancy (``ranks * slots`` experts) experts are only reordered.

    Args:
        load: [layers, experts] tokens routed to each expert, any unit.
        current: [layers, ranks, slots] the present placement. Few experts are then copied to come within
            ``tolerance``.
        tolerance: fraction by which the peak may exceed the lower bound, one number or one for each layer.
        max_moves: the most experts copied in a layer. Needs ``current``.
    """
    load = _checked_load(load)
    layers, experts = load.shape
    _check_sizes(experts, ranks, slots, current, max_moves)
    total = load.sum(1, keepdims=True)
    load = np.divide(load * ranks, total, out=np.zeros_like(load), where=total > 0)  # mean rank: 1
    target = lower_bound(load, ranks, slots) * (1 + np.broadcast_to(np.asarray(tolerance, float), layers))
    if current is not None:
        current = _checked_placement(current, layers, ranks, slots, experts)
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


def _check_sizes(experts, ranks, slots, current, max_moves) -> None:
    if ranks < 1 or slots < 1:
        raise ValueError(f"ranks={ranks} and slots={slots} must be at least 1")
    if ranks * slots < experts:
        raise ValueError(f"{ranks} x {slots} slots hold {ranks * slots} of {experts} experts: add slots")
    if slots > experts:
        raise ValueError(f"{slots} slots per rank, {experts} experts: a rank would hold one twice")
    if max_moves is not None and (current is None or max_moves < 0):
        raise ValueError("max_moves >= 0 limits the change of a current placement")


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
    """[layers, ranks, slots] From scratch or from ``current``."""
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
    improve_layers(load, placement, target, UNLIMITED if max_moves is None else max_moves)
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


def _counts(load: np.ndarray, ranks: int, slots: int) -> np.ndarray:
    counts = np.empty(load.shape, dtype=np.int64)
    for row, layer in zip(counts, load, strict=True):
        min_max_counts(layer, ranks, slots, row)
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
    solve_layers(load, np.ascontiguousarray(target), above, DEALT_COPIES, placement)
    return placement

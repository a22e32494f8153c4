"""experts/eplb.py: valid placements, compared with the exact optimum; few moves; a gate; vLLM's maps."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from ascend_rl.experts.eplb import (
    align,
    ascend_expert_maps,
    balance,
    copied,
    lower_bound,
    rank_loads,
    rebalance_table,
    replica_counts,
    update,
    vllm_maps,
)

PUBLISHED = np.array([[600.0, 560, 120, 120, 20, 10, 10, 10]])


def optimum(load: np.ndarray, ranks: int, slots: int) -> float:
    """The least peak there is, by mixed-integer programming over counts and places of one layer."""
    experts = len(load)
    most = min(ranks, ranks * slots - experts + 1)
    # One binary for each (expert, count), one for each (expert, count, rank), and the peak.
    pairs = [(e, c) for e in range(experts) for c in range(1, most + 1)]
    width = len(pairs) * (1 + ranks) + 1
    rows, low, high = [], [], []

    def add(entries: dict[int, float], least: float, greatest: float) -> None:
        rows.append(entries)
        low.append(least)
        high.append(greatest)

    def at(pair: int, rank: int) -> int:
        return len(pairs) + pair * ranks + rank

    for e in range(experts):
        add({i: 1 for i, (expert, _) in enumerate(pairs) if expert == e}, 1, 1)
    for i, (_, c) in enumerate(pairs):
        add({at(i, r): 1 for r in range(ranks)} | {i: -c}, 0, 0)
        for r in range(ranks):
            add({at(i, r): 1, i: -1}, -np.inf, 0)
    for r in range(ranks):
        add({at(i, r): 1 for i in range(len(pairs))}, slots, slots)
        loads = {at(i, r): load[e] / c for i, (e, c) in enumerate(pairs)}
        add(loads | {width - 1: -1}, -np.inf, 0)
        if r:  # ranks are alike: the fullest first
            previous = {at(i, r - 1): -load[e] / c for i, (e, c) in enumerate(pairs)}
            add(loads | previous, -np.inf, 0)
    matrix = lil_array((len(rows), width))
    for row, entries in enumerate(rows):
        for column, value in entries.items():
            matrix[row, column] = value
    result = milp(
        np.eye(width)[-1],
        constraints=LinearConstraint(matrix.tocsr(), low, high),
        integrality=np.r_[np.ones(width - 1), 0],
        bounds=Bounds(np.zeros(width), np.r_[np.ones(width - 1), np.inf]),
    )
    assert result.status == 0, result.message
    return result.fun


def check(load: np.ndarray, placement: np.ndarray, ranks: int, slots: int) -> None:
    """Every expert is placed, none twice on a rank, and no peak is below the bound."""
    assert placement.shape == (len(load), ranks, slots)
    assert (replica_counts(placement, load.shape[1]) > 0).all()
    ordered = np.sort(placement, -1)
    assert (ordered[..., 1:] > ordered[..., :-1]).all()
    loads = rank_loads(load, placement)
    np.testing.assert_allclose(loads.sum(1), load.sum(1))
    assert (loads.max(1) >= lower_bound(load, ranks, slots) * (1 - 1e-9)).all()


@st.composite
def problems(draw):
    """Loads with zeros and ties, and sizes that fit: load, ranks, slots, nodes, groups."""
    nodes = draw(st.integers(1, 2))
    ranks = nodes * draw(st.integers(1, 4))
    groups = nodes * draw(st.integers(1, 3))
    experts = groups * draw(st.integers(1, 4))
    least = -(-experts // ranks)
    slots = draw(st.integers(least, max(least, experts // nodes)))
    values = st.one_of(st.integers(0, 5), st.integers(0, 1000), st.floats(0, 1e6))
    rows = draw(st.lists(st.lists(values, min_size=experts, max_size=experts), min_size=1, max_size=3))
    return np.array(rows, dtype=float), ranks, slots, nodes, groups


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 1000))
def test_placements_are_valid_and_repeatable(problem, seed):
    load, ranks, slots, nodes, groups = problem
    kwargs = {"nodes": nodes, "groups": groups} if nodes > 1 else {}
    placement = balance(load, ranks, slots, **kwargs)
    check(load, placement, ranks, slots)
    assert np.array_equal(placement, balance(load.copy(), ranks, slots, **kwargs))
    # From there to other loads: what stays on a rank stays in its slot, and nothing gets worse.
    other = np.random.default_rng(seed).permuted(load, axis=1)
    moved = balance(other, ranks, slots, current=placement, **kwargs)
    check(other, moved, ranks, slots)
    stays = (placement[..., None] == moved[..., None, :]).any(-1)
    assert (placement[stays] == moved[stays]).all()
    if nodes == 1:
        peaks = [rank_loads(other, place).max(1) for place in (placement, moved)]
        assert (peaks[1] <= peaks[0] * (1 + 1e-9)).all()
    for place in (placement, moved) if nodes > 1 else ():
        group_of = place.reshape(len(load), nodes, -1) // (load.shape[1] // groups)
        for group in range(groups):
            assert ((group_of == group).any(-1).sum(-1) == 1).all()  # on one node


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("experts, ranks, slots", [(6, 3, 2), (6, 2, 4), (5, 3, 3), (6, 3, 3)])
def test_against_the_exact_optimum(experts, ranks, slots, seed):
    load = np.rint(np.random.default_rng(seed).pareto(1.2, (1, experts)) * 100 + 1)
    best = optimum(load[0], ranks, slots)
    peak = rank_loads(load, balance(load, ranks, slots)).max()
    assert lower_bound(load, ranks, slots)[0] <= best * (1 + 1e-6)
    assert peak <= best * 1.005
    if seed == 0 and ranks * slots == experts:
        assert len(np.unique(balance(load, ranks, slots))) == experts  # only reordered


@pytest.mark.parametrize("load, ranks, slots, bound", [
    ([4, 2, 2, 2, 1, 1], 3, 3, 4.0),  # the mean rank
    ([30, 1, 0, 0, 0, 0], 4, 2, 10.0),  # the largest copy: 3 copies of the first
    ([30, 1, 1, 1], 2, 3, 16.5),  # the mean; two copies at most, one a rank
    ([10, 3, 2, 1], 2, 2, 11.0),  # without redundancy: the largest with the lightest
    ([9, 8, 7, 3, 2, 1], 2, 3, 16.0),  # of the 3 largest one rank holds 2, and the lightest
    ([6, 5, 5, 4, 3, 0], 2, 3, 12.0),  # of the 5 largest one rank holds 3: the lightest three of them
])  # fmt: skip
def test_the_bound_is_what_it_says_and_can_be_reached(load, ranks, slots, bound):
    load = np.array([load], dtype=float)
    assert lower_bound(load, ranks, slots)[0] == pytest.approx(bound, rel=1e-12)
    assert optimum(load[0], ranks, slots) == pytest.approx(bound, rel=1e-6)
    # Of many layers each has its own.
    assert lower_bound(np.tile(load, (2, 1)) * [[1], [3]], ranks, slots).tolist() == [bound, 3 * bound]


def test_published_example_is_solved_exactly():
    """All counts, and for two slots a rank the best places: the largest copy with the smallest."""
    best = np.inf
    stack = [((), 16)]
    while stack:
        counts, left = stack.pop()
        if len(counts) == 8:
            if left == 0:
                copies = np.sort(np.repeat(PUBLISHED[0] / counts, counts))
                best = min(best, (copies[:8] + copies[:7:-1]).max())
        else:
            stack += [((*counts, c), left - c) for c in range(1, min(8, left - 7 + len(counts)) + 1)]
    placement = balance(PUBLISHED, 8, 2)
    assert rank_loads(PUBLISHED, placement).max() == pytest.approx(best, rel=1e-12)
    assert best == pytest.approx(590 / 3)


def test_model_sized_layers_reach_the_bound():
    random = np.random.default_rng(0)
    zipf = 1 / random.permuted(np.tile(np.arange(1.0, 129), (8, 1)), axis=1)
    for load in (random.uniform(0, 1, (8, 128)), zipf):
        for ranks, slots in ((8, 18), (32, 6), (32, 8)):
            peak = rank_loads(load, balance(load, ranks, slots)).max(1)
            assert (peak <= lower_bound(load, ranks, slots) * 1.005).all()


def test_without_redundancy_it_only_reorders():
    load = np.random.default_rng(0).gamma(1, 100, (4, 32))
    placement = balance(load, 8, 4)
    assert (np.sort(placement.reshape(4, -1)) == np.arange(32)).all()
    in_order = np.tile(np.arange(32).reshape(8, 4), (4, 1, 1))
    assert (rank_loads(load, placement).max(1) < rank_loads(load, in_order).max(1)).all()


def test_hierarchical_is_no_worse_than_its_fullest_node():
    load = np.random.default_rng(1).gamma(1, 100, (4, 64))
    placement = balance(load, 16, 6, nodes=4, groups=8)
    node = load.reshape(4, 8, 8).sum(-1)
    best_node = optimum_reordered(node[0], 4)
    assert rank_loads(load, placement)[0].reshape(4, 4).sum(1).max() == pytest.approx(best_node, rel=5e-3)
    drifted = load * np.random.default_rng(2).uniform(0.95, 1.05, load.shape)
    moved = balance(drifted, 16, 6, nodes=4, groups=8, current=placement, tolerance=0.1)
    assert copied(placement, moved).sum() < 0.2 * placement.size


def optimum_reordered(load: np.ndarray, ranks: int) -> float:
    """Least peak of pairs: two items a rank, each once."""
    ordered = np.sort(load)
    return (ordered[:ranks] + ordered[: ranks - 1 : -1]).max()


def test_few_copies_for_a_small_change():
    random = np.random.default_rng(3)
    load = random.gamma(1, 1000, (6, 64))
    placement = balance(load, 16, 6)
    assert np.array_equal(balance(load, 16, 6, current=placement, tolerance=0.01), placement)
    drifted = load * random.lognormal(0, 0.2, load.shape)
    moved = balance(drifted, 16, 6, current=placement, tolerance=0.01)
    assert (rank_loads(drifted, moved).max(1) <= lower_bound(drifted, 16, 6) * 1.01).all()
    fresh = align(placement, balance(drifted, 16, 6))
    assert 0 < copied(placement, moved).sum() < copied(placement, fresh).sum() / 2
    for most in (0, 1, 3):
        limited = balance(drifted, 16, 6, current=placement, max_moves=most)
        assert copied(placement, limited).sum(1).max() <= most
        before, after = (rank_loads(drifted, place).max(1) for place in (placement, limited))
        assert (after <= before).all() and (most == 0 or (after < before).all())


def test_the_way_back_home_costs_nothing():
    """An expert that returns to its rank is not copied: the move counts as negative against max_moves."""
    load = np.array([[19.0, 1, 2, 2, 1, 4, 14, 7]])
    current = np.array([[[6, 2, 1], [5, 7, 0], [4, 7, 3]]])
    moved = balance(load, 3, 3, current=current, max_moves=2)
    assert copied(current, moved).sum() == 2
    assert rank_loads(load, moved).max() == 17.5  # 21 without the way back


@pytest.mark.parametrize("seed", range(3))
def test_alignment_keeps_the_most(seed):
    random = np.random.default_rng(seed)
    old, new = (balance(random.gamma(1, 1, (1, 8)), 5, 3) for _ in range(2))
    least = min(copied(old, new[:, list(order)]).sum() for order in permutations(range(5)))
    renamed = align(old, new)
    assert copied(old, renamed).sum() == least
    assert sorted(map(sorted, renamed[0].tolist())) == sorted(map(sorted, new[0].tolist()))


def test_an_expert_twice_on_a_rank_is_mended():
    current = np.array([[[0, 0], [1, 2]]])
    check(np.ones((1, 3)), balance(np.ones((1, 3)), 2, 2, current=current), 2, 2)


def test_the_gate_moves_what_pays():
    random = np.random.default_rng(4)
    steady = np.tile(random.gamma(1, 1000, 32), (4, 1))  # the same experts hot in each window
    turning = np.array([np.roll(steady[0], 8 * window) for window in range(4)])
    windows = np.stack([steady, turning], axis=1)  # [4, 2, 32]
    current = np.tile(np.arange(32).reshape(8, 4), (2, 1, 1))
    costs = {"token_s": 1e-6, "expert_bytes": 1e6, "bytes_per_s": 1e10}
    done = update(windows, current, **costs)
    proposal = balance(windows.mean(0), 8, 4, current=current, tolerance=0.01)
    gain = [
        1e-6 * np.mean([rank_loads(window, current).max(1)[layer] - rank_loads(window, proposal).max(1)[layer]
                        for window in windows]) for layer in range(2)
    ]  # fmt: skip
    np.testing.assert_allclose(done.gain_s, gain)
    np.testing.assert_allclose(done.cost_s, copied(current, proposal).max(1) * 1e6 / 1e10)
    assert done.gain_s[0] > done.cost_s[0] and done.copied[0] > 0
    assert np.array_equal(done.placement[0], proposal[0])
    assert done.gain_s[1] < done.gain_s[0] / 4
    dear = update(windows, current, **(costs | {"bytes_per_s": 1e3}))
    assert np.array_equal(dear.placement, current) and not dear.copied.any()
    longer = update(windows, current, **(costs | {"bytes_per_s": 1e3}), intervals=1e9)
    assert longer.copied[0] > 0


def test_maps():
    placement = balance(np.random.default_rng(5).gamma(1, 1, (2, 8)), 4, 3)
    maps, experts = vllm_maps(placement, 8), ascend_expert_maps(placement, 8)
    assert maps.physical_to_logical.shape == (2, 12) and maps.logical_to_physical.shape == (2, 8, 5)
    for layer in range(2):
        for expert in range(8):
            slots = maps.logical_to_physical[layer, expert]
            where = np.flatnonzero(placement[layer].ravel() == expert).tolist()
            assert slots[: len(where)].tolist() == where and (slots[len(where) :] == -1).all()
            assert maps.replicas[layer, expert] == len(where)
            for rank in range(4):
                slot = experts[layer, rank, expert]
                held = placement[layer, rank].tolist()
                assert held[slot] == expert if slot >= 0 else expert not in held


def test_table_of_vllm_ascend():
    load = np.random.default_rng(6).gamma(1, 1000, (3, 16))
    table = np.tile((np.arange(8)[:, None] * 2 + np.arange(3)) % 16, (3, 1, 1))
    slot_load = (load / replica_counts(table, 16))[np.arange(3)[:, None, None], table]
    changed, priority, new = rebalance_table(table, slot_load)
    assert changed and sorted(priority) == [0, 1, 2]
    check(load, new, 8, 3)
    ratio = rank_loads(load, new).max(1) / rank_loads(load, table).max(1)
    assert (np.diff(ratio[priority]) >= 0).all() and (ratio < 1).all()
    assert not rebalance_table(new, (load / replica_counts(new, 16))[np.arange(3)[:, None, None], new])[0]


@pytest.mark.parametrize("change, message", [
    ({"load": np.ones(8)}, "give \\[layers, experts\\]"),
    ({"load": np.array([[1, -1.0] * 4])}, "layer 0, expert 1 is -1"),
    ({"load": np.full((1, 8), np.nan)}, "expert 0 is nan"),
    ({"slots": 1}, "hold 4 of 8 experts"),
    ({"slots": 9}, "hold one twice"),
    ({"ranks": 0}, "at least 1"),
    ({"nodes": 3}, "nodes=3 must divide"),
    ({"groups": 3}, "groups=3 must divide"),
    ({"max_moves": 1}, "max_moves"),
    ({"current": np.zeros((1, 4, 2))}, "not \\(1, 4, 3\\)"),
    ({"current": np.zeros((1, 4, 3))}, "no copy of expert 1"),
    ({"current": np.full((1, 4, 3), 8)}, "outside 0 to 7"),
])  # fmt: skip
def test_errors_say_what_is_wrong(change, message):
    arguments = {"load": np.ones((1, 8)), "ranks": 4, "slots": 3} | change
    with pytest.raises(ValueError, match=message):
        balance(**arguments)

"""data_rebalance: equal counts, an exact way back, and a balance checked against brute force."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_rl.rollout.data_rebalance import place, predict

NAN = float("nan")


@st.composite
def batches(draw):
    """Groups of uneven sizes, mixed or adjacent, with some lengths known."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=12))
    groups = [f"p{index}" for index, size in enumerate(sizes) for _ in range(size)]
    if draw(st.booleans()):
        groups = draw(st.permutations(groups))
    lengths = {f"p{index}": draw(st.sampled_from([NAN, 1.0, 5.0, 9.0, 30.0])) for index in range(len(sizes))}
    return groups, np.array([lengths[group] for group in groups])


@settings(max_examples=100)
@given(batches(), st.integers(1, 9), st.booleans())
def test_counts_are_equal_and_the_order_is_restored(batch, ranks, known):
    groups, predicted = batch
    placed = place(groups, ranks, predicted if known else None)
    count = len(groups)
    assert placed.sizes.tolist() == [len(part) for part in np.array_split(np.arange(count), ranks)]
    assert np.bincount(placed.rank, minlength=ranks).tolist() == placed.sizes.tolist()
    parts = np.split(np.array(groups)[placed.order], np.cumsum(placed.sizes)[:-1])
    assert np.concatenate(parts)[placed.inverse].tolist() == list(groups)
    assert sorted(placed.order.tolist()) == list(range(count))
    for rank, part in enumerate(np.split(placed.order, np.cumsum(placed.sizes)[:-1])):
        assert (placed.rank[part] == rank).all()
        if known and not np.isnan(predicted).any():
            assert (np.diff(predicted[part]) <= 0).all()  # longest first


@settings(max_examples=100)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 7))
def test_every_rank_has_its_share_of_the_longest(lengths, ranks):
    predicted = np.array(lengths, dtype=float)
    placed = place(list(range(len(lengths))), ranks, predicted)
    for threshold in set(lengths):
        # Equal lengths at the threshold may fall either way.
        counts = np.bincount(placed.rank[predicted > threshold], minlength=ranks)
        assert counts.max() - counts.min() <= 1


@settings(max_examples=30)
@given(st.lists(st.integers(1, 30), min_size=4, max_size=6), st.integers(2, 3))
def test_steps_with_many_running_against_all_placements(lengths, ranks):
    """The sum over steps of the fullest rank's batch: no placement with equal counts has less."""
    count = len(lengths)
    placed = place(list(range(count)), ranks, np.array(lengths, dtype=float))

    def cost(rank):
        return sum(max(Counter(r for r, n in zip(rank, lengths, strict=True) if n > step).values())
                   for step in range(max(lengths)))  # fmt: skip

    best = min(cost(rank) for rank in itertools.product(range(ranks), repeat=count)
               if sorted(map(rank.count, range(ranks))) == sorted(placed.sizes))  # fmt: skip
    assert cost(placed.rank.tolist()) == best


@pytest.mark.parametrize("prompts, samples, ranks", [(256, 16, 32), (8, 3, 4), (5, 7, 3)])
def test_unknown_lengths_give_the_interleaved_order(prompts, samples, ranks):
    groups = np.repeat(np.arange(prompts), samples)
    interleaved = np.arange(prompts * samples).reshape(prompts, samples).T.ravel()
    for predicted in (None, np.full(len(groups), NAN)):
        placed = place(groups.tolist(), ranks, predicted)
        assert placed.order.tolist() == interleaved.tolist()


def test_siblings_are_on_different_ranks():
    groups = [prompt for prompt in range(32) for _ in range(16)]
    for predicted in (None, np.repeat(np.arange(32.0), 16)):
        rank = place(groups, 32, predicted).rank.reshape(32, 16)
        assert {len(set(row)) for row in rank.tolist()} == {16}


def test_partly_known_lengths_count_as_the_mean_of_the_known():
    placed = place(["a", "b", "c", "d"], 2, np.array([NAN, 10.0, 2.0, NAN]))
    # 10, then 6 and 6 (unknown), then 2: the ranks with 10 and with 6 first.
    assert placed.rank[1] == placed.rank[2] and placed.rank[0] == placed.rank[3]


def test_what_is_expected_of_a_prompt():
    groups = ["a", "b", "a", "c"]
    assert np.isnan(predict(groups, {})).all()
    expected = predict(groups, {"a": [4, 8], "b": [3], "c": []}, [("b", 5.0), ("b", 7.0)])
    assert expected[:3].tolist() == [6.0, 6.0, 6.0] and np.isnan(expected[3])


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="ranks=0"):
        place(["a"], 0)
    with pytest.raises(ValueError, match="2 samples"):
        place(["a", "b"], 1, np.array([1.0]))

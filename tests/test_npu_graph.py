"""Sequence ends and static kernel sizes of decode graphs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_rl.npu_graph import align_ends, static_sizes


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 20))
def test_padding_is_one_sequence_without_keys(queries, padding):
    ends = [sum(queries[: i + 1]) for i in range(len(queries))]
    lengths = [40 + i for i in range(len(queries))]
    tokens = sum(queries) + padding
    new_ends, new_lengths = align_ends(ends, lengths, tokens)
    assert new_ends[: len(ends)] == ends and new_lengths[: len(ends)] == lengths
    assert new_ends[-1] == tokens
    assert new_lengths[len(ends) :] == [0] * bool(padding)
    assert len(new_ends) == len(new_lengths)


def test_a_graph_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="9 query tokens do not fit into the graph of 8"):
        align_ends([4, 9], [4, 9], 8)


def test_static_sizes_without_drafts_are_those_of_the_batches():
    assert static_sizes([32, 1, 256, 64], max_num_seqs=64, drafts=0) == [1, 32, 64]
    assert static_sizes([], max_num_seqs=64, drafts=3) == []

"""Sequence ends and static kernel sizes of decode graphs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_rl.rollout.npu_graph import align_ends, plain_sizes, static_kernels, static_sizes


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


@pytest.mark.parametrize(("sizes", "limit", "drafts", "expected"), [
    ([1, 4, 10, 14, 64], 8, 3, [4, 12, 16]),  # multiples of 4, none above the 32 tokens of 8 requests
    ([8, 16], 8, 1, [8, 16]),  # up to a full batch, and up to the largest given
    ([2, 10], 99, 3, [4]),  # 12 is above the largest given
    ([3], 99, 3, []),  # so is a single request's 4
    ([6], 99, 2, [6]),
])  # fmt: skip
def test_static_sizes_with_drafts_are_multiples_of_a_request(sizes, limit, drafts, expected):
    assert static_sizes(sizes, max_num_seqs=limit, drafts=drafts) == expected


@given(st.lists(st.integers(1, 300), max_size=9), st.integers(1, 40), st.integers(1, 15))
def test_ranks_that_share_their_sizes_find_those_of_each_other(sizes, limit, drafts):
    """Without drafts a batch is padded to a size that graphs with drafts have, so that they go together."""
    shared = plain_sizes(sizes, limit, drafts, shared=True)
    drafted = static_sizes(sizes, limit, drafts)
    assert shared == [size for size in drafted if size <= limit]
    assert plain_sizes(sizes, limit, drafts, shared=False) == sorted({n for n in sizes if n <= limit})


def configuration(enabled, speculative=None):
    return SimpleNamespace(
        additional_config={} if enabled is None else {"enable_static_kernel": enabled},
        speculative_config=speculative,
        parallel_config=SimpleNamespace(local_world_size=4, data_parallel_size_local=2, data_parallel_size=1),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 8, 64]),
        scheduler_config=SimpleNamespace(max_num_seqs=16),
    )


@pytest.mark.parametrize(("method", "drafts", "sizes"), [
    (None, 0, [1, 8]), ("ngram", 3, [4, 8, 64]), ("sam", 3, [1, 4, 8, 64]),
])  # fmt: skip
def test_kernels_are_compiled_for_the_graphs_on_all_ranks_of_the_node(method, drafts, sizes):
    speculative = SimpleNamespace(method=method, num_speculative_tokens=drafts) if method else None
    for environ, ranks in (({}, "8"), ({"LOCAL_WORLD_SIZE": "2"}, "2")):
        aclgraph = SimpleNamespace()
        static_kernels(aclgraph, configuration(True, speculative), environ)
        assert vars(aclgraph) == {
            "_aclnn_static_shape_kernel": True, "_aclnn_static_shape_kernel_sym_value_range": sizes,
        }  # fmt: skip
        assert environ == {"LOCAL_WORLD_SIZE": ranks}


@pytest.mark.parametrize("enabled", [None, False])
def test_without_the_option_nothing_is_compiled(enabled):
    aclgraph, environ = SimpleNamespace(), {}
    static_kernels(aclgraph, configuration(enabled), environ)
    assert not vars(aclgraph) and not environ

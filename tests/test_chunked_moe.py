"""An MoE layer in chunks of tokens: the same results, and the same number of chunks on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from ascend_rl.experts.chunked_moe import SWITCH, in_chunks, least_tokens

WEIGHTS = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0))


@dataclass
class Result:
    routed_out: torch.Tensor
    before_dispatch_evt: int
    before_combine_evt: int
    group_list_type: int
    expert_tokens: torch.Tensor | None


def context(tokens: int, kind: str = "ALLTOALL"):
    return SimpleNamespace(moe_comm_type=SimpleNamespace(name=kind), max_tokens_across_dp=tokens)


def experts(calls: list[int], cumulative: bool = False):
    """The best expert of each token, by its logits; notes the tokens of each call."""

    def apply(*, x, router_logits, pertoken_scale=None, layer):
        assert layer == "layer"
        calls.append(len(x))
        best = router_logits.argmax(-1)
        scaled = x if pertoken_scale is None else x * pertoken_scale[:, None]
        counts = torch.bincount(best, minlength=len(WEIGHTS))
        load = counts.cumsum(0) if cumulative else counts
        out = torch.einsum("td,tde->te", scaled, WEIGHTS[best])
        return Result(out, len(calls), 10 * len(calls), 1 - cumulative, load)

    return apply


@pytest.mark.parametrize("kind", ["ALLTOALL", "ALLGATHER"])
@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_chunks_bring_what_the_whole_does(monkeypatch, counts, kind, cumulative, scaled):
    x, logits, calls = torch.randn(201, 8), torch.randn(201, 4), []
    given = {"x": x, "router_logits": logits, "pertoken_scale": torch.rand(201) if scaled else None}
    expected = experts([], cumulative)(**given, layer="layer")
    monkeypatch.setenv(SWITCH, "64")
    found = in_chunks(experts(calls, cumulative), context(201, kind), False)(**given, layer="layer")
    assert calls == [51, 50, 50, 50] and counts() == {"chunked_moe": 4}
    torch.testing.assert_close(found.routed_out, expected.routed_out)
    assert found.expert_tokens.tolist() == expected.expert_tokens.tolist()
    assert (found.before_dispatch_evt, found.before_combine_evt) == (1, 40)


@pytest.mark.parametrize("tokens", [65, 200, 201, 4097])
@pytest.mark.parametrize("ranks", [1, 2, 7, 16])
def test_all_ranks_make_as_many_chunks_none_empty(monkeypatch, tokens, ranks):
    monkeypatch.setenv(SWITCH, "64")
    made = set()
    for share in torch.zeros(tokens, 8).tensor_split(ranks):
        calls = []
        run = in_chunks(experts(calls), context(tokens), False)
        run(x=share, router_logits=torch.zeros(len(share), 4), layer="layer")
        assert all(calls)
        made.add(len(calls))
    assert made == {-(-tokens // 64)}


def test_a_rank_with_fewer_rows_than_chunks_adds_some(monkeypatch):
    """None of them is in the result."""
    monkeypatch.setenv(SWITCH, "64")
    x, logits, calls = torch.randn(1, 8), torch.randn(1, 4), []
    found = in_chunks(experts(calls), context(150), False)(x=x, router_logits=logits, layer="layer")
    expected = experts([])(x=x, router_logits=logits, layer="layer")
    assert calls == [1, 1, 1] and torch.equal(found.routed_out, expected.routed_out)


@pytest.mark.parametrize("most", [65, 200, 201, 4097])
@pytest.mark.parametrize("tp", [1, 2, 7, 16])
def test_a_rank_with_few_tokens_has_some_in_each_chunk(monkeypatch, most, tp):
    monkeypatch.setenv(SWITCH, "64")
    for share in torch.zeros(least_tokens(most, tp), 8).tensor_split(tp):
        calls = []
        in_chunks(experts(calls), context(most), False)(
            x=share, router_logits=torch.zeros(len(share), 4), layer="layer"
        )
        assert calls == [1] * -(-most // 64)


def test_otherwise_nothing_changes(monkeypatch):
    apply = experts([])
    assert in_chunks(apply, context(9999), False) is apply
    monkeypatch.setenv(SWITCH, "64")
    assert in_chunks(apply, context(64), False) is apply
    assert in_chunks(apply, context(9999, "MC2"), False) is apply


@pytest.mark.parametrize("given, gate, message", [
    ("8k", False, "VLLM_FUSED_MOE_CHUNK_SIZE=8k: give a number of tokens, 64 or more"),
    ("63", False, "VLLM_FUSED_MOE_CHUNK_SIZE=63"),
    ("64", True, "multistream_overlap_gate"),
])  # fmt: skip
def test_incompatible_settings_are_refused(monkeypatch, given, gate, message):
    monkeypatch.setenv(SWITCH, given)
    with pytest.raises(ValueError, match=message):
        in_chunks(experts([]), context(65), gate)

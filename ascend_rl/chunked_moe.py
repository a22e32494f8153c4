"""MoE layers of vllm-ascend in chunks of tokens, so that the peak of a prefill leaves room for KV cache.

Problem: in a prefill an MoE layer copies each token for each of its experts (8 in Qwen3), sends the copies,
and computes on all of them at once; out of balance, most of them meet on one rank. vLLM measures this peak
before it lays out the KV cache, which gets what is left.
Idea: tokens do not depend on each other in an MoE layer. Routing, dispatch, experts and combination run for
some tokens after the others, so that copies exist of one chunk at a time.
Invariants (tests/test_chunked_moe.py, tests/patched/test_npu_chunked_moe.py): what a token gets does not
depend on chunks; all ranks make equally many, since dispatching is collective: their number follows from the
number of tokens of a DP rank, to which vllm-ascend pads all of them. Cost: a dispatch and a combination more
for each chunk; none where a step has no more tokens than a chunk, or for MC2, which small batches take.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

SWITCH = "VLLM_FUSED_MOE_CHUNK_SIZE"  # vLLM's own name, which vllm-ascend 0.13 does not read
LEAST = 64  # tensor parallelism cuts chunks once more; no rank may be left without a token


def chunk_tokens() -> int | None:
    """Tokens of a DP rank in a chunk; None: all.

    Raises:
        ValueError: it is no number, or too small.
    """
    text = os.environ.get(SWITCH)
    if not text:
        return None
    if not text.isdigit() or int(text) < LEAST:
        raise ValueError(f"{SWITCH}={text}: give a number of tokens, {LEAST} or more, or unset it")
    return int(text)


def in_chunks(apply: Callable[..., Any], context: Any, gate_overlaps: bool) -> Callable[..., Any]:
    """``apply`` of a layer's quant_method, for each chunk of this step; itself where there is one.

    Args:
        context: vllm-ascend's forward context (``moe_comm_type``, ``max_tokens_across_dp``).
        gate_overlaps: experts are chosen before, for all tokens (``multistream_overlap_gate``).

    Raises:
        ValueError: a setting under which there are no chunks.
    """
    size = chunk_tokens()
    if size is None or context.moe_comm_type.name not in ("ALLTOALL", "ALLGATHER"):
        return apply
    if gate_overlaps:
        raise ValueError(f"{SWITCH} does not work with multistream_overlap_gate: set one of them only")
    chunks = -(-context.max_tokens_across_dp // size)
    if chunks == 1:
        return apply

    def call(*, x, router_logits, pertoken_scale=None, **others):
        scales = [None] * chunks if pertoken_scale is None else pertoken_scale.tensor_split(chunks)
        results = [
            apply(x=tokens, router_logits=logits, pertoken_scale=scale, **others)
            for tokens, logits, scale in zip(
                x.tensor_split(chunks), router_logits.tensor_split(chunks), scales, strict=True
            )
        ]
        loads = [result.expert_tokens for result in results]  # counts, or their cumulative sums
        return replace(
            results[-1],
            routed_out=torch.cat([result.routed_out for result in results]),
            before_dispatch_evt=results[0].before_dispatch_evt,
            expert_tokens=None if loads[0] is None else torch.stack(loads).sum(0),
        )

    return call

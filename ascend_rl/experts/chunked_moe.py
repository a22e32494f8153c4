"""MoE layers of vllm-ascend in chunks of tokens, so that a prefill leaves more memory for the KV cache.

Problem: in a prefill an MoE layer copies each token for each of its experts (8 in Qwen3), sends the copies,
and computes on all of them together; without balance, most of them end up on one rank. vLLM measures this
peak before it allocates the KV cache, which gets the rest.
Idea: tokens do not depend on each other in an MoE layer. Routing, dispatch, experts and combination run chunk
by chunk, so only one chunk's copies exist.
Invariants (tests/test_chunked_moe.py, tests/patched/test_npu_chunked_moe.py): the result of a token does not
depend on the chunks; all ranks make the same number of chunks, since dispatch is collective: it follows from
the tokens of the largest DP rank, and a rank with fewer rows adds some, so that no chunk is empty. Cost: one
more dispatch and combination for each chunk; none when a step fits into one chunk, or with MC2, which
vllm-ascend uses for small batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ascend_rl.process.counts import count
from ascend_rl.settings.switch import CannotWork, refuse

SWITCH = "VLLM_FUSED_MOE_CHUNK_SIZE"  # vLLM's own name, which vllm-ascend 0.13 does not read
BY_ROW = ("x", "router_logits", "pertoken_scale", "mc2_mask")
LEAST = 64  # tensor parallelism splits a chunk further; every rank needs a token


def chunk_tokens() -> int | None:
    """Tokens of a DP rank in a chunk; None: all.

    Raises:
        CannotWork: not a number, or too small.
    """
    text = os.environ.get(SWITCH)
    if not text:
        return None
    if not text.isdigit() or int(text) < LEAST:
        raise CannotWork(f"{SWITCH}={text}: give a number of tokens, {LEAST} or more, or unset it")
    return int(text)


def least_tokens(most: int, tp: int) -> int:
    """Tokens of a DP rank with which each of its TP ranks has some in each chunk of the largest, of ``most``.

    >>> os.environ[SWITCH] = "64"
    >>> least_tokens(64, 4), least_tokens(129, 4), least_tokens(3, 4)
    (4, 12, 3)
    """
    return min(tp * -(-most // (chunk_tokens() or most)), most)


def in_chunks(apply: Callable[..., Any], context: Any, gate_overlaps: bool) -> Callable[..., Any]:
    """``apply`` of a layer's quant_method, for each chunk of this step; ``apply`` itself if there is one.

    Args:
        context: vllm-ascend's forward context (``moe_comm_type``, ``max_tokens_across_dp``).
        gate_overlaps: ``multistream_overlap_gate``, with which experts are chosen earlier, for all tokens.

    Raises:
        CannotWork: ``gate_overlaps``, or see `chunk_tokens`.
    """
    size = chunk_tokens()
    if size is None or context.moe_comm_type.name not in ("ALLTOALL", "ALLGATHER"):
        return apply
    if gate_overlaps:
        refuse(f"{SWITCH}={size}", ["multistream_overlap_gate is on: set only one of them"])
    chunks = -(-context.max_tokens_across_dp // size)
    if chunks == 1:
        return apply

    def call(**arguments):
        rows = len(arguments["x"])
        by_row = {name: arguments[name] for name in BY_ROW if arguments.get(name) is not None}
        if rows < chunks:
            by_row = {
                name: torch.cat((given, given.new_zeros(chunks - rows, *given.shape[1:])))
                for name, given in by_row.items()
            }
        parts = zip(*[rows.tensor_split(chunks) for rows in by_row.values()], strict=True)
        results = [apply(**arguments | dict(zip(by_row, part, strict=True))) for part in parts]
        count("chunked_moe", chunks)
        loads = [result.expert_tokens for result in results]  # counts, or their cumulative sums
        return replace(
            results[-1],
            routed_out=torch.cat([result.routed_out for result in results])[:rows],
            before_dispatch_evt=results[0].before_dispatch_evt,
            expert_tokens=None if loads[0] is None else torch.stack(loads).sum(0),
        )

    return call

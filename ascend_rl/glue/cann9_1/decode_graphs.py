"""Decode graphs for steps without drafts, beside those for steps with drafts (rollout/npu_graph.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ascend_rl.glue.decode_dispatcher import DecodeDispatcher
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher


def plain(batch: BatchDescriptor) -> bool:
    """Whether each row of a decode graph is one token."""
    return batch.uniform and batch.num_reqs == batch.num_tokens


class Dispatcher(DecodeDispatcher):
    """For vLLM 0.23, whose batches also say how many LoRA adapters they have."""

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode, *args: Any) -> None:
        CudagraphDispatcher.initialize_cudagraph_keys(self, cudagraph_mode, *args)
        if cudagraph_mode != CUDAGraphMode.FULL_DECODE_ONLY:
            self.plain_sizes = []
        keys = self.cudagraph_keys[CUDAGraphMode.FULL]
        keys |= {replace(key, num_tokens=size, num_reqs=size) for key in keys for size in self.plain_sizes}

    def dispatch(self, num_tokens: int, uniform_decode: bool = False, *args: Any, **kwargs: Any):
        """Without a graph where another data-parallel rank computes more tokens than could be rows here."""
        if uniform_decode and self.selects_plain and num_tokens > self.plain_sizes[-1]:
            return CUDAGraphMode.NONE, BatchDescriptor(num_tokens)
        return CudagraphDispatcher.dispatch(self, num_tokens, uniform_decode, *args, **kwargs)

    def _create_padded_batch_descriptor(self, num_tokens: int, uniform_decode: bool, *args: Any):
        batch = super()._create_padded_batch_descriptor(num_tokens, uniform_decode, *args)
        if not (uniform_decode and self.selects_plain):
            return batch
        size = min(size for size in self.plain_sizes if size >= num_tokens)
        return replace(batch, num_tokens=size, num_reqs=size)

    @property
    def selects_plain(self) -> bool:
        return bool(self.plain_sizes) and self.uniform_decode_query_len == 1


class GraphParams:
    """vllm-ascend's parameters of attention in graphs, by number of tokens: one set for each kind."""

    def __init__(self, drafted: Any):
        sizes = drafted.workspaces
        self.drafted, self.plain = drafted, type(drafted)(
            *({size: value() for size in sizes} for value in (list, lambda: None, list, list))
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain if plain(get_forward_context().batch_descriptor) else self.drafted, name)

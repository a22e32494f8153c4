"""vLLM's dispatcher with a second set of decode graphs, for steps without drafts (rollout/npu_graph.py)."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from ascend_rl.rollout.npu_graph import graphs_without_drafts, plain_sizes
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher


class DecodeDispatcher(CudagraphDispatcher):
    """Graphs for rows of one token besides those for rows with all drafts; constructed by NPUModelRunner."""

    def __init__(self, vllm_config: Any):
        super().__init__(vllm_config)
        self.drafted_query_len = self.uniform_decode_query_len
        self.plain_sizes: list[int] = []
        parallel = vllm_config.parallel_config
        if (
            graphs_without_drafts(vllm_config.speculative_config)
            and not vllm_config.model_config.use_mla
            and parallel.prefill_context_parallel_size == 1
            and parallel.decode_context_parallel_size == 1
        ):
            self.plain_sizes = plain_sizes(
                self.compilation_config.cudagraph_capture_sizes or [],
                vllm_config.scheduler_config.max_num_seqs,
                self.drafted_query_len - 1,
                parallel.data_parallel_size > 1,
            )

    @property
    def drafted_tokens(self) -> int | None:
        """Tokens of the largest graph with drafts; None if rows need not be of equal length."""
        return self.compilation_config.cudagraph_capture_sizes[-1] if self.plain_sizes else None

    def select(self, longest: int) -> None:
        """Serve batches whose longest row has this many tokens, from now on."""
        plain = self.plain_sizes and longest == 1
        self.uniform_decode_query_len = 1 if plain else self.drafted_query_len

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode, uniform_decode_query_len: int) -> None:
        super().initialize_cudagraph_keys(cudagraph_mode, uniform_decode_query_len)
        if cudagraph_mode != CUDAGraphMode.FULL_DECODE_ONLY:
            self.plain_sizes = []
        lora_cases = {key.has_lora for key in self.cudagraph_keys[CUDAGraphMode.FULL]}
        for size in self.plain_sizes:
            for has_lora in lora_cases:
                self.add_cudagraph_key(CUDAGraphMode.FULL, BatchDescriptor(size, size, True, has_lora))

    def dispatch(self, num_tokens: int, uniform_decode: bool, has_lora: bool, disable_full: bool = False):
        if not (self.plain_sizes and uniform_decode and self.uniform_decode_query_len == 1):
            return super().dispatch(num_tokens, uniform_decode, has_lora, disable_full)
        fitting = bisect_left(self.plain_sizes, num_tokens)
        if disable_full or fitting == len(self.plain_sizes):
            return CUDAGraphMode.NONE, BatchDescriptor(num_tokens)
        size = self.plain_sizes[fitting]
        return CUDAGraphMode.FULL, BatchDescriptor(size, size, True, has_lora)

"""SAM decoding as vLLM's speculative method custom_class, with this module's `SamDrafter` as its model."""

from __future__ import annotations

from typing import Any

from ascend_rl.speculation.sam_decoding import SamProposer


class SamDrafter(SamProposer):
    """vLLM constructs it from its configuration alone; `vllm_plugin` gives it the runner it reads."""

    runner: Any = None

    def __init__(self, vllm_config: Any):
        super().__init__(
            vllm_config.speculative_config.num_speculative_tokens,
            vllm_config.model_config.max_model_len,
            (vllm_config.additional_config or {}).get("sam_decoding"),
        )
        graphs = vllm_config.compilation_config
        mode = graphs.cudagraph_mode
        replayed = mode is not None and mode.decode_mode() == type(mode).FULL
        self.graph_tokens = graphs.max_cudagraph_capture_size if replayed else None

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        runner = self.runner
        return super().propose(runner.input_batch, runner.requests, sampled_token_ids, self.graph_tokens)

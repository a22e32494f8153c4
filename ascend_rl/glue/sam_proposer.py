"""vllm-ascend's proposer of drafts by a suffix automaton."""

from __future__ import annotations

from typing import Any

from ascend_rl.speculation.sam_decoding import SamProposer
from vllm_ascend.spec_decode.interface import Proposer, SpecDcodeType


class SamDecodingProposer(SamProposer, Proposer):
    """Constructed by vllm-ascend's get_spec_decode_method."""

    def __init__(self, vllm_config: Any, device: Any, runner: Any):
        SamProposer.__init__(
            self,
            vllm_config.speculative_config.num_speculative_tokens,
            vllm_config.model_config.max_model_len,
            vllm_config.additional_config.get("sam_decoding"),
        )
        self.name, self.runner = SpecDcodeType.SAM, runner

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        pass

    def generate_token_ids(self, valid_sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any):
        most = getattr(self.runner.cudagraph_dispatcher, "drafted_tokens", None)
        return self.propose(self.runner.input_batch, self.runner.requests, valid_sampled_token_ids, most)

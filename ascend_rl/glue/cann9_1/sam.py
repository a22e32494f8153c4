"""SAM decoding as vLLM's speculative method custom_class, with this module's `SamDrafter` as its model."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ascend_rl.glue.cann9_1.hooks import Hooks
from ascend_rl.speculation.sam_decoding import SamProposer

MODEL = f"{__name__}.SamDrafter"  # speculative_config.model
hooks = Hooks()


class SamDrafter(SamProposer):
    """vLLM constructs it from its configuration alone; the hooks give it the runner whose batch it reads."""

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


@hooks.after("vllm.v1.worker.gpu_model_runner")
def give_the_runner(module: ModuleType) -> None:
    start = module.GPUModelRunner.__init__

    def __init__(self, *args, **kwargs):
        start(self, *args, **kwargs)
        if isinstance(getattr(self, "drafter", None), SamDrafter):
            self.drafter.runner = self

    module.GPUModelRunner.__init__ = __init__


@hooks.after("vllm_ascend.worker.model_runner_v1")
def know_the_method(module: ModuleType) -> None:
    """vllm-ascend's factory refuses custom_class, and its runner goes by the type of the drafter."""
    known = module.get_spec_decode_method

    class NpuSamDrafter(SamDrafter, module.AscendNgramProposer):  # the branch that takes and gives lists
        pass

    def get_spec_decode_method(method, vllm_config, device, runner):
        if method != "custom_class" or vllm_config.speculative_config.model != MODEL:
            return known(method, vllm_config, device, runner)
        drafter = NpuSamDrafter(vllm_config)
        drafter.runner = runner
        return drafter

    module.get_spec_decode_method = get_spec_decode_method

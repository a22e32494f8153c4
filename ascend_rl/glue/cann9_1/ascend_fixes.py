"""What is wrong in vllm-ascend 0.23.0, right (docs/stacks.md, "What is wrong upstream")."""

from __future__ import annotations

from types import ModuleType

from ascend_rl.glue.cann9_1.hooks import Hooks
from ascend_rl.speculation.rejection_sampler import expand

hooks = Hooks()


@hooks.after("vllm_ascend.sample.sampler")
def draw_after_the_division(module: ModuleType) -> None:
    """Random numbers are free memory once the host returns: draw the next ones behind their use."""
    original = module.random_sample

    def random_sample(probs, generators):
        tokens = original(probs, generators)
        module.global_stream().wait_stream(module.torch.npu.current_stream())
        return tokens

    module.random_sample = random_sample


@hooks.after("vllm_ascend.sample.rejection_sampler")
def expand_rows_without_triton(module: ModuleType) -> None:
    """Drafts have a row for each token: fallbacks take penalties by request, and 0 x inf for other rows."""
    if not module.HAS_TRITON:
        module.AscendRejectionSampler.apply_penalties = staticmethod(module.RejectionSampler.apply_penalties)
        module.expand_batch_to_tokens = expand

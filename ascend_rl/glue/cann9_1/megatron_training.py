"""verl's Megatron engine in float32, as on the other stack (patch megatron_fp32 of verl).

In float32 its log-probs can be compared with Hugging Face's to 1e-6; bf16 hides wrong layouts below 1e-2.
"""

from __future__ import annotations

import types

from ascend_rl.glue.cann9_1.hooks import Hooks

hooks = Hooks()


@hooks.after("verl.workers.config.engine")
def accept_float32(module: types.ModuleType) -> None:
    """The configuration accepts bfloat16 and float16 only; everything behind it follows the dtype already."""
    check = module.McoreEngineConfig.__post_init__

    def __post_init__(self):
        dtype = self.dtype
        if dtype == "float32":
            object.__setattr__(self, "dtype", "bfloat16")  # for the check alone
        check(self)
        object.__setattr__(self, "dtype", dtype)

    module.McoreEngineConfig.__post_init__ = __post_init__


@hooks.after("megatron.core.optimizer.distrib_optimizer")
def load_without_gradients(module: types.ModuleType) -> None:
    """The optimizer's weights are then views of leaves, into which torch copies only without gradients."""
    import torch

    optimizer = module.DistributedOptimizer
    name = "_set_main_param_and_optimizer_states"
    setattr(optimizer, name, torch.no_grad()(getattr(optimizer, name)))

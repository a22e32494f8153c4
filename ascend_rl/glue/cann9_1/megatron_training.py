"""verl's Megatron engine in float32, with random weights, and checkpoints in another layout.

In float32 its log-probs can be compared with Hugging Face's to 1e-6; bf16 hides wrong layouts below 1e-2.
"""

from __future__ import annotations

import types

from ascend_rl.glue.cann9_1.hooks import Hooks
from ascend_rl.weights.checkpoints import has_rng_states

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


@hooks.after("verl.workers.engine.megatron.transformer_impl")
def train_random_weights(module: types.ModuleType) -> None:
    """``override_mcore_model_config.load_weight=False``: train the weights that Megatron made."""
    engine = module.MegatronEngine
    build = engine._build_megatron_module

    def _build_megatron_module(self) -> list:
        if not self.engine_config.override_mcore_model_config.get("load_weight", True):
            load = "load_weights" if self.vanilla_bridge else "load_hf_weights"
            setattr(self.bridge, load, lambda *args, **kwargs: None)
        return build(self)

    engine._build_megatron_module = _build_megatron_module


@hooks.after("megatron.core.optimizer.distrib_optimizer")
def load_without_gradients(module: types.ModuleType) -> None:
    """The optimizer's weights are then views of leaves, into which torch copies only without gradients."""
    import torch

    optimizer = module.DistributedOptimizer
    name = "_set_main_param_and_optimizer_states"
    setattr(optimizer, name, torch.no_grad()(getattr(optimizer, name)))


@hooks.after("verl.utils.checkpoint.megatron_checkpoint_manager")
def load_another_layout(module: types.ModuleType) -> None:
    """Without the states of random numbers, one for each TP and PP rank, which cannot be split again."""
    manager = module.MegatronCheckpointManager
    load = manager.load_checkpoint

    def load_checkpoint(self, local_path: str, *args, **kwargs) -> None:
        contents = self.checkpoint_load_contents
        extra = module.get_extra_dist_checkpoint_path(local_path)
        if self.should_load_extra and not has_rng_states(extra, module.mpu):
            self.checkpoint_load_contents = [name for name in contents if name != "extra"]
        try:
            load(self, local_path, *args, **kwargs)
        finally:
            self.checkpoint_load_contents = contents

    manager.load_checkpoint = load_checkpoint

"""verl's Megatron engine in float32 and with random weights; its checkpoints, written while it trains on, and
read in another layout.

In float32 its log-probs can be compared with Hugging Face's to 1e-6; bf16 hides wrong layouts below 1e-2.
"""

from __future__ import annotations

import functools
import multiprocessing
import types
from pathlib import Path

from ascend_rl.glue.cann9_1.hooks import Hooks, first
from ascend_rl.weights import checkpoints

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


@hooks.after("verl.workers.engine.megatron.transformer_impl")
def end_saves_that_are_written(module: types.ModuleType) -> None:
    """Those of async_save: verl 0.9.1's trainer begins them, and nothing ends them."""
    first(module.MegatronEngine, "optimizer_step", lambda *args: finalize_saves(blocking=False))


@hooks.after("verl.workers.engine_workers")
def end_the_last_save(module: types.ModuleType) -> None:
    """When the run ends."""
    from verl.single_controller.base.decorator import Dispatch, register

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_saves(self) -> None:
        finalize_saves(blocking=True)

    module.ActorRolloutRefWorker.finish_saves = finish_saves


@hooks.after("megatron.core.dist_checkpointing.strategies.filesystem_async")
def let_each_save_have_its_results(module: types.ModuleType) -> None:
    """verl 0.9.1 begins two at a time, and of Megatron's one queue the first to end took what came first."""

    @functools.cache
    def manager():
        return multiprocessing.get_context("spawn").Manager()

    module._get_write_results_queue = lambda: manager().Queue()


def finalize_saves(blocking: bool) -> None:
    """A collective, if any are under way."""
    from megatron.core.dist_checkpointing.strategies.base import async_calls

    async_calls.maybe_finalize_async_calls(blocking=blocking)


@hooks.after("verl.utils.checkpoint.megatron_checkpoint_manager")
def commit_what_is_written(module: types.ModuleType) -> None:
    """Of async_save, as the trainer does with other saves."""
    manager = module.MegatronCheckpointManager
    finalize = manager._finalize_save

    def _finalize_save(self, *, local_path: str, max_ckpt_to_keep: int | None, **given) -> None:
        partial = Path(local_path).parents[1]
        later = self.checkpoint_config.async_save and partial.suffix == checkpoints.PARTIAL
        finalize(self, local_path=local_path, max_ckpt_to_keep=None if later else max_ckpt_to_keep, **given)
        if later and self.rank == 0:
            checkpoints.unpack(str(partial))
            checkpoints.commit(str(partial), max_ckpt_to_keep)

    manager._finalize_save = _finalize_save


@hooks.after("verl.utils.checkpoint.megatron_checkpoint_manager")
def load_another_layout(module: types.ModuleType) -> None:
    """Without the states of random numbers, one for each TP and PP rank, which cannot be split again."""
    manager = module.MegatronCheckpointManager
    load = manager.load_checkpoint

    def load_checkpoint(self, local_path: str, *args, **kwargs) -> None:
        contents = self.checkpoint_load_contents
        extra = module.get_extra_dist_checkpoint_path(local_path)
        if self.should_load_extra and not checkpoints.has_rng_states(extra, module.mpu):
            self.checkpoint_load_contents = [name for name in contents if name != "extra"]
        try:
            load(self, local_path, *args, **kwargs)
        finally:
            self.checkpoint_load_contents = contents

    manager.load_checkpoint = load_checkpoint

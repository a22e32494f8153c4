"""A run with MindSpeed's swap optimizer that is killed continues from its checkpoint as if it had not been.

MindSpeed's own SwapDistributedOptimizer on software NPUs: float32 weights and moments are in host memory, and
their tensors on the device are empty except during the update. verl's manager saves; other processes load;
the update after that is bit for bit the one after the save.
"""

from __future__ import annotations

import os

import pytest
import torch
from megatron_tiny import Layout, make_batch, make_checkpoint, make_worker
from mindspeed_tree import MINDSPEED, needs_mindspeed
from ranks import run_ranks
from test_megatron_actor import OVERRIDES, update
from test_mindspeed import FLASH, OVERLAP, options

from ascend_rl.weights import converter

pytestmark = needs_mindspeed
SWAP = options(swap_optimizer=True, swap_optimizer_times=4)
LAYOUTS = {
    "dense": Layout(options=FLASH + SWAP),
    "moe": Layout("moe", ep=2, options=FLASH + SWAP),
    "overlap": Layout("moe", ep=2, options=OVERLAP + SWAP),  # as the 235B recipes
}
TYPE = "actor_rollout_ref.actor.megatron.dtype=bfloat16"
# Rates that differ from step to step, so that a step with the rate of another shows.
RATES = tuple(
    f"actor_rollout_ref.actor.optim.{setting}" for setting in ("lr_warmup_steps=4", "lr_decay_style=linear")
)


def bytes_on_device(worker) -> int:
    """Of float32 weights and moments."""
    total = 0
    for optimizer in getattr(worker.actor_optimizer, "chained_optimizers", [worker.actor_optimizer]):
        for group in optimizer.shard_fp32_from_float16_groups:
            assert group
            for parameter in group:
                state = optimizer.optimizer.state[parameter]
                for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]):
                    total += tensor.untyped_storage().nbytes()
    return total


def weights_of(worker) -> dict[str, torch.Tensor]:
    """This rank's."""
    return {
        f"{stage} {name}": parameter.detach().clone().cpu()
        for stage, module in enumerate(worker.actor_module)
        for name, parameter in module.named_parameters()
    }


def after(worker) -> dict:
    """An update, and what it made."""
    norm = update(worker, make_batch())[0]
    return {"norm": norm, "on device": bytes_on_device(worker), "weights": weights_of(worker)}


def worker_of(layout: Layout, path, mcore):
    overlap = ()
    if layout.options[: len(OVERLAP)] == OVERLAP:
        os.environ["USE_ALLTOALL_OVERLAP"] = "1"
        megatron = "actor_rollout_ref.actor.megatron"
        overlap = (
            f"{megatron}.use_mbridge=False",
            f"{megatron}.use_dist_checkpointing=True",
            f"{megatron}.dist_checkpointing_path={mcore}",
        )
    return make_worker(layout, path, *OVERRIDES, *RATES, TYPE, *overlap)


def train(rank: int, layout: Layout, path, mcore, directory) -> dict:
    worker = worker_of(layout, path, mcore)
    for _ in range(2):
        update(worker, make_batch())
    saved = weights_of(worker)
    worker.save_checkpoint(str(directory))
    return {"saved": saved} | after(worker)


def resume(rank: int, layout: Layout, path, mcore, directory) -> dict:
    worker = worker_of(layout, path, mcore)
    worker.load_checkpoint(str(directory), del_local_after_load=False)
    return {"saved": weights_of(worker)} | after(worker)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name != "overlap")) for name in LAYOUTS]
)
def test_the_step_after_a_load_is_that_after_the_save(tmp_path, name):
    layout = LAYOUTS[name]
    path, mcore = make_checkpoint(layout.kind, tmp_path / "model", layers=2), tmp_path / "mcore"
    if name == "overlap":
        converter.to_mcore(path, mcore, converter.Options(quiet=True, layout="grouped", ep_size=2))
    first, second = (
        run_ranks(2, function, layout, path, mcore, tmp_path / "saved", stubs=(MINDSPEED,), npu=True)
        for function in (train, resume)
    )
    for rank, (went_on, resumed) in enumerate(zip(first, second, strict=True)):
        assert went_on["on device"] == resumed["on device"] == 0
        assert went_on["norm"] == resumed["norm"], rank
        for name, weight in went_on["weights"].items():
            assert torch.equal(went_on["saved"][name], resumed["saved"][name]), name
            assert torch.equal(weight, resumed["weights"][name]), name
        assert any(not torch.equal(w, went_on["saved"][n]) for n, w in went_on["weights"].items())

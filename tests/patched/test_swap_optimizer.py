"""A run with MindSpeed's swap optimizer that is killed goes on from its checkpoint as if it had not been.

MindSpeed's own SwapDistributedOptimizer on software NPUs: float32 weights and moments are in host memory, and
their tensors on the device are empty except during the update. verl's manager saves; other processes load;
the update after that is bit for bit the one after the save.
"""

from __future__ import annotations

import pytest
import torch
from megatron_tiny import Layout, exported, make_batch, make_checkpoint, make_worker
from ranks import run_ranks
from test_megatron_actor import OVERRIDES, update
from test_mindspeed import FLASH, MINDSPEED, needs_mindspeed, options

pytestmark = needs_mindspeed
SWAP = FLASH + options(swap_optimizer=True, swap_optimizer_times=4)
LAYOUTS = [Layout(options=SWAP), Layout("moe", ep=2, options=SWAP)]
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


def after(worker) -> dict:
    """An update, and what it made."""
    norm = update(worker, make_batch())[0]
    return {"norm": norm, "on device": bytes_on_device(worker), "weights": exported(worker)}


def train(rank: int, layout: Layout, path, directory) -> dict:
    worker = make_worker(layout, path, *OVERRIDES, *RATES, TYPE)
    for _ in range(2):
        update(worker, make_batch())
    saved = exported(worker)
    worker.save_checkpoint(str(directory))
    return {"saved": saved} | after(worker)


def resume(rank: int, layout: Layout, path, directory) -> dict:
    worker = make_worker(layout, path, *OVERRIDES, *RATES, TYPE)
    worker.load_checkpoint(str(directory), del_local_after_load=False)
    return {"saved": exported(worker)} | after(worker)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["dense", "moe"])
def test_the_step_after_a_load_is_that_after_the_save(tmp_path, layout):
    path = make_checkpoint(layout.kind, tmp_path / "model", layers=2)
    first, second = (
        run_ranks(2, function, layout, path, tmp_path / "saved", stubs=(MINDSPEED,), npu=True)
        for function in (train, resume)
    )
    for rank, (went_on, resumed) in enumerate(zip(first, second, strict=True)):
        assert went_on["on device"] == resumed["on device"] == 0
        assert went_on["norm"] == resumed["norm"], rank
        for name, weight in went_on["weights"].items():
            assert torch.equal(went_on["saved"][name], resumed["saved"][name]), name
            assert torch.equal(weight, resumed["weights"][name]), name
        assert any(not torch.equal(w, went_on["saved"][n]) for n, w in went_on["weights"].items())

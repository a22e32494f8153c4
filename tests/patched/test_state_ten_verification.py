"""A None in an optimizer's state leaves only that key out of a checkpoint.

MindSpeed's swap optimizer keeps max_exp_avg_sq = None; megatron-core's DistributedOptimizer must still save
and load the moments and float32 weights of the same parameters, so that the next update after a load is the
one after the save.
"""

from __future__ import annotations

from megatron_tiny import Layout, make_batch, make_checkpoint, make_worker
from ranks import run_ranks
from test_megatron_actor import OVERRIDES, resumes, update

LAYOUTS = [Layout("moe", ep=2), Layout("moe", pp=2)]


def optimizer_states(worker):
    for optimizer in getattr(worker.actor_optimizer, "chained_optimizers", [worker.actor_optimizer]):
        yield from optimizer.optimizer.state.values()


def resume_with_none(rank: int, path, directory) -> list[dict[str, bool]]:
    batch, results = make_batch(), []
    for layout in LAYOUTS:
        worker = make_worker(layout, path, *OVERRIDES)
        update(worker, batch)
        for state in optimizer_states(worker):
            state["max_exp_avg_sq"] = None
        result = resumes(worker, batch, directory / str(layout).replace(" ", "_"))
        result["None is still there"] = all(
            state["max_exp_avg_sq"] is None for state in optimizer_states(worker)
        )
        result["moments are there"] = all(state["exp_avg"].any() for state in optimizer_states(worker))
        results.append(result)
    return results


def test_only_the_none_is_left_out(tmp_path):
    path = make_checkpoint("moe", tmp_path / "model", layers=2)
    for rank, results in enumerate(run_ranks(2, resume_with_none, path, tmp_path)):
        for layout, result in zip(LAYOUTS, results, strict=True):
            assert all(result.values()), (str(layout), rank, result)

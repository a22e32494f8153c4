"""A Megatron checkpoint continues in another layout: the next update is that of the layout that saved it."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from megatron_tiny import Layout, exported, make_batch, make_checkpoint, make_worker
from ranks import run_ranks
from test_megatron_actor import OVERRIDES, update

DENSE, MOE = Layout(tp=2, pp=2), Layout("moe", tp=2, pp=2, ep=2)


def go_on(
    rank: int, source: Layout, targets: list[Layout], path, directory
) -> list[tuple[dict, float, dict]]:
    """Weights of the checkpoint, the next gradient's norm, weights after it, what was said: of the source and
    of the targets."""
    batch, results = make_batch(), []
    worker = make_worker(source, path, *OVERRIDES)
    update(worker, batch)
    worker.save_checkpoint(str(directory))
    for target in (None, *targets):
        said = io.StringIO()
        if target is not None:
            worker = make_worker(target, path, *OVERRIDES)
            with contextlib.redirect_stdout(said):
                worker.load_checkpoint(str(directory), del_local_after_load=False)
        before = exported(worker)
        norm = update(worker, batch)[0]
        results.append((before, norm, exported(worker), said.getvalue()))
    return results if rank == 0 else []


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        (MOE, [Layout("moe", pp=2, ep=2)]),
        pytest.param(MOE, [Layout("moe", ep=4), Layout("moe", tp=2, ep=2)], marks=pytest.mark.long),
        pytest.param(
            DENSE, [Layout(pp=2), Layout(tp=2), Layout(), Layout(tp=2, cp=2)], marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_the_next_update_is_the_same(tmp_path, source, targets):
    path = make_checkpoint(source.kind, tmp_path / "model")
    (weights, norm, updated, _), *others = run_ranks(4, go_on, source, targets, path, tmp_path / "saved")[0]
    assert any(not torch.equal(weights[name], updated[name]) for name in weights)
    for target, (loaded, next_norm, next_weights, said) in zip(targets, others, strict=True):
        assert all(torch.equal(loaded[name], weights[name]) for name in weights), target
        assert next_norm == pytest.approx(norm, rel=1e-6), target
        for name in updated:
            torch.testing.assert_close(next_weights[name], updated[name], rtol=0, atol=2e-6)
        assert f"the checkpoint is of PP2 TP2, this run of PP{target.pp} TP{target.tp}" in said

"""verl 0.9.1's Megatron worker with MindSpeed on software NPUs, if MindSpeed is there: git alone has it."""

from __future__ import annotations

import pytest
import torch
from megatron_tiny import Layout, make_batch, make_checkpoint
from ranks import run_ranks
from test_megatron import as_numpy, as_torch, exported, log_probs, make_worker, on_disk, update
from test_megatron_actor import reference

from ascend_rl.settings import stack

MINDSPEED = stack.DIRECTORY / "frameworks/mindspeed"
FLASH = "+actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=True"
LAYOUTS = [Layout(), Layout("moe", ep=2)]


def learn_on_npus(rank: int, paths: dict) -> list[tuple]:
    from software_npu.kernels.training import calls

    results = []
    for layout in LAYOUTS:
        worker, batch = make_worker(layout, paths[layout.kind], FLASH), make_batch()
        assert type(worker.actor.engine).__name__ == "MindspeedEngineWithLMHead"
        before = log_probs(worker, batch).cpu().numpy()
        weights = as_numpy({name: tensor.cpu() for name, tensor in exported(worker).items()})
        results.append((before, weights, update(worker, batch), set(calls)))
    return results


@pytest.mark.skipif(not (MINDSPEED / "mindspeed").is_dir(), reason=f"{MINDSPEED} is absent")
def test_mindspeed_computes_and_learns_as_hugging_face(tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM")  # verl finds the NPUs
    paths = {kind: make_checkpoint(kind, tmp_path / kind) for kind in ("dense", "moe")}
    expected = {kind: (*reference(path, make_batch())[:2], on_disk(path)) for kind, path in paths.items()}
    for results in run_ranks(2, learn_on_npus, paths, stubs=(MINDSPEED,), npu=True):
        for layout, (before, weights, norm, kernels) in zip(LAYOUTS, results, strict=True):
            first, norms, disk = expected[layout.kind]
            assert (torch.from_numpy(before) - first).abs().max() < 1e-5, layout
            assert all(torch.equal(tensor, disk[name]) for name, tensor in as_torch(weights).items()), layout
            assert norm == pytest.approx(norms[0], rel=1e-5), layout
            assert {"npu_fusion_attention", "npu_rms_norm"} <= kernels
        assert "npu_grouped_matmul" in kernels

"""MindSpeed's alltoall overlap in verl 0.9.1's Megatron worker learns as Hugging Face does, and resumes."""

from __future__ import annotations

import pytest
import torch
from megatron_tiny import Layout, make_batch, make_checkpoint
from mindspeed_tree import MINDSPEED, needs_mindspeed
from ranks import run_ranks
from test_megatron import as_numpy, as_torch, exported, log_probs, make_worker, on_disk, update
from test_megatron_actor import reference

OVERRIDE = "+actor_rollout_ref.actor.megatron.override_transformer_config"
OVERLAP = (
    f"{OVERRIDE}.use_flash_attn=True",
    f"{OVERRIDE}.moe_alltoall_overlap_comm=True",
    f"+{OVERRIDE}.moe_token_dispatcher_type=alltoall",
    f"+{OVERRIDE}.moe_grouped_gemm=True",
)


def weights(worker) -> dict:
    return as_numpy({name: tensor.cpu() for name, tensor in exported(worker).items()})


def overlapping(rank: int, path, directory) -> dict:
    worker, batch = make_worker(Layout("moe", ep=2), path, *OVERLAP), make_batch()
    layers = worker.actor.engine.module[0].module.decoder.layers
    assert all("weight1" in dict(layer.mlp.experts.named_parameters()) for layer in layers)
    found = {"loaded": weights(worker), "log_probs": log_probs(worker, batch).cpu().numpy()}
    found["norm"] = update(worker, batch)
    saved = weights(worker)
    worker.save_checkpoint(str(directory))
    norm = update(worker, batch)
    worker.load_checkpoint(str(directory))
    found["resumed"] = all((tensor == saved[name]).all() for name, tensor in weights(worker).items())
    found["again"] = update(worker, batch) == norm
    return found | {"changed": any((found["loaded"][name] != saved[name]).any() for name in saved)}


@needs_mindspeed
def test_it_computes_learns_and_resumes(tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM")
    path = make_checkpoint("moe", tmp_path / "moe", layers=2)
    first, norms, _ = reference(path, make_batch())
    disk = on_disk(path)
    for found in run_ranks(2, overlapping, path, tmp_path / "saved", stubs=(MINDSPEED,), npu=True):
        loaded = as_torch(found["loaded"])
        assert loaded.keys() == disk.keys() and all(torch.equal(loaded[name], disk[name]) for name in disk)
        assert (torch.from_numpy(found["log_probs"]) - first).abs().max() < 1e-5
        assert found["norm"] == pytest.approx(norms[0], rel=1e-5)
        assert found["changed"] and found["resumed"] and found["again"]

"""verl gives a sign of progress for each response and each micro-batch; the launcher watches for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from counting_servers import PROMPTS, make_manager, rollout
from megatron_tiny import Layout, make_batch, make_checkpoint, make_worker, own_share
from patched.test_compute_old_log_prob import fsdp_worker
from ranks import run_ranks

from ascend_rl.process.progress import FILE


def test_each_response_is_a_sign(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv(FILE, str(tmp_path / "progress"))
    (tmp_path / "progress").touch()
    rollout(make_manager(tiny / "model"))
    assert (tmp_path / "progress").stat().st_size == len(PROMPTS)


def signs_and_forwards(rank: int, layout, path: str, place: str) -> tuple[int, int]:
    """Of a pass for log-probs and an update, on one rank."""
    worker = make_worker(layout, path) if layout else fsdp_worker(path)
    os.environ[FILE] = f"{place}/{rank}"
    Path(os.environ[FILE]).touch()
    place_of = () if layout else (rank, torch.distributed.get_world_size())
    forwards: list[int] = []
    model = worker.actor_module[0] if layout else worker.actor_module_fsdp
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    share = own_share(make_batch(), *place_of)
    log_probs = worker.compute_log_prob(own_share(make_batch(), *place_of)).batch["old_log_probs"]
    share.batch["old_log_probs"] = log_probs
    worker.update_actor(share)
    return Path(os.environ[FILE]).stat().st_size, len(forwards)


@pytest.mark.parametrize("layout", [None, Layout(pp=2)], ids=str)
def test_each_micro_batch_is_a_sign(tmp_path, layout):
    path = make_checkpoint(layout.kind if layout else "dense", tmp_path / "model")
    for signs, forwards in run_ranks(2, signs_and_forwards, layout, str(path), str(tmp_path)):
        assert signs == forwards > 2

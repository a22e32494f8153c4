"""verl 0.9.1's Megatron worker with MindSpeed on software NPUs, if MindSpeed is there: git alone has it."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from megatron_tiny import Layout, make_batch, make_checkpoint, worker_config
from ranks import run_ranks
from test_megatron import as_numpy, as_torch, exported, log_probs, make_worker, on_disk, update
from test_megatron_actor import reference

from ascend_rl.settings import stack

pytestmark = pytest.mark.long

MINDSPEED = stack.DIRECTORY / "frameworks/mindspeed"
OVERRIDE = "+actor_rollout_ref.actor.megatron.override_transformer_config"
FLASH = f"{OVERRIDE}.use_flash_attn=True"
SWAP = (
    f"{OVERRIDE}.swap_optimizer=True",
    f"{OVERRIDE}.swap_optimizer_times=4",
    f"{OVERRIDE}.use_distributed_optimizer=True",
    "actor_rollout_ref.actor.megatron.dtype=bfloat16",
    # Rates that differ from step to step, so that a step with the rate of another shows.
    "actor_rollout_ref.actor.optim.lr_warmup_steps=4",
    "actor_rollout_ref.actor.optim.lr_decay_style=linear",
)
LAYOUTS = [
    Layout("qwen2"), Layout(tp=2), Layout(pp=2), Layout(cp=2), Layout("moe", ep=2), Layout("moe", tp=2, ep=2)
]  # fmt: skip
EXPERTS = {"npu_grouped_matmul", "npu_moe_token_permute_with_routing_map", "_sort_chunks_by_map_kernel"}
needs_mindspeed = pytest.mark.skipif(not (MINDSPEED / "mindspeed").is_dir(), reason=f"{MINDSPEED} is absent")


def learn_on_npus(rank: int, layout: Layout, path) -> tuple:
    from software_npu.kernels.training import calls

    asked = set()

    class Lazy(types.ModuleType):
        def __getattr__(self, name: str):
            asked.add(name)
            raise AttributeError(name)

    sys.modules["lazy"] = Lazy("lazy")
    options = (FLASH, f"{OVERRIDE}.moe_permute_fusion=True") if layout.ep > 1 else (FLASH,)
    worker, batch = make_worker(layout, path, *options), make_batch()
    assert type(worker.actor.engine).__name__ == "MindspeedEngineWithLMHead"
    before = log_probs(worker, batch).cpu().numpy()
    weights = as_numpy({name: tensor.cpu() for name, tensor in exported(worker).items()})
    return before, weights, update(worker, batch), set(calls), asked


@needs_mindspeed
def test_mindspeed_computes_and_learns_as_hugging_face(tmp_path, monkeypatch):
    """Each layout in processes of its own, as in a run: MindSpeed keeps the sizes and groups of the first."""
    monkeypatch.delenv("VERL_PLATFORM")  # verl finds the NPUs
    paths = {kind: make_checkpoint(kind, tmp_path / kind) for kind in ("dense", "moe", "qwen2")}
    expected = {kind: (*reference(path, make_batch())[:2], on_disk(path)) for kind, path in paths.items()}
    for layout in LAYOUTS:
        first, norms, disk = expected[layout.kind]
        ranks = run_ranks(2, learn_on_npus, layout, paths[layout.kind], stubs=(MINDSPEED,), npu=True)
        for before, weights, norm, kernels, asked in ranks:
            assert (torch.from_numpy(before) - first).abs().max() < 1e-5, layout
            assert all(torch.equal(tensor, disk[name]) for name, tensor in as_torch(weights).items()), layout
            assert norm in (None, pytest.approx(norms[0], rel=1e-5)), layout
            assert {"npu_fusion_attention", "npu_rms_norm"} <= kernels, layout
            assert layout.kind != "moe" or EXPERTS <= kernels, layout
            assert layout.cp == 1 or "npu_fusion_attention_grad" in kernels, layout  # of the ring
            assert "TERowParallelLinear" not in asked  # of what MindSpeed patches
        assert any(norm for _, _, norm, *_ in ranks), layout


def bytes_on_device(worker) -> int:
    """Of float32 weights and moments."""
    optimizer = worker.actor.engine.optimizer
    total = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for weight in (weight for group in part.shard_fp32_from_float16_groups for weight in group):
            state = part.optimizer.state[weight]
            kept = (weight, state["exp_avg"], state["exp_avg_sq"])
            total += sum(tensor.untyped_storage().nbytes() for tensor in kept)
    return total


def swapped(rank: int, layout: Layout, path, directory, resume: bool) -> dict:
    """Two updates and a save, or a load; then an update."""
    from verl.workers.engine.mindspeed.transformer_impl import _mindspeed_repatch

    _mindspeed_repatch(worker_config(layout, path, FLASH, *SWAP).actor.megatron)  # as for a reference
    worker = make_worker(layout, path, FLASH, *SWAP)
    if resume:
        worker.load_checkpoint(str(directory), del_local_after_load=False)
    else:
        for _ in range(2):
            update(worker, make_batch())
    weights = {name: tensor.float().cpu().numpy() for name, tensor in exported(worker).items()}
    if not resume:
        worker.save_checkpoint(str(directory), global_step=2)
    norm, left = update(worker, make_batch()), bytes_on_device(worker)
    learned = {name: tensor.float().cpu().numpy() for name, tensor in exported(worker).items()}
    return {"weights": weights, "norm": norm, "left": left, "learned": learned}


@needs_mindspeed
def test_the_step_after_a_load_of_the_swapped_optimizer_is_that_after_the_save(tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM")
    layout, path = Layout("moe", ep=2), make_checkpoint("moe", tmp_path / "moe", layers=2)
    first, second = (
        run_ranks(2, swapped, layout, path, tmp_path / "saved", resume, stubs=(MINDSPEED,), npu=True)
        for resume in (False, True)
    )
    for went_on, resumed in zip(first, second, strict=True):
        assert went_on["left"] == resumed["left"] == 0
        assert went_on["norm"] == resumed["norm"]
        for name, weight in went_on["learned"].items():
            assert (went_on["weights"][name] == resumed["weights"][name]).all(), name
            assert (weight == resumed["learned"][name]).all(), name
        assert any((weight != went_on["weights"][name]).any() for name, weight in went_on["learned"].items())

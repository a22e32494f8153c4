"""verl's Megatron path on megatron-core 0.12.1 computes the same as Hugging Face in every layout, on a CPU.

Weights go Hugging Face -> mbridge -> megatron-core -> Hugging Face's names (both of verl's exports) bit for
bit; log-probs of verl's worker agree within 1e-5. The layouts take turns in the same processes, which are
slow to start.
"""

from __future__ import annotations

import pytest
import torch
from megatron_tiny import (
    Layout,
    exported,
    hugging_face,
    make_batch,
    make_checkpoint,
    make_worker,
    own_share,
    response_log_probs,
)
from ranks import run_ranks

from ascend_rl.weights.reshard import Train

LAYOUTS = {
    1: [Layout(), Layout("moe")],
    4: [
        Layout(),
        Layout(tp=2),
        Layout(pp=2),
        Layout(cp=2),
        Layout(tp=2, pp=2),
        Layout(tp=2, cp=2),
        Layout(pp=2, cp=2),
        Layout(tp=4),
        Layout(pp=4),
        Layout(cp=4),
        Layout("moe"),
        Layout("moe", ep=2),
        Layout("moe", ep=4),
        Layout("moe", tp=2, ep=2),
        Layout("moe", tp=2, ep=4),
        Layout("moe", pp=2, ep=2),
        Layout("moe", cp=2, ep=2),
        Layout("moe", cp=2, ep=4),
        Layout("moe", tp=2, pp=2, ep=2),
        Layout("moe", pp=4),
    ],
}


def forward_in(rank: int, layouts: list[Layout], paths: dict) -> list[tuple[float, list[str], list[str]]]:
    """For each layout: the worst log-prob error, and the weights that differ after verl's two ways of
    export."""
    from megatron.core import parallel_state
    from verl.models.mcore import get_mcore_weight_converter
    from verl.utils.megatron_utils import per_tensor_generator

    batch, results = make_batch(), []
    references = {kind: hugging_face(path) for kind, path in paths.items()}
    for layout in layouts:
        reference = references[layout.kind]
        worker = make_worker(layout, paths[layout.kind])
        if layout.kind == "moe":
            train = Train(torch.distributed.get_world_size(), layout.ep, ((),) * layout.pp)
            assert train.place(rank) == (
                parallel_state.get_pipeline_model_parallel_rank(),
                parallel_state.get_expert_model_parallel_rank(),
            )
        by_bridge = exported(worker)
        converter = get_mcore_weight_converter(worker.hf_config, torch.float32)
        by_verl = {
            name: tensor.clone().cpu()
            for name, tensor in per_tensor_generator(
                worker.actor_module, worker.hf_config, converter, worker.tf_config, worker.layer_name_mapping
            )
        }
        with torch.no_grad():
            share = own_share(batch | {"expected": response_log_probs(reference, batch)})
        got = worker.compute_log_prob(share).batch["old_log_probs"]
        error = (got - share.batch["expected"]).abs().max().item()
        results.append(
            (error, *(different(reference.state_dict(), weights) for weights in (by_bridge, by_verl)))
        )
    return results


def different(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in expected.keys() | got.keys()
        if name not in got or name not in expected or not torch.equal(expected[name], got[name])
    ]


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.weekly)])
def test_every_layout_equals_hugging_face(world, tmp_path):
    paths = {kind: make_checkpoint(kind, tmp_path / kind) for kind in ("dense", "moe")}
    for rank, results in enumerate(run_ranks(world, forward_in, LAYOUTS[world], paths)):
        for layout, (error, *wrong_names) in zip(LAYOUTS[world], results, strict=True):
            assert error <= 1e-5, f"{layout}, rank {rank}: log-probs are off by {error}"
            assert wrong_names == [[], []], f"{layout}, rank {rank}"
            print(f"{layout} of {world}, rank {rank}: {error:.1e}")

"""verl exports a model that keeps its experts as weight1/weight2 under Hugging Face's names, bit for bit.

verl's actor worker does everything: it builds the model with megatron-core's GroupedMLP, loads the
converter's checkpoint without mbridge, computes log-probs, and exports as for the weight sync. The oracle is
Hugging Face. With mbridge, verl refuses the layout while it reads the configuration.
"""

from __future__ import annotations

import pytest
import torch
from megatron_tiny import (
    Layout,
    hugging_face,
    make_batch,
    make_checkpoint,
    make_worker,
    own_share,
    response_log_probs,
)
from ranks import run_ranks

from ascend_rl.weights import converter

ACTOR = "actor_rollout_ref.actor.megatron"
LAYOUTS = [
    Layout("moe"),
    Layout("moe", ep=2),
    Layout("moe", tp=2),
    Layout("moe", tp=2, ep=2),
    Layout("moe", tp=2, etp=2),
    Layout("moe", pp=2),
]


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv("USE_ALLTOALL_OVERLAP", "1")


def test_mbridge_is_refused_before_anything_is_built(monkeypatch):
    from hydra import compose, initialize_config_module

    from verl.utils.config import omega_conf_to_dataclass

    def actor(*overrides: str):
        with initialize_config_module("verl.trainer.config", version_base=None):
            sizes = (
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
                "actor_rollout_ref.rollout.n=1",
            )
            config = compose("ppo_megatron_trainer", overrides=[*sizes, *overrides])
        return omega_conf_to_dataclass(config.actor_rollout_ref.actor)  # as verl's validate_config does first

    with pytest.raises(Exception, match=r"mbridge can neither load nor export .* set megatron.use_mbridge="):
        actor()
    assert not actor(f"{ACTOR}.use_mbridge=False").megatron.use_mbridge
    monkeypatch.setenv("USE_ALLTOALL_OVERLAP", "0")
    assert actor().megatron.use_mbridge


def export_in(rank: int, layouts: list[Layout], path, mcore) -> list[tuple[float, list[str]]]:
    """For each layout: the worst log-prob error, and the exported weights that differ from Hugging Face's."""
    from verl.utils.megatron_utils import per_tensor_generator

    options = (
        f"{ACTOR}.use_mbridge=False",
        f"{ACTOR}.use_dist_checkpointing=True",
        f"{ACTOR}.dist_checkpointing_path={mcore}",
        f"+{ACTOR}.override_transformer_config.moe_use_legacy_grouped_gemm=True",
        f"+{ACTOR}.override_transformer_config.use_cpu_initialization=True",  # else verl asks for cpu:cpu
    )
    model, batch, results = hugging_face(path), make_batch(), []
    weights = model.state_dict()
    for layout in layouts:
        worker = make_worker(layout, path, *options)
        names = [name for module in worker.actor_module for name, _ in module.named_parameters()]
        assert sum(name.endswith("mlp.experts.weight1") for name in names) == 4 // layout.pp
        exported = {
            name: tensor.clone().cpu()
            for name, tensor in per_tensor_generator(
                worker.actor_module,
                worker.hf_config,
                worker.weight_converter,
                worker.tf_config,
                worker.layer_name_mapping,
            )
        }
        wrong = exported.keys() ^ weights.keys()
        wrong |= {n for n in exported.keys() - wrong if not torch.equal(exported[n], weights[n])}
        error = 0.0
        if layout.etp == 1:  # the forward pass of expert tensor parallelism needs collectives that gloo lacks
            with torch.no_grad():
                share = own_share(batch | {"expected": response_log_probs(model, batch)})
            got = worker.compute_log_prob(share).batch["old_log_probs"]
            error = (got - share.batch["expected"]).abs().max().item()
        results.append((error, sorted(wrong)))
    return results


def test_the_actor_exports_what_the_converter_read(tmp_path):
    path = make_checkpoint("moe", tmp_path / "moe")
    options = converter.Options(quiet=True, layout="grouped", ep_size=2)
    converter.to_mcore(path, tmp_path / "mcore", options)
    for rank, results in enumerate(run_ranks(2, export_in, LAYOUTS, path, tmp_path / "mcore")):
        for layout, (error, wrong) in zip(LAYOUTS, results, strict=True):
            assert wrong == [], f"{layout}, rank {rank}"
            assert error <= 1e-5, f"{layout}, rank {rank}: log-probs are off by {error}"
            print(f"{layout}, rank {rank}: {error:.1e}")

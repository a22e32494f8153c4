"""verl's actors without the forward pass for old log-probs: the same updates, bit for bit, in fewer passes.

Real FSDP and Megatron workers on 2 ranks, and verl's own training loop, plain and with dynamic sampling.
"""

from __future__ import annotations

import pytest
import torch
from megatron_tiny import Layout, exported, make_batch, make_checkpoint, make_worker, own_share
from ranks import run_ranks
from training_stage import FILTER, Stage, train

ACTOR = "actor_rollout_ref.actor"
OFF = f"{ACTOR}.compute_old_log_prob=False"
EXPERTS = 8
ONE_UPDATE = f"{ACTOR}.ppo_mini_batch_size=4"
REFUSED = {
    f"{ACTOR}.ppo_epochs": "2",
    f"{ACTOR}.ppo_mini_batch_size": "2",
    f"{ACTOR}.router_replay.mode": "R2",
    f"{ACTOR}.use_rollout_log_probs": "True",
    "algorithm.use_kl_in_reward": "True",
    "algorithm.adv_estimator": "optimal_token_baseline",
    "algorithm.rollout_correction.bypass_mode": "True",
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_rs": "seq_mean_k1",
    "trainer.use_legacy_worker_impl": "disable",
}


@pytest.mark.parametrize("key", REFUSED)
def test_settings_that_need_the_pass_are_refused_at_the_start(tmp_path, monkeypatch, key):
    where = "algorithm.rollout_correction" if key.endswith(("rollout_is", "rollout_rs")) else key
    with pytest.raises(ValueError, match=f"{OFF} is incompatible with this configuration:\n  {where}: "):
        train(tmp_path, ONE_UPDATE, OFF, f"++{key}={REFUSED[key]}", monkeypatch=monkeypatch)


def fsdp_worker(path, *overrides: str):
    from hydra import compose, initialize_config_module

    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={path}",
                "actor_rollout_ref.model.use_remove_padding=False",
                "actor_rollout_ref.model.enable_gradient_checkpointing=False",
                "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.n=1",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
                f"{ACTOR}.fsdp_config.dtype=float32",
                f"{ACTOR}.fsdp_config.model_dtype=float32",
                f"{ACTOR}.ppo_mini_batch_size=8",
                f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
                f"{ACTOR}.use_torch_compile=False",
                f"{ACTOR}.optim.lr=1e-2",
                f"{ACTOR}.optim.total_training_steps=100",
                *overrides,
            ],
        )
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


GSPO = f"{ACTOR}.policy_loss.loss_mode=gspo"
ENTROPY = f"{ACTOR}.calculate_entropy=True"
R3 = f"{ACTOR}.router_replay.mode=R3"
BY_TOKENS = (
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=64",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=64",
)
CASES = {  # layout (None: FSDP), overrides, overrides without the pass
    "fsdp": (None, (), (ENTROPY,)),
    "fsdp gspo": (None, (GSPO, f"{ACTOR}.entropy_coeff=0.01"), ()),
    "megatron gspo pp2": (Layout(pp=2), (GSPO,), ()),
    "megatron tp2 by tokens": (Layout(tp=2), BY_TOKENS, (ENTROPY,)),
    "moe replay": (Layout("moe", ep=2), (R3,), ()),
}


def two_updates(layout, path, overrides, recompute: bool) -> dict:
    """Weights, gradient norms and metrics after two updates, and how many forwards of the model they took."""
    worker = make_worker(layout, path, *overrides) if layout else fsdp_worker(path, *overrides)
    batch = make_batch()

    def share_of(batch):
        if layout:
            return own_share(batch)
        return own_share(batch, torch.distributed.get_rank(), torch.distributed.get_world_size())

    if R3 in overrides:
        generator = torch.Generator().manual_seed(1)
        shape = (*batch["input_ids"].shape, worker.tf_config.num_layers)
        batch["routed_experts"] = torch.rand(*shape, EXPERTS, generator=generator).topk(2).indices
    model = worker.actor_module[0] if layout else worker.actor_module_fsdp
    forwards, steps, refused = [], [], None
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    for _ in range(2):
        share = share_of(batch)
        if recompute:
            share.batch["old_log_probs"] = worker.compute_log_prob(share_of(batch)).batch["old_log_probs"]
        steps.append(worker.update_actor(share).meta_info["metrics"])
    if not recompute:
        with pytest.raises(ValueError) as refused:
            worker.update_actor(share_of({k: torch.cat([v, v]) for k, v in batch.items()}))
    if layout:
        weights = exported(worker)
    else:
        weights = {
            k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()
        }
    return {
        "weights": {k: v.detach().clone().numpy() for k, v in weights.items()},
        "norms": [step["actor/grad_norm"] for step in steps],
        "metrics": {k: v for k, v in steps[-1].items() if k.startswith("actor/")},
        "forwards": len(forwards),
        "refused": refused and str(refused.value),
    }


def workers(rank: int, paths: dict) -> dict:
    results = {}
    for name, (layout, overrides, further) in CASES.items():
        path = paths[layout.kind if layout else "dense"]
        results[name, True] = two_updates(layout, path, overrides, recompute=True)
        results[name, False] = two_updates(layout, path, (*overrides, *further, OFF), recompute=False)
    layout = CASES["moe replay"][0]
    results["moe", False] = two_updates(layout, paths["moe"], (OFF,), recompute=False)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    paths = {kind: make_checkpoint(kind, directory / kind, layers=2) for kind in ("dense", "moe")}
    return run_ranks(2, workers, paths)


@pytest.mark.parametrize("name", CASES)
def test_updates_are_the_same_bit_for_bit_with_fewer_forwards(ranks, name):
    for results in ranks:
        on, off = results[name, True], results[name, False]
        assert on["norms"] == off["norms"] and on["norms"][0] != on["norms"][1]
        assert all((value == off["weights"][key]).all() for key, value in on["weights"].items())
        assert off["forwards"] * 2 == on["forwards"] > 0
        assert on["metrics"].get("actor/pg_loss") == off["metrics"].get("actor/pg_loss")


def test_the_replayed_routing_is_trained(ranks):
    """Else the equality above would say nothing of router replay."""
    free, replayed = (ranks[0][name, False]["norms"] for name in ("moe", "moe replay"))
    assert free != replayed


@pytest.mark.parametrize("name", ["fsdp", "megatron tp2 by tokens"])
def test_the_entropy_is_reported_on_request(ranks, name):
    assert "actor/entropy" not in ranks[0]["moe", False]["metrics"]
    entropy = ranks[0][name, False]["metrics"]["actor/entropy"]
    assert entropy and all(0 < value < 4.6 for value in entropy)  # log 96 = 4.56


@pytest.mark.parametrize("name", CASES)
def test_an_actor_refuses_a_second_update(ranks, name):
    refused = ranks[0][name, False]["refused"]
    assert refused.startswith(
        f"{OFF} is incompatible with this configuration:\n  it allows one update per step, but "
    )


class Listening(Stage):
    """The stage of test_dapo.py, which also notes who asks for or gets old log-probs."""

    def compute_log_prob(self, batch):
        self.events.append(("old_log_prob",))
        return super().compute_log_prob(batch)

    def update_actor(self, batch):
        self.events.append(("brought", "old_log_probs" in batch.batch))
        return super().update_actor(batch)


@pytest.mark.parametrize("options", [[], FILTER], ids=["grpo", "dapo"])
def test_the_trainer_leaves_the_pass_out(tmp_path, monkeypatch, options):
    monkeypatch.setattr("training_stage.Stage", Listening)
    on, logged = train(tmp_path / "on", ONE_UPDATE, *options, monkeypatch=monkeypatch)
    off, logged_off = train(tmp_path / "off", ONE_UPDATE, OFF, *options, monkeypatch=monkeypatch)
    assert on.count(("old_log_prob",)) == on.count(("brought", True)) == 5
    assert off.count(("old_log_prob",)) == off.count(("brought", True)) == 0
    skipped = [("old_log_prob",), ("brought", True), ("brought", False)]
    assert [e for e in on if e not in skipped] == [e for e in off if e not in skipped]  # the rest is the same
    assert any("timing_s/old_log_prob" in row for row in logged)
    assert not any("timing_s/old_log_prob" in row for row in logged_off)

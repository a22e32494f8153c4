"""Which settings need separate old log-probs, and what the actor reads without them."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from ascend_rl.loss import old_log_prob
from ascend_rl.loss.old_log_prob import SWITCH, leave_out, old_log_prob_of, recompute, reports_entropy
from ascend_rl.settings.switch import CannotWork

ACTOR = "actor_rollout_ref.actor"
OFF = {"compute_old_log_prob": False, "ppo_mini_batch_size": 4, "ppo_epochs": 1}


def configuration(**changes):
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": {**OFF, "ppo_mini_batch_size": 32}},
            "algorithm": {"use_kl_in_reward": False, "adv_estimator": "grpo"},
            "data": {"train_batch_size": 32},
            "trainer": {},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


NEEDED = {  # key to change: value, key that is named where it differs
    f"{ACTOR}.ppo_epochs": (2, None),
    f"{ACTOR}.ppo_mini_batch_size": (16, None),
    f"{ACTOR}.use_rollout_log_probs": (True, None),
    f"{ACTOR}.router_replay.mode": ("R2", None),
    "algorithm.use_kl_in_reward": (True, None),
    "algorithm.adv_estimator": ("tir_optimal_token_baseline", None),
    "algorithm.rollout_correction.bypass_mode": (True, None),
    "algorithm.rollout_correction.rollout_is": ("token", "algorithm.rollout_correction"),
    "algorithm.rollout_correction.rollout_rs": ("token", "algorithm.rollout_correction"),
    "trainer.use_legacy_worker_impl": ("disable", None),
}


@pytest.mark.parametrize("key", NEEDED)
def test_settings_that_need_them_are_refused_by_name(key):
    value, named = NEEDED[key]
    config = configuration(**{key: value})
    assert [found for found, _ in old_log_prob.problems(config)] == [named or key]
    with pytest.raises(
        CannotWork, match=f"{SWITCH}=False is incompatible with this configuration:\n  {named or key}: "
    ):
        recompute(config)
    config.actor_rollout_ref.actor.compute_old_log_prob = True
    assert recompute(config)  # with the pass, all of them work


def test_all_reasons_are_given_together():
    config = configuration(**{key: value for key, (value, _) in NEEDED.items()})
    with pytest.raises(CannotWork) as refused:
        recompute(config)
    assert len(str(refused.value).splitlines()) == 1 + len(NEEDED) - 1  # rollout_is and rollout_rs are one


@pytest.mark.parametrize("changes", [
    {}, {f"{ACTOR}.router_replay.mode": "R3"}, {"algorithm.rollout_correction.rollout_is": None},
    {"algorithm.rollout_correction": None}, {"trainer.use_legacy_worker_impl": "auto"},
    {f"{ACTOR}.ppo_mini_batch_size": 8, "data.train_batch_size": 8},
])  # fmt: skip
def test_one_update_a_step_works_without_them(changes):
    assert recompute(configuration(**changes)) is False
    config = configuration(**changes)
    del config.actor_rollout_ref.actor.compute_old_log_prob
    assert recompute(config) is True  # the default


def test_the_actor_reads_no_old_log_probs_for_one_update():
    keys = ["responses", "old_log_probs", "advantages"]
    for rows in (1, 4):
        assert leave_out(keys, OFF, rows) == ["responses", "advantages"]
    for actor in ({}, OFF | {"compute_old_log_prob": True}):
        assert leave_out(keys, actor, 99) == keys


@pytest.mark.parametrize(
    ("rows", "changes"), [(5, {}), (4, {"ppo_epochs": 2}), (4, {"ppo_mini_batch_size": 3})]
)
def test_the_actor_refuses_a_second_update(rows, changes):
    with pytest.raises(CannotWork, match=f"one update per step, but {rows} rows .* set it to True"):
        leave_out(["old_log_probs"], OFF | changes, rows)


def test_old_log_probs_are_those_trained_without_gradient():
    log_prob, brought = torch.tensor([[-1.0, -2.0]], requires_grad=True), torch.tensor([[-3.0, -4.0]])
    old = old_log_prob_of({}, log_prob, OFF)
    assert torch.equal(old, log_prob) and not old.requires_grad
    for actor in ({}, OFF | {"compute_old_log_prob": True}):
        assert old_log_prob_of({"old_log_probs": brought}, log_prob, actor) is brought


@pytest.mark.parametrize(("actor", "reported"), [
    (OFF | {"calculate_entropy": True}, True), (OFF | {"calculate_entropy": False}, False), (OFF, False),
    ({"calculate_entropy": True}, False),
    ({"compute_old_log_prob": True, "calculate_entropy": True}, False),
])  # fmt: skip
def test_the_update_reports_the_entropy_if_nothing_else_does(actor, reported):
    assert reports_entropy(actor) is reported

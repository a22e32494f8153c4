"""Training without the forward pass for old log-probs (actor.compute_old_log_prob=False).

A policy-gradient loss compares the log-probs being trained with those of the policy before the step. With one
update per step the two are the same number: the trained log-prob without its gradient. The forward pass
that computes the old ones beforehand then wastes a fifth to a quarter of the training FLOPs.

Invariants (tests/patched/test_compute_old_log_prob.py): the update is the same with and without the pass,
bit for bit where both passes compute the same numbers; settings under which old and new log-probs differ, or
which read the old ones elsewhere, are refused before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ascend_rl.settings.switch import refuse

if TYPE_CHECKING:  # the linter, which takes a second, uses `problems`
    import torch

SWITCH = "actor_rollout_ref.actor.compute_old_log_prob"


def problems(config: Any) -> list[tuple[str, str]]:
    """Settings that need old log-probs of their own: (key, what is wrong and what to set instead).

    Args:
        config: verl's whole configuration, an OmegaConf node.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction, train = algorithm.get("rollout_correction") or {}, config.data.train_batch_size
    rules = [
        (actor.ppo_epochs != 1, "actor_rollout_ref.actor.ppo_epochs",
         f"{actor.ppo_epochs}: the second epoch is off-policy; use 1"),
        (actor.ppo_mini_batch_size != train, "actor_rollout_ref.actor.ppo_mini_batch_size",
         f"{actor.ppo_mini_batch_size} of data.train_batch_size={train}; use one mini-batch a step"),
        (algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward",
         "reads old log-probs; use the KL term of the loss (use_kl_loss)"),
        (str(algorithm.adv_estimator).endswith("optimal_token_baseline"), "algorithm.adv_estimator",
         f"{algorithm.adv_estimator} reads old log-probs; use grpo, or another that needs rewards only"),
        (correction.get("bypass_mode"), "algorithm.rollout_correction.bypass_mode",
         "True already takes the rollout's log-probs for old ones; leave compute_old_log_prob at True"),
        (correction.get("rollout_is") or correction.get("rollout_rs"), "algorithm.rollout_correction",
         "compares old log-probs with the rollout's; set rollout_is and rollout_rs to null"),
        (actor.get("use_rollout_log_probs"), "actor_rollout_ref.actor.use_rollout_log_probs",
         "True takes the rollout's log-probs for old ones; leave compute_old_log_prob at True"),
        (actor.get("router_replay", {}).get("mode") == "R2", "actor_rollout_ref.actor.router_replay.mode",
         "R2 records the routing in the pass that is left out; use disabled"),
        (config.trainer.get("use_legacy_worker_impl") == "disable", "trainer.use_legacy_worker_impl",
         "disable: engine workers always compute old log-probs; use auto"),
    ]  # fmt: skip
    return [(key, message) for applies, key, message in rules if applies]


def recompute(config: Any) -> bool:
    """Whether the trainer is to compute old log-probs; refuses incompatible settings before models are
    loaded.

    Raises:
        CannotWork: naming the settings and what to set instead.
    """
    if config.actor_rollout_ref.actor.get("compute_old_log_prob", True):
        return True
    check(config)
    return False


def check(config: Any) -> None:
    """Refuse settings that need the pass, naming each and what to set instead."""
    refuse(f"{SWITCH}=False", (f"{key}: {text}" for key, text in problems(config)))


def leave_out(keys: list[str], actor: Mapping[str, Any], rows: int) -> list[str]:
    """What the actor reads of its batch: ``keys``, without old log-probs where it computes none.

    Args:
        actor: the actor's configuration; its ppo_mini_batch_size counts rows of one rank.
        rows: of this rank's batch.

    Raises:
        CannotWork: the batch is more than one update.
    """
    if actor.get("compute_old_log_prob", True):
        return keys
    size, epochs = actor.get("ppo_mini_batch_size"), actor.get("ppo_epochs")
    if rows > size or epochs != 1:
        updates = f"{rows} rows on a rank are trained in mini-batches of {size} and {epochs} epochs"
        refuse(f"{SWITCH}=False", [f"it allows one update per step, but {updates}; set it to True"])
    return [key for key in keys if key != "old_log_probs"]


def old_log_prob_of(
    micro_batch: Mapping[str, torch.Tensor], log_prob: torch.Tensor, actor: Mapping[str, Any]
) -> torch.Tensor:
    """Old log-probs of a micro-batch: those it brings, or the trained ones without gradient: [B, T]."""
    return micro_batch["old_log_probs"] if actor.get("compute_old_log_prob", True) else log_prob.detach()


def reports_entropy(actor: Mapping[str, Any]) -> bool:
    """Whether the update has to report the entropy, as the pass that is left out would have done."""
    return not actor.get("compute_old_log_prob", True) and bool(actor.get("calculate_entropy"))

"""GSPO's objectives (loss/gspo.py) in verl's registry of policy losses, in place of verl's own ``gspo``."""

from __future__ import annotations

from typing import Any

import torch

import verl.utils.torch_functional as verl_F
from ascend_rl.loss import gspo
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss


@register_policy_loss("gspo")
@register_policy_loss("gspo_token")
def compute_policy_loss_gspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss and metrics of a micro-batch.

    Args:
        old_log_prob, log_prob, advantages, response_mask, rollout_is_weights: [B, T].
        loss_agg_mode: of verl's `agg_loss`; GSPO's is seq-mean-token-mean.
        config: verl's ActorConfig.
    """
    low, high = (
        config.clip_ratio if given is None else given
        for given in (config.clip_ratio_low, config.clip_ratio_high)
    )
    losses, statistics = gspo.policy_losses(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        clip_ratio_low=low,
        clip_ratio_high=high,
        token_level=config.policy_loss.loss_mode == "gspo_token",
    )
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    batch_info = gspo.sizes(response_mask) | {"loss_scale_factor": config.loss_scale_factor}
    loss = agg_loss(losses, response_mask, loss_agg_mode, **(batch_info | config.global_batch_info))
    kl = -verl_F.masked_mean(gspo.log_ratios(log_prob, old_log_prob), response_mask).item()
    return loss, {"actor/ppo_kl": kl, **gspo.sequence_metrics(statistics)}

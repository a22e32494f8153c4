"""Every sequence of a mini-batch weighs what it weighs in one loss over all of them, however they are split.

verl's FSDP and Megatron actors take a loss of each micro-batch and average: over the micro-batches (FSDP: by
their rows) and over the data-parallel (DP) ranks. Each micro-batch divides by its own tokens or sequences.
Micro-batches by tokens hold few long or many short sequences, so a long one weighs several times as much as a
short one, and a setting of speed (token budget, ranks, HDP) changes what is optimised.

Idea: before a mini-batch's micro-batches, one sum over the DP ranks counts its tokens and sequences. Every
micro-batch then divides by these counts; ``dp_size`` undoes the averages. These are verl's own parameters of
``agg_loss`` (``global_batch_info``), which its engine workers set and its actors leave empty.

Invariants (tests/test_whole_batch_loss.py, tests/patched/test_whole_batch_loss.py): the mean over
micro-batches and ranks equals `agg_loss` of the whole mini-batch, and so do gradients, for every
``loss_agg_mode``; a mini-batch without tokens has loss 0.
Cost: one all-reduce of four integers per mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ascend_rl.settings.switch import refuse

COUNTS_EMPTY = ("gspo", "gspo_token")  # losses whose denominator has the responses without tokens too


def check(actor: Mapping[str, Any]) -> None:
    """Refuse a loss that knows no counts, before models are loaded.

    Args:
        actor: verl's configuration of the actor.

    Raises:
        CannotWork: the loss divides by what a micro-batch holds, whatever it is told.
    """
    if not actor.get("whole_batch_loss"):
        return
    losses = actor.get("policy_loss") or {}
    if losses.get("loss_mode") == "geo_mean":
        message = "actor.policy_loss.loss_mode=geo_mean averages each micro-batch by itself: use another"
        refuse("actor_rollout_ref.actor.whole_batch_loss=True", [message])


def counts(response_mask: torch.Tensor, group: dist.ProcessGroup | None, device: Any) -> tuple[int, ...]:
    """Tokens, responses with tokens, responses, and ranks, over all ranks of ``group`` (None: all there are).

    Args:
        response_mask: [B, T], nonzero where a token counts.
    """
    mask = response_mask.bool()
    own = torch.tensor([mask.sum(), mask.any(-1).sum(), len(mask), 1], dtype=torch.int64)
    if dist.is_initialized():
        own = own.to(device)
        dist.all_reduce(own, group=group)
    return tuple(own.tolist())


def prepare(
    actor: Mapping[str, Any], response_mask: torch.Tensor, micro_batches: int, group: Any, device: Any
) -> dict[str, int]:
    """Make the policy loss of each micro-batch its part of the whole mini-batch's, by ``global_batch_info``.

    Args:
        actor: verl's configuration of the actor.
        response_mask: [B, T] of this rank's rows.
        micro_batches: how many they are split into; gradients are averaged over these and over ``group``.
        group: the ranks whose rows differ; None: all ranks.

    Returns:
        `agg_loss`'s arguments for other terms of the loss, such as KL and entropy; empty when switched off.
    """
    if not actor.get("whole_batch_loss"):
        return {}
    tokens, with_tokens, responses, ranks = counts(response_mask, group, device)
    info = {
        "dp_size": ranks * micro_batches,
        "batch_num_tokens": max(tokens, 1),
        "global_batch_size": max(with_tokens, 1),
    }
    all_count = actor["policy_loss"].get("loss_mode") in COUNTS_EMPTY
    actor["global_batch_info"].update(info | {"global_batch_size": responses} if all_count else info)
    return info


def scale(actor: Mapping[str, Any], upstream: float, micro_batches: int) -> float:
    """What the FSDP actor multiplies a micro-batch's loss by: `upstream`'s factor when switched off."""
    return 1 / micro_batches if actor.get("whole_batch_loss") else upstream

"""The load that EPLB of vllm-ascend balances: real tokens, without padding and dummy batches.

Problem: vllm-ascend 0.13.0 counts the rows that reach a rank's experts. Rows that pad a graph, or a DP rank
to the others, count as much as tokens, and so do the dummy batches of a rank without requests. MC2 cannot
leave them out: its x_active_mask is for ranks that all dispatch equally many rows.
Idea: each rank counts its own real rows by slot before it sends them; their sum over ranks is a slot's load.
Invariants (tests/patched/test_npu_eplb.py): a token counts once in each layer for each of its experts, with
every dispatch, in graphs too, whose mask is read at each replay. Cost: a layer adds one number per row and
expert; ranks gather the counts of all slots, once per round, instead of those of their own.
"""

from __future__ import annotations

from typing import Any

import torch


def real_rows(
    config: Any, context: Any, router_logits: torch.Tensor, mc2_mask: torch.Tensor | None, split: dict | None
) -> torch.Tensor:
    """[rows] which rows that a rank is about to dispatch are tokens that no other rank counts.

    Args:
        config: vLLM's FusedMoEConfig with vllm-ascend's groups.
        context: vllm-ascend's forward context.
        router_logits: [rows, experts] as prepared for the dispatch, like ``mc2_mask`` (None: not with MC2).
        split: its ``padded_hidden_states_shape`` was split over TP; None: AllGather, ranks have all rows.
    """
    rows, tp, dp = len(router_logits), config.tp_group, config.dp_group
    if mc2_mask is not None:
        return mc2_mask if len(mc2_mask) == rows else context.mc2_mask[:rows]
    if split is None:
        here = rows // dp.world_size
    else:
        here = split["padded_hidden_states_shape"][0] * (tp.world_size if context.sp_enabled else 1)
    real = context.mc2_mask[:here]  # what a graph can read
    if len(real) < here:  # more than MC2 takes, so no graph
        real = torch.arange(here, device=router_logits.device) < context.num_actual_tokens
    if split is not None:
        return real.tensor_split(tp.world_size)[tp.rank_in_group]
    mask = torch.zeros(rows, dtype=torch.bool, device=router_logits.device)
    if tp.rank_in_group == 0:
        mask[dp.rank_in_group * here :][:here].copy_(real)
    return mask


def count_rows(dispatched: Any, slots: torch.Tensor, real: torch.Tensor | None, count: int) -> None:
    """Puts this rank's real rows by slot in place of the rows that it has received; see `rows_by_slot`.

    Args:
        dispatched: vllm-ascend's TokenDispatchResult.
    """
    if real is not None:
        dispatched.group_list, dispatched.group_list_type = rows_by_slot(slots, real, count), 1


def rows_by_slot(slots: torch.Tensor, real: torch.Tensor, count: int) -> torch.Tensor:
    """[count] how many real rows are for each of all slots.

    Args:
        slots: [rows, experts of a token].
        real: [rows].
    """
    each = real[:, None].expand_as(slots).flatten().float()  # exact to 2^24 in a step
    load = torch.zeros(count, device=slots.device).index_add_(0, slots.flatten().long(), each)
    return load.long()


def of_slots(moe_load: torch.Tensor, load: torch.Tensor, rank: int) -> torch.Tensor:
    """The part of ``moe_load``, of all slots, that ``load`` is about: all, or those of this rank."""
    return moe_load if len(load) == len(moe_load) else moe_load[rank * len(load) :][: len(load)]

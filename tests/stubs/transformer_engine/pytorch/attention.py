"""Attention over packed sequences (``thd``) or a batch (``sbhd``), with context parallelism in a ring."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from .extra_state import ExtraState
from .ring_attention import RingAttention


class DotProductAttention(ExtraState, torch.nn.Module):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups,
        *,
        softmax_scale=None,
        attention_dropout=0.0,
        cp_group=None,
        cp_comm_type="p2p",
        **kwargs,
    ):
        super().__init__()
        assert attention_dropout == 0, "the models under test have none"
        self.scale = softmax_scale or kv_channels**-0.5
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"):
        self.cp_group = cp_group

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type,
        qkv_format="sbhd",
        cu_seqlens_q=None,
        cu_seqlens_q_padded=None,
        **packed,
    ):
        if qkv_format == "thd":
            bounds = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
            out = packed_attention(query, key, value, bounds.tolist(), self.scale, self.cp_group)
            return out.flatten(1)
        assert self.cp_group is None, "context parallelism needs packed sequences here"
        masked = {"attn_mask": ~attention_mask} if attn_mask_type == "arbitrary" else {"is_causal": True}
        out = attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), self.scale, **masked)
        return out.permute(2, 0, 1, 3).flatten(2)


def attend(query, key, value, scale, **masked):
    """[..., heads, tokens, channels]; ``key`` and ``value`` may have fewer heads."""
    return scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True, **masked)


def packed_attention(query, key, value, bounds: list[int], scale: float, group=None) -> torch.Tensor:
    """Causal attention within each sequence of a packed batch.

    Args:
        query, key, value: [tokens, heads, channels]. With context parallelism a rank holds, of each sequence
        cut into
            2 * CP chunks, chunks ``rank`` and ``2 * CP - 1 - rank``, one after the other.
        bounds: where the whole sequences begin and end, e.g. [0, 8, 24]; lengths are multiples of 2 * CP.
        group: ranks that share each sequence.

    Returns:
        [tokens, heads, channels] of this rank's tokens.
    """
    if group is not None and dist.get_world_size(group) > 1:
        return RingAttention.apply(query, key, value, bounds, scale, group)
    out = []
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        own = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        out.append(attend(*own, scale, is_causal=True).transpose(0, 1))
    return torch.cat(out)

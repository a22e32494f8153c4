"""The kernels that MindSpeed calls, in plain torch, with the arguments it uses."""

from __future__ import annotations

import functools
from collections import Counter
from itertools import pairwise

import torch
from torch.nn.functional import silu

__all__ = [
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_gmm",
    "npu_grouped_matmul",
    "npu_rms_norm",
    "npu_rotary_position_embedding",
    "npu_swiglu",
]
calls: Counter[str] = Counter()


def counted(kernel):
    @functools.wraps(kernel)
    def call(*args, **kwargs):
        calls[kernel.__name__] += 1
        return kernel(*args, **kwargs)

    return call


@counted
def npu_fusion_attention(
    query,
    key,
    value,
    head_num,
    input_layout,
    *,
    atten_mask=None,
    scale=1.0,
    sparse_mode=0,
    keep_prob=1.0,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    **ignored,
):
    """Attention within each packed sequence; causal at the right end (sparse modes 2 and 3) where masked.

    Args:
        query: [tokens, heads, channels]; ``key`` and ``value`` may have fewer heads.
        actual_seq_qlen, actual_seq_kvlen: where the sequences end.

    Returns:
        The output, then the maximum and the sum of its softmax, both [tokens, heads, 8]; nothing of the rest.
    """
    assert input_layout == "TND" and keep_prob == 1.0
    assert sparse_mode in ((0,) if atten_mask is None else (2, 3))
    groups = head_num // key.shape[1]
    outputs, maxima, sums = [], [], []
    ends = zip(pairwise(_from_zero(actual_seq_qlen)), pairwise(_from_zero(actual_seq_kvlen)), strict=True)
    for (begin, end), (begin_kv, end_kv) in ends:
        q, k, v = query[begin:end], key[begin_kv:end_kv], value[begin_kv:end_kv]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhc,khc->qhk", q, k) * scale
        if atten_mask is not None:
            hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
            scores = scores.masked_fill(hidden[:, None], float("-inf"))
        maximum = scores.amax(-1, keepdim=True)
        weights = (scores - maximum).exp()
        total = weights.sum(-1, keepdim=True)
        outputs.append(torch.einsum("qhk,khc->qhc", weights / total, v))
        maxima.append(maximum)
        sums.append(total)
    return torch.cat(outputs), _by_head(maxima), _by_head(sums), torch.empty(0), 0, 0, 0


@counted
def npu_fusion_attention_grad(
    query,
    key,
    value,
    dy,
    head_num,
    input_layout,
    *,
    softmax_max,
    softmax_sum,
    attention_in,
    scale_value,
    atten_mask=None,
    sparse_mode=0,
    keep_prob=1.0,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    **ignored,
):
    """Gradients of query, key and value, given the output and the softmax over all that a query attends to.

    Those may include keys of other ranks: maximum and sum are of the whole softmax, as `npu_fusion_attention`
    returns them.
    """
    assert input_layout == "TND" and keep_prob == 1.0
    groups, grads = head_num // key.shape[1], ([], [], [])
    ends = zip(pairwise(_from_zero(actual_seq_qlen)), pairwise(_from_zero(actual_seq_kvlen)), strict=True)
    for (begin, end), (begin_kv, end_kv) in ends:
        own, q = slice(begin, end), query[begin:end]
        k, v = (x[begin_kv:end_kv].repeat_interleave(groups, 1) for x in (key, value))
        maximum, total = (
            x.reshape(-1, 8)[begin * head_num : end * head_num, 0].view(head_num, -1, 1).transpose(0, 1)
            for x in (softmax_max, softmax_sum)
        )
        weights = (torch.einsum("qhc,khc->qhk", q, k) * scale_value - maximum).exp() / total
        if atten_mask is not None:
            hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
            weights = weights.masked_fill(hidden[:, None], 0)
        by_weight = torch.einsum("qhc,khc->qhk", dy[own], v)
        by_weight = by_weight - (dy[own] * attention_in[own]).sum(-1, keepdim=True)
        by_score = weights * by_weight * scale_value
        grads[0].append(torch.einsum("qhk,khc->qhc", by_score, k))
        for parts, by_key, other in ((grads[1], by_score, q), (grads[2], weights, dy[own])):
            by_head = torch.einsum("qhk,qhc->khc", by_key, other)
            parts.append(by_head.unflatten(1, (-1, groups)).sum(2))
    return *map(torch.cat, grads), torch.empty(0)


def _by_head(values: list[torch.Tensor]) -> torch.Tensor:
    """[tokens, heads, 8] by name; in memory each sequence is [heads, tokens, 8], as MindSpeed reads it."""
    heads = values[0].shape[1]
    return torch.cat([v.transpose(0, 1).expand(-1, -1, 8).reshape(-1, 8) for v in values]).view(-1, heads, 8)


def _from_zero(ends) -> list[int]:
    ends = [int(end) for end in ends]
    return ends if ends[0] == 0 else [0, *ends]


@counted
def npu_grouped_matmul(x, weight, *, group_list, group_type, group_list_type=0, split_item=2, bias=None):
    """A product for each group of rows. x[0]: [tokens, in]; weight: an [in, out] a group, or one [groups, in,
    out]; ``group_list``: sizes of the groups (type 1) or where they end (type 0)."""
    assert group_type == 0 and split_item == 2 and bias is None, "only the forward pass is here"
    weights = weight if len(weight) > 1 else [weight[0]] if weight[0].ndim == 2 else weight[0]
    sizes = [int(n) for n in group_list]
    if group_list_type == 0:
        sizes = [end - begin for begin, end in pairwise([0, *sizes])]
    return [torch.cat([rows @ w for rows, w in zip(x[0].split(sizes), weights, strict=True)])]


@counted
def npu_gmm(x, weight, bias, group_list, group_type, group_list_type):
    """MindSpeed's own operator, which it compiles with CANN: npu_grouped_matmul, called by position."""
    assert not bias
    return npu_grouped_matmul(
        x, weight, group_list=group_list, group_type=group_type, group_list_type=group_list_type
    )


@counted
def npu_rms_norm(x, weight, epsilon=1e-6):
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return x * inverse * weight, inverse


@counted
def npu_swiglu(x, dim=-1):
    gate, up = x.chunk(2, dim)
    return silu(gate) * up


@counted
def npu_rotary_position_embedding(x, cos, sin, mode=0):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin

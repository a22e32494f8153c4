"""Kernels for training, in plain torch, on the host."""

from __future__ import annotations

import functools
from collections import Counter
from itertools import pairwise

import torch
from torch.nn.functional import cross_entropy, silu

from . import limits
from .limits import NAMES, check, check_dtype

__all__ = [
    "npu_cross_entropy_loss",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_grouped_matmul",
    "npu_moe_token_permute",
    "npu_moe_token_permute_with_routing_map",
    "npu_moe_token_permute_with_routing_map_grad",
    "npu_moe_token_unpermute",
    "npu_moe_token_unpermute_with_routing_map_grad",
    "_npu_moe_token_unpermute_with_routing_map",
    "npu_rms_norm",
    "npu_rotary_mul",
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


def wide(x: torch.Tensor) -> torch.Tensor:
    """What the device computes in: float32 where the numbers are shorter."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def hidden_keys(mask, sparse_mode: int, queries: int, keys: int) -> torch.Tensor | None:
    """Which keys each query does not see, [queries, keys] or as the mask is; None: it sees all.

    Modes 0 and 1 take the mask as it is; 2 is causal from the left, 3 from the right end of the keys, and
    both want a mask of [2048, 2048], of which they use the shape only. Without a mask no mode hides anything.
    """
    if mask is None:
        return None
    if sparse_mode in (2, 3):
        return torch.ones(queries, keys, dtype=torch.bool).triu(
            1 + (keys - queries if sparse_mode == 3 else 0)
        )
    return mask[..., :queries, :keys].bool()


def one_attention(q, k, v, scale, hidden):
    """[heads, queries, channels] and [groups, keys, channels]: output, maximum and sum of the softmax."""
    groups = len(q) // len(k)
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = wide(q) @ wide(k).transpose(-1, -2) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    maximum = scores.amax(-1, keepdim=True)
    weights = (scores - maximum).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / total @ wide(v)).to(q.dtype), maximum, total


@counted
def npu_fusion_attention(
    query,
    key,
    value,
    head_num,
    input_layout,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    scale=1.0,
    keep_prob=1.0,
    pre_tockens=2147483647,
    next_tockens=2147483647,
    inner_precise=0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
    softmax_layout="",
    sink=None,
):
    """Attention in one of five layouts; TND is packed: attention within each sequence.

    Args:
        query: [tokens, heads, channels] (TND), or with a batch BSND, BNSD, BSH, SBH (H: heads x channels);
            ``key`` and ``value`` may have fewer heads.
        atten_mask: True where a key is hidden.
        actual_seq_qlen, actual_seq_kvlen: where the sequences of TND end.

    Returns:
        The output; the maximum and the sum of its softmax, [batch, heads, queries, 8] (TND: [tokens, heads,
        8]); nothing of the rest.
    """
    operator = "aclnnFlashAttentionVarLenScore" if input_layout == "TND" else "aclnnFlashAttentionScore"
    limits.fusion_attention(
        operator, query, key, value, head_num, input_layout, atten_mask, sparse_mode, actual_seq_qlen,
        actual_seq_kvlen, keep_prob, padding_mask, softmax_layout,
    )  # fmt: skip
    limits.here(operator, pse is None and sink is None and not prefix, "pse, sink or prefix")
    if input_layout != "TND":
        return _with_batch(query, key, value, head_num, input_layout, atten_mask, scale, sparse_mode)
    outputs, maxima, sums = [], [], []
    ends = zip(pairwise(_from_zero(actual_seq_qlen)), pairwise(_from_zero(actual_seq_kvlen)), strict=True)
    for (begin, end), (begin_kv, end_kv) in ends:
        if begin == end:
            continue
        own = [x.transpose(0, 1) for x in (query[begin:end], key[begin_kv:end_kv], value[begin_kv:end_kv])]
        hidden = hidden_keys(atten_mask, sparse_mode, end - begin, end_kv - begin_kv)
        for parts, x in zip((outputs, maxima, sums), one_attention(*own, scale, hidden), strict=True):
            parts.append(x.transpose(0, 1))
    return torch.cat(outputs), _by_head(maxima), _by_head(sums), query.new_empty(0), 0, 0, 0


def _with_batch(query, key, value, heads, layout, mask, scale, sparse_mode):
    """The layouts that have a batch, by way of BNSD."""
    channels = query.shape[-1] if "N" in layout else query.shape[-1] // heads

    def split(x):
        x = x if "N" in layout else x.unflatten(-1, (-1, channels))
        return x.permute(
            {"BSH": (0, 2, 1, 3), "BSND": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BNSD": (0, 1, 2, 3)}[layout]
        )

    q, k, v = map(split, (query, key, value))
    hidden = hidden_keys(mask, sparse_mode, q.shape[2], k.shape[2])
    hidden = None if hidden is None else hidden.expand(len(q), heads, q.shape[2], k.shape[2])
    each = [
        one_attention(q[i], k[i], v[i], scale, None if hidden is None else hidden[i]) for i in range(len(q))
    ]
    output, maximum, total = map(torch.stack, zip(*each, strict=True))
    output = output.permute(
        {"BSH": (0, 2, 1, 3), "BSND": (0, 2, 1, 3), "SBH": (2, 0, 1, 3), "BNSD": (0, 1, 2, 3)}[layout]
    )
    if "N" not in layout:
        output = output.flatten(2)
    spread = [x.expand(-1, -1, -1, 8).contiguous() for x in (maximum, total)]
    return output.contiguous(), *spread, query.new_empty(0), 0, 0, 0


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
    operator = "aclnnFlashAttentionUnpaddingScoreGrad"
    limits.here(operator, input_layout == "TND", f"input_layout {input_layout}")
    limits.fusion_attention(
        operator, query, key, value, head_num, input_layout, atten_mask, sparse_mode, actual_seq_qlen,
        actual_seq_kvlen, keep_prob,
    )  # fmt: skip
    groups, grads, dtype = head_num // key.shape[1], ([], [], []), query.dtype
    query, key, value, dy, attention_in = map(wide, (query, key, value, dy, attention_in))
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
    return *(torch.cat(grad).to(dtype) for grad in grads), torch.empty(0), torch.empty(0)


def _by_head(values: list[torch.Tensor]) -> torch.Tensor:
    """[tokens, heads, 8] by name; in memory each sequence is [heads, tokens, 8], as MindSpeed reads it."""
    heads = values[0].shape[1]
    return torch.cat([v.transpose(0, 1).expand(-1, -1, 8).reshape(-1, 8) for v in values]).view(-1, heads, 8)


def _from_zero(ends) -> list[int]:
    ends = [int(end) for end in ends]
    return ends if ends[0] == 0 else [0, *ends]


def sizes_of(group_list, group_list_type: int) -> list[int]:
    """Rows of each group, from sizes (type 1) or from where the groups end (type 0)."""
    numbers = [int(number) for number in group_list]
    return numbers if group_list_type == 1 else [end - begin for begin, end in pairwise([0, *numbers])]


def check_grouped(x, weight, bias, split_item: int) -> None:
    """What torch_npu's reference (npu_grouped_matmul) says of products of plain numbers.

    Lists of 128 at most; x and weight of one dtype, and the bias of float32 where they are bfloat16; x of two
    dimensions unless ``split_item`` is 0.
    """
    name = "aclnnGroupedMatmulV4"
    for kind, tensors in (("x", x), ("weight", weight)):
        check(
            name,
            len(tensors) <= 128,
            f"the list {kind} has {len(tensors)} tensors, at most 128 are supported",
        )
        for tensor in tensors:
            check_dtype(name, kind, tensor)
    kinds = {tensor.dtype for tensor in (*x, *weight)}
    check(name, len(kinds) == 1, f"x and weight should have one dtype, not {sorted(map(NAMES.get, kinds))}")
    wanted = torch.float32 if x[0].dtype is torch.bfloat16 else x[0].dtype
    for tensor in bias or ():
        check(
            name,
            tensor.dtype is wanted,
            f"Tensor bias should be {NAMES[wanted]} for x of {NAMES[x[0].dtype]}",
        )
    flat = split_item in (0, None) or all(tensor.ndim == 2 for tensor in x)
    check(name, flat, f"x should have 2 dimensions with split_item {split_item}")


def grouped_products(
    x, weight, *, bias=None, scale=None, offset=None, antiquant_scale=None, antiquant_offset=None,
    per_token_scale=None, group_list=None, activation_input=None, activation_quant_scale=None,
    activation_quant_offset=None, split_item=0, group_type=None, group_list_type=0, act_type=0,
    tuning_config=None, output_dtype=None,
):  # fmt: skip
    """A product for each group.

    Group type 0: groups of rows; x[0]: [tokens, in]; weight: an [in, out] a group, or one [groups, in, out];
    rows behind the last group are left alone. Group type 2: groups of the inner dimension; x[0]: [in,
    tokens], weight[0]: [tokens, out]; the result is [groups, in, out]. Without ``group_list`` (type -1) a
    product for each pair of x and weight.
    """
    given = bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale, activation_input
    assert not any(given) and act_type == 0, "products of plain numbers only are here"
    to = output_dtype or x[0].dtype
    if group_type in (None, -1):
        assert group_list is None and split_item in (0, 1)
        return [(wide(a) @ wide(b)).to(to) for a, b in zip(x, weight, strict=True)]
    sizes = sizes_of(group_list, group_list_type)
    assert len(x) == 1 and split_item in (2, 3), "one x, and one result, for groups by a list of sizes"
    if group_type == 2:
        parts = zip(x[0].split(sizes, 1), weight[0].split(sizes), strict=True)
        return [torch.stack([(wide(a) @ wide(b)).to(to) for a, b in parts])]
    assert group_type == 0, f"group type {group_type} is not here"
    weights = weight if len(weight) > 1 else [weight[0]] if weight[0].ndim == 2 else weight[0]
    rows = x[0][: sum(sizes)].split(sizes)
    products = [(wide(a) @ wide(b)).to(to) for a, b in zip(rows, weights, strict=True)]
    return [torch.cat([*products, left_alone(len(x[0]) - sum(sizes), weights[0].shape[-1], dtype=to)])]


@counted
def npu_grouped_matmul(x, weight, *, bias=None, split_item=0, **options):
    check_grouped(x, weight, bias, split_item)
    return grouped_products(x, weight, bias=bias, split_item=split_item, **options)


def left_alone(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that an operator does not write: what was there, here a number that nobody takes for a result."""
    return torch.full(shape, 12345, dtype=dtype)


@counted
def npu_rms_norm(self, gamma, epsilon=1e-6):
    """Of float16, bfloat16 or float32; gamma has the shape of the last dimensions (torch_npu's reference)."""
    check_dtype("aclnnRmsNorm", "x", self)
    shapes = (
        f"the shape of gamma {list(gamma.shape)} is not that of the last dimensions of x {list(self.shape)}"
    )
    check("aclnnRmsNorm", self.shape[self.ndim - gamma.ndim :] == gamma.shape, shapes)
    x = wide(self)
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return (x * inverse * wide(gamma)).to(self.dtype), inverse


@counted
def npu_swiglu(self, dim=-1):
    gate, up = wide(self).chunk(2, dim)
    return (silu(gate) * up).to(self.dtype)


def rotated(x: torch.Tensor, mode: str) -> torch.Tensor:
    """Each pair (a, b) as (-b, a); pairs are the halves, or neighbours ("interleave")."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    assert mode == "interleave", f"rotary mode {mode}"
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


@counted
def npu_rotary_mul(self, r1, r2, rotary_mode="half"):
    x, cos, sin = wide(self), wide(r1), wide(r2)
    return (x * cos + rotated(x, rotary_mode) * sin).to(self.dtype)


@counted
def npu_rotary_position_embedding(x, cos, sin, mode=0):
    assert mode in (0, 1)
    return npu_rotary_mul.__wrapped__(x, cos, sin, ("half", "interleave")[mode])


@counted
def npu_cross_entropy_loss(
    input, target, weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0,
    lse_square_scale_for_zloss=0.0, return_zloss=False,
):  # fmt: skip
    """The loss, log-probabilities [rows, classes], and nothing of the z-loss."""
    assert not return_zloss and lse_square_scale_for_zloss == 0.0, "the z-loss is not here"
    logits = wide(input)
    loss = cross_entropy(
        logits, target.long(), None if weight is None else wide(weight), reduction=reduction,
        ignore_index=ignore_index, label_smoothing=label_smoothing,
    )  # fmt: skip
    nothing = input.new_empty(0)
    return loss.to(input.dtype), torch.log_softmax(logits, -1).to(input.dtype), nothing, nothing


@counted
def npu_moe_token_permute(tokens, indices, num_out_tokens=None, padded_mode=False):
    """A row for each of a token's experts, by expert, the first ``num_out_tokens``; where each went."""
    assert not padded_mode
    order = indices.flatten().argsort(stable=True)
    each = indices.shape[1] if indices.ndim == 2 else 1
    rows = tokens[order[: num_out_tokens or None] // each]
    return rows, order.argsort().to(torch.int32)


@counted
def npu_moe_token_unpermute(
    permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None
):  # fmt: skip
    """Rows where they were; with ``probs`` [tokens, experts of each], their weighted sums."""
    assert not padded_mode
    rows = permuted_tokens[sorted_indices.abs().long()]
    if probs is None:
        return rows
    return (rows.view(*probs.shape, -1) * probs.unsqueeze(-1).to(rows.dtype)).sum(1)


def experts_of_tokens(routing_map: torch.Tensor) -> torch.Tensor:
    """[rows, 2]: token and expert of each row, in the order of experts."""
    return routing_map.bool().T.nonzero().flip(1)


@counted
def npu_moe_token_permute_with_routing_map(
    tokens, routing_map, *, probs=None, num_out_tokens=None, drop_and_pad=False
):
    """A row for each of a token's experts, by expert; their probabilities; where each token's rows went.

    ``routing_map``, ``probs``: [tokens, experts].
    """
    assert not drop_and_pad
    token, expert = experts_of_tokens(routing_map).unbind(1)
    rows = len(token) if num_out_tokens is None else num_out_tokens
    assert rows == len(token), f"{len(token)} rows for {num_out_tokens} tokens out"
    return tokens[token], None if probs is None else probs[token, expert], where_rows_went(token)


def where_rows_went(token: torch.Tensor) -> torch.Tensor:
    """The rows of token 0, then of token 1, ...: int32."""
    return token.argsort(stable=True).to(torch.int32)


@counted
def npu_moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad, probs_grad, sorted_indices, routing_map, experts_num, tokens_num, drop_and_pad
):  # fmt: skip
    assert not drop_and_pad
    token, expert = experts_of_tokens(routing_map).unbind(1)
    grad = permuted_token_out_grad
    by_token = wide(grad).new_zeros(tokens_num, grad.shape[1]).index_add_(0, token, wide(grad)).to(grad.dtype)
    if probs_grad is None:
        return by_token, None
    by_expert = probs_grad.new_zeros(tokens_num, experts_num)
    by_expert[token, expert] = probs_grad
    return by_token, by_expert


@counted
def _npu_moe_token_unpermute_with_routing_map(
    permuted_tokens, sorted_indices, restore_shape, *, probs=None, routing_map=None, drop_and_pad=False
):
    """The sum of each token's rows, weighted by ``probs`` [tokens, experts]; then what the gradient wants."""
    assert not drop_and_pad
    rows, own = wide(permuted_tokens), None
    if probs is not None:
        token, expert = experts_of_tokens(routing_map).unbind(1)
        own = probs[token, expert]
        rows = rows * wide(own).unsqueeze(-1)
    each = rows[sorted_indices.long()].view(restore_shape[0], -1, restore_shape[1])
    output = each.sum(1).to(permuted_tokens.dtype)
    return output, sorted_indices.clone(), sorted_indices.clone(), own


@counted
def npu_moe_token_unpermute_with_routing_map_grad(
    unpermuted_tokens_grad, out_index, permuted_token_id, routing_map, permuted_tokens, probs, drop_and_pad,
    restore_shape,
):  # fmt: skip
    assert not drop_and_pad
    grad, experts = unpermuted_tokens_grad, len(out_index) // restore_shape[0]
    token = torch.empty_like(out_index, dtype=torch.int64)
    token[out_index.long()] = torch.arange(restore_shape[0]).repeat_interleave(experts)
    rows = wide(grad)[token]
    if probs is None:
        return rows.to(grad.dtype), None
    expert = experts_of_tokens(routing_map)[:, 1]
    by_expert = wide(probs).new_zeros(probs.shape)
    by_expert[token, expert] = (rows * wide(permuted_tokens)).sum(-1)
    rows = rows * wide(probs[token, expert]).unsqueeze(-1)
    return rows.to(grad.dtype), by_expert.to(probs.dtype)


# Those that torch_npu has a derivative of (its library has a node NpuRmsNormBackward0 and so on). The grouped
# product has none: who trains through it writes the backward pass.
DIFFERENTIABLE = {
    kernel.__name__: kernel
    for kernel in (
        npu_fusion_attention, npu_rms_norm, npu_swiglu, npu_rotary_mul, npu_cross_entropy_loss,
        npu_moe_token_permute, npu_moe_token_unpermute,
    )
}  # fmt: skip

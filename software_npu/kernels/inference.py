"""The kernels that vllm-ascend's runner calls for Qwen3 and Qwen3-MoE, in plain torch.

Their calls are counted in ``training.calls`` with those of the kernels for training, some of which they are.
"""

from __future__ import annotations

import torch

from . import communication, limits, training
from .training import counted

KERNELS = {"npu": {}, "atb": {}, "_C_ascend": {}}  # namespace -> operator -> kernel


def kernel(namespace: str):
    def register(function):
        KERNELS[namespace][function.__name__] = counted(function)
        return function

    return register


for _name in training.__all__:
    if _name != "npu_gmm":
        KERNELS["npu"][_name] = getattr(training, _name)


@kernel("npu")
def npu_add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    x = x1 + x2  # rounded, as the sum that is returned
    y, inverse = training.npu_rms_norm.__wrapped__(x, gamma, epsilon)  # one call, not two
    return y, inverse, x


@kernel("_C_ascend")
def npu_add_rms_norm_bias(x1, x2, gamma, beta=None, epsilon=1e-6):
    y, inverse, x = npu_add_rms_norm(x1, x2, gamma, epsilon)
    return y if beta is None else y + beta, inverse, x


@kernel("_C_ascend")
def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    _npu_rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)
    return query, key


@kernel("_C_ascend")
def get_masked_input_and_mask(input, start, end, padding, added_start, added_end):
    """Rows of this rank's part of the vocabulary, which has added words behind it; True where it has none."""
    own, added = (input >= start) & (input < end), (input >= added_start) & (input < added_end)
    offset = own * start + added * (added_start - (end - start) - padding)
    return (own | added) * (input - offset), ~(own | added)


@kernel("npu")
def npu_format_cast(self, acl_format, customize_dtype=None):
    return self.clone()


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@kernel("npu")
def npu_apply_rotary_pos_emb(query, key, cos, sin, layout="BSH", rotary_mode="half"):
    """In place, as the device does it."""
    assert rotary_mode == "half"
    return query.copy_(rotated(query, cos, sin)), key.copy_(rotated(key, cos, sin))


@kernel("atb")
def _npu_rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style):
    assert is_neox_style
    halves = cos_sin_cache.index_select(0, positions.flatten()).chunk(2, -1)
    cos, sin = (torch.cat((half, half), -1).unsqueeze(1) for half in halves)
    for x in (query, key):
        heads = x.view(len(x), -1, head_size)
        heads.copy_(rotated(heads, cos, sin))


@kernel("atb")
def _npu_reshape_and_cache(key, value, key_cache, value_cache, slot_indices):
    slots = slot_indices.long()
    held = slots >= 0
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.flatten(0, 1)[slots[held]] = new[held]


@kernel("atb")
def _npu_matmul_add_fp32(x, weight, C):
    C.add_(x.float().T @ weight.float())


def attention(query, key, value, scale, causal):
    """query: [t, heads, channels]; key, value: [s, groups, channels]; causal: queries are the last keys."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhc,khc->hqk", query.float(), key.float()) * scale
    if causal:
        hidden = torch.ones(len(query), len(key), dtype=torch.bool).triu(1 + len(key) - len(query))
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khc->qhc", scores.softmax(-1), value.float()).to(query.dtype)


def pages(cache, blocks, length, groups):
    """The first ``length`` entries of a sequence: [length, groups, channels]."""
    count = -(-length // cache.shape[1])
    channels = cache[0, 0].numel() // groups
    return cache[blocks[:count].long()].reshape(count * cache.shape[1], groups, channels)[:length]


@kernel("npu")
def npu_fused_infer_attention_score(
    query,
    key,
    value,
    *,
    atten_mask=None,
    actual_seq_lengths=None,
    actual_seq_lengths_kv=None,
    block_table=None,
    num_heads=1,
    num_key_value_heads=0,
    scale=1.0,
    input_layout="BSH",
    sparse_mode=0,
    block_size=0,
):
    """Layout TND. As the device demands, the cumulative query lengths end at the number of rows; lengths of
    keys are cumulative too unless a block table says where they are."""
    ends, lengths = ([int(x) for x in given or ()] for given in (actual_seq_lengths, actual_seq_lengths_kv))
    limits.fused_infer_attention(
        "aclnnFusedInferAttentionScoreV3", query, key, value, atten_mask, ends, lengths, block_table,
        num_heads, num_key_value_heads, input_layout, sparse_mode, block_size,
    )  # fmt: skip
    groups = num_key_value_heads or num_heads
    output = torch.zeros_like(query)
    begin = begin_kv = 0
    for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        if block_table is None:
            keys, values = key[begin_kv:length], value[begin_kv:length]
            begin_kv = length
        else:
            blocks = block_table[row]
            keys, values = (pages(cache, blocks, length, groups) for cache in (key, value))
        if end > begin and len(keys):
            output[begin:end] = attention(query[begin:end], keys, values, scale, causal=sparse_mode == 3)
        begin = end
    return output, query.new_zeros(0)


@kernel("npu")
def _npu_fused_infer_attention_score_get_max_workspace(query, key, value, **options):
    return query.new_empty(16)


def _with_out(query, key, value, *, attention_out, softmax_lse, workspace=None, **options):
    kernel = KERNELS["npu"]["npu_fused_infer_attention_score"]
    attention_out.copy_(kernel(query, key, value, **options)[0])
    return attention_out, softmax_lse


KERNELS["npu"]["npu_fused_infer_attention_score.out"] = _with_out


@kernel("_C_ascend")
def weak_ref_tensor(input):
    """The same memory; here it is held."""
    return input.view_as(input)


@kernel("atb")
def _npu_paged_attention_get_workspace(query, *args, **options):
    return query.new_empty(16)


@kernel("atb")
def _npu_paged_attention(
    query, key_cache, value_cache, num_kv_heads, num_heads, scale_value, block_table, context_lens, out,
    workspace=None,
):  # fmt: skip
    lengths, groups = context_lens.tolist(), num_kv_heads or num_heads
    limits.paged_attention(
        "PagedAttentionOperation", query, key_cache, value_cache, groups, num_heads, block_table, lengths
    )
    for row, length in enumerate(lengths[: len(query)]):
        blocks = block_table[row]
        keys, values = (pages(cache, blocks, length, groups) for cache in (key_cache, value_cache))
        one = attention(query[row : row + 1], keys, values, scale_value, causal=False)
        out[row : row + 1] = one.view_as(out[row : row + 1])


@kernel("_C_ascend")
def moe_gating_top_k(
    x, k, k_group, group_count, group_select_mode, renorm, norm_type, out_flag, routed_scaling_factor, eps,
    bias_opt=None,
):  # fmt: skip
    assert k_group == group_count == 1 and bias_opt is None and norm_type == 0
    scores = x.float().softmax(-1)
    weights, experts = scores.topk(k, -1)
    if renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), experts.to(torch.int32), scores


@kernel("_C_ascend")
def npu_moe_init_routing_custom(
    x,
    expert_idx,
    *,
    active_num=-1,
    expert_num=-1,
    drop_pad_mode=0,
    expert_tokens_num_type=0,
    expert_tokens_num_flag=False,
    quant_mode=0,
    active_expert_range=(),
    row_idx_type=0,
):
    """Rows by expert, those of other ranks' experts last; where each went; how many each expert has."""
    assert quant_mode == -1 and expert_tokens_num_type == 1 and row_idx_type == 0 and drop_pad_mode == 0
    experts, (low, high) = expert_idx.flatten().long(), active_expert_range
    sorted_by = torch.where((experts >= low) & (experts < high), experts, expert_num)
    order = sorted_by.argsort(stable=True)
    counts = torch.bincount(sorted_by, minlength=expert_num + 1)[low:high]
    return x[order // expert_idx.shape[1]], order.argsort().to(torch.int32), counts, x.new_zeros(0)


def product(x1: torch.Tensor, x2: torch.Tensor, bias=None) -> torch.Tensor:
    result = training.wide(x1) @ training.wide(x2)
    return (result if bias is None else result + bias).to(x1.dtype)


@kernel("npu")
def npu_mm_all_reduce_base(x1, x2, hcom, *, reduce_op="sum", bias=None, comm_turn=0):
    assert reduce_op == "sum"
    return communication.all_reduce(hcom, product(x1, x2, bias))


@kernel("npu")
def npu_mm_reduce_scatter_base(
    self, x2, hcom, world_size, *, reduce_op="sum", bias=None, comm_turn=0, output_dtype=None, comm_mode=None
):
    """[rows, k] x [k, n], summed over the ranks: [rows / world_size, n], those of this rank."""
    assert reduce_op == "sum" and len(self) % world_size == 0, (reduce_op, len(self), world_size)
    whole = communication.all_reduce(hcom, product(self, x2, bias))
    return whole.chunk(world_size)[communication.group(hcom).rank()].clone()


@kernel("npu")
def npu_all_gather_base_mm(
    self, x2, hcom, world_size, *, bias=None, gather_index=0, gather_output=True, comm_turn=0,
    output_dtype=None, comm_mode=None,
):  # fmt: skip
    """The ranks' rows times x2, and those rows."""
    assert gather_index == 0
    rows = torch.cat(communication.all_gather(hcom, self))
    return product(rows, x2, bias), rows if gather_output else rows.new_zeros(0)


@kernel("npu")
def npu_moe_distribute_dispatch_v2(
    x, expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, *, x_active_mask=None, scales=None,
    expert_shard_type=0, shared_expert_rank_num=0, quant_mode=0, global_bs=0, expert_token_nums_type=1,
    group_tp="", tp_world_size=0, tp_rank_id=0,
):  # fmt: skip
    """Rows for the experts of this rank, by expert; how many each has (type 1) or where they end (type 0);
    (rank, place in its expert_ids). Tokens that x_active_mask leaves out go nowhere.

    As on a device there is always room for as many rows as can come; those that do not come are left alone.
    """
    assert expert_shard_type == shared_expert_rank_num == quant_mode == 0 and scales is None
    assert expert_token_nums_type in (0, 1)
    assert expert_ids.numel() == 0 or 0 <= int(expert_ids.min()) <= int(expert_ids.max()) < moe_expert_num
    local = moe_expert_num // ep_world_size
    rows, experts, origins = [], [], []
    sent = expert_ids.long()
    if x_active_mask is not None:
        limits.active_mask("aclnnMoeDistributeDispatchV3", x_active_mask, len(x))
        sent = sent.masked_fill(~x_active_mask[:, None], -1)
    of_ranks = [communication.all_gather(group_ep, part) for part in (x, sent)]
    tokens_at_most = global_bs or sum(map(len, of_ranks[0]))
    assert max(map(len, of_ranks[0])) * ep_world_size <= tokens_at_most, "global_bs is too small"
    for rank, (tokens, ids) in enumerate(zip(*of_ranks, strict=True)):
        place = (ids.flatten() // local == ep_rank_id).nonzero().flatten()
        rows.append(tokens[place // ids.shape[1]])
        experts.append(ids.flatten()[place] % local)
        origins.append(torch.stack((torch.full_like(place, rank), place), 1))
    experts = torch.cat(experts)
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=local)
    if expert_token_nums_type == 0:
        counts = counts.cumsum(0)
    nothing, left = x.new_zeros(0), tokens_at_most * min(local, expert_ids.shape[1]) - len(order)
    expand_x = torch.cat([torch.cat(rows)[order], training.left_alone(left, x.shape[1], dtype=x.dtype)])
    assist_info = torch.cat([torch.cat(origins)[order], counts.new_full((left, 2), -1)])
    return expand_x, nothing, assist_info, counts, nothing, nothing, nothing


@kernel("npu")
def npu_moe_distribute_combine_v2(
    expand_x, expert_ids, assist_info_for_combine, ep_send_counts, expert_scales, group_ep, ep_world_size,
    ep_rank_id, moe_expert_num, *, tp_send_counts=None, x_active_mask=None, expand_scales=None, group_tp="",
    tp_world_size=0, tp_rank_id=0, expert_shard_type=0, shared_expert_rank_num=0, global_bs=0,
    comm_quant_mode=0,
):  # fmt: skip
    assert comm_quant_mode == 0
    output = torch.zeros(len(expert_ids), expand_x.shape[1])
    gathered = [communication.all_gather(group_ep, part) for part in (expand_x, assist_info_for_combine)]
    for rows, origins in zip(*gathered, strict=True):
        mine = origins[:, 0] == ep_rank_id
        place = origins[mine, 1]
        output.index_add_(0, place // expert_ids.shape[1], rows[mine] * expert_scales.flatten()[place, None])
    output = output.to(expand_x.dtype)
    if x_active_mask is not None:
        limits.active_mask("aclnnMoeDistributeCombineV3", x_active_mask, len(expert_ids))
        output[~x_active_mask] = training.left_alone(1, output.shape[1], dtype=output.dtype)
    return output


@kernel("npu")
def npu_top_k_top_p(logits, p=None, k=None):
    """-inf where a logit is below the k largest, or, of these, outside of the likeliest that make up p."""
    kept, order = logits.float().sort(-1)
    if k is not None:
        smallest = kept.gather(-1, logits.shape[-1] - k.long()[:, None])
        kept = kept.masked_fill(kept < smallest, -torch.inf)
    if p is not None:
        tail = kept.softmax(-1).cumsum(-1) <= 1 - p.float()[:, None]
        tail[:, -1] = False  # one always remains
        kept = kept.masked_fill(tail, -torch.inf)
    return torch.empty_like(kept).scatter_(-1, order, kept).to(logits.dtype)


@kernel("npu")
def npu_prefetch(self, dependency, max_size, offset=0):
    """Brings part of a weight into the cache, which changes no result."""
    if max_size <= 0 or not 0 <= offset < self.nbytes:
        raise RuntimeError(f"npu_prefetch: max_size {max_size} or offset {offset} of {self.nbytes} bytes")

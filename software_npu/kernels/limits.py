"""What fused operators refuse, by the references of torch_npu (op-plugin), CANN and ATB.

A call that a reference rules out raises RuntimeError with the operator, the rule and the value; one that it
permits and that has no kernel here raises NotImplementedError. float32 is taken where a device takes 16 bits
only (attention for inference), since the tests compare tokens with a reference in float32.
"""

from __future__ import annotations

import torch

NAMES = {
    torch.float16: "DT_FLOAT16", torch.bfloat16: "DT_BFLOAT16", torch.float32: "DT_FLOAT",
    torch.float64: "DT_DOUBLE", torch.int8: "DT_INT8", torch.int32: "DT_INT32", torch.int64: "DT_INT64",
    torch.uint8: "DT_UINT8", torch.bool: "DT_BOOL",
}  # fmt: skip
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLAGS = (torch.bool, torch.int8, torch.uint8)
LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
INFERENCE_LAYOUTS = (
    "BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND", "TND_NTD", "NTD_TND",
)  # fmt: skip
COMPRESSED = (2048, 2048)


def check(operator: str, right: bool, reason: str) -> None:
    """Refuse a call as the device's library does, by the name of its function and a reason.

    Raises:
        RuntimeError: the call is not ``right``.
    """
    if not right:
        raise RuntimeError(f"call {operator} failed, detail:EZ1001: {reason}")


def check_dtype(operator: str, name: str, tensor: torch.Tensor, among=FLOATS) -> None:
    said = f"Tensor {name} not implemented for {NAMES.get(tensor.dtype, tensor.dtype)}, should be in dtype"
    check(operator, tensor.dtype in among, f"{said} support list [{','.join(NAMES[x] for x in among)}]")


def here(operator: str, has: bool, what: str) -> None:
    if not has:
        raise NotImplementedError(f"{operator}: {what} has no kernel on the software NPU")


def check_inputs(operator: str, query, key, value, names=("query", "key", "value")) -> None:
    """Dtypes that the operator takes, one for all."""
    for name, tensor in zip(names, (query, key, value), strict=True):
        check_dtype(operator, name, tensor)
        same = tensor.dtype is query.dtype
        check(
            operator, same, f"{name} is {NAMES[tensor.dtype]}, query {NAMES[query.dtype]}: one dtype for all"
        )


def check_heads(operator: str, heads: int, groups: int) -> None:
    check(operator, 1 <= heads <= 256, f"the number of heads {heads} is not in [1, 256]")
    right = groups > 0 and heads % groups == 0
    check(operator, right, f"{heads} heads of query are no multiple of {groups} heads of key and value")


def check_ends(operator: str, name: str, ends, rows: int, at_most: int) -> None:
    """Where the packed sequences of ``rows`` rows end."""
    check(operator, bool(ends), f"{name} is needed with layout TND")
    check(operator, len(ends) <= at_most, f"{name} has {len(ends)} sequences, more than {at_most}")
    descent = [i for i in range(1, len(ends)) if ends[i] < ends[i - 1]]
    said = (
        f"{name} are ends, which do not descend: {ends[descent[0] - 1]}, {ends[descent[0]]}"
        if descent
        else ""
    )
    check(operator, not descent and ends[0] >= 0, said or f"{name} begins at {ends[0]}")
    check(operator, ends[-1] == rows, f"{name} end at {ends[-1]} of {rows} rows")


def fusion_attention(
    operator, query, key, value, heads, layout, mask, mode, q_ends, kv_ends, keep_prob=1.0, padding_mask=None,
    softmax_layout="",
):  # fmt: skip
    """Rules of npu_fusion_attention and of its gradient."""
    check(operator, layout in LAYOUTS, f"input_layout {layout} is not one of {', '.join(LAYOUTS)}")
    check(operator, 0 < keep_prob <= 1, f"keep_prob {keep_prob} is not in (0, 1]")
    check(operator, padding_mask is None, "padding_mask is not supported")
    check_inputs(operator, query, key, value)
    packed = layout == "TND"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        said = f"{name} has {tensor.dim()} dimensions, layout {layout} {len(layout)}"
        check(operator, tensor.dim() == len(layout), said)
    same = key.shape[:-1] == value.shape[:-1] and key.shape[-1] >= value.shape[-1]
    check(operator, same, f"shapes of key {list(key.shape)} and value {list(value.shape)} differ")
    q, k = (dict(zip(layout, x.shape, strict=True)) for x in (query, key))
    if "H" in layout:
        right = 1 <= heads and q["H"] % heads == 0
        check(operator, right, f"H {q['H']} of query is not a multiple of head_num {heads}")
        size = q["H"] // heads
        right = size > 0 and k["H"] % size == 0
        check(operator, right, f"H {k['H']} of key is not a multiple of the head size {size} of query")
        groups = k["H"] // size
    else:
        check(operator, q["N"] == heads, f"head_num {heads}, but query has {q['N']} heads")
        check(operator, q["D"] == k["D"], f"head sizes of query {q['D']} and key {k['D']} differ")
        size, groups = q["D"], k["N"]
    check(operator, 1 <= size <= 768, f"head size {size} is not in [1, 768]")
    check_heads(operator, heads, groups)
    if packed:
        check_ends(operator, "actual_seq_qlen", q_ends, len(query), 1024)
        check_ends(operator, "actual_seq_kvlen", kv_ends, len(key), 1024)
        said = f"{len(q_ends)} actual_seq_qlen, {len(kv_ends)} actual_seq_kvlen"
        check(operator, len(q_ends) == len(kv_ends), said)
        queries, keys = (
            max(end - begin for begin, end in zip([0, *ends], ends, strict=False))
            for ends in (q_ends, kv_ends)
        )
    else:
        check(operator, q["B"] == k["B"], f"batches of query {q['B']} and key {k['B']} differ")
        queries, keys = q["S"], k["S"]
    batch = 1 if packed else q["B"]
    check(
        operator, softmax_layout in (("", "TND") if packed else ("",)), f"softmax_layout {softmax_layout!r}"
    )
    check(operator, mode in range(9), f"sparse_mode {mode} is not in [0, 8]")
    check(operator, not (mode == 5 and packed), "sparse_mode 5 is not supported with layout TND")
    check(operator, mode < 7 or packed, f"sparse_mode {mode} is supported with layout TND only")
    if mask is not None:
        check_dtype(operator, "atten_mask", mask, (torch.bool, torch.uint8))
        own = COMPRESSED if mode in (2, 3, 4, 7, 8) else (3072, 2048) if mode == 6 else (queries, keys)
        shapes = [own] if packed else [own, (1, 1, *own)]
        if own == (queries, keys) and not packed:
            shapes += [(batch, 1, *own), (batch, heads, *own)]
        said = f"shape of atten_mask {list(mask.shape)} is not {' or '.join(str(list(s)) for s in shapes)}"
        check(operator, tuple(mask.shape) in shapes, f"{said}, with sparse_mode {mode}")
    here(operator, keep_prob == 1, f"keep_prob {keep_prob}")
    here(operator, not softmax_layout, f"softmax_layout {softmax_layout}")
    here(operator, mask is None or mode < 4, f"sparse_mode {mode}")


def fused_infer_attention(
    operator, query, key, value, mask, ends, kv_lengths, table, heads, groups, layout, mode, block_size
):  # fmt: skip
    """Rules of npu_fused_infer_attention_score; of TND, those without MLA."""
    check(
        operator,
        layout in INFERENCE_LAYOUTS,
        f"input_layout {layout} is not one of {', '.join(INFERENCE_LAYOUTS)}",
    )
    here(operator, layout == "TND", f"input_layout {layout}")
    check_inputs(operator, query, key, value)
    check(operator, query.dim() == 3, f"query has {query.dim()} dimensions, layout TND 3")
    check(operator, query.shape[1] == heads, f"num_heads {heads}, but query has {query.shape[1]} heads")
    groups, size = groups or heads, query.shape[2]
    check_heads(operator, heads, groups)
    check(operator, heads // groups <= 64, f"{heads} heads to {groups} of key and value: more than 64")
    check(
        operator, size % 16 == 0 and 0 < size <= 256, f"head size {size} is not a multiple of 16 in [16, 256]"
    )
    check(
        operator,
        key.shape == value.shape,
        f"shapes of key {list(key.shape)} and value {list(value.shape)} differ",
    )
    check(operator, bool(kv_lengths), "actual_seq_lengths_kv is needed with layout TND")
    check_ends(operator, "actual_seq_lengths", ends, len(query), 4096)
    said = f"{len(ends)} actual_seq_lengths, {len(kv_lengths)} actual_seq_lengths_kv"
    check(operator, len(ends) == len(kv_lengths), said)
    check(operator, mode in (0, 3, 4), f"sparse_mode {mode} with layout TND is not one of 0, 3, 4")
    if mode == 0:
        check(operator, mask is None, "sparse_mode 0 takes no atten_mask with layout TND")
    else:
        check(operator, mask is not None, f"sparse_mode {mode} needs an atten_mask")
        check_dtype(operator, "atten_mask", mask, FLAGS)
        right = tuple(mask.shape) in (COMPRESSED, (1, *COMPRESSED), (1, 1, *COMPRESSED))
        said = f"shape of atten_mask {list(mask.shape)} is not [2048, 2048], with sparse_mode {mode}"
        check(operator, right, said)
    if table is None:
        said = f"shape of key {list(key.shape)} is not [tokens, {groups}, {size}]"
        check(operator, key.dim() == 3 and tuple(key.shape[1:]) == (groups, size), said)
        check_ends(operator, "actual_seq_lengths_kv", kv_lengths, len(key), 4096)
    else:
        width = groups * size
        said = f"the paged key {list(key.shape)} is not [blocks, block_size, {width}]"
        check(
            operator,
            key.dim() == 3 and tuple(key.shape[1:]) == (block_size, width),
            f"{said}, of {block_size}",
        )
        right = block_size % 16 == 0 and 0 < block_size <= 128
        check(operator, right, f"block_size {block_size} is not a multiple of 16 in [16, 128]")
        check(
            operator,
            width <= 65535,
            f"{groups} heads of {size} in the paged key are {width}, more than 65535",
        )
        check_table(operator, table, kv_lengths, block_size)
    here(operator, mode != 4, "sparse_mode 4")


def check_table(operator: str, table, lengths, block_size: int) -> None:
    check_dtype(operator, "block_table", table, (torch.int32,))
    right = table.dim() == 2 and len(table) >= len(lengths)
    said = f"block_table {list(table.shape)} has no row for each of {len(lengths)} sequences"
    check(operator, right, said)
    blocks = -(-max(lengths) // block_size)
    said = f"block_table has {table.shape[1]} columns for {blocks} blocks of {max(lengths)} tokens"
    check(operator, table.shape[1] >= blocks, said)


def paged_attention(operator, query, key_cache, value_cache, groups, heads, table, lengths) -> None:
    """Rules of ATB's PagedAttentionOperation, without quantisation."""
    check_inputs(operator, query, key_cache, value_cache, ("query", "key_cache", "value_cache"))
    check_heads(operator, heads, groups)
    check(operator, key_cache.dim() == 4, f"key_cache has {key_cache.dim()} dimensions, not 4")
    blocks, block_size, held, size = key_cache.shape
    check(operator, held == groups, f"num_kv_heads {groups}, but key_cache has {held} heads")
    said = f"query {list(query.shape)} is not [tokens, {heads}, {size}]"
    check(operator, tuple(query.shape[1:]) == (heads, size), said)
    check(operator, block_size % 16 == 0, f"block_size {block_size} is not a multiple of 16")
    check(operator, 0 < size <= 576, f"head size {size} is not in [1, 576]")
    check(
        operator,
        size <= 256 or block_size <= 128,
        f"block_size {block_size} with head size {size} is over 128",
    )
    lengths = lengths[: len(query)]
    check_table(operator, table, lengths, block_size)
    for row, length in zip(table, lengths, strict=False):
        used = row[: -(-length // block_size)]
        right = not len(used) or 0 <= int(used.min()) <= int(used.max()) < blocks
        check(operator, right, f"block_table names {used.tolist()}, the cache has blocks [0, {blocks})")


def active_mask(operator: str, mask: torch.Tensor, tokens: int) -> None:
    """Which tokens of a dispatch or combine of experts are real: the first ones."""
    check_dtype(operator, "x_active_mask", mask, (torch.bool,))
    check(operator, tuple(mask.shape) == (tokens,), f"x_active_mask {list(mask.shape)} is not [{tokens}]")
    check(operator, not bool((mask[1:] & ~mask[:-1]).any()), "x_active_mask has a True behind a False")

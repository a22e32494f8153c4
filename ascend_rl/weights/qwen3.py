"""The tensors of Qwen2, Qwen2.5, Qwen3 and Qwen3-MoE, by Hugging Face's names and by Megatron's, and which
rows of one are which of the other. Qwen2 has a bias at query, key and value, and no norms there.

A Megatron tensor is rows of Hugging Face tensors in another order: query, key and value rows interleaved by
group, gate above up, layers and experts as leading axes. So a matrix of either side is a stack of rows of the
other side's, and `clip` says what is in a part of a stack, in both directions.

Invariants (tests/test_converter.py): every row of every Hugging Face tensor is in one place of one Megatron
tensor; chunks tile their tensor. Cost: O(layers * experts).

Example, 2 query heads, 1 group: linear_qkv.weight[layer] = rows of q_proj, then of k_proj, then of v_proj.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ascend_rl.settings.model import Model
from ascend_rl.settings.switch import refuse
from ascend_rl.weights.torch_dist import shard_key

PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")  # by Megatron, for some TP sizes


def read_model(directory: str | os.PathLike) -> Model:
    """The shapes of the Hugging Face model in ``directory``.

    Raises:
        CannotWork: config.json is missing, or describes something that this module does not know.
    """
    model = Model.from_path(directory)
    biased = model.qkv_bias and model.qk_norm  # Qwen3's o_proj would have one, too
    given = {"attention_bias=True": biased, "quantization_config": model.quantized}
    refuse(model.name, [f"{name}: use a model without" for name, found in given.items() if found])
    return replace(model, name=model.kind)  # outputs do not depend on where the input lies


@dataclass(frozen=True)
class Rows:
    """``rows`` rows from ``row`` on: of a Hugging Face tensor, or of the matrix at ``index`` of the leading
    axes (layer, expert) of a Megatron tensor.
    """

    name: str
    row: int
    rows: int
    index: tuple[int, ...] = ()


@dataclass(frozen=True)
class Matrix:
    """A Megatron tensor: at each index of its ``leading`` axes (layer, expert) a matrix or vector of
    ``shape``, which is the ``stack`` of these Hugging Face rows.
    """

    key: str
    leading: tuple[int, ...]
    shape: tuple[int, ...]
    stack: Callable[[tuple[int, ...]], list[Rows]]
    cuts: tuple[int, ...] = ()  # rows at which megatron-core begins another chunk

    @property
    def size(self) -> tuple[int, ...]:
        return (*self.leading, *self.shape)


def hf_tensors(model: Model) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the Hugging Face model, in its order."""
    hidden, dim, ffn = model.hidden, model.head_dim, model.ffn
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocabulary, hidden)}
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        shapes[attention + "q_proj.weight"] = (model.heads * dim, hidden)
        shapes[attention + "k_proj.weight"] = shapes[attention + "v_proj.weight"] = (
            model.kv_heads * dim,
            hidden,
        )
        if model.qkv_bias:
            shapes[attention + "q_proj.bias"] = (model.heads * dim,)
            shapes[attention + "k_proj.bias"] = shapes[attention + "v_proj.bias"] = (model.kv_heads * dim,)
        shapes[attention + "o_proj.weight"] = (hidden, model.heads * dim)
        if model.qk_norm:
            shapes[attention + "q_norm.weight"] = shapes[attention + "k_norm.weight"] = (dim,)
        if model.experts:
            shapes[mlp + "gate.weight"] = (model.experts, hidden)
        for unit in [f"{mlp}experts.{expert}." for expert in range(model.experts)] or [mlp]:
            shapes[unit + "gate_proj.weight"] = shapes[unit + "up_proj.weight"] = (ffn, hidden)
            shapes[unit + "down_proj.weight"] = (hidden, ffn)
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (
            hidden,
        )
    shapes["model.norm.weight"] = (hidden,)
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocabulary, hidden)
    return shapes


def mcore_tensors(model: Model) -> list[Matrix]:
    """The tensors of verl's Megatron model (Transformer Engine's names), and the rows they are made of."""
    table = (model.vocabulary, model.hidden)
    tensors = [_whole("embedding.word_embeddings.weight", "model.embed_tokens.weight", table)]
    tensors += _attention(model)
    tensors += _experts(model) if model.experts else _dense(model)
    tensors.append(_whole("decoder.final_layernorm.weight", "model.norm.weight", (model.hidden,)))
    if not model.tied:
        tensors.append(_whole("output_layer.weight", "lm_head.weight", table))
    return tensors


def _whole(key: str, name: str, shape: tuple[int, ...], leading: tuple[int, ...] = ()) -> Matrix:
    """Each matrix is one Hugging Face tensor, of that ``name`` with the index put in."""
    return Matrix(key, leading, shape, lambda index: [Rows(name.format(*index), 0, shape[0])])


def _gate_up(key: str, unit: str, model: Model, leading: tuple[int, ...]) -> Matrix:
    """gate_proj above up_proj, of the Hugging Face module ``unit`` with the index put in."""

    def stack(index: tuple[int, ...]) -> list[Rows]:
        prefix = unit.format(*index)
        return [Rows(f"{prefix}{half}_proj.weight", 0, model.ffn) for half in ("gate", "up")]

    return Matrix(key, leading, (2 * model.ffn, model.hidden), stack, (model.ffn,))


def _attention(model: Model) -> list[Matrix]:
    hidden, dim, layers = model.hidden, model.head_dim, (model.layers,)
    queries = model.heads // model.kv_heads * dim  # rows of q_proj per group

    def qkv(kind: str) -> Callable[[tuple[int, ...]], list[Rows]]:
        parts = (("q", queries), ("k", dim), ("v", dim))
        return lambda index: [
            Rows(f"model.layers.{index[0]}.self_attn.{part}_proj.{kind}", group * rows, rows)
            for group in range(model.kv_heads)
            for part, rows in parts
        ]

    ours, theirs = "decoder.layers.self_attention.", "model.layers.{0}."
    own, rows = theirs + "self_attn.", model.kv_heads * (queries + 2 * dim)
    tensors = [
        _whole(ours + "linear_qkv.layer_norm_weight", theirs + "input_layernorm.weight", (hidden,), layers),
        Matrix(ours + "linear_qkv.weight", layers, (rows, hidden), qkv("weight")),
        _whole(ours + "linear_proj.weight", own + "o_proj.weight", (hidden, model.heads * dim), layers),
    ]
    if model.qkv_bias:
        tensors.append(Matrix(ours + "linear_qkv.bias", layers, (rows,), qkv("bias")))
    if model.qk_norm:
        tensors += [
            _whole(ours + f"{part}_layernorm.weight", own + f"{part}_norm.weight", (dim,), layers)
            for part in ("q", "k")
        ]
    return tensors


def _dense(model: Model) -> list[Matrix]:
    hidden, layers = model.hidden, (model.layers,)
    ours, theirs = "decoder.layers.mlp.", "model.layers.{0}."
    norm = theirs + "post_attention_layernorm.weight"
    return [
        _whole(ours + "linear_fc1.layer_norm_weight", norm, (hidden,), layers),
        _gate_up(ours + "linear_fc1.weight", theirs + "mlp.", model, layers),
        _whole(ours + "linear_fc2.weight", theirs + "mlp.down_proj.weight", (hidden, model.ffn), layers),
    ]


def _experts(model: Model) -> list[Matrix]:
    hidden, layers, each = model.hidden, (model.layers,), (model.layers, model.experts)
    ours, theirs = "decoder.layers.", "model.layers.{0}."
    experts, unit = ours + "mlp.experts.experts.", theirs + "mlp.experts.{1}."
    norm = theirs + "post_attention_layernorm.weight"
    return [
        _whole(ours + "pre_mlp_layernorm.weight", norm, (hidden,), layers),
        _whole(ours + "mlp.router.weight", theirs + "mlp.gate.weight", (model.experts, hidden), layers),
        _gate_up(experts + "linear_fc1.weight", unit, model, each),
        _whole(experts + "linear_fc2.weight", unit + "down_proj.weight", (hidden, model.ffn), each),
    ]


def hf_stacks(model: Model) -> dict[str, list[Rows]]:
    """For each Hugging Face tensor the Megatron rows it is made of, from its first row to its last."""
    placed: dict[str, list[tuple[int, Rows]]] = {name: [] for name in hf_tensors(model)}
    for matrix in mcore_tensors(model):
        for index in np.ndindex(*matrix.leading):
            row = 0
            for part in matrix.stack(index):
                placed[part.name].append((part.row, Rows(matrix.key, row, part.rows, index)))
                row += part.rows
    return {name: [part for _, part in sorted(parts, key=lambda p: p[0])] for name, parts in placed.items()}


def clip(stack: Sequence[Rows], first: int, last: int) -> list[Rows]:
    """What is in the rows [first, last) of a ``stack``.

    >>> [(part.name, part.row, part.rows) for part in clip([Rows("q", 0, 4), Rows("k", 0, 2)], 3, 5)]
    [('q', 3, 1), ('k', 0, 1)]
    """
    result, start = [], 0
    for part in stack:
        low, high = max(first, start), min(last, start + part.rows)
        if low < high:
            result.append(Rows(part.name, part.row + low - start, high - low, part.index))
        start += part.rows
    return result


def extra_states(model: Model) -> list[str]:
    """Keys of the empty per-module states that Megatron's layers and Transformer Engine's ask for when they
    load.
    """
    names = ["linear_qkv", "core_attention", "linear_proj"]
    names += ["q_layernorm", "k_layernorm"] if model.qk_norm else []
    per_layer = [f"decoder.layers.self_attention.{name}" for name in names]
    per_layer += (
        ["decoder.layers.pre_mlp_layernorm"]
        if model.experts
        else ["decoder.layers.mlp.linear_fc1", "decoder.layers.mlp.linear_fc2"]
    )
    per_expert = [f"decoder.layers.mlp.experts.experts.{name}" for name in ("linear_fc1", "linear_fc2")]
    keys = [shard_key("decoder.final_layernorm._extra_state", (0,), (1,))]
    for names, shape in ((per_layer, (model.layers,)), (per_expert, (model.layers, model.experts))):
        keys += [shard_key(f"{n}._extra_state", i, shape) for n in names for i in np.ndindex(*shape)]
    return keys


@dataclass(frozen=True)
class Chunk:
    """Part of a Megatron tensor that is stored as one archive: whole matrices, or some rows of one."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stack: tuple[Rows, ...]


def chunks_of(matrix: Matrix, itemsize: int, experts_per_chunk: int, chunk_bytes: int) -> Iterator[Chunk]:
    """Cut a tensor where megatron-core cuts it at TP 1, and further where a chunk would exceed
    ``chunk_bytes``.
    """
    rows, rest = matrix.shape[0], matrix.shape[1:]
    together = experts_per_chunk if len(matrix.leading) == 2 else 1
    rows_at_once = max(1, chunk_bytes // (math.prod(rest) * itemsize * together))
    bands = [
        (first, min(first + rows_at_once, end))
        for start, end in itertools.pairwise([0, *matrix.cuts, rows])
        for first in range(start, end, rows_at_once)
    ]
    for index in np.ndindex(*matrix.leading[:1], *(size // together for size in matrix.leading[1:])):
        corner = (*index[:1], *(i * together for i in index[1:]))
        covered = [(*corner[:-1], corner[-1] + i) for i in range(together)] if len(corner) == 2 else [corner]
        stacks = [matrix.stack(each) for each in covered]
        for first, last in bands:
            yield Chunk(
                matrix.key,
                (*corner, first, *(0 for _ in rest)),
                (*(1 for _ in corner[:1]), *(together for _ in corner[1:]), last - first, *rest),
                tuple(part for stack in stacks for part in clip(stack, first, last)),
            )

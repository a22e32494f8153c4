"""The memory of an FSDP layout: shards as torch allocates them, gathered units, activations, and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ascend_rl.estimate.die import GIB, HBM_GIB, RESERVE_GIB, largest
from ascend_rl.estimate.layouts import Fsdp, fsdp_problems
from ascend_rl.estimate.tensors import (
    LOGIT_BYTES,
    WEIGHT_BYTES,
    adapter_parameters,
    attention_activation_bytes,
    mlp_activation_bytes,
)
from ascend_rl.settings.model import Model
from ascend_rl.settings.switch import CannotWork

ADAM_MOMENTS = 2  # of FSDP, in the dtype of the parameters, which are the master weights
# FSDP, bytes a parameter of the unit (layer) at work. bf16: its weights, the gathered ones they were copied
# from, the next unit's, its gradients; fp32: what is reduced of the unit before.
UNIT_BYTES = 3 * 2 + 2 + 4
FROZEN_BYTES = 3 * 2  # the same without gradients


def layer_shapes(model: Model) -> list[tuple[int, ...]]:
    """Shapes of one layer's tensors as Hugging Face has them; an expert has three of its own."""
    q, kv, hidden, ffn = (
        model.heads * model.head_dim,
        model.kv_heads * model.head_dim,
        model.hidden,
        model.ffn,
    )
    shapes: list[tuple[int, ...]] = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]
    shapes += [(q,), (kv,), (kv,)] * model.qkv_bias + [(model.head_dim,)] * 2 * model.qk_norm
    shapes += [(hidden,)] * 2 + [(model.experts, hidden)] * bool(model.experts)
    return shapes + [(ffn, hidden), (ffn, hidden), (hidden, ffn)] * max(1, model.experts)


def fsdp_units(model: Model, version: int) -> list[tuple[int, list[tuple[int, ...]]]]:
    """(how many, shapes) of what verl wraps: each layer, and the rest, the root, last. FSDP2 also wraps the
    embedding and lm_head, unless they are tied.
    """
    matrix, norm = (model.vocabulary, model.hidden), (model.hidden,)
    layers = (model.layers, layer_shapes(model))
    if version == 1 or model.tied:
        return [layers, (1, [matrix] * (1 if model.tied else 2) + [norm])]
    return [layers, (2, [matrix]), (1, [norm])]


def shard_numel(shapes: list[tuple[int, ...]], shards: int, version: int) -> int:
    """Elements of a unit on one die, padding included. FSDP1 cuts the unit as one flat tensor. FSDP2 cuts
    each tensor, in verl along its first dimension that divides, else along dimension 0 with padding.
    """
    if version == 1:
        return math.ceil(sum(map(math.prod, shapes)) / shards)
    return sum(
        math.prod(shape) // shards
        if any(length % shards == 0 for length in shape)
        else math.ceil(shape[0] / shards) * math.prod(shape[1:])
        for shape in shapes
    )


@dataclass(frozen=True)
class FsdpPlan:
    """One die of an FSDP layout at the peak of an update, in bytes; the limits as in TrainingPlan."""

    layout: Fsdp
    dp: int
    weights: int
    gradients: int
    optimizer: int
    gathered: int  # whole weights and gradients of the units at work, and their communication buffers
    activations: int  # kept, of all layers
    working: int
    logits: int
    step: int  # what AdamW allocates in its step, when activations are gone
    peak_bytes: int
    budget_bytes: int
    fits: bool
    max_token_len_per_gpu: int
    max_sequence_tokens: int


def _fsdp_peak(model: Model, layout: Fsdp) -> dict[str, int]:
    units = fsdp_units(model, layout.version)
    sharded = sum(count * shard_numel(shapes, layout.shards, layout.version) for count, shapes in units)
    adapters = math.ceil(model.layers * adapter_parameters(model, layout.lora_rank) / layout.shards)
    weights = layout.parameter_bytes * (sharded + adapters)
    trained = layout.parameter_bytes * adapters if layout.lora_rank else weights
    numels = [sum(map(math.prod, shapes)) for _, shapes in units]
    unit, root = max(numels[:-1]), numels[-1]  # the root stays whole until the end of backward
    gathered = max(UNIT_BYTES * unit + 4 * root, 8 * root)
    if layout.lora_rank:
        gathered = FROZEN_BYTES * unit + WEIGHT_BYTES * root
    if not layout.reshard_after_forward:
        gathered += WEIGHT_BYTES * sum(count * numel for (count, _), numel in zip(units, numels, strict=True))

    tokens = layout.max_token_len_per_gpu
    working = attention_activation_bytes(model, tokens) + mlp_activation_bytes(model, tokens)
    kept = WEIGHT_BYTES * tokens * model.hidden if layout.recompute == "full" else working
    states = {
        "weights": weights,
        "gradients": trained,
        "optimizer": ADAM_MOMENTS * trained,
        "step": trained,  # torch's foreach AdamW: the root of the second moment
    }
    if layout.offload_policy:
        states = dict.fromkeys(states, 0)
    parts = states | {
        "gathered": gathered,
        "activations": model.layers * kept,
        "working": working,
        "logits": LOGIT_BYTES * tokens * model.vocabulary,
    }
    update = gathered + parts["activations"] + max(working, parts["logits"])
    resident = parts["weights"] + parts["gradients"] + parts["optimizer"]
    return parts | {"peak_bytes": resident + max(parts["step"], update)}


def plan_fsdp(
    model: Model, layout: Fsdp, hbm_gib: float = HBM_GIB, reserve_gib: float = RESERVE_GIB
) -> FsdpPlan:
    """Memory of an FSDP layout, and its limits. Raises CannotWork if the layout is illegal."""
    if problems := fsdp_problems(model, layout):
        raise CannotWork("training: " + "; ".join(problems))
    budget = int((hbm_gib - reserve_gib) * GIB)
    parts = _fsdp_peak(model, layout)
    tokens = largest(
        lambda n: _fsdp_peak(model, replace(layout, max_token_len_per_gpu=n))["peak_bytes"] <= budget, 1 << 22
    )
    return FsdpPlan(
        layout=layout,
        dp=layout.dp,
        budget_bytes=budget,
        fits=parts["peak_bytes"] <= budget,
        max_token_len_per_gpu=tokens,
        max_sequence_tokens=tokens * layout.sp,
        **parts,
    )

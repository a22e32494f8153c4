"""The memory of a training layout of Megatron: every pipeline stage at the peak of an update, and the limits.

Under 1F1B stage i of PP holds the activations of PP - i micro-batches; the optimizer is sharded over the
ranks that hold the same parameters, which are others for experts than for the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ascend_rl.estimate.die import GIB, HBM_GIB, RESERVE_GIB, largest
from ascend_rl.estimate.layouts import Training, training_problems
from ascend_rl.estimate.tensors import (
    LOGIT_BYTES,
    WEIGHT_BYTES,
    adapter_parameters,
    attention_activation_bytes,
    mlp_activation_bytes,
    stage_parameters,
    worst_imbalance,
)
from ascend_rl.settings.model import Model
from ascend_rl.settings.switch import CannotWork

GRADIENT_BYTES = 4  # megatron-core's gradient buffer is fp32 and not sharded
OPTIMIZER_BYTES = 12  # fp32 master weight and two moments, sharded by the distributed optimizer
SWAP_TIMES = 16  # MindSpeed's swap_optimizer_times: share of the states on the die during the step


def split_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage, as megatron-core can split them: equal stages between a first and a last one that
    get less, as they have the embedding and lm_head. 94 layers on 4 stages: 23, 24, 24, 23.
    """
    if pp == 1:
        return (layers,)
    middle = math.ceil(layers / pp)
    if layers - middle * (pp - 2) < 2:
        middle = layers // pp
    ends = layers - middle * (pp - 2)
    return (ends // 2, *[middle] * (pp - 2), ends - ends // 2)


@dataclass(frozen=True)
class Stage:
    """One die of a pipeline stage at the peak of an update. All in bytes except ``layers`` and
    ``micro_batches``.
    """

    layers: int
    micro_batches: int  # in flight under 1F1B
    weights: int
    gradients: int
    optimizer: int  # on the die during forward and backward
    swapped: int  # of a swapped optimizer, on the die during the step, when activations are gone
    activations: int  # kept, of all layers and micro-batches in flight
    working: int  # one layer's activations: what backward recomputes, or their gradients
    logits: int
    peak: int


@dataclass(frozen=True)
class TrainingPlan:
    """``max_token_len_per_gpu`` and ``max_imbalance``: the largest that fit, with the rest unchanged; 0 if
    none does.
    """

    layout: Training
    dp: int
    stages: tuple[Stage, ...]
    peak_bytes: int
    budget_bytes: int
    fits: bool
    max_token_len_per_gpu: int
    max_sequence_tokens: int
    worst_imbalance: float
    max_imbalance: float


def _stage(model: Model, layout: Training, index: int, layers: int) -> Stage:
    tp, pp = layout.tp, layout.pp
    parts = stage_parameters(model, layers, tp, layout.ep, layout.etp, index == 0, index == pp - 1)
    parameters, experts = sum(parts.values()), parts.get("moe", 0)
    dense_shards, expert_shards = layout.dp * layout.cp, layout.dies // (pp * layout.ep * layout.etp)
    adapters = layers * adapter_parameters(model, layout.lora_rank, tp, layout.ep, layout.etp)
    states = OPTIMIZER_BYTES * ((parameters - experts) // dense_shards + experts // expert_shards)
    if layout.lora_rank:  # as if all were of experts, which fewer dies share
        states = OPTIMIZER_BYTES * adapters // expert_shards
    swap = layout.optimizer == "swap"

    tokens, etp, imbalance = layout.max_token_len_per_gpu, layout.etp, layout.imbalance
    attention = attention_activation_bytes(model, tokens, tp)
    working = attention + mlp_activation_bytes(model, tokens, tp, etp, imbalance)
    if layout.recompute == "full":
        kept = WEIGHT_BYTES * tokens * model.hidden // tp
    else:
        kept = attention + mlp_activation_bytes(model, tokens, tp, etp, imbalance, layout.moe_zero_memory)
    micro_batches = pp - index
    activations = layers * micro_batches * kept
    logits = LOGIT_BYTES * tokens * model.vocabulary // tp if index == pp - 1 else 0
    weights = WEIGHT_BYTES * (parameters + adapters)
    gradients = GRADIENT_BYTES * (adapters if layout.lora_rank else parameters)
    optimizer, swapped = (0, states // SWAP_TIMES) if swap else (states, 0)
    return Stage(
        layers=layers,
        micro_batches=micro_batches,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        swapped=swapped,
        activations=activations,
        working=working,
        logits=logits,
        peak=weights + gradients + optimizer + max(swapped, activations + working + logits),
    )


def training_stages(model: Model, layout: Training) -> tuple[Stage, ...]:
    """Every pipeline stage's memory. The layout must be legal."""
    split = layout.layer_split or split_layers(model.layers, layout.pp)
    return tuple(_stage(model, layout, index, layers) for index, layers in enumerate(split))


def plan_training(
    model: Model, layout: Training, hbm_gib: float = HBM_GIB, reserve_gib: float = RESERVE_GIB
) -> TrainingPlan:
    """Memory of a training layout, and its limits. Raises CannotWork if the layout is illegal."""
    if problems := training_problems(model, layout):
        raise CannotWork("training: " + "; ".join(problems))
    budget = int((hbm_gib - reserve_gib) * GIB)
    stages = training_stages(model, layout)
    peak, worst = max(stage.peak for stage in stages), worst_imbalance(model, layout.ep)

    def fits(**change) -> bool:
        return all(stage.peak <= budget for stage in training_stages(model, replace(layout, **change)))

    tokens = largest(lambda n: fits(max_token_len_per_gpu=n), 1 << 22)
    imbalance = largest(lambda n: fits(imbalance=n / 10), int(worst * 10)) / 10
    return TrainingPlan(
        layout=layout,
        dp=layout.dp,
        stages=stages,
        peak_bytes=peak,
        budget_bytes=budget,
        fits=peak <= budget,
        max_token_len_per_gpu=tokens,
        max_sequence_tokens=tokens * layout.cp,
        worst_imbalance=worst,
        max_imbalance=imbalance,
    )

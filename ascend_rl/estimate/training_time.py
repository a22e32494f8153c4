"""How long an update, a log-prob pass and a weight sync take, from shapes, layout and lengths.

A micro-batch of T tokens in sequences of l, split over a ring of CP dies, takes in each layer of a stage,
forward and backward:

    MICRO_BATCH_S + (6 * parameters * T / TP + 6 * heads * sum(l^2) / TP) / (CP * PEAK * TRAINING)
        + (CP - 1) * (RING_STEP_S + T / CP * KV bytes / RING_BYTES_S)

with the parameters that a token meets; a third more with full recomputation. A pipeline of PP stages adds PP
- 1 micro-batches. A log-prob pass is a third of it. Balance among DP ranks and experts is assumed, and what
the optimizer computes is left out.

Which published figures fixed the constants: docs/step_time.md. The terms are those of ascend_rl/hdp/hdp.py in
seconds. Cost: O(sequences).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ascend_rl.estimate.layouts import Training
from ascend_rl.estimate.rollout_time import LINK_BYTES_S, PEAK_FLOPS, active_parameters
from ascend_rl.estimate.tensors import WEIGHT_BYTES, stage_parameters
from ascend_rl.settings.model import Model

TRAINING = 0.36  # share of peak of the products of a layer: 798 s of Qwen3-235B-A22B
MICRO_BATCH_S = 0.0019  # a layer's launches, forward and backward: as hdp.QWEN3_235B.micro_batch
RING_STEP_S = 0.0014  # a ring step's latency, forward and backward: as hdp.QWEN3_235B.ring_step
RING_BYTES_S = 25e9  # of a die between nodes, by the data sheet: 400 Gbit/s a chip of two, both directions
HOST_BYTES_S = 20e9  # between host and die; assumed
STATE_BYTES = 12  # a parameter's optimizer states, see docs/memory_plan.md
BACKWARD = 2  # of the forward pass


@dataclass(frozen=True)
class Trained:
    """What a token costs in one layer of a model in training: parameters it meets, width of all heads, bytes
    of key and value on one die.
    """

    layers: int
    parameters: float
    heads_width: int
    kv_bytes: float

    @classmethod
    def of(cls, model: Model, tp: int) -> Trained:
        kv = 2 * WEIGHT_BYTES * max(1, model.kv_heads // tp) * model.head_dim
        width = model.heads * model.head_dim
        return cls(model.layers, active_parameters(model) / model.layers, width, kv)


def update_seconds(model: Trained, layout: Training, lengths: np.ndarray, dynamic: bool = True) -> float:
    """Forward and backward of all sequences, prompts included, of ``lengths`` [N] tokens.

    Args:
        dynamic: micro-batches of up to ``layout.max_token_len_per_gpu * cp`` tokens; else of one sequence.
    """
    lengths = np.asarray(lengths, float)
    tokens, squares = lengths.sum() / layout.dp, (lengths**2).sum() / layout.dp
    count = len(lengths) / layout.dp
    if dynamic:
        count = math.ceil(tokens / (layout.max_token_len_per_gpu * layout.cp))
    flops = 6 * (model.parameters * tokens + model.heads_width * squares) / layout.tp
    if layout.recompute == "full":
        flops *= 4 / 3
    each = flops / (layout.cp * PEAK_FLOPS * TRAINING) + count * MICRO_BATCH_S
    sent = 3 * model.kv_bytes * tokens / layout.cp / RING_BYTES_S  # K and V twice, their gradients once
    each += (layout.cp - 1) * (count * RING_STEP_S + sent)
    return each * math.ceil(model.layers / layout.pp) * (1 + (layout.pp - 1) / count)


def log_prob_seconds(model: Trained, layout: Training, lengths: np.ndarray, dynamic: bool = True) -> float:
    """A forward pass over all sequences."""
    share = 4 / 3 if layout.recompute == "full" else 1
    return update_seconds(model, layout, lengths, dynamic) / (1 + BACKWARD) / share


def sync_seconds(model: Model, layout: Training, rollout_weights_bytes: float) -> float:
    """New weights to the rollout, and all that moves between host and die in a step: weights and gradients
    in and out for the update, weights in for the sync, optimizer states in and out, sleep and wake-up.
    """
    stage = math.ceil(model.layers / layout.pp)
    mine = sum(stage_parameters(model, stage, layout.tp, layout.ep, layout.etp).values())
    states = STATE_BYTES * sum(stage_parameters(model, model.layers).values()) / layout.dies
    moved = 2 * (WEIGHT_BYTES + 4) * mine * layout.param_offload + WEIGHT_BYTES * mine
    if layout.optimizer != "resident":
        moved += 2 * states
    return (moved + rollout_weights_bytes) / HOST_BYTES_S + rollout_weights_bytes / LINK_BYTES_S

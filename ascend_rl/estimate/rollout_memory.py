"""The memory of a rollout layout of vLLM: weights, the peak of the profile run, KV cache, decode graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ascend_rl.estimate.die import GIB, HBM_GIB, MIB, RESERVE_GIB
from ascend_rl.estimate.layouts import Rollout, rollout_problems
from ascend_rl.estimate.tensors import WEIGHT_BYTES, stage_parameters
from ascend_rl.settings.model import Model
from ascend_rl.settings.switch import CannotWork

BLOCK_TOKENS = 128  # a KV cache block of vllm-ascend
# Of a graph, for each layer and one more: the most of three published captures (docs/memory_plan.md).
GRAPH_LAYER_BYTES = MIB // 2


def rollout_parameters(model: Model, tp: int, ep: int) -> dict[str, int]:
    """Parameters of one die of vLLM: without expert parallelism TP splits the experts too."""
    return stage_parameters(model, model.layers, tp, ep, etp=tp if ep == 1 else 1)


def kv_bytes_per_token(model: Model, tp: int = 1) -> int:
    """KV cache of a token on one die."""
    return model.layers * 2 * max(1, model.kv_heads // tp) * model.head_dim * WEIGHT_BYTES


def step_bytes(model: Model, rollout: Rollout, tokens: int, copies: float) -> float:
    """An estimate of what is on a die at once in a step of ``tokens``: hidden and residual, attention, the
    widest tensors of the MLP, of ``copies`` of tokens for experts.
    """
    q, kv, tp = model.heads * model.head_dim, model.kv_heads * model.head_dim, rollout.tp
    values = tokens * (2 * model.hidden + (2 * q + 2 * kv) / tp)
    if not model.experts:
        values += tokens * 3 * model.ffn / tp
    else:
        values += copies * (2 * model.hidden + 3 * model.ffn / (1 if rollout.ep > 1 else tp))
    return WEIGHT_BYTES * values


def prefill_bytes(model: Model, rollout: Rollout) -> int:
    """An estimate of the peak of vLLM's profile run (max_num_batched_tokens, balanced experts), with fp32
    logits and their copy in the sampler.
    """
    tokens = rollout.max_num_batched_tokens
    copies = min(tokens, rollout.moe_chunk_tokens or tokens) * model.experts_per_token
    if rollout.ep > 1:  # alltoall: each TP rank dispatches its share of the tokens
        copies /= rollout.tp
    step = step_bytes(model, rollout, tokens, copies)
    return int(step + rollout.max_num_seqs * model.vocabulary * 8)


def graph_bytes(model: Model, rollout: Rollout) -> int:
    """An upper estimate of the memory that capturing decode graphs takes: one pool that holds a step of the
    largest graph, and what each graph keeps. MC2 has room for all tokens of all ranks that may come.
    """
    if not rollout.graph_sizes:
        return 0
    tokens = max(rollout.graph_sizes)
    copies = tokens * model.experts_per_token
    if rollout.ep > 1:
        copies = math.ceil(tokens / rollout.tp) * rollout.ep
        copies *= min(model.experts // rollout.ep, model.experts_per_token)
    kept = len(rollout.graph_sizes) * (model.layers + 1) * GRAPH_LAYER_BYTES
    return int(step_bytes(model, rollout, tokens, copies)) + kept


@dataclass(frozen=True)
class RolloutPlan:
    """``max_num_seqs``: sequences of max_model_len in the KV cache of one DP rank at once; more can run while
    they are short, and vLLM preempts when they grow. ``fits``: at least one, which vLLM insists on, and the
    graphs, which are captured when the KV cache is there, in what gpu_memory_utilization leaves.
    """

    layout: Rollout
    dp: int
    weights: dict[str, int]
    weights_bytes: int
    prefill_bytes: int
    training_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_sequence: int
    kv_bytes: int
    kv_tokens: int
    graph_bytes: int
    graph_room_bytes: int
    max_num_seqs: int
    fits: bool


def plan_rollout(
    model: Model,
    layout: Rollout,
    training_bytes: int = 0,
    hbm_gib: float = HBM_GIB,
    reserve_gib: float = RESERVE_GIB,
) -> RolloutPlan:
    """Memory of a rollout layout. Raises CannotWork if it is illegal. ``training_bytes``: what the trainer
    leaves on the die meanwhile; vllm-ascend subtracts from its share whatever else is on the die.
    """
    if problems := rollout_problems(model, layout):
        raise CannotWork("rollout: " + "; ".join(problems))
    weights = {
        name: WEIGHT_BYTES * count for name, count in rollout_parameters(model, layout.tp, layout.ep).items()
    }
    share = int(layout.gpu_memory_utilization * hbm_gib * GIB)
    prefill, total = prefill_bytes(model, layout), sum(weights.values())
    room = max(0, share - total - prefill - training_bytes - int(reserve_gib * GIB))
    per_token = kv_bytes_per_token(model, layout.tp)
    blocks = room // (per_token * BLOCK_TOKENS)
    sequence_blocks = math.ceil(layout.max_model_len / BLOCK_TOKENS)
    graphs, graph_room = graph_bytes(model, layout), int(hbm_gib * GIB) - share
    return RolloutPlan(
        layout=layout,
        dp=layout.dp,
        weights=weights,
        weights_bytes=total,
        prefill_bytes=prefill,
        training_bytes=training_bytes,
        kv_bytes_per_token=per_token,
        kv_bytes_per_sequence=per_token * layout.max_model_len,
        kv_bytes=blocks * per_token * BLOCK_TOKENS,
        kv_tokens=blocks * BLOCK_TOKENS,
        graph_bytes=graphs,
        graph_room_bytes=graph_room,
        max_num_seqs=blocks // sequence_blocks,
        fits=blocks >= sequence_blocks and graphs <= graph_room,
    )

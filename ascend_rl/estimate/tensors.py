"""What one rank holds of a model: parameters, and the activations that a layer keeps for backward."""

from __future__ import annotations

from ascend_rl.settings.model import Model

WEIGHT_BYTES = 2  # bf16, also activations and the KV cache
LOGIT_BYTES = 8  # bf16 logit, fp32 softmax that turns into the gradient, bf16 gradient


def layer_parameters(model: Model, tp: int = 1, ep: int = 1, etp: int = 1) -> dict[str, int]:
    """Parameters of one layer that one rank holds. Norms and gate are on every rank; a key-value head is
    repeated where TP exceeds their number (rollout only).
    """
    heads, kv_heads = model.heads // tp, max(1, model.kv_heads // tp)
    parts = {
        "qkv": (heads + 2 * kv_heads) * model.head_dim * (model.hidden + model.qkv_bias),
        "o": heads * model.head_dim * model.hidden,
        "norm": 2 * model.hidden + 2 * model.head_dim * model.qk_norm,
    }
    if not model.experts:
        return parts | {"mlp": 3 * model.hidden * (model.ffn // tp)}
    return parts | {
        "moe": (model.experts // ep) * 3 * model.hidden * (model.ffn // etp),
        "gate": model.experts * model.hidden,
    }


def adapter_parameters(model: Model, rank: int, tp: int = 1, ep: int = 1, etp: int = 1) -> int:
    """Parameters of LoRA in one layer that one rank holds: for each linear layer of [out, in], rank x (in +
    out). As peft's all-linear; Megatron-Bridge fuses some and has fewer.
    """
    q, kv, hidden, ffn = (
        model.heads * model.head_dim,
        model.kv_heads * model.head_dim,
        model.hidden,
        model.ffn,
    )
    attention = (4 * hidden + 2 * q + 2 * kv) // tp
    if not model.experts:
        return rank * (attention + 3 * (hidden + ffn) // tp)
    return rank * (attention + hidden + model.experts + model.experts // ep * 3 * (hidden + ffn) // etp)


def stage_parameters(
    model: Model, layers: int, tp: int = 1, ep: int = 1, etp: int = 1, first: bool = True, last: bool = True
) -> dict[str, int]:
    """Parameters of one rank of a pipeline stage. A tied embedding is on the first and on the last stage."""
    parts = {name: layers * count for name, count in layer_parameters(model, tp, ep, etp).items()}
    matrices = first + last - (model.tied and first and last)
    parts["embedding_lm_head"] = matrices * (model.vocabulary // tp) * model.hidden
    parts["norm"] += model.hidden * last
    return parts


def attention_activation_bytes(model: Model, tokens: int, tp: int = 1) -> int:
    """What one layer's attention keeps for backward on one rank, for ``tokens`` of its CP rank: layer input,
    its norm, the fused q, k, v, then q and k after norm and rotation, the core's output, and the residual
    sum.
    """
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    values = 3 * model.hidden + (q + 2 * kv) + (q + kv) + q
    return WEIGHT_BYTES * tokens * values // tp


def mlp_activation_bytes(
    model: Model, tokens: int, tp: int = 1, etp: int = 1, imbalance: float = 1.0, zero_memory: str = "disable"
) -> int:
    """What one layer's MLP or experts keep for backward on one rank.

    MLP: the norm, gate and up, their product. Experts: the norm and the layer's output, and for each copy of
    a token what MindSpeed's alltoall-overlap GroupedMLP saves: input, gate and up, their product, the same
    times the router's probability. level0 keeps gate and up only, level1 nothing.
    """
    if not model.experts:
        return WEIGHT_BYTES * tokens * (model.hidden + 3 * model.ffn) // tp
    copies = tokens * model.experts_per_token * etp * imbalance
    ffn = model.ffn // etp
    kept = {"disable": model.hidden + 4 * ffn, "level0": 2 * ffn, "level1": 0}[zero_memory]
    return int(WEIGHT_BYTES * (tokens * 2 * model.hidden + copies * kept) / tp)


def worst_imbalance(model: Model, ep: int) -> float:
    """The imbalance if every token chooses all it can from one rank; EP32 of 128 experts, top 8: 16."""
    if not model.experts:
        return 1.0
    return ep * min(model.experts_per_token, model.experts // ep) / model.experts_per_token

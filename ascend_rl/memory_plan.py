"""How much of a die's HBM a partition of training and rollout needs, what fits, and which partitions to try.

On a cluster a wrong TP/PP/CP/EP choice shows as an out-of-memory error, long after the start. But every large
tensor follows from config.json, so count them: the parameters of a rank, what autograd keeps for a token, the
KV cache of a token. Training and rollout take turns on the same dies (verl's hybrid engine); each phase must
fit beside a fixed reserve.

Invariants (tests/test_memory_plan.py): parameter totals equal Hugging Face's and Megatron's models; shares of
all ranks add up to the total; shards of FSDP are what torch allocates, to the byte; kept activations equal
what autograd saves; the published tables of Qwen3-235B are met within 5%. Cost: O(stages) a plan,
O(partitions * stages) a suggestion; no framework is imported.

Units: bytes, tokens, GiB = 2**30 (the "GB" of the published tables). docs/memory_plan.md lists what is not
counted. Example: 94 layers * 2 (K, V) * 1 head * 128 * 2 bytes * 32768 tokens = 1.47 GiB of KV cache at TP4.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

GIB, MIB = 2**30, 2**20
WEIGHT_BYTES = 2  # bf16, also activations and the KV cache
GRADIENT_BYTES = 4  # megatron-core's gradient buffer is fp32 and not sharded
OPTIMIZER_BYTES = 12  # fp32 master weight and two moments, sharded by the distributed optimizer
ADAM_MOMENTS = 2  # of FSDP, in the dtype of the parameters, which are the master weights
# FSDP, bytes a parameter of the unit (layer) at work. bf16: its weights, the gathered ones they were copied
# from, the next unit's, its gradients; fp32: what is reduced of the unit before.
UNIT_BYTES = 3 * 2 + 2 + 4
LOGIT_BYTES = 8  # bf16 logit, fp32 softmax that turns into the gradient, bf16 gradient
SWAP_TIMES = 16  # MindSpeed's swap_optimizer_times: share of the states on the die during the step
BLOCK_TOKENS = 128  # a KV cache block of vllm-ascend
HBM_GIB = 64.0  # a die of Atlas A3
RESERVE_GIB = 6.0  # ten HCCL communicators of both processes, each 2 * HCCL_BUFFSIZE=300 MB
DIES_PER_NODE = 16

_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
# What the public config.json of each model says about shapes.
CONFIGS: dict[str, dict] = {
    "qwen3-235b-a22b": {
        **_QWEN3_MOE,
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
    "qwen3-30b-a3b": {
        **_QWEN3_MOE,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "qwen3-32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25600,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
    },
    "qwen2.5-3b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 11008,
        "tie_word_embeddings": True,
    },
}


class PlanError(ValueError):
    """A model, a partition or an option that cannot be planned; the message says what to change."""


# ------------------------------------------------------------------------------------------ model and options


@dataclass(frozen=True)
class Model:
    """The shapes of config.json. ``ffn`` is the width of one expert, or of the MLP if ``experts`` is 0."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    ffn: int
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = True

    @classmethod
    def load(cls, name: str) -> Model:
        """A name of CONFIGS, a config.json, or a directory that holds one."""
        if name.lower() in CONFIGS:
            return cls.from_config(CONFIGS[name.lower()], name.lower())
        path = Path(name)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise PlanError(
                f"model '{name}' is neither one of {', '.join(CONFIGS)} nor a readable config.json: {error}"
            ) from error
        return cls.from_config(config, name)

    @classmethod
    def from_config(cls, config: dict, name: str = "config.json") -> Model:
        kind = config.get("model_type")
        if kind not in ("qwen2", "qwen3", "qwen3_moe"):
            raise PlanError(f"{name}: model_type '{kind}' is not known, only qwen2, qwen3 and qwen3_moe are")
        moe = kind == "qwen3_moe"
        if moe and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
            raise PlanError(
                f"{name}: layers without experts (mlp_only_layers, decoder_sparse_step) are not handled"
            )

        def value(key: str) -> int:
            if not isinstance(config.get(key), int) or config[key] < 1:
                raise PlanError(f"{name}: {key} must be a positive integer, is {config.get(key)}")
            return config[key]

        heads, hidden = value("num_attention_heads"), value("hidden_size")
        return cls(
            name=name,
            layers=value("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=value("num_key_value_heads"),
            head_dim=config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads),
            vocabulary=value("vocab_size"),
            ffn=value("moe_intermediate_size" if moe else "intermediate_size"),
            experts=value("num_experts") if moe else 0,
            experts_per_token=value("num_experts_per_tok") if moe else 0,
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            qk_norm=kind != "qwen2",
        )


@dataclass(frozen=True)
class Training:
    """A layout of Megatron, with sequence parallelism where TP > 1 and the distributed optimizer.

    ``max_token_len_per_gpu``: tokens of a micro-batch on one CP rank (verl multiplies it by CP).
    ``optimizer``: swap (in host memory, MindSpeed's swap_optimizer), offload (verl's optimizer_offload: on
    the die during the whole update), resident (always on the die).
    ``recompute``: none or full (uniform, 1 layer). ``moe_zero_memory``: disable, level0, level1 (MindSpeed).
    ``imbalance``: tokens of the rank with the fullest experts, over the mean.
    ``layer_split``: layers of each pipeline stage; empty for ``split_layers``.
    ``param_offload``: weights and gradients leave the die during the rollout.
    """

    dies: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    max_token_len_per_gpu: int = 8704
    optimizer: str = "swap"
    recompute: str = "none"
    moe_zero_memory: str = "level1"
    imbalance: float = 1.0
    layer_split: tuple[int, ...] = ()
    param_offload: bool = True

    @property
    def dp(self) -> int:
        return self.dies // (self.tp * self.pp * self.cp)


@dataclass(frozen=True)
class Fsdp:
    """FSDP as verl sets it up: ``version`` 1 (strategy fsdp) or 2 (fsdp2), bf16 computation, fp32 reduction.

    ``size``: dies that share the states (fsdp_size); 0 is all, fewer are replicas of each other (HSDP).
    ``sp``: Ulysses. ``max_token_len_per_gpu``: tokens of a micro-batch on one SP rank (verl: x SP).
    ``recompute``: full (enable_gradient_checkpointing) or none.
    ``param_offload``, ``optimizer_offload``: away during the rollout, on the die during the whole update.
    ``offload_policy``: FSDP2 keeps weights, gradients and optimizer in host memory at all times.
    ``parameter_bytes``: of the weights that the optimizer updates (model_dtype), 4 for fp32, verl's default.
    """

    dies: int
    size: int = 0
    sp: int = 1
    version: int = 2
    max_token_len_per_gpu: int = 8704
    recompute: str = "full"
    param_offload: bool = True
    optimizer_offload: bool = True
    offload_policy: bool = False
    reshard_after_forward: bool = True
    parameter_bytes: int = 4

    @property
    def shards(self) -> int:
        return self.size or self.dies

    @property
    def dp(self) -> int:
        return self.dies // self.sp


@dataclass(frozen=True)
class Rollout:
    """A layout of vLLM. ``ep``: TP * data_parallel_size dies share the experts (enable_expert_parallel), or
    1, and each TP group is a replica of its own that splits every expert.
    """

    dies: int
    tp: int = 1
    ep: int = 1
    max_model_len: int = 34816
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 34816
    gpu_memory_utilization: float = 0.87
    moe_chunk_tokens: int | None = None  # VLLM_FUSED_MOE_CHUNK_SIZE; None: all at once

    @property
    def dp(self) -> int:
        return self.dies // self.tp


CHOICES = {
    "optimizer": ("swap", "offload", "resident"),
    "recompute": ("none", "full"),
    "moe_zero_memory": ("disable", "level0", "level1"),
}


# ------------------------------------------------------------------------------------------------- parameters


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


def stage_parameters(
    model: Model, layers: int, tp: int = 1, ep: int = 1, etp: int = 1, first: bool = True, last: bool = True
) -> dict[str, int]:
    """Parameters of one rank of a pipeline stage. A tied embedding is on the first and on the last stage."""
    parts = {name: layers * count for name, count in layer_parameters(model, tp, ep, etp).items()}
    matrices = first + last - (model.tied and first and last)
    parts["embedding_lm_head"] = matrices * (model.vocabulary // tp) * model.hidden
    parts["norm"] += model.hidden * last
    return parts


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


def rollout_parameters(model: Model, tp: int, ep: int) -> dict[str, int]:
    """Parameters of one die of vLLM: without expert parallelism TP splits the experts too."""
    return stage_parameters(model, model.layers, tp, ep, etp=tp if ep == 1 else 1)


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


# ------------------------------------------------------------------------------------------------ activations


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


def kv_bytes_per_token(model: Model, tp: int = 1) -> int:
    """KV cache of a token on one die."""
    return model.layers * 2 * max(1, model.kv_heads // tp) * model.head_dim * WEIGHT_BYTES


def prefill_bytes(model: Model, rollout: Rollout) -> int:
    """An estimate of the peak of vLLM's profile run (max_num_batched_tokens, balanced experts): hidden and
    residual, attention, the widest tensors of the MLP, fp32 logits and their copy in the sampler.
    """
    tokens, tp = rollout.max_num_batched_tokens, rollout.tp
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    values = tokens * (2 * model.hidden + (2 * q + 2 * kv) / tp)
    if not model.experts:
        values += tokens * 3 * model.ffn / tp
    else:
        copies = min(tokens, rollout.moe_chunk_tokens or tokens) * model.experts_per_token
        if rollout.ep > 1:  # alltoall: each TP rank dispatches its share of the tokens
            values += copies / tp * (2 * model.hidden + 3 * model.ffn)
        else:
            values += copies * (2 * model.hidden + 3 * model.ffn / tp)
    return int(WEIGHT_BYTES * values + rollout.max_num_seqs * model.vocabulary * 8)


# ------------------------------------------------------------------------------------------------------ plans


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
    """``max_token_len_per_gpu`` and ``max_imbalance``: the largest that fit, with the rest as asked; 0 if
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


@dataclass(frozen=True)
class RolloutPlan:
    """``max_num_seqs``: sequences of max_model_len in the KV cache of one DP rank at once; more can run while
    they are short, and vLLM preempts when they grow. ``fits``: at least one, which vLLM insists on.
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
    max_num_seqs: int
    fits: bool


@dataclass(frozen=True)
class Plan:
    """``sync_bytes``: weights of both engines, on one die while new weights go to vLLM."""

    model: Model
    training: TrainingPlan | FsdpPlan | None
    rollout: RolloutPlan | None
    sync_bytes: int
    fits: bool


def training_problems(model: Model, layout: Training) -> list[str]:
    """Why megatron-core cannot train in this layout; empty if it can."""
    tp, pp, cp, ep, etp, dies = layout.tp, layout.pp, layout.cp, layout.ep, layout.etp, layout.dies
    if min(tp, pp, cp, ep, etp, dies, layout.max_token_len_per_gpu) < 1:
        return ["every size must be at least 1"]
    problems = [
        f"{name}={getattr(layout, name)} is unknown, use one of {', '.join(values)}"
        for name, values in CHOICES.items()
        if getattr(layout, name) not in values
    ]
    checks = [
        (dies % (tp * pp * cp), f"TP{tp} x PP{pp} x CP{cp} = {tp * pp * cp} must divide the {dies} dies"),
        (model.heads % tp, f"TP{tp} must divide the {model.heads} attention heads"),
        (model.kv_heads % tp, f"TP{tp} must divide the {model.kv_heads} key-value heads (query groups)"),
        (model.vocabulary % tp, f"TP{tp} must divide the vocabulary of {model.vocabulary}"),
        (pp > model.layers, f"PP{pp} exceeds the {model.layers} layers"),
        (layout.imbalance < 0, f"imbalance={layout.imbalance} must not be negative"),
    ]
    if model.experts:
        checks += [
            (model.experts % ep, f"EP{ep} must divide the {model.experts} experts"),
            (model.ffn % etp, f"ETP{etp} must divide the expert width {model.ffn}"),
            (
                dies % (pp * ep * etp),
                f"EP{ep} x ETP{etp} = {ep * etp} must divide the {dies}/{pp} dies of a pipeline stage",
            ),
        ]
    else:
        checks += [
            (model.ffn % tp, f"TP{tp} must divide the MLP width {model.ffn}"),
            (ep * etp > 1, f"{model.name} has no experts: EP and ETP must be 1"),
        ]
    split = layout.layer_split
    checks.append(
        (
            split and (len(split) != pp or sum(split) != model.layers or min(split) < 1),
            f"layer_split {split} must give each of {pp} stages a layer and sum to {model.layers}",
        )
    )
    return problems + [message for wrong, message in checks if wrong]


def rollout_problems(model: Model, layout: Rollout) -> list[str]:
    """Why vLLM cannot serve in this layout; empty if it can."""
    tp, ep, dies, kv_heads = layout.tp, layout.ep, layout.dies, model.kv_heads
    if min(tp, ep, dies, layout.max_model_len, layout.max_num_seqs, layout.max_num_batched_tokens) < 1:
        return ["every size must be at least 1"]
    checks = [
        (dies % tp, f"TP{tp} must divide the {dies} dies"),
        (model.heads % tp, f"TP{tp} must divide the {model.heads} attention heads"),
        (
            kv_heads % tp and tp % kv_heads,
            f"TP{tp} must divide the {kv_heads} key-value heads or be a multiple of it",
        ),
        (model.vocabulary % tp, f"TP{tp} must divide the vocabulary of {model.vocabulary}"),
        ((not model.experts or ep == 1) and model.ffn % tp, f"TP{tp} must divide the MLP width {model.ffn}"),
        (not model.experts and ep > 1, f"{model.name} has no experts: EP must be 1"),
        (
            ep > 1 and (ep % tp or dies % ep),
            f"EP{ep} must be a multiple of TP{tp} and divide the {dies} dies",
        ),
        (model.experts % ep, f"EP{ep} must divide the {model.experts} experts"),
        (
            not 0 < layout.gpu_memory_utilization <= 1,
            f"gpu_memory_utilization={layout.gpu_memory_utilization} must be in (0, 1]",
        ),
    ]
    return [message for wrong, message in checks if wrong]


def _stage(model: Model, layout: Training, index: int, layers: int) -> Stage:
    tp, pp = layout.tp, layout.pp
    parts = stage_parameters(model, layers, tp, layout.ep, layout.etp, index == 0, index == pp - 1)
    parameters, experts = sum(parts.values()), parts.get("moe", 0)
    dense_shards, expert_shards = layout.dp * layout.cp, layout.dies // (pp * layout.ep * layout.etp)
    states = OPTIMIZER_BYTES * ((parameters - experts) // dense_shards + experts // expert_shards)
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
    weights, gradients = WEIGHT_BYTES * parameters, GRADIENT_BYTES * parameters
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


def _largest(fits: Callable[[int], bool], high: int) -> int:
    """The largest n in [0, high] that fits, if all smaller ones do; 0 if none does."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def plan_training(
    model: Model, layout: Training, hbm_gib: float = HBM_GIB, reserve_gib: float = RESERVE_GIB
) -> TrainingPlan:
    """Memory of a training layout, and its limits. Raises PlanError if the layout is illegal."""
    if problems := training_problems(model, layout):
        raise PlanError("training: " + "; ".join(problems))
    budget = int((hbm_gib - reserve_gib) * GIB)
    stages = training_stages(model, layout)
    peak, worst = max(stage.peak for stage in stages), worst_imbalance(model, layout.ep)

    def fits(**change) -> bool:
        return all(stage.peak <= budget for stage in training_stages(model, replace(layout, **change)))

    tokens = _largest(lambda n: fits(max_token_len_per_gpu=n), 1 << 22)
    imbalance = _largest(lambda n: fits(imbalance=n / 10), int(worst * 10)) / 10
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


def fsdp_problems(model: Model, layout: Fsdp) -> list[str]:
    """Why verl cannot train in this layout; empty if it can."""
    dies, shards, sp = layout.dies, layout.shards, layout.sp
    if min(dies, shards, sp, layout.max_token_len_per_gpu) < 1:
        return ["every size must be at least 1"]
    checks = [
        (layout.version not in (1, 2), f"there is FSDP 1 and 2, not {layout.version}"),
        (dies % shards, f"an FSDP size of {shards} must divide the {dies} dies"),
        (dies % sp, f"SP{sp} must divide the {dies} dies"),
        (model.heads % sp, f"SP{sp} must divide the {model.heads} attention heads"),
        (
            model.kv_heads % sp and sp % model.kv_heads,
            f"SP{sp} must divide the {model.kv_heads} key-value heads or be a multiple of it",
        ),
        (layout.recompute not in CHOICES["recompute"], f"recompute={layout.recompute} is unknown"),
        (layout.offload_policy and layout.version == 1, "offload_policy needs FSDP2"),
    ]
    return [message for wrong, message in checks if wrong]


def _fsdp_peak(model: Model, layout: Fsdp) -> dict[str, int]:
    units = fsdp_units(model, layout.version)
    sharded = sum(count * shard_numel(shapes, layout.shards, layout.version) for count, shapes in units)
    weights = layout.parameter_bytes * sharded
    numels = [sum(map(math.prod, shapes)) for _, shapes in units]
    unit, root = max(numels[:-1]), numels[-1]  # the root stays whole until the end of backward
    gathered = max(UNIT_BYTES * unit + 4 * root, 8 * root)
    if not layout.reshard_after_forward:
        gathered += WEIGHT_BYTES * sum(count * numel for (count, _), numel in zip(units, numels, strict=True))

    tokens = layout.max_token_len_per_gpu
    working = attention_activation_bytes(model, tokens) + mlp_activation_bytes(model, tokens)
    kept = WEIGHT_BYTES * tokens * model.hidden if layout.recompute == "full" else working
    states = {
        "weights": weights,
        "gradients": weights,
        "optimizer": ADAM_MOMENTS * weights,
        "step": weights,  # torch's foreach AdamW: the root of the second moment
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
    """Memory of an FSDP layout, and its limits. Raises PlanError if the layout is illegal."""
    if problems := fsdp_problems(model, layout):
        raise PlanError("training: " + "; ".join(problems))
    budget = int((hbm_gib - reserve_gib) * GIB)
    parts = _fsdp_peak(model, layout)
    tokens = _largest(
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


def bytes_kept_in_rollout(trained: TrainingPlan | FsdpPlan) -> int:
    """What the trainer leaves on a die during the rollout. verl moves Megatron's gradients with the weights;
    FSDP's are freed.
    """
    if isinstance(trained, FsdpPlan):
        weights = 0 if trained.layout.param_offload else trained.weights
        return weights + (0 if trained.layout.optimizer_offload else trained.optimizer)
    resident, offload = trained.layout.optimizer == "resident", trained.layout.param_offload
    return max(
        (0 if offload else stage.weights + stage.gradients) + (stage.optimizer if resident else 0)
        for stage in trained.stages
    )


def plan_rollout(
    model: Model,
    layout: Rollout,
    training_bytes: int = 0,
    hbm_gib: float = HBM_GIB,
    reserve_gib: float = RESERVE_GIB,
) -> RolloutPlan:
    """Memory of a rollout layout. Raises PlanError if it is illegal. ``training_bytes``: what the trainer
    leaves on the die meanwhile; vllm-ascend subtracts from its share whatever else is on the die.
    """
    if problems := rollout_problems(model, layout):
        raise PlanError("rollout: " + "; ".join(problems))
    weights = {
        name: WEIGHT_BYTES * count for name, count in rollout_parameters(model, layout.tp, layout.ep).items()
    }
    share = int(layout.gpu_memory_utilization * hbm_gib * GIB)
    prefill, total = prefill_bytes(model, layout), sum(weights.values())
    room = max(0, share - total - prefill - training_bytes - int(reserve_gib * GIB))
    per_token = kv_bytes_per_token(model, layout.tp)
    blocks = room // (per_token * BLOCK_TOKENS)
    sequence_blocks = math.ceil(layout.max_model_len / BLOCK_TOKENS)
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
        max_num_seqs=blocks // sequence_blocks,
        fits=blocks >= sequence_blocks,
    )


def plan(
    model: Model,
    training: Training | Fsdp | None = None,
    rollout: Rollout | None = None,
    hbm_gib: float = HBM_GIB,
    reserve_gib: float = RESERVE_GIB,
) -> Plan:
    """Both phases on the same dies. Raises PlanError for an illegal layout, not for one that does not fit."""
    if training and rollout and training.dies != rollout.dies:
        raise PlanError(
            f"training has {training.dies} dies and rollout {rollout.dies}: both use the same dies"
        )
    trained: TrainingPlan | FsdpPlan | None = None
    sync = 0
    if isinstance(training, Fsdp):
        trained = plan_fsdp(model, training, hbm_gib, reserve_gib)
        largest = (
            training.parameter_bytes * model.vocabulary * model.hidden
        )  # tensors are gathered one by one
        sync = trained.weights + largest
    elif training:
        trained = plan_training(model, training, hbm_gib, reserve_gib)
        sync = max(stage.weights for stage in trained.stages)
    left = bytes_kept_in_rollout(trained) if trained else 0
    rolled = plan_rollout(model, rollout, left, hbm_gib, reserve_gib) if rollout else None
    sync += rolled.weights_bytes if rolled else 0
    fits = all(part.fits for part in (trained, rolled) if part) and sync <= (hbm_gib - reserve_gib) * GIB
    return Plan(model, trained, rolled, sync, fits)


# ------------------------------------------------------------------------------------------------ suggestions


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def training_layouts(model: Model, base: Training) -> Iterator[Training]:
    """Every legal layout of ``base.dies``: TP inside a node, ETP 1 or TP. A micro-batch stays as long: tokens
    times CP of ``base`` are shared by the new CP.
    """
    sequence, dies = base.max_token_len_per_gpu * base.cp, base.dies
    for tp in (n for n in _divisors(dies) if n <= DIES_PER_NODE):
        for pp in _divisors(dies // tp):
            for cp in _divisors(dies // tp // pp):
                for ep in _divisors(model.experts or 1):
                    for etp in {1, tp} if model.experts else {1}:
                        layout = replace(
                            base,
                            tp=tp,
                            pp=pp,
                            cp=cp,
                            ep=ep,
                            etp=etp,
                            layer_split=(),
                            max_token_len_per_gpu=math.ceil(sequence / cp),
                        )
                        if not training_problems(model, layout):
                            yield layout


def suggest_training(
    model: Model, base: Training, hbm_gib: float = HBM_GIB, reserve_gib: float = RESERVE_GIB, count: int = 5
) -> list[TrainingPlan]:
    """The ``count`` best legal layouts that fit, best first, one for each TP, PP and CP; empty if none fits.

    Rule, in this order: fits at the worst expert imbalance; small TP * PP * CP (more data parallelism); small
    CP (ring traffic in every layer), PP (bubble), ETP, EP (alltoall over fewer dies); low peak. A rule of
    thumb about memory and traffic, not a model of time.
    """
    budget = (hbm_gib - reserve_gib) * GIB
    ranked = {}
    for layout in training_layouts(model, base):
        peak = max(stage.peak for stage in training_stages(model, layout))
        if peak <= budget:
            worst = replace(layout, imbalance=worst_imbalance(model, layout.ep))
            fits_worst = max(stage.peak for stage in training_stages(model, worst)) <= budget
            size = layout.tp * layout.pp * layout.cp
            key = (not fits_worst, size, layout.cp, layout.pp, layout.etp, layout.ep, peak)
            group = (layout.tp, layout.pp, layout.cp)
            ranked[group] = min(ranked.get(group, (key, layout)), (key, layout), key=lambda pair: pair[0])
    best = sorted(ranked.values(), key=lambda pair: pair[0])[:count]
    return [plan_training(model, layout, hbm_gib, reserve_gib) for _, layout in best]


def suggest_fsdp(
    model: Model, base: Fsdp, hbm_gib: float = HBM_GIB, reserve_gib: float = RESERVE_GIB, count: int = 5
) -> list[FsdpPlan]:
    """The ``count`` best legal layouts that fit; a micro-batch stays as long as tokens times SP of ``base``.
    Rule: small SP (more data parallelism), then few dies that share the states (less traffic), at least a
    node of them.
    """
    tokens, node = base.max_token_len_per_gpu * base.sp, min(base.dies, DIES_PER_NODE)
    layouts = [
        replace(base, sp=sp, size=size, max_token_len_per_gpu=math.ceil(tokens / sp))
        for sp in _divisors(node)
        for size in _divisors(base.dies)
        if size >= node
    ]
    plans = (plan_fsdp(model, one, hbm_gib, reserve_gib) for one in layouts if not fsdp_problems(model, one))
    return [one for one in plans if one.fits][:count]


def suggest_rollout(
    model: Model,
    base: Rollout,
    training_bytes: int = 0,
    hbm_gib: float = HBM_GIB,
    reserve_gib: float = RESERVE_GIB,
    count: int = 5,
) -> list[RolloutPlan]:
    """The ``count`` best legal layouts that fit. Rule: most sequences of max_model_len at once on all dies;
    of equals, small TP, then small EP.
    """
    plans = []
    for tp in (n for n in _divisors(base.dies) if n <= DIES_PER_NODE):
        for ep in _divisors(model.experts or 1):
            layout = replace(base, tp=tp, ep=ep)
            if not rollout_problems(model, layout):
                plans.append(plan_rollout(model, layout, training_bytes, hbm_gib, reserve_gib))
    plans = [one for one in plans if one.fits]
    return sorted(plans, key=lambda one: (-one.max_num_seqs * one.dp, one.layout.tp, one.layout.ep))[:count]


# ----------------------------------------------------------------------------------------------- command line


def gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def verdict(fits: bool) -> str:
    return "fits" if fits else "DOES NOT FIT"


def training_name(layout: Training) -> str:
    experts = f" EP{layout.ep} ETP{layout.etp}" if layout.ep * layout.etp > 1 else ""
    return f"TP{layout.tp} PP{layout.pp} CP{layout.cp} DP{layout.dp}{experts}"


def rollout_name(layout: Rollout) -> str:
    return f"TP{layout.tp} DP{layout.dp}" + (f" EP{layout.ep}" if layout.ep > 1 else "")


def training_text(one: TrainingPlan) -> list[str]:
    layout = one.layout
    lines = [
        f"training {training_name(layout)}, {layout.max_token_len_per_gpu} tokens a die, optimizer "
        f"{layout.optimizer}, recompute {layout.recompute}, moe_zero_memory {layout.moe_zero_memory}",
        "  stage layers x micro-batches weights    grads  optimizer  activations  working  logits  peak GiB",
    ]
    for index, stage in enumerate(one.stages):
        optimizer = stage.optimizer or stage.swapped
        lines.append(
            f"  {index:5d} {stage.layers:6d} x {stage.micro_batches:<12d} {gib(stage.weights):>7s} "
            f"{gib(stage.gradients):>8s} {gib(optimizer):>10s} {gib(stage.activations):>12s} "
            f"{gib(stage.working):>8s} {gib(stage.logits):>7s} {gib(stage.peak):>9s}"
        )
    lines.append(
        f"  {verdict(one.fits)}: peak {gib(one.peak_bytes)} of {gib(one.budget_bytes)} GiB; "
        f"largest max_token_len_per_gpu {one.max_token_len_per_gpu} (sequence {one.max_sequence_tokens})"
    )
    if one.worst_imbalance > 1:
        lines.append(
            f"  expert imbalance that fits {one.max_imbalance:.1f} (worst possible {one.worst_imbalance:.1f})"
        )
    return lines


def fsdp_name(layout: Fsdp) -> str:
    replicas = f" x {layout.dies // layout.shards} replicas" if layout.shards < layout.dies else ""
    return f"FSDP{layout.version} over {layout.shards}{replicas} SP{layout.sp} DP{layout.dp}"


def fsdp_text(one: FsdpPlan) -> list[str]:
    layout = one.layout
    where = "in host memory" if layout.offload_policy else "on the die"
    return [
        f"training {fsdp_name(layout)}, {layout.max_token_len_per_gpu} tokens a die, recompute "
        f"{layout.recompute}, states {where}",
        "  weights    grads  optimizer  gathered  activations  working  logits     step  peak GiB",
        f"  {gib(one.weights):>7s} {gib(one.gradients):>8s} {gib(one.optimizer):>10s} "
        f"{gib(one.gathered):>9s} {gib(one.activations):>12s} {gib(one.working):>8s} {gib(one.logits):>7s} "
        f"{gib(one.step):>8s} {gib(one.peak_bytes):>9s}",
        f"  {verdict(one.fits)}: peak {gib(one.peak_bytes)} of {gib(one.budget_bytes)} GiB; "
        f"largest max_token_len_per_gpu {one.max_token_len_per_gpu} (sequence {one.max_sequence_tokens})",
    ]


def rollout_text(one: RolloutPlan) -> list[str]:
    split = ", ".join(f"{name} {gib(size)}" for name, size in one.weights.items())
    return [
        f"rollout {rollout_name(one.layout)}, max_model_len {one.layout.max_model_len}",
        f"  weights {gib(one.weights_bytes)} GiB a die ({split}), prefill {gib(one.prefill_bytes)}, "
        f"trainer {gib(one.training_bytes)}",
        f"  KV cache {gib(one.kv_bytes)} GiB a die, {one.kv_tokens} tokens; "
        f"{gib(one.kv_bytes_per_sequence)} GiB a full sequence",
        f"  {verdict(one.fits)}: {one.max_num_seqs} full sequences at once on each DP rank",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_rl.memory_plan",
        description="Plan the HBM of training and rollout; status 0: fits, 1: does not, 2: wrong arguments.",
        epilog="Example: --model qwen3-235b-a22b --dies 128 --tp 4 --pp 4 --cp 4 --ep 32 --rollout-tp 4 "
        "--rollout-ep 128. Without --tp (--sp with --fsdp) or --rollout-tp the best suggestion is planned.",
    )
    parser.add_argument("--model", required=True, help=f"{', '.join(CONFIGS)}, or a path to a config.json")
    parser.add_argument("--dies", type=int, required=True, help="dies of both phases, 16 a node on A3")
    for name in ("tp", "pp", "cp", "ep", "etp"):
        parser.add_argument(f"--{name}", type=int, help=f"training {name.upper()}")
    parser.add_argument("--fsdp", type=int, choices=(1, 2), help="train with FSDP 1 or 2, not with Megatron")
    parser.add_argument("--fsdp-size", type=int, default=0, help="dies that share the states; default all")
    parser.add_argument("--sp", type=int, help="Ulysses SP of FSDP")
    parser.add_argument("--offload-policy", action="store_true", help="FSDP2: states stay in host memory")
    parser.add_argument("--rollout-tp", type=int, help="rollout TP")
    parser.add_argument("--rollout-ep", type=int, help="rollout EP: 1, or TP * data_parallel_size")
    parser.add_argument("--prompt", type=int, default=2048, help="longest prompt, tokens")
    parser.add_argument("--response", type=int, default=32768, help="longest response, tokens")
    parser.add_argument("--max-token-len-per-gpu", type=int, help="default (prompt + response) / CP or SP")
    parser.add_argument("--layer-split", help="layers of each stage, as 23,24,24,23")
    for name, values in CHOICES.items():
        default = getattr(Training, name)
        also = " (FSDP: full)" if name == "recompute" else " (FSDP: offload)" if name == "optimizer" else ""
        parser.add_argument(f"--{name.replace('_', '-')}", choices=values, help=f"default {default}{also}")
    parser.add_argument("--imbalance", type=float, default=1.0, help="tokens of the fullest rank / mean")
    parser.add_argument("--no-param-offload", action="store_true", help="weights stay during the rollout")
    parser.add_argument("--max-num-seqs", type=int, default=Rollout.max_num_seqs)
    parser.add_argument("--max-num-batched-tokens", type=int, help="default prompt + response")
    parser.add_argument("--moe-chunk-tokens", type=int, help="VLLM_FUSED_MOE_CHUNK_SIZE; default all at once")
    parser.add_argument("--gpu-memory-utilization", type=float, default=Rollout.gpu_memory_utilization)
    parser.add_argument("--hbm-gib", type=float, default=HBM_GIB, help="HBM of a die")
    parser.add_argument("--reserve-gib", type=float, default=RESERVE_GIB, help="HCCL buffers and the like")
    parser.add_argument("--suggest", type=int, default=5, help="how many partitions to suggest")
    parser.add_argument("--json", action="store_true")
    return parser


def _fsdp_layout(arguments: argparse.Namespace, tokens: int) -> Fsdp:
    if arguments.optimizer == "swap":
        raise PlanError("--optimizer swap is MindSpeed's: FSDP has offload and resident")
    return Fsdp(
        dies=arguments.dies,
        size=arguments.fsdp_size,
        sp=arguments.sp or 1,
        version=arguments.fsdp,
        max_token_len_per_gpu=tokens,
        recompute=arguments.recompute or Fsdp.recompute,
        param_offload=not arguments.no_param_offload,
        optimizer_offload=arguments.optimizer != "resident",
        offload_policy=arguments.offload_policy,
    )


def _layouts(arguments: argparse.Namespace) -> tuple[Training | Fsdp, Rollout]:
    sequence, split = arguments.prompt + arguments.response, arguments.cp or 1
    if arguments.fsdp:
        split = arguments.sp or 1
    if min(sequence, split, arguments.dies) < 1:
        raise PlanError("--dies, --cp, --sp and --prompt + --response must be at least 1")
    tokens = arguments.max_token_len_per_gpu or math.ceil(sequence / split)
    training: Training | Fsdp
    if arguments.fsdp:
        training = _fsdp_layout(arguments, tokens)
    else:
        training = Training(
            dies=arguments.dies,
            tp=arguments.tp or 1,
            pp=arguments.pp or 1,
            cp=split,
            ep=arguments.ep or 1,
            etp=arguments.etp or 1,
            max_token_len_per_gpu=tokens,
            imbalance=arguments.imbalance,
            layer_split=tuple(int(n) for n in (arguments.layer_split or "").split(",") if n),
            param_offload=not arguments.no_param_offload,
            **{name: getattr(arguments, name) or getattr(Training, name) for name in CHOICES},
        )
    rollout = Rollout(
        dies=arguments.dies,
        tp=arguments.rollout_tp or 1,
        ep=arguments.rollout_ep or 1,
        max_model_len=sequence,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens or sequence,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        moe_chunk_tokens=arguments.moe_chunk_tokens,
    )
    return training, rollout


def _training_line(one: TrainingPlan) -> str:
    return (
        f"  {training_name(one.layout):32s} peak {gib(one.peak_bytes):>5s} GiB, imbalance up to "
        f"{one.max_imbalance:.1f} of {one.worst_imbalance:.1f}, sequence up to {one.max_sequence_tokens}"
    )


def _fsdp_line(one: FsdpPlan) -> str:
    return (
        f"  {fsdp_name(one.layout):42s} peak {gib(one.peak_bytes):>5s} GiB, "
        f"sequence up to {one.max_sequence_tokens}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    memory = dict(hbm_gib=arguments.hbm_gib, reserve_gib=arguments.reserve_gib)
    try:
        model = Model.load(arguments.model)
        training, rollout = _layouts(arguments)
        count = max(1, arguments.suggest)
        if isinstance(training, Fsdp):
            trainings = suggest_fsdp(model, training, count=count, **memory)
            chosen = arguments.sp is not None
        else:
            trainings = suggest_training(model, training, count=count, **memory)
            chosen = arguments.tp is not None
        if not chosen and trainings:
            training = trainings[0].layout
        left = bytes_kept_in_rollout(plan(model, training, **memory).training)
        rollouts = suggest_rollout(model, rollout, left, count=count, **memory)
        if arguments.rollout_tp is None and rollouts:
            rollout = rollouts[0].layout
        result = plan(model, training, rollout, **memory)
    except ValueError as error:
        parser.error(str(error))
    if arguments.json:
        suggestions = {"training": [asdict(p) for p in trainings], "rollout": [asdict(p) for p in rollouts]}
        print(json.dumps(asdict(result) | {"suggestions": suggestions}, indent=1))
        return int(not result.fits)
    describe, suggested = (fsdp_text, _fsdp_line) if arguments.fsdp else (training_text, _training_line)
    lines = describe(result.training) + rollout_text(result.rollout)
    lines.append(f"weight sync: {gib(result.sync_bytes)} GiB, both engines' weights on a die")
    lines.append("suggested for training, best first (full plan with --json):")
    lines += [suggested(one) for one in trainings] or [
        "  none fits; try more dies, --recompute full, a shorter response, or --optimizer swap "
        "(FSDP: --offload-policy)"
    ]
    lines.append("suggested for rollout, best first:")
    lines += [
        f"  {rollout_name(p.layout):32s} weights {gib(p.weights_bytes):>5s} GiB, {p.max_num_seqs} full "
        f"sequences a DP rank, {p.max_num_seqs * p.dp} in all"
        for p in rollouts
    ] or ["  none fits; try more dies, a shorter response or fewer max_num_batched_tokens"]
    print("\n".join(lines))
    return int(not result.fits)


if __name__ == "__main__":
    sys.exit(main())

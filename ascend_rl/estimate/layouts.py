"""The layouts of training and rollout that can be planned, and what the frameworks would refuse."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_rl.settings.model import Model


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
    ``lora_rank``: above 0 only adapters have gradients and an optimizer (model.lora.rank).
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
    lora_rank: int = 0

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
    ``lora_rank``: above 0 only adapters have gradients and an optimizer (model.lora_rank).
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
    lora_rank: int = 0

    @property
    def shards(self) -> int:
        return self.size or self.dies

    @property
    def dp(self) -> int:
        return self.dies // self.sp


@dataclass(frozen=True)
class Rollout:
    """A layout of vLLM. ``ep``: TP * data_parallel_size dies share the experts (enable_expert_parallel), or
    1, and each TP group is a replica of its own that splits every expert. ``graph_sizes``: tokens of the
    decode graphs that are captured; none, if vLLM runs without.
    """

    dies: int
    tp: int = 1
    ep: int = 1
    max_model_len: int = 34816
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 34816
    gpu_memory_utilization: float = 0.87
    moe_chunk_tokens: int | None = None  # VLLM_FUSED_MOE_CHUNK_SIZE; None: all at once
    graph_sizes: tuple[int, ...] = ()

    @property
    def dp(self) -> int:
        return self.dies // self.tp


CHOICES = {
    "optimizer": ("swap", "offload", "resident"),
    "recompute": ("none", "full"),
    "moe_zero_memory": ("disable", "level0", "level1"),
}


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

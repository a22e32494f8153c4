"""Plans as lines of text, sizes in GiB."""

from __future__ import annotations

from ascend_rl.planning.die import GIB
from ascend_rl.planning.fsdp_memory import FsdpPlan
from ascend_rl.planning.layouts import Fsdp, Rollout, Training
from ascend_rl.planning.megatron_memory import TrainingPlan
from ascend_rl.planning.rollout_memory import RolloutPlan


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


def training_line(one: TrainingPlan) -> str:
    experts = f"imbalance up to {one.max_imbalance:.1f} of {one.worst_imbalance:.1f}, "
    return (
        f"  {training_name(one.layout):32s} peak {gib(one.peak_bytes):>5s} GiB, "
        f"{experts if one.worst_imbalance > 1 else ''}sequence up to {one.max_sequence_tokens}"
    )


def fsdp_line(one: FsdpPlan) -> str:
    return (
        f"  {fsdp_name(one.layout):42s} peak {gib(one.peak_bytes):>5s} GiB, "
        f"sequence up to {one.max_sequence_tokens}"
    )

"""Plans as lines of text of at most 80 columns, sizes in GiB."""

from __future__ import annotations

import textwrap

from ascend_rl.estimate.die import GIB
from ascend_rl.estimate.fsdp_memory import FsdpPlan
from ascend_rl.estimate.layouts import Fsdp, Rollout, Training
from ascend_rl.estimate.megatron_memory import TrainingPlan
from ascend_rl.estimate.rollout_memory import RolloutPlan


def gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def folded(text: str, indent: str = "") -> list[str]:
    """A sentence in as many lines as it needs."""
    return textwrap.wrap(text, 80, initial_indent=indent, subsequent_indent=f"{indent}  ")


def verdict(fits: bool) -> str:
    return "fits" if fits else "DOES NOT FIT"


def training_name(layout: Training) -> str:
    experts = f" EP{layout.ep} ETP{layout.etp}" if layout.ep * layout.etp > 1 else ""
    return f"TP{layout.tp} PP{layout.pp} CP{layout.cp} DP{layout.dp}{experts}"


def rollout_name(layout: Rollout) -> str:
    return f"TP{layout.tp} DP{layout.dp}" + (f" EP{layout.ep}" if layout.ep > 1 else "")


def fits(one: TrainingPlan | FsdpPlan) -> list[str]:
    return folded(
        f"{verdict(one.fits)}: peak {gib(one.peak_bytes)} of {gib(one.budget_bytes)} GiB; largest "
        f"max_token_len_per_gpu {one.max_token_len_per_gpu} (sequence {one.max_sequence_tokens})",
        "  ",
    )


def training_text(one: TrainingPlan) -> list[str]:
    layout = one.layout
    lines = [
        *folded(
            f"training {training_name(layout)}, {layout.max_token_len_per_gpu} tokens per die, optimizer "
            f"{layout.optimizer}, recompute {layout.recompute}, moe_zero_memory {layout.moe_zero_memory}"
        ),
        # Layers and the micro-batches whose activations a stage holds.
        "  stage layers weights  grads optimizer activations working logits  peak GiB",
    ]
    for index, stage in enumerate(one.stages):
        optimizer = stage.optimizer or stage.swapped
        lines.append(
            f"  {index:5d} {f'{stage.layers}x{stage.micro_batches}':>6s} {gib(stage.weights):>7s} "
            f"{gib(stage.gradients):>6s} {gib(optimizer):>9s} {gib(stage.activations):>11s} "
            f"{gib(stage.working):>7s} {gib(stage.logits):>6s} {gib(stage.peak):>9s}"
        )
    lines += fits(one)
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
        *folded(
            f"training {fsdp_name(layout)}, {layout.max_token_len_per_gpu} tokens per die, recompute "
            f"{layout.recompute}, states {where}"
        ),
        "  weights  grads optimizer gathered activations working logits   step  peak GiB",
        f"  {gib(one.weights):>7s} {gib(one.gradients):>6s} {gib(one.optimizer):>9s} "
        f"{gib(one.gathered):>8s} {gib(one.activations):>11s} {gib(one.working):>7s} {gib(one.logits):>6s} "
        f"{gib(one.step):>6s} {gib(one.peak_bytes):>9s}",
        *fits(one),
    ]


def rollout_text(one: RolloutPlan) -> list[str]:
    split = ", ".join(f"{name} {gib(size)}" for name, size in one.weights.items())
    graphs = (
        f"  {len(one.layout.graph_sizes)} decode graphs at most {gib(one.graph_bytes)} of the "
        f"{gib(one.graph_room_bytes)} GiB beside vLLM's share"
    )
    return [
        f"rollout {rollout_name(one.layout)}, max_model_len {one.layout.max_model_len}",
        *folded(
            f"weights {gib(one.weights_bytes)} GiB per die ({split}), prefill {gib(one.prefill_bytes)}, "
            f"trainer {gib(one.training_bytes)}",
            "  ",
        ),
        f"  KV cache {gib(one.kv_bytes)} GiB per die, {one.kv_tokens} tokens; "
        f"{gib(one.kv_bytes_per_sequence)} GiB a full sequence",
        *([graphs] if one.layout.graph_sizes else []),
        f"  {verdict(one.fits)}: {one.max_num_seqs} full sequences at once on each DP rank",
    ]


def training_line(one: TrainingPlan) -> str:
    experts = f", imbalance {one.max_imbalance:.1f} of {one.worst_imbalance:.1f}"
    return (
        f"  {training_name(one.layout):26s} {gib(one.peak_bytes):>6s} GiB, sequence "
        f"{one.max_sequence_tokens}{experts if one.worst_imbalance > 1 else ''}"
    )


def fsdp_line(one: FsdpPlan) -> str:
    return f"  {fsdp_name(one.layout):40s} {gib(one.peak_bytes):>6s} GiB, sequence {one.max_sequence_tokens}"

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
from dataclasses import asdict, dataclass

from ascend_rl.estimate.die import GIB, HBM_GIB, RESERVE_GIB
from ascend_rl.estimate.fsdp_memory import FsdpPlan, plan_fsdp
from ascend_rl.estimate.layouts import CHOICES, Fsdp, Rollout, Training
from ascend_rl.estimate.megatron_memory import TrainingPlan, plan_training
from ascend_rl.estimate.partitions import suggest_fsdp, suggest_rollout, suggest_training
from ascend_rl.estimate.plan_text import (
    fsdp_line,
    fsdp_text,
    gib,
    rollout_name,
    rollout_text,
    training_line,
    training_text,
)
from ascend_rl.estimate.rollout_memory import RolloutPlan, plan_rollout
from ascend_rl.estimate.tensors import adapter_parameters, stage_parameters
from ascend_rl.settings.model import PUBLISHED, Model
from ascend_rl.settings.numbers import real, whole
from ascend_rl.settings.switch import CannotWork


@dataclass(frozen=True)
class Plan:
    """``sync_bytes``: weights of both engines, on one die while new weights go to vLLM."""

    model: Model
    training: TrainingPlan | FsdpPlan | None
    rollout: RolloutPlan | None
    sync_bytes: int
    fits: bool


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


def plan(
    model: Model,
    training: Training | Fsdp | None = None,
    rollout: Rollout | None = None,
    hbm_gib: float = HBM_GIB,
    reserve_gib: float = RESERVE_GIB,
) -> Plan:
    """Both phases on the same dies. Raises CannotWork for an illegal layout, not for one that is too big."""
    if training and rollout and training.dies != rollout.dies:
        raise CannotWork(
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


def checkpoint_bytes(model: Model, fsdp: bool, lora_rank: int = 0) -> int:
    """One checkpoint of verl on disk, all ranks together: weights, Adam's two moments and, with Megatron, the
    float32 copy of its bfloat16 weights; FSDP trains float32 weights. With LoRA, adapters alone have these.

    >>> round(checkpoint_bytes(Model.named("Qwen3-235B-A22B"), fsdp=False) / 1e12, 2)  # TB
    3.29
    """
    adapters = model.layers * adapter_parameters(model, lora_rank)
    parameters = sum(stage_parameters(model, model.layers).values()) + adapters
    return parameters * (4 if fsdp else 2) + (adapters if lora_rank else parameters) * (8 if fsdp else 4 + 8)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_rl.memory_plan",
        description="Plan the HBM of training and rollout; status 0: fits, 1: does not, 2: wrong arguments.",
        epilog="""Examples:
  python -m ascend_rl.memory_plan --model qwen3-32b --dies 32
  python -m ascend_rl.memory_plan --model qwen3-235b-a22b --dies 128 --tp 4 --pp 4 --cp 4 --ep 32 \\
      --rollout-tp 4 --rollout-ep 128

Without --tp (--sp with --fsdp) or --rollout-tp the best suggestion is planned.
Writes nothing but the plan.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help=f"{', '.join(PUBLISHED)}, or a path to a config.json")
    parser.add_argument(
        "--dies", type=whole(high=100_000), required=True, help="dies of both phases, 16 per node on A3"
    )
    for name in ("tp", "pp", "cp", "ep", "etp"):
        parser.add_argument(f"--{name}", type=whole(high=10**6), help=f"training {name.upper()}")
    parser.add_argument("--fsdp", type=int, choices=(1, 2), help="train with FSDP 1 or 2, not with Megatron")
    parser.add_argument(
        "--fsdp-size", type=whole(0), default=0, help="dies that share the states; default all"
    )
    parser.add_argument("--sp", type=whole(), help="Ulysses SP of FSDP")
    parser.add_argument(
        "--lora-rank", type=whole(0), default=0, help="train adapters of this rank; default none"
    )
    parser.add_argument("--offload-policy", action="store_true", help="FSDP2: states stay in host memory")
    parser.add_argument("--rollout-tp", type=whole(), help="rollout TP")
    parser.add_argument("--rollout-ep", type=whole(), help="rollout EP: 1, or TP * data_parallel_size")
    parser.add_argument("--prompt", type=whole(), default=2048, help="longest prompt, tokens")
    parser.add_argument("--response", type=whole(), default=32768, help="longest response, tokens")
    parser.add_argument(
        "--max-token-len-per-gpu", type=whole(), help="default (prompt + response) / CP or SP"
    )
    parser.add_argument("--layer-split", help="layers of each stage, as 23,24,24,23")
    for name, values in CHOICES.items():
        default = getattr(Training, name)
        also = " (FSDP: full)" if name == "recompute" else " (FSDP: offload)" if name == "optimizer" else ""
        parser.add_argument(f"--{name.replace('_', '-')}", choices=values, help=f"default {default}{also}")
    parser.add_argument("--imbalance", type=real(1), default=1.0, help="tokens of the fullest rank / mean")
    parser.add_argument("--no-param-offload", action="store_true", help="weights stay during the rollout")
    parser.add_argument("--max-num-seqs", type=whole(), default=Rollout.max_num_seqs)
    parser.add_argument("--max-num-batched-tokens", type=whole(), help="default prompt + response")
    parser.add_argument(
        "--moe-chunk-tokens", type=whole(), help="VLLM_FUSED_MOE_CHUNK_SIZE; default all at once"
    )
    parser.add_argument("--graph-sizes", help="tokens of the decode graphs, as 32,64,128,256; default none")
    parser.add_argument("--gpu-memory-utilization", type=real(high=1), default=Rollout.gpu_memory_utilization)
    parser.add_argument("--hbm-gib", type=real(), default=HBM_GIB, help="HBM of a die")
    parser.add_argument("--reserve-gib", type=real(), default=RESERVE_GIB, help="HCCL buffers and the like")
    parser.add_argument("--suggest", type=whole(0), default=5, help="how many partitions to suggest")
    parser.add_argument("--json", action="store_true")
    return parser


def _fsdp_layout(arguments: argparse.Namespace, tokens: int) -> Fsdp:
    if arguments.optimizer == "swap":
        raise CannotWork("--optimizer swap is MindSpeed's: FSDP has offload and resident")
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
        lora_rank=arguments.lora_rank,
    )


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in (text or "").split(",") if number)


def _layouts(arguments: argparse.Namespace) -> tuple[Training | Fsdp, Rollout]:
    sequence, split = arguments.prompt + arguments.response, arguments.cp or 1
    if arguments.fsdp:
        split = arguments.sp or 1
    if min(sequence, split, arguments.dies) < 1 or arguments.lora_rank < 0:
        raise CannotWork(
            "--dies, --cp, --sp and --prompt + --response must be at least 1, --lora-rank 0 or more"
        )
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
            layer_split=_numbers(arguments.layer_split),
            param_offload=not arguments.no_param_offload,
            lora_rank=arguments.lora_rank,
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
        graph_sizes=_numbers(arguments.graph_sizes),
    )
    return training, rollout


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
    describe, suggested = (fsdp_text, fsdp_line) if arguments.fsdp else (training_text, training_line)
    lines = describe(result.training) + rollout_text(result.rollout)
    lines.append(f"weight sync: {gib(result.sync_bytes)} GiB, both engines' weights on a die")
    saved = checkpoint_bytes(model, bool(arguments.fsdp), arguments.lora_rank)
    lines.append(
        f"checkpoint: {gib(saved)} GiB on disk; {saved / 1e9:.0f} s if all nodes together write 1 GB/s"
    )
    lines.append("suggested for training, best first: peak, longest sequence (--json: all of it):")
    lines += [suggested(one) for one in trainings] or [
        "  none fits; try more dies, --recompute full, a shorter response,",
        "  or --optimizer swap (FSDP: --offload-policy)",
    ]
    lines.append("suggested for rollout, best first, with full sequences:")
    lines += [
        f"  {rollout_name(p.layout):17s} weights {gib(p.weights_bytes):>5s} GiB, {p.max_num_seqs} "
        f"sequences a DP rank, {p.max_num_seqs * p.dp} in all"
        for p in rollouts
    ] or ["  none fits; try more dies, a shorter response or fewer max_num_batched_tokens"]
    print("\n".join(lines))
    return int(not result.fits)

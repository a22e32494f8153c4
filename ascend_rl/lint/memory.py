"""Rules about memory: the planner's estimate (ascend_rl/estimate/memory_plan.py) of a run's configuration."""

from __future__ import annotations

from ascend_rl.estimate import layouts, memory_plan
from ascend_rl.lint.setup import (
    ACTOR,
    MEGATRON,
    ROLLOUT,
    VLLM,
    Setup,
    as_mapping,
    checkpoint,
    local_path,
    rule,
)
from ascend_rl.rollout import npu_graph
from ascend_rl.settings.model import QWEN
from ascend_rl.settings.switch import CannotWork


def lora_rank(s: Setup) -> int:
    """The rank of the adapters that are trained in place of the weights; 0 for none."""
    key = "actor_rollout_ref.model"
    if s.megatron:
        return max(s.number(f"{key}.lora.rank", 0), 0)
    rank = max(s.number(f"{key}.lora_rank", 0), 0)
    adapter = local_path(s.get(f"{key}.lora_adapter_path"))
    if adapter and (file := adapter / "adapter_config.json").is_file():
        rank = int(as_mapping(file.read_text()).get("r") or rank)
    return rank


def _fsdp(s: Setup) -> layouts.Fsdp:
    engine, checkpointing = f"{ACTOR}.fsdp_config", "actor_rollout_ref.model.enable_gradient_checkpointing"
    micro = s.number(f"{ACTOR}.ppo_micro_batch_size_per_gpu") * -(-s.sequence // s.sp)
    return layouts.Fsdp(
        dies=s.dies,
        size=min(max(s.number(f"{engine}.fsdp_size", 0), 0), s.dies),
        sp=s.sp,
        version=2 if s.get(f"{ACTOR}.strategy") == "fsdp2" else 1,
        max_token_len_per_gpu=s.number(f"{ACTOR}.ppo_max_token_len_per_gpu") if s.dynamic else micro,
        recompute="full" if s.get(checkpointing) else "none",
        param_offload=bool(s.get(f"{engine}.param_offload")),
        optimizer_offload=bool(s.get(f"{engine}.optimizer_offload")),
        offload_policy=bool(s.get(f"{engine}.offload_policy")),
        reshard_after_forward=bool(s.get(f"{engine}.reshard_after_forward", True)),
        parameter_bytes=4 if s.get(f"{engine}.model_dtype") in ("fp32", "float32") else 2,
        lora_rank=lora_rank(s),
    )


def _megatron(s: Setup, experts: bool) -> layouts.Training:
    transformer = f"{MEGATRON}.override_transformer_config"
    offload = "offload" if s.get(f"{MEGATRON}.optimizer_offload") else "resident"
    micro = s.number(f"{ACTOR}.ppo_micro_batch_size_per_gpu") * -(-s.sequence // s.cp)
    return layouts.Training(
        dies=s.dies,
        tp=s.tp,
        pp=s.pp,
        cp=s.cp,
        ep=s.ep,
        etp=s.etp if experts else 1,
        max_token_len_per_gpu=s.number(f"{ACTOR}.ppo_max_token_len_per_gpu") if s.dynamic else micro,
        optimizer="swap" if s.get(f"{transformer}.swap_optimizer") else offload,
        recompute="full" if s.get(f"{transformer}.recompute_granularity") == "full" else "none",
        moe_zero_memory=s.get(f"{transformer}.moe_zero_memory", "disable"),
        layer_split=s.layer_split,
        param_offload=bool(s.get(f"{MEGATRON}.param_offload")),
        lora_rank=lora_rank(s),
    )


def captured_sizes(s: Setup) -> tuple[int, ...]:
    """Tokens of the decode graphs that vLLM captures; those of steps without drafts come on top (SAM)."""
    if not s.graphs:
        return ()
    batches = s.graph_sizes, s.number(f"{ROLLOUT}.max_num_seqs"), s.decode_tokens - 1
    plain = (
        npu_graph.plain_sizes(*batches, s.rollout_dp > 1)
        if s.get(f"{VLLM}.speculative_config.method") == "sam"
        else []
    )
    return *npu_graph.static_sizes(*batches), *plain


def plan_of(s: Setup) -> memory_plan.Plan | None:
    """The memory plan of both phases; None where it cannot know: other models, illegal layouts."""
    model = checkpoint(str(s.get("actor_rollout_ref.model.path", "")), QWEN)
    if not s.npu or not s.utilization or model is None:
        return None
    training = _megatron(s, bool(model.experts)) if s.megatron else _fsdp(s) if s.fsdp else None
    rollout = layouts.Rollout(
        dies=s.rollout_dies,
        tp=s.rollout_tp,
        ep=s.number(f"{ROLLOUT}.expert_parallel_size"),
        max_model_len=s.number(f"{ROLLOUT}.max_model_len", model.positions or s.sequence),
        max_num_seqs=s.number(f"{ROLLOUT}.max_num_seqs"),
        max_num_batched_tokens=s.number(f"{ROLLOUT}.max_num_batched_tokens"),
        gpu_memory_utilization=s.utilization,
        moe_chunk_tokens=s.variable("VLLM_FUSED_MOE_CHUNK_SIZE") or None,
        graph_sizes=captured_sizes(s),
    )
    try:
        if s.apart:
            trains, rolls = memory_plan.plan(model, training), memory_plan.plan(model, None, rollout)
            fits = trains.fits and rolls.fits
            return memory_plan.Plan(model, trains.training, rolls.rollout, 0, fits)
        return memory_plan.plan(model, training, rollout)
    except CannotWork:
        return None


@rule(
    "train.memory",
    "warning",
    "by the planner, the update fits",
    why="the planner expects it to run out of memory",
    fix="see: python -m ascend_rl.memory_plan -h; more CP, PP or SP, recomputation, a smaller token budget",
)
def train_memory(s):
    plan = plan_of(s)
    if plan and plan.training and not plan.training.fits:
        peak, budget = plan.training.peak_bytes / 2**30, plan.training.budget_bytes / 2**30
        tokens = plan.training.max_token_len_per_gpu
        would = f"a token budget of {tokens} would fit" if tokens else "no token budget would fit"
        yield (
            MEGATRON if s.megatron else f"{ACTOR}.fsdp_config",
            f"{peak:.1f} GiB of {budget:.1f} GiB; {would}",
        )


@rule(
    "train.sync_memory",
    "warning",
    "by the planner, both engines' weights fit on a die during a weight sync",
    why="the planner expects the weight sync to run out of memory",
    fix="more TP, PP or EP in training or rollout; see: python -m ascend_rl.memory_plan -h",
)
def sync_memory(s):
    plan = plan_of(s)
    if not (plan and plan.training and plan.rollout):
        return
    model, needed = plan.model, plan.sync_bytes
    key = f"{MEGATRON}.vanilla_mbridge"
    fused = s.megatron and model.experts and s.get(f"{MEGATRON}.use_mbridge") and not s.get(key, True)
    if fused:  # Megatron-Bridge makes one tensor [experts, 2 * I, H] of a layer
        needed += model.experts * 2 * model.ffn * model.hidden * 2
    if needed > plan.training.budget_bytes:
        detail = f"{needed / 2**30:.1f} GiB of {plan.training.budget_bytes / 2**30:.1f} GiB"
        yield (key, f"{detail}, with all experts of a layer in one tensor") if fused else (ROLLOUT, detail)


@rule(
    "rollout.memory",
    "warning",
    "by the planner, weights and the KV cache of one sequence fit, and decode graphs beside them",
    why="vLLM refuses to start without room for one sequence of max_model_len; it captures graphs in what "
    "gpu_memory_utilization leaves",
    fix="see: python -m ascend_rl.memory_plan -h; more TP or EP, a higher gpu_memory_utilization",
)
def rollout_memory(s):
    plan = plan_of(s)
    if not (plan and plan.rollout) or plan.rollout.fits:
        return
    where, one = f"{ROLLOUT}.gpu_memory_utilization", plan.rollout
    if one.graph_bytes > one.graph_room_bytes:
        graphs, room = one.graph_bytes / 2**30, one.graph_room_bytes / 2**30
        detail = (
            f"{len(one.layout.graph_sizes)} graphs of up to {graphs:.1f} GiB beside it, in {room:.1f} GiB"
        )
        yield where, detail, "lower it, or give fewer cudagraph_capture_sizes"
    else:
        weights, left = one.weights_bytes / 2**30, one.kv_bytes / 2**30
        yield where, f"{weights:.1f} GiB of weights leave {left:.1f} GiB of KV cache"


@rule(
    "rollout.kv_capacity",
    "info",
    "by the planner, the KV cache holds max_num_seqs full sequences",
    why="more run while responses are short, and are preempted and computed again when they grow",
    fix="choose max_num_seqs by the usual length of responses",
)
def kv_capacity(s):
    plan, wanted = plan_of(s), s.number(f"{ROLLOUT}.max_num_seqs")
    if plan and plan.rollout and plan.rollout.fits and plan.rollout.max_num_seqs < wanted:
        yield (
            f"{ROLLOUT}.max_num_seqs",
            f"{plan.rollout.max_num_seqs} of {wanted} sequences of full length fit",
        )

"""Rules about the engines: vLLM's rollout, the trainer, the loss and the reward.

Some settings that are right on GPUs stop a run on NPUs; others run, but slowly, or train something else than
the script says.
"""

from __future__ import annotations

import ast
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ascend_rl.estimate import layouts, memory_plan
from ascend_rl.experts import support_eplb
from ascend_rl.lint import switches
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
from ascend_rl.loss import dapo, old_log_prob
from ascend_rl.rollout import npu_graph, npu_options
from ascend_rl.settings.model import QWEN
from ascend_rl.settings.switch import CannotWork
from ascend_rl.speculation import sam_options
from ascend_rl.weights import checkpoints

LOCAL_DIRECTORIES = ("/tmp", "/var", "/dev/shm")
GSPO_LOSSES = ("gspo", "gspo_token")


# Rollout.


@rule(
    "rollout.mode",
    "error",
    "the rollout uses the async server",
    why="verl 0.7 removed the synchronous one and raises ValueError",
    fix="remove rollout.mode, or set async",
)
def rollout_mode(s):
    if s.get(f"{ROLLOUT}.mode", "async") != "async":
        yield f"{ROLLOUT}.mode", f"'{s.get(f'{ROLLOUT}.mode')}'"


@rule(
    "rollout.utilization",
    "error",
    "gpu_memory_utilization is above 0 and at most 1",
    why="vLLM refuses it: it is a share of the die",
    fix="0.6 to 0.9, see the memory planner",
)
def rollout_utilization(s):
    if not s.utilization:
        yield f"{ROLLOUT}.gpu_memory_utilization", str(s.get(f"{ROLLOUT}.gpu_memory_utilization"))


@rule(
    "rollout.batched_tokens",
    "error",
    "max_num_batched_tokens holds max_num_seqs, or a whole sequence unchunked",
    why="vLLM raises ValueError in SchedulerConfig",
    fix="raise it; the recipes use prompt + response",
)
def batched_tokens(s):
    tokens, seqs = s.number(f"{ROLLOUT}.max_num_batched_tokens"), s.number(f"{ROLLOUT}.max_num_seqs")
    longest = s.number(f"{ROLLOUT}.max_model_len", s.sequence)
    if not s.vllm:
        return
    if tokens < seqs:
        yield f"{ROLLOUT}.max_num_batched_tokens", f"{tokens}, and max_num_seqs is {seqs}"
    if not s.get(f"{ROLLOUT}.enable_chunked_prefill") and tokens < longest:
        yield f"{ROLLOUT}.max_num_batched_tokens", f"{tokens} without chunked prefill, sequences of {longest}"


def _load(s: Setup) -> tuple[int, int]:
    """The engines of the rollout, and the requests of a step."""
    servers = s.dies // (s.rollout_tp * s.rollout_dp)
    engines = servers * (s.rollout_dp if s.number(f"{ROLLOUT}.expert_parallel_size") > 1 else 1)
    return engines, s.number("data.train_batch_size") * s.number(f"{ROLLOUT}.n")


@rule(
    "rollout.seats",
    "info",
    "all requests of a step decode at once: train batch x n fits into max_num_seqs x all engines",
    why="the others start when earlier ones end, and the last of them end last: published for Qwen3-235B, "
    "64 of 128 requests an engine take 1:22 h, all 128 take 1:18 h, 24 take 2:27 h",
    fix="raise max_num_seqs as far as the KV cache allows, or lower the batch",
)
def rollout_seats(s):
    engines, requests = _load(s)
    seats = engines * s.number(f"{ROLLOUT}.max_num_seqs")
    if s.npu and engines and seats < requests:
        yield f"{ROLLOUT}.max_num_seqs", f"{seats} seats in {engines} engines, {requests} requests a step"


@rule(
    "rollout.model_len",
    "error",
    "max_model_len holds prompt + response and is within the model's positions",
    why="responses are cut earlier than the configuration says, or vLLM refuses to start",
    fix="set rollout.max_model_len to prompt + response, or shorten them",
)
def model_len(s):
    longest, positions = s.number(f"{ROLLOUT}.max_model_len", 0), s.positions
    if longest and longest < s.sequence:
        yield f"{ROLLOUT}.max_model_len", f"{longest}, and prompt + response is {s.sequence}"
    if positions and max(longest, s.sequence) > positions:
        yield (
            f"{ROLLOUT}.max_model_len",
            f"{max(longest, s.sequence)}, and the model has {positions} positions",
        )


@rule(
    "rollout.graph_sizes",
    "warning",
    "the largest usable graph holds the requests of an engine, up to max_num_seqs (x 1 + speculative tokens)",
    why="larger decode batches run without a graph, 7.5 times slower in one report (vllm-ascend#16049)",
    fix="add that size to the capture sizes, or set max_num_seqs to one of them",
)
def rollout_graph_sizes(s):
    engines, requests = _load(s)
    seats = s.number(f"{ROLLOUT}.max_num_seqs")
    largest = max((size for size in s.graph_sizes if size <= seats * s.decode_tokens), default=0)
    batch = min(seats, math.ceil(requests / engines) if engines else seats) * s.decode_tokens
    if s.graphs and largest < batch:
        yield (
            f"{ROLLOUT}.max_num_seqs",
            f"full decode batches have {batch} tokens, the largest usable graph {largest}",
        )


@rule(
    "rollout.graph_stride",
    "warning",
    "graph sizes are multiples of the tokens a sequence decodes, and of TP",
    why="vLLM rounds the others up (1 + speculative tokens), vllm-ascend drops them (FLASHCOMM1 shares "
    "tokens over TP): other graphs than written are captured",
    fix="use multiples of the stride",
)
def graph_stride(s):
    strides = [("speculative tokens", s.decode_tokens)]
    if s.variable("VLLM_ASCEND_ENABLE_FLASHCOMM1"):
        strides.append(("FLASHCOMM1 with TP", s.rollout_tp))
    for name, stride in strides:
        off = [size for size in s.graph_sizes if size % stride]
        if s.graphs and s.given_graph_sizes and off:
            yield f"{ROLLOUT}.cudagraph_capture_sizes", f"{off} are not multiples of {stride} ({name})"


@rule(
    "rollout.flashcomm",
    "error",
    "FLASHCOMM1 has TP to share tokens over",
    why="vllm-ascend asserts that TP is above 1 when it builds the model, the rollout does not start",
    fix="set VLLM_ASCEND_ENABLE_FLASHCOMM1=0, or tensor_model_parallel_size above 1",
)
def rollout_flashcomm(s):
    if s.npu and s.variable("VLLM_ASCEND_ENABLE_FLASHCOMM1") and s.rollout_tp == 1:
        yield f"{ROLLOUT}.tensor_model_parallel_size", "1, and VLLM_ASCEND_ENABLE_FLASHCOMM1 is 1"


@rule(
    "rollout.options",
    "error",
    "speculation, graphs, npugraph_ex and HCCL modes do not contradict each other",
    why="verl's server refuses it when the rollout starts",
    fix="see docs/npu_options.md",
)
def rollout_options(s):
    if s.get(f"{ROLLOUT}.name") != "vllm":
        return
    mtp = "actor_rollout_ref.model.mtp"
    found = npu_options.conflicts(
        s.engine_options,
        npu=s.npu,
        eager=bool(s.get(f"{ROLLOUT}.enforce_eager")),
        mtp=bool(s.get(f"{mtp}.enable") and s.get(f"{mtp}.enable_rollout")),
        shared_by=s.rollout_tp if s.variable("VLLM_ASCEND_ENABLE_FLASHCOMM1") else 1,
        environ=s.env,
    )
    speculative, extra = (
        s.engine_options.get(name) or {} for name in ("speculative_config", "additional_config")
    )
    if speculative.get("method") == "sam":
        of_sam = sam_options.conflicts(extra.get(sam_options.NAME, {}))
        found += [(f"additional_config.{key}", why, fix) for key, why, fix in of_sam]
    yield from ((f"{VLLM}.{key}", why, fix) for key, why, fix in found)


@rule(
    "options.idle",
    "warning",
    "a switch that is on changes something in this run",
    why="it is silently ignored",
    fix="leave it out, or set what it needs",
)
def options_idle(s):
    yield from switches.idle(s)


@rule(
    "rollout.eplb",
    "error",
    "with VLLM_ENABLE_EPLB=1 there are experts, expert parallelism and matching sizes",
    why="verl's server refuses it when the rollout starts",
    fix="see docs/eplb.md",
)
def rollout_eplb(s):
    if s.variable(support_eplb.SWITCH) != 1 or s.get(f"{ROLLOUT}.name") != "vllm" or s.model is None:
        return
    args = s.engine_options | {
        "tensor_parallel_size": s.rollout_tp,
        "data_parallel_size": s.rollout_dp,
        "enable_expert_parallel": s.number(f"{ROLLOUT}.expert_parallel_size") > 1,
        "quantization": s.get(f"{ROLLOUT}.quantization"),
    }
    kind = support_eplb.MODELS[0] if s.model.experts else "a dense model"
    model = SimpleNamespace(model_type=kind, num_experts=s.model.experts)
    for key, why, fix in support_eplb.conflicts(args, model, "npu" if s.npu else "cpu", s.env):
        yield key, f"{support_eplb.SWITCH}=1, but {why}", fix


@rule(
    "rollout.eplb_slots",
    "warning",
    "with VLLM_ENABLE_EPLB=1 a rank holds more than one expert",
    why="where each rank holds one expert, another order of the experts changes no rank's load",
    fix="+...additional_config.init_redundancy_expert=128 for a copy on each of 128 ranks, or switch it off",
)
def eplb_slots(s):
    if s.variable(support_eplb.SWITCH) != 1 or s.model is None or not s.model.experts:
        return
    ranks = s.number(f"{ROLLOUT}.expert_parallel_size")
    if s.model.experts + support_eplb.redundant_experts(s.engine_options) == ranks:
        yield f"${support_eplb.SWITCH}", f"1, with {s.model.experts} experts on {ranks} ranks, none twice"


@rule(
    "rollout.graph_mode",
    "warning",
    "graphs are captured as FULL_DECODE_ONLY",
    why="vllm-ascend turns FULL_AND_PIECEWISE into PIECEWISE, which leaves attention out of the graph, "
    "limits the number of sizes and switches npugraph_ex off",
    fix=f"+{VLLM}.compilation_config.cudagraph_mode=FULL_DECODE_ONLY",
)
def rollout_graph_mode(s):
    if s.graphs and s.graph_mode not in ("FULL_DECODE_ONLY", "FULL"):
        yield f"{VLLM}.compilation_config.cudagraph_mode", s.graph_mode


def piecewise_limit(layers: int, moe: bool, tp: int, dp: int, ep: bool, aiv: bool) -> int:
    """How many PIECEWISE graphs vllm-ascend 0.13 captures: each takes streams for its layers and groups.

    Source: vllm_ascend.utils.update_aclgraph_sizes.
    """
    groups, streams, graph = (dp > 1) + (tp > 1), 1800, layers + 1
    if not aiv:
        return int((streams - groups * 40) / graph / (1 + groups * 2))
    factor = 1 + groups + ep + (moe and dp > 1)
    return int((streams - (0 if moe else factor * graph)) / graph / factor)


@rule(
    "rollout.graph_limit",
    "warning",
    "no more PIECEWISE graph sizes than the streams allow",
    why="vllm-ascend keeps an even sample of the sizes, so batches are padded further (vllm-ascend#1168)",
    fix="use FULL_DECODE_ONLY, or give the sizes that matter",
)
def graph_limit(s):
    if not s.graphs or s.graph_mode in ("FULL_DECODE_ONLY", "FULL") or not s.model:
        return
    ep, aiv = s.number(f"{ROLLOUT}.expert_parallel_size") > 1, s.env.get("HCCL_OP_EXPANSION_MODE") == "AIV"
    limit = piecewise_limit(s.model.layers, s.model.experts > 0, s.rollout_tp, s.rollout_dp, ep, aiv)
    if len(s.graph_sizes) > limit:
        yield f"{ROLLOUT}.cudagraph_capture_sizes", f"{len(s.graph_sizes)} sizes, {limit} are kept"


@rule(
    "rollout.task_queue",
    "error",
    "TASK_QUEUE_ENABLE is 1 with graphs",
    why="level 2 and graph capture exclude each other: capturing fails",
    fix="export TASK_QUEUE_ENABLE=1",
)
def task_queue(s):
    if s.graphs and s.env.get("TASK_QUEUE_ENABLE") == "2":
        yield "$TASK_QUEUE_ENABLE", "2, and rollout.enforce_eager is False"


@rule(
    "rollout.task_queue_eager",
    "info",
    "TASK_QUEUE_ENABLE is 2 without graphs",
    why="level 2 moves more of the launch work off the Python thread",
    fix="export TASK_QUEUE_ENABLE=2",
)
def task_queue_eager(s):
    if s.npu and not s.graphs and s.env.get("TASK_QUEUE_ENABLE", "1") != "2":
        yield "$TASK_QUEUE_ENABLE", s.env.get("TASK_QUEUE_ENABLE", "not set") + ", and there are no graphs"


@rule(
    "rollout.launch_blocking",
    "error",
    "ASCEND_LAUNCH_BLOCKING is off with graphs",
    why="vllm-ascend raises ValueError: ACL graphs are incompatible with it",
    fix="unset ASCEND_LAUNCH_BLOCKING",
)
def launch_blocking(s):
    if s.graphs and s.env.get("ASCEND_LAUNCH_BLOCKING") == "1":
        yield "$ASCEND_LAUNCH_BLOCKING", "1, and rollout.enforce_eager is False"


@rule(
    "rollout.sleep_segments",
    "error",
    "no expandable segments in the environment with sleep mode",
    why="vllm-ascend's memory pool asserts against expandable_segments:True, the rollout does not start",
    fix="leave it empty, and verl switches segments on for training; or use max_split_size_mb:24",
)
def sleep_segments(s):
    sleep = s.get(f"{ROLLOUT}.free_cache_engine") and s.get(f"{ROLLOUT}.enable_sleep_mode", True)
    if s.npu and sleep and "expandable_segments:True" in s.env.get("PYTORCH_NPU_ALLOC_CONF", ""):
        yield "$PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True, and rollout.free_cache_engine is True"


@rule(
    "rollout.log_probs_needed",
    "error",
    "rollout log-probs are computed where they are used",
    why="importance sampling and bypass_mode read rollout_log_probs: the first step fails or the correction "
    "is left out",
    fix="set rollout.calculate_log_probs=True",
)
def log_probs_needed(s):
    for key in ("rollout_is", "rollout_rs", "bypass_mode"):
        value = s.get(f"algorithm.rollout_correction.{key}")
        if value and not s.get(f"{ROLLOUT}.calculate_log_probs"):
            yield f"algorithm.rollout_correction.{key}", f"{value}, and rollout.calculate_log_probs is False"


# Memory, by the planner.


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
        dies=s.dies,
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


# Training.


@rule(
    "train.torch_compile",
    "error",
    "torch.compile is off in FSDP training on NPUs",
    why="the actor compiles its entropy with Inductor, which has no NPU backend here: compile_fx fails in "
    "the first step",
    fix=f"set {ACTOR}.use_torch_compile=False",
)
def torch_compile(s):
    if s.npu and s.fsdp and s.get(f"{ACTOR}.use_torch_compile"):
        yield f"{ACTOR}.use_torch_compile", "True (verl's default)"


@rule(
    "train.flash_attn",
    "error",
    "MindSpeed's flash attention is on",
    why="without it: 'Please set micro_batch_size or set use_flash_attn=True in config', or the attention "
    "matrix of long sequences runs out of memory in the update",
    fix=f"+{MEGATRON}.override_transformer_config.use_flash_attn=True",
)
def train_flash_attn(s):
    key = f"{MEGATRON}.override_transformer_config.use_flash_attn"
    if s.npu and s.megatron and s.get(key) is not True:
        yield key, str(s.get(key, "not set"))


@rule(
    "train.mindspeed_values",
    "error",
    "MindSpeed gets what its checks of options read",
    why="with the fused rotary embedding it asks the configuration for position_embedding_type, which verl "
    "does not set (AttributeError); the split of a pipeline it parses as a string (TypeError on a list)",
    fix="+...override_transformer_config.position_embedding_type=rope, and quotes: "
    "\"...pipeline_num_transformer_layers='[[23],[24],[24],[23]]'\"",
)
def mindspeed_values(s):
    prefix = f"{MEGATRON}.override_transformer_config"
    if not (s.npu and s.megatron):
        return
    position = s.get(f"{prefix}.position_embedding_type")
    if s.get(f"{prefix}.use_fused_rotary_pos_emb") and position != "rope":
        yield f"{prefix}.position_embedding_type", "not set" if position is None else str(position)
    split = s.get(f"{prefix}.pipeline_num_transformer_layers")
    if split is not None and not isinstance(split, str):
        yield f"{prefix}.pipeline_num_transformer_layers", f"a list, {split}"


@rule(
    "train.recompute",
    "error",
    "full recomputation specifies the method and the number of layers",
    why="Megatron raises ValueError",
    fix="add recompute_method=uniform and recompute_num_layers=1",
)
def train_recompute(s):
    prefix = f"{MEGATRON}.override_transformer_config"
    if (
        s.megatron
        and s.get(f"{prefix}.recompute_granularity") == "full"
        and not (s.get(f"{prefix}.recompute_method") and s.get(f"{prefix}.recompute_num_layers"))
    ):
        yield (
            f"{prefix}.recompute_granularity",
            "full, and recompute_method or recompute_num_layers is not set",
        )


@rule(
    "train.overlap_weights",
    "error",
    "alltoall overlap loads its weights from a distributed checkpoint",
    why="its experts are stored as one grouped matrix, which mbridge (verl's default) does not know",
    fix=f"{MEGATRON}.use_mbridge=False with use_dist_checkpointing=True and a converted checkpoint",
)
def overlap_weights(s):
    prefix = f"{MEGATRON}.override_transformer_config"
    dense = s.model and not s.model.experts
    by_variable = s.variable(switches.OVERLAP) == 1 and not dense
    if s.megatron and s.get(f"{MEGATRON}.use_mbridge"):
        if s.get(f"{prefix}.moe_alltoall_overlap_comm"):
            yield f"{MEGATRON}.use_mbridge", "True, with MindSpeed's alltoall overlap"
        elif by_variable:
            yield f"{MEGATRON}.use_mbridge", f"True, with {switches.OVERLAP}=1"


@rule(
    "train.dist_checkpoint",
    "error",
    "a path is given where a distributed checkpoint is used",
    why="verl has nothing to load the weights from",
    fix=f"set {MEGATRON}.dist_checkpointing_path",
)
def dist_checkpoint(s):
    if (
        s.megatron
        and s.get(f"{MEGATRON}.use_dist_checkpointing")
        and not s.get(f"{MEGATRON}.dist_checkpointing_path")
    ):
        yield f"{MEGATRON}.dist_checkpointing_path", "not set, and use_dist_checkpointing is True"


@rule(
    "train.swap_optimizer",
    "error",
    "the optimizer is either swapped by MindSpeed or offloaded by verl",
    why="both move the same states between host and die",
    fix=f"set {MEGATRON}.optimizer_offload=False",
)
def swap_optimizer(s):
    if (
        s.megatron
        and s.get(f"{MEGATRON}.override_transformer_config.swap_optimizer")
        and s.get(f"{MEGATRON}.optimizer_offload")
    ):
        yield f"{MEGATRON}.optimizer_offload", "True, with swap_optimizer"


def saves(s: Setup) -> int:
    """Steps between two checkpoints; 0 for none."""
    return max(s.number("trainer.save_freq", -1), 0)


@rule(
    "train.shared_storage",
    "warning",
    "checkpoints of several nodes are on shared storage",
    why="each node writes its shards; a resume finds only its own",
    fix="use an absolute path that all nodes mount",
)
def shared_storage(s):
    if s.number("trainer.nnodes") < 2:
        return
    keys = ["trainer.default_local_dir"] if saves(s) else []
    if s.get(f"{MEGATRON}.use_dist_checkpointing"):
        keys.append(f"{MEGATRON}.dist_checkpointing_path")
    for key in keys:
        path = str(s.get(key, ""))
        if path and (not path.startswith("/") or path.startswith(LOCAL_DIRECTORIES)):
            yield key, f"'{path}' on {s.number('trainer.nnodes')} nodes"


@rule(
    "train.saves_nothing",
    "warning",
    "a run on NPUs that trains a checkpoint saves what it learns",
    why="with save_freq=-1 verl saves nothing, not even the last step: a failure costs the whole run",
    fix="trainer.save_freq=5 trainer.max_actor_ckpt_to_keep=2; see docs/resilience.md for how often",
)
def saves_nothing(s):
    random_weights = s.megatron and not s.get(f"{ACTOR}.load_weight", True)
    trial = random_weights or 0 < s.number("trainer.total_training_steps", 0) < 20
    if s.npu and not saves(s) and not trial:
        yield "trainer.save_freq", f"{s.get('trainer.save_freq')}"


@rule(
    "train.schedule_restarts",
    "warning",
    "a Megatron run that is resumed goes on with its learning rate",
    why="Megatron then restarts warm-up and decay, one step after the resume",
    fix=f"{ACTOR}.optim.use_checkpoint_opt_param_scheduler=True; see docs/resilience.md",
)
def schedule_restarts(s):
    optim = f"{ACTOR}.optim"
    if not (s.megatron and saves(s)) or s.get(f"{optim}.use_checkpoint_opt_param_scheduler"):
        return
    for key in ("lr_warmup_steps", "lr_warmup_steps_ratio"):
        if s.number(f"{optim}.{key}", 0) > 0:
            yield f"{optim}.{key}", f"{s.get(f'{optim}.{key}')}"
    if (style := s.get(f"{optim}.lr_decay_style", "constant")) != "constant":
        yield f"{optim}.lr_decay_style", f"{style}"


@rule(
    "train.resume_engine",
    "error",
    "the checkpoint that a run would go on from is one that its engine can load",
    why="FSDP loads what as many dies saved, Megatron what Megatron saved",
    fix="train as the checkpoint was saved, set another OUTPUT_DIR, or trainer.resume_mode=disable",
)
def resume_engine(s):
    mode = s.get("trainer.resume_mode")
    key = "trainer.resume_from_path" if mode == "resume_path" else "trainer.default_local_dir"
    if not s.here or mode == "disable":
        return
    folder = Path(str(s.get(key, ".")))
    if found := folder if mode == "resume_path" else checkpoints.newest(folder):
        ranks = s.number("trainer.nnodes") * s.number("trainer.n_gpus_per_node")
        if reason := checkpoints.other_engine(str(found), str(s.get(f"{ACTOR}.strategy")), ranks):
            yield key, f"{found}: {reason}"


@rule(
    "train.checkpoint_disk",
    "error",
    "the disk has room for the checkpoints that are kept, and for one being written",
    why="a save that fills the disk ends the run; earlier checkpoints stay whole",
    fix="set OUTPUT_DIR to a larger disk, or keep fewer: trainer.max_actor_ckpt_to_keep=1",
)
def checkpoint_disk(s):
    if not (s.here and saves(s) and s.model):
        return
    folder = Path(str(s.get("trainer.default_local_dir", "."))).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    kept = s.number("trainer.max_actor_ckpt_to_keep", 0)
    wanted = (kept + 1) * memory_plan.checkpoint_bytes(s.model, not s.megatron, lora_rank(s))
    if kept and (free := shutil.disk_usage(existing).free) < wanted:
        yield "trainer.default_local_dir", f"{free / 1e9:.0f} GB free, {wanted / 1e9:.0f} GB needed"


@rule(
    "train.hdp",
    "error",
    "with USE_HDP=1 the Megatron actor can follow plans",
    why="the actor refuses it when it is built",
    fix="see docs/hdp.md, or unset USE_HDP",
)
def train_hdp(s):
    if s.variable("USE_HDP") != 1:
        return
    if not s.megatron:
        yield "$USE_HDP", f"1, and {ACTOR}.strategy is {s.get(f'{ACTOR}.strategy')}, which ignores it"
        return
    from ascend_rl.hdp import hdp_training  # imports torch

    if s.get("trainer.use_legacy_worker_impl") == "disable":
        yield "$USE_HDP", f"1, and {hdp_training.ENGINE_WORKERS}"
    actor = s.mapping(ACTOR) | {
        "megatron": s.mapping(MEGATRON) | {"context_parallel_size": s.cp},
        "router_replay": s.mapping(f"{ACTOR}.router_replay"),
        "policy_loss": s.mapping(f"{ACTOR}.policy_loss"),
    }
    transformer = SimpleNamespace(**s.mapping(f"{MEGATRON}.override_transformer_config"))
    for problem in hdp_training.problems(actor, transformer, s.mapping("actor_rollout_ref.model.mtp")):
        yield "$USE_HDP", f"1, and {problem}"


# The algorithm.


@rule(
    "algorithm.gspo_aggregation_unset",
    "error",
    "GSPO runs set loss_agg_mode explicitly",
    why="the patched verl honours loss_agg_mode, and its default is token-mean: long responses weigh more "
    "than in GSPO",
    fix=f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
)
def gspo_aggregation_unset(s):
    if s.get(f"{ACTOR}.policy_loss.loss_mode") in GSPO_LOSSES and f"{ACTOR}.loss_agg_mode" not in s.given:
        yield f"{ACTOR}.loss_agg_mode", "not set"


@rule(
    "algorithm.gspo_aggregation",
    "warning",
    "GSPO averages over responses: seq-mean-token-mean",
    why="it used to be ignored, now it is honoured: not the paper's objective",
    fix=f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
)
def gspo_aggregation(s):
    mode = s.get(f"{ACTOR}.loss_agg_mode")
    if (
        s.get(f"{ACTOR}.policy_loss.loss_mode") in GSPO_LOSSES
        and f"{ACTOR}.loss_agg_mode" in s.given
        and mode != "seq-mean-token-mean"
    ):
        yield f"{ACTOR}.loss_agg_mode", f"{mode} with GSPO"


@rule(
    "algorithm.clip_range",
    "warning",
    "clip bounds suit the ratio: about 3e-4 for GSPO, 0.2 for tokens",
    why="sequence ratios stay so close to 1 that bounds made for tokens never clip, and the other way round",
    fix="GSPO: clip_ratio_low=3e-4 clip_ratio_high=4e-4; token ratios: 0.2",
)
def clip_range(s):
    loss = s.get(f"{ACTOR}.policy_loss.loss_mode")
    for key in (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"):
        bound = s.get(key, 0.2)
        if isinstance(bound, int | float) and (
            bound > 0.02 if loss in GSPO_LOSSES else loss == "vanilla" and bound < 0.02
        ):
            yield key, f"{bound} with {loss}"


@rule(
    "algorithm.gspo_on_policy",
    "info",
    "GSPO makes several updates a step",
    why="with one, every sequence ratio is 1 and nothing is ever clipped",
    fix="lower ppo_mini_batch_size",
)
def gspo_on_policy(s):
    mini, train = s.number(f"{ACTOR}.ppo_mini_batch_size"), s.number("data.train_batch_size")
    if s.get(f"{ACTOR}.policy_loss.loss_mode") in GSPO_LOSSES and mini >= train:
        yield f"{ACTOR}.ppo_mini_batch_size", f"{mini} of {train}: one update"


@rule(
    "algorithm.filter_groups",
    "error",
    "filter_groups is used with settings that let groups vary and can fill a batch",
    why="otherwise dynamic sampling stops the run, at its start or after its last generation batch",
    fix="see docs/dapo.md",
)
def filter_groups(s):
    from omegaconf import OmegaConf

    if s.get("algorithm.filter_groups.enable"):
        yield from dapo.problems(OmegaConf.create(s.config))


def _overlong(s: Setup) -> tuple[str, dict, Any, str]:
    """(node, the overlong buffer, max_resp_len, the reward manager) as verl reads them: old keys win."""
    old = s.get("reward_model.reward_kwargs")
    node = "reward_model.reward_kwargs" if old is not None else "reward.reward_kwargs"
    manager = s.get("reward_model.reward_manager") or s.get("reward.reward_manager.name")
    buffer = s.mapping(f"{node}.overlong_buffer_cfg")
    return f"{node}.overlong_buffer_cfg", buffer, s.get(f"{node}.max_resp_len"), str(manager)


@rule(
    "algorithm.overlong",
    "error",
    "the overlong penalty has max_resp_len, and a buffer that is positive and within it, even if it is off",
    why="verl 0.7.1 asserts it when the reward workers start, although enable=False",
    fix="give +reward.reward_kwargs.max_resp_len=..., or leave overlong_buffer_cfg out",
)
def algorithm_overlong(s):
    where, buffer, most, manager = _overlong(s)
    if not buffer or manager != "dapo":
        return
    response, length = s.number("data.max_response_length"), buffer.get("len")
    whole = where.rpartition(".")[0] + ".max_resp_len"
    missing = [name for name in ("enable", "len") if buffer.get(name) is None]
    if buffer.get("enable"):
        missing += [name for name in ("penalty_factor", "log") if buffer.get(name) is None]
    for name in missing:
        example = {"len": 4096, "penalty_factor": 1.0}.get(name, False)
        yield f"{where}.{name}", "not set, and verl reads it", f"+{where}.{name}={example}"
    if most is None:
        yield (
            whole,
            f"not set, with {where.rpartition('.')[2]}",
            f"give +{whole}={response}",
            f"+{whole}={response}",
        )
    elif isinstance(most, bool) or not isinstance(most, int | float):
        yield whole, f"'{most}' is not a number"
    if not isinstance(length, int | float):
        return
    limit = min([response, *([most] if isinstance(most, int | float) else [])])
    if buffer.get("enable") and length <= 0:
        yield f"{where}.len", f"{length}, and the penalty is on", f"{where}.enable=False, or a length"
    elif length > limit and (buffer.get("enable") or most is not None and length > most):
        detail = f"{length}, and responses end at {limit}"
        yield (
            f"{where}.len",
            detail,
            f"at most {limit}, such as {limit // 2}",
            s.override(f"{where}.len", limit // 2),
        )


@rule(
    "algorithm.overlong_length",
    "warning",
    "the overlong penalty counts from the length at which responses end, and its reward manager reads it",
    why="the penalty is never paid, paid in full too early, or ignored",
    fix="reward.reward_kwargs.max_resp_len=data.max_response_length with reward.reward_manager.name=dapo",
)
def overlong_length(s):
    where, buffer, most, manager = _overlong(s)
    if not buffer.get("enable"):
        return
    whole, response = where.rpartition(".")[0] + ".max_resp_len", s.number("data.max_response_length")
    if manager != "dapo" and s.get("reward.reward_manager.source", "register") == "register":
        yield where, f"enable=True with the reward manager {manager}"
    elif isinstance(most, int | float) and most != response:
        yield (
            whole,
            f"{most}, and responses end at {response}",
            f"{whole}={response}",
            s.override(whole, response),
        )


@rule(
    "algorithm.old_log_prob",
    "error",
    "old log-probs are skipped only where they equal the new ones",
    why="with a second update, or a correction that compares them, old and new differ: ratios become wrong",
    fix="one mini-batch a step, ppo_epochs=1 and no rollout correction; or recompute_old_log_prob=True",
)
def algorithm_old_log_prob(s):
    from omegaconf import OmegaConf

    if s.get(old_log_prob.SWITCH) is False:
        yield from old_log_prob.problems(OmegaConf.create(s.config))


@rule(
    "rollout.routing_replay",
    "error",
    "the rollout's routing is replayed only by an engine that returns it",
    why="verl passes vLLM enable_return_routed_experts, which 0.13.0 does not know: no server starts",
    fix="enable_rollout_routing_replay=False and actor.router_replay.mode=disabled (or R2)",
)
def routing_replay(s):
    key = f"{ROLLOUT}.enable_rollout_routing_replay"
    if s.get(f"{ROLLOUT}.name") == "vllm" and s.get(key):
        yield key, "True, with vLLM 0.13.0"


def _substring_tests(source: str) -> Iterator[int]:
    """Lines of `truth in answer` where both sides are plain strings by their names."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # paths.function says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.In) for op in node.ops):
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            if re.search(r"truth|gold|label|target|expected", left) and re.search(
                r"solution|response|answer|output|text|completion|pred", right
            ):
                yield node.lineno


@rule(
    "algorithm.substring_reward",
    "error",
    "the reward compares answers instead of searching for them",
    why="'1' is in almost every response: the model is paid for writing digits",
    fix="extract the final answer and compare it as a number or an expression",
)
def substring_reward(s):
    for key in ("reward.custom_reward_function.path", "custom_reward_function.path"):
        file = Path(str(s.get(key, ""))).expanduser()
        if file.is_file() and file.suffix == ".py":
            for number in _substring_tests(file.read_text()):
                yield f"{file}:{number}", "the ground truth is looked for anywhere in the response"

"""Rules about sizes: partitions of training and rollout, batches, token budgets.

Every one of them ends a run otherwise, most of them only when the weights are loaded or after the first
rollout. Each says the numbers it compared.
"""

from __future__ import annotations

import re
from pathlib import Path

from ascend_rl.lint.setup import ACTOR, MEGATRON, REF, ROLLOUT, Setup, rule

# Partitions.


SIZES = (
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    *(
        f"{MEGATRON}.{name}_parallel_size"
        for name in "tensor_model pipeline_model context expert_model".split()
    ),
    *(f"{ROLLOUT}.{name}_parallel_size" for name in "tensor_model data expert".split()),
    f"{ROLLOUT}.n",
    "data.train_batch_size",
    f"{ACTOR}.ppo_mini_batch_size",
)


@rule("parallel.positive", "error", "sizes are positive integers", fix="set the variable it comes from")
def parallel_positive(s):
    for key in SIZES:
        value = s.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            yield key, f"'{value}' is not a valid size"


@rule(
    "parallel.world",
    "error",
    "the number of dies is a multiple of training TP x PP x CP",
    why="Megatron stops with 'world_size is not divisible'",
    fix="change nodes, TP, PP or CP",
)
def parallel_world(s):
    if s.megatron and s.dp == 0:
        yield (
            MEGATRON,
            f"TP {s.tp} x PP {s.pp} x CP {s.cp} = {s.tp * s.pp * s.cp}, and there are {s.dies} dies",
        )


@rule(
    "parallel.ulysses",
    "error",
    "Ulysses SP divides the dies and the heads, and padding is removed",
    why="verl stops when it makes the mesh or the attention",
    fix="use a divisor; set model.use_remove_padding=True",
)
def parallel_ulysses(s):
    key = f"{ACTOR}.ulysses_sequence_parallel_size"
    if not s.fsdp or s.sp == 1:
        return
    if s.dp == 0:
        yield key, f"{s.dies} dies over {s.sp}"
    if s.model and s.model.heads % s.sp:
        yield key, f"{s.model.heads} heads over {s.sp}"
    if not s.get("actor_rollout_ref.model.use_remove_padding"):
        yield "actor_rollout_ref.model.use_remove_padding", f"False with sequence parallelism {s.sp}"


@rule(
    "parallel.kv_heads",
    "error",
    "the numbers of KV heads (query groups) and heads are multiples of training TP",
    why="'num_query_groups must be a multiple of tensor_model_parallel_size'",
    fix="lower TP; use CP or PP instead",
)
def parallel_kv_heads(s):
    if s.megatron and s.model and s.model.kv_heads % s.tp:  # heads are a multiple of KV heads
        yield (
            f"{MEGATRON}.tensor_model_parallel_size",
            f"{s.model.heads} heads and {s.model.kv_heads} KV heads, TP {s.tp}",
        )


@rule(
    "parallel.experts",
    "error",
    "the number of experts is a multiple of EP; a dense model has EP 1",
    why="Megatron cannot share the experts out",
    fix="use a divisor of the number of experts",
)
def parallel_experts(s):
    if s.megatron and s.model and s.ep > 1 and (not s.model.experts or s.model.experts % s.ep):
        yield f"{MEGATRON}.expert_model_parallel_size", f"{s.model.experts or 'no'} experts, EP {s.ep}"


@rule(
    "parallel.expert_world",
    "error",
    "the number of dies is a multiple of ETP x EP x PP",
    why="Megatron stops with 'decoder world_size is not divisible'",
    fix="set expert_tensor_parallel_size=1 (it defaults to TP), or lower EP",
)
def expert_world(s):
    if s.megatron and s.ep > 1 and s.dies % (s.etp * s.ep * s.pp):
        yield (
            f"{MEGATRON}.expert_model_parallel_size",
            f"ETP {s.etp} x EP {s.ep} x PP {s.pp} = {s.etp * s.ep * s.pp}, and there are {s.dies} dies",
        )


@rule(
    "parallel.sequence_parallel",
    "error",
    "sequence parallelism is on if a MoE uses TP",
    why="Megatron refuses EP with TP without it",
    fix="leave megatron.sequence_parallel at True",
)
def sequence_parallel(s):
    if s.megatron and s.ep > 1 and s.tp > 1 and not s.get(f"{MEGATRON}.sequence_parallel"):
        yield f"{MEGATRON}.sequence_parallel", f"False with TP {s.tp} and EP {s.ep}"


@rule(
    "parallel.layers",
    "error",
    "the number of layers is a multiple of PP, or a custom split adds up to it",
    why="Megatron stops when it builds the stages",
    fix="give a split, e.g. for 94 layers on 4 stages "
    "+...override_transformer_config.num_layers_in_first_pipeline_stage=23 and ..._last_...=23",
)
def parallel_layers(s):
    if not s.megatron or not s.model or s.pp == 1:
        return
    prefix = f"{MEGATRON}.override_transformer_config"
    edges = [s.number(f"{prefix}.num_layers_in_{edge}_pipeline_stage", 0) for edge in ("first", "last")]
    if split := s.layer_split:
        if sum(split) != s.model.layers or len(split) % s.pp:
            yield prefix, f"{list(split)} does not split {s.model.layers} layers over {s.pp} stages"
    elif any(edges):
        middle, stages = s.model.layers - sum(edges), s.pp - sum(edge > 0 for edge in edges)
        if middle < 0 or (middle % stages if stages else middle):
            yield prefix, f"{middle} layers are left for {stages} middle stages"
    elif s.uneven_layers:  # Megatron counts the embedding and the loss as layers
        counted = [f"{prefix}.account_for_{part}_in_pipeline_split" for part in ("loss", "embedding")]
        layers = s.model.layers + sum(bool(s.get(key)) for key in counted)
        if layers % s.pp:
            yield f"{MEGATRON}.pipeline_model_parallel_size", f"{layers} layers and ends over {s.pp} stages"
    elif s.model.layers % s.pp:
        yield f"{MEGATRON}.pipeline_model_parallel_size", f"{s.model.layers} layers over {s.pp} stages"


@rule(
    "parallel.rollout_world",
    "error",
    "the number of dies is a multiple of rollout TP x DP",
    why="verl stops with 'rollout world_size is not divisible by infer_world_size'",
    fix="change TP or DP",
)
def rollout_world(s):
    size = s.rollout_tp * s.rollout_dp
    if s.rollout_dies % size:
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"TP {s.rollout_tp} x DP {s.rollout_dp} = {size}, and there are {s.rollout_dies} dies",
        )


@rule(
    "parallel.rollout_node",
    "error",
    "rollout TP divides the dies of a node, or is a multiple of them",
    why="verl asserts that a server fills whole nodes or fits in one",
    fix="lower TP, raise data_parallel_size",
)
def rollout_node(s):
    node = s.size("trainer.n_gpus_per_node")
    if node % s.rollout_tp and s.rollout_tp % node:
        fits = max(size for size in range(1, min(node, s.rollout_tp) + 1) if node % size == 0)
        key = f"{ROLLOUT}.tensor_model_parallel_size"
        yield key, f"TP {s.rollout_tp} on nodes of {node} dies", f"TP {fits}", s.override(key, fits)


@rule(
    "parallel.rollout_across",
    "warning",
    "rollout TP stays within a node",
    why="every layer's all-reduce goes over the network between nodes",
    fix="lower TP, raise data_parallel_size",
)
def rollout_across(s):
    node = s.size("trainer.n_gpus_per_node")
    if s.rollout_tp > node and s.rollout_tp % node == 0:
        key = f"{ROLLOUT}.tensor_model_parallel_size"
        yield key, f"TP {s.rollout_tp} on nodes of {node} dies", f"TP {node}", s.override(key, node)


@rule(
    "parallel.rollout_heads",
    "error",
    "the number of heads is a multiple of rollout TP; that of KV heads divides it or is divisible by it",
    why="vLLM stops when it builds the attention",
    fix="use a divisor of the number of heads",
)
def rollout_heads(s):
    if s.model:
        tp, kv = s.rollout_tp, s.model.kv_heads
        if s.model.heads % tp or (kv % tp and tp % kv):
            yield f"{ROLLOUT}.tensor_model_parallel_size", f"{s.model.heads} heads and {kv} KV heads, TP {tp}"


@rule(
    "parallel.rollout_experts",
    "error",
    "rollout EP is 1 or TP x DP, and divides the number of experts",
    why="verl asserts that expert_parallel_size equals tensor_model_parallel_size * data_parallel_size",
    fix="set expert_parallel_size to TP x DP, or to 1",
)
def rollout_experts(s):
    ep = s.number(f"{ROLLOUT}.expert_parallel_size")
    if (
        s.get(f"{ROLLOUT}.name") != "trtllm"
        and ep > 1
        and (ep != s.rollout_tp * s.rollout_dp or (s.model and (s.model.experts or 1) % ep))
    ):
        yield (
            f"{ROLLOUT}.expert_parallel_size",
            f"EP {ep}, TP {s.rollout_tp} x DP {s.rollout_dp}, {s.model.experts if s.model else '?'} experts",
        )


@rule("parallel.rollout_pp", "error", "rollout PP is 1", why="verl has none for vLLM", fix="use TP and DP")
def rollout_pp(s):
    if s.number(f"{ROLLOUT}.pipeline_model_parallel_size") > 1:
        yield f"{ROLLOUT}.pipeline_model_parallel_size", "above 1"


@rule(
    "parallel.vllm_dp",
    "error",
    "VLLM_DP_SIZE equals data_parallel_size: dies / TP where one server spans all dies",
    why="a server that is not given a DP size takes this one and waits for ranks that do not exist",
    fix="set both to dies / TP, or unset the variable",
)
def vllm_dp(s):
    size = s.variable("VLLM_DP_SIZE", 1)
    if size > 1 and size != s.rollout_dp:
        yield (
            "$VLLM_DP_SIZE",
            f"{size}, data_parallel_size {s.rollout_dp}, {s.rollout_dies} dies / TP {s.rollout_tp}",
        )


@rule(
    "parallel.rollout_servers",
    "warning",
    "there are several vLLM engines for rollout_rebalance and data_rebalance",
    why="they choose between servers and their DP engines: with one engine the switch does nothing. verl "
    "hands data_parallel_size to vLLM only with expert_parallel_size above 1",
    fix="switch it off (ROLLOUT_REBALANCE_ENABLE=0), or make engines of fewer dies (TP)",
)
def rollout_servers(s):
    size = s.rollout_tp * s.rollout_dp
    engines = (
        s.rollout_dies // size * (s.rollout_dp if s.number(f"{ROLLOUT}.expert_parallel_size") > 1 else 1)
    )
    for switch in ("rollout_rebalance.enable", "data_rebalance"):
        if s.get(f"{ROLLOUT}.{switch}") and engines <= 1:
            yield (
                f"{ROLLOUT}.{switch}",
                f"one engine: TP {s.rollout_tp} x DP {s.rollout_dp}, {s.rollout_dies} dies",
            )


@rule(
    "parallel.node",
    "error",
    "n_gpus_per_node and nnodes match the machines",
    why="Ray waits for NPUs that no node has",
    fix="pass NPUS_PER_NODE and NNODES on: trainer.n_gpus_per_node=...",
)
def parallel_node(s):
    for key, names in (
        ("trainer.n_gpus_per_node", "NPUS_PER_NODE NGPUS_PER_NODE GPUS_PER_NODE"),
        ("trainer.nnodes", "NNODES"),
    ):
        for name in names.split():
            if s.variable(name) and s.variable(name) != s.number(key):
                yield key, f"{s.number(key)}, and ${name} is {s.env[name]}"
    shown = [die for die in s.env.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",") if die.strip()]
    if s.npu and shown and len(shown) < s.number("trainer.n_gpus_per_node"):
        yield (
            "trainer.n_gpus_per_node",
            f"{s.number('trainer.n_gpus_per_node')}, and ASCEND_RT_VISIBLE_DEVICES has {len(shown)} dies",
            "name as many dies, or set trainer.n_gpus_per_node to their number",
            s.override("trainer.n_gpus_per_node", len(shown)),
        )
    here = len([file for file in Path("/dev").glob("davinci*") if re.fullmatch(r"davinci\d+", file.name)])
    if s.npu and 0 < here < s.number("trainer.n_gpus_per_node"):
        yield (
            "trainer.n_gpus_per_node",
            f"{s.number('trainer.n_gpus_per_node')}, and this node has {here} dies",
        )


# Batches.


def _per_rank(s: Setup) -> float:
    """Sequences of a mini-batch on each training rank."""
    samples = s.number(f"{ACTOR}.ppo_mini_batch_size") * s.number(f"{ROLLOUT}.n")
    return samples / s.dp if s.dp else 0


@rule(
    "batch.mini",
    "error",
    "the mini-batch is not larger than the train batch",
    why="verl stops, or makes no update from a full mini-batch",
    fix="lower ppo_mini_batch_size",
)
def batch_mini(s):
    mini, train = s.number(f"{ACTOR}.ppo_mini_batch_size"), s.number("data.train_batch_size")
    if mini > train:
        yield f"{ACTOR}.ppo_mini_batch_size", f"{mini}, and data.train_batch_size is {train}"


@rule(
    "batch.mini_divides",
    "warning",
    "the train batch is a multiple of the mini-batch",
    why="the last mini-batch of a step is smaller, and its samples weigh more",
    fix="use a divisor",
)
def mini_divides(s):
    mini, train = s.number(f"{ACTOR}.ppo_mini_batch_size"), s.number("data.train_batch_size")
    if 0 < mini < train and train % mini:
        yield f"{ACTOR}.ppo_mini_batch_size", f"{train} prompts in mini-batches of {mini}"


@rule(
    "batch.ranks",
    "error",
    "train batch x n and mini-batch x n are multiples of the training DP",
    why="verl rounds the mini-batch of a rank down, or cannot share the batch out",
    fix="change batch, n or DP",
)
def batch_ranks(s):
    n = s.number(f"{ROLLOUT}.n")
    for key in (f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size"):
        if s.dp and s.number(key) * n % s.dp:
            yield key, f"{s.number(key)} x n {n} = {s.number(key) * n} sequences over {s.dp} ranks"


@rule(
    "batch.dies",
    "error",
    "train batch x n is a multiple of the dies, without dynamic batches on FSDP",
    why="verl asserts 'real_train_batch_size must be divisible by minimal possible batch size'",
    fix="change the batch, or set use_dynamic_bsz=True",
)
def batch_dies(s):
    samples = s.number("data.train_batch_size") * s.number(f"{ROLLOUT}.n")
    if s.fsdp and not s.dynamic and s.dies and samples % s.dies:
        yield "data.train_batch_size", f"{samples} sequences, {s.dies} dies"


@rule(
    "batch.micro_missing",
    "error",
    "micro-batch sizes are given, without dynamic batches",
    why="verl (and MindSpeed: 'Please set micro_batch_size or set use_flash_attn=True') cannot split a batch",
    fix="set it, or use_dynamic_bsz=True with a token budget",
)
def micro_missing(s):
    if s.dynamic:
        return
    keys = [f"{ACTOR}.ppo_micro_batch_size", f"{ROLLOUT}.log_prob_micro_batch_size"]
    if s.get(f"{ACTOR}.use_kl_loss") or s.get("algorithm.use_kl_in_reward"):
        keys.append(f"{REF}.log_prob_micro_batch_size")
    for key in keys:
        if s.get(key) is None and s.get(f"{key}_per_gpu") is None:
            yield f"{key}_per_gpu", "not set, and use_dynamic_bsz is False"


@rule(
    "batch.micro_divides",
    "error",
    "the mini-batch of a rank is a multiple of the micro-batch",
    why="verl asserts that the normalized mini-batch is divisible",
    fix="use a divisor",
)
def micro_divides(s):
    micro, per_rank = s.number(f"{ACTOR}.ppo_micro_batch_size_per_gpu", 0), int(_per_rank(s))
    if not s.dynamic and micro and per_rank and per_rank % micro:
        yield (
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            f"{per_rank} sequences per rank in micro-batches of {micro}",
        )


@rule(
    "batch.token_budget",
    "error",
    "dynamic-batch budgets x CP (or Ulysses) hold the longest sequence",
    why="verl asserts 'max_token_len must be greater than the sequence length', after the first rollout",
    fix="set it to at least (prompt + response) / CP or SP, rounded up",
)
def token_budget(s):
    budgets = [
        (f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu", s.sp),
        (f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_max_token_len_per_gpu", s.sp),
    ]
    if s.get(f"{ACTOR}.use_kl_loss") or s.get("algorithm.use_kl_in_reward"):
        budgets.append(
            (
                f"{REF}.log_prob_use_dynamic_bsz",
                f"{REF}.log_prob_max_token_len_per_gpu",
                s.number(f"{REF}.ulysses_sequence_parallel_size"),
            )
        )
    for switch, key, ulysses in budgets:
        split = s.cp if s.megatron else ulysses
        if s.get(switch) and s.number(key, 0) * split < s.sequence:
            yield key, f"{s.number(key, 0)} x {split} tokens, and a sequence has up to {s.sequence}"

"""Rules about vLLM's rollout: what stops it on NPUs, what is slow, what differs from the script."""

from __future__ import annotations

import math
from types import SimpleNamespace

from ascend_rl.experts import support_eplb
from ascend_rl.lint import switches
from ascend_rl.lint.setup import ROLLOUT, VLLM, Setup, rule
from ascend_rl.rollout import npu_options
from ascend_rl.settings import stack
from ascend_rl.speculation import sam_options


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
    servers = s.rollout_dies // (s.rollout_tp * s.rollout_dp)
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
        yield f"{ROLLOUT}.max_num_seqs", f"{seats} seats in {engines} engines, {requests} requests per step"


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
        later=stack.NAME != stack.DEFAULT,
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


@rule(
    "rollout.routing_replay",
    "error",
    "the rollout's routing is replayed only by an engine that returns it",
    why="verl passes vLLM enable_return_routed_experts, which 0.13.0 does not know: no server starts",
    fix="enable_rollout_routing_replay=False and actor.router_replay.mode=disabled (or R2)",
)
def routing_replay(s):
    key = f"{ROLLOUT}.enable_rollout_routing_replay"
    if stack.NAME == stack.DEFAULT and s.get(f"{ROLLOUT}.name") == "vllm" and s.get(key):
        yield key, "True, with vLLM 0.13.0"

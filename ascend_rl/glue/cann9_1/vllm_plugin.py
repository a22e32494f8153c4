"""What vLLM calls in each process of an engine (entry point group `vllm.general_plugins`)."""

from __future__ import annotations

import importlib
import multiprocessing
from types import ModuleType
from typing import Any

from ascend_rl.glue.cann9_1 import ascend_fixes, experts, vllm_fixes
from ascend_rl.glue.cann9_1.hooks import Hooks, first, or_stop, then, version_is
from ascend_rl.host import core_binding
from ascend_rl.host.disable_gc import CallCollector, collect_between
from ascend_rl.speculation.bs_threshold_for_spec_decode import KEY, draft_gate

hooks = Hooks()


@hooks.after("vllm.v1.engine.core")
def collect_between_steps(module: ModuleType) -> None:
    engine = module.EngineCoreProc
    engine._process_engine_step = collect_between(engine._process_engine_step)


@hooks.after("vllm.v1.engine.core")
def say_held_requests(module: ModuleType) -> None:
    """For rollout_rebalance, which asks an engine through vLLM's `call_utility`."""
    from ascend_rl.rollout.request_mover import held_requests

    module.EngineCore.held_requests = lambda self: held_requests(self.scheduler)


@hooks.after("vllm.v1.executor.multiproc_executor")
def collect_between_calls(module: ModuleType) -> None:
    """A worker's loop takes a call, and may answer it; it has ended when the loop takes the next one."""
    loop = module.WorkerProc.worker_busy_loop

    def worker_busy_loop(worker: Any) -> None:
        collector, last = CallCollector(), {}
        take, answer = worker.rpc_broadcast_mq.dequeue, worker.handle_output

        def dequeue(*args, **kwargs):
            if last:
                collector.after(last["method"], last["output"])
            call = take(*args, **kwargs)
            last.update(method=call[0], output=None)
            return call

        def handle_output(output):
            answer(output)
            last["output"] = output

        worker.rpc_broadcast_mq.dequeue, worker.handle_output = dequeue, handle_output
        loop(worker)

    module.WorkerProc.worker_busy_loop = worker_busy_loop


@hooks.after("vllm_ascend.worker.model_runner_v1")
def read_logprobs_mode(module: ModuleType) -> None:
    """The runner constructs its sampler without the mode, so that log-probs are always the raw ones."""
    sampler, runner = module.AscendSampler, module.NPUModelRunner
    start = runner.__init__

    def __init__(self, vllm_config, *args, **kwargs):
        module.AscendSampler = lambda: sampler(logprobs_mode=vllm_config.model_config.logprobs_mode)
        try:
            start(self, vllm_config, *args, **kwargs)
        finally:
            module.AscendSampler = sampler

    runner.__init__ = __init__


@hooks.after("vllm_ascend.worker.model_runner_v1")
def record_routes_of_several_ranks(module: ModuleType) -> None:
    """vllm-ascend imports its own correction with later versions of vLLM only: R3 stops with TP and DP."""
    importlib.import_module("vllm_ascend.patch.worker.patch_routed_experts_capture")


# `sam` compiles when it is imported: only where it is asked for.
SAM = "ascend_rl.glue.cann9_1.sam"


def drafts_with_sam(speculative: Any) -> bool:
    return speculative is not None and speculative.model == f"{SAM}.SamDrafter"


@hooks.after("vllm.v1.worker.gpu_model_runner")
def give_the_runner(module: ModuleType) -> None:
    start = module.GPUModelRunner.__init__

    def __init__(self, *args, **kwargs):
        start(self, *args, **kwargs)
        drafter = getattr(self, "drafter", None)
        if type(drafter).__module__ == SAM:
            drafter.runner = self

    module.GPUModelRunner.__init__ = __init__


@hooks.after("vllm_ascend.worker.model_runner_v1")
def know_the_method(module: ModuleType) -> None:
    """vllm-ascend's factory refuses custom_class, and its runner goes by the type of the drafter."""
    known = module.get_spec_decode_method

    def get_spec_decode_method(method, vllm_config, device, runner):
        if not drafts_with_sam(vllm_config.speculative_config):
            return known(method, vllm_config, device, runner)
        from ascend_rl.glue.cann9_1.sam import SamDrafter

        class NpuSamDrafter(SamDrafter, module.AscendNgramProposer):  # the branch that takes and gives lists
            pass

        drafter = NpuSamDrafter(vllm_config)
        drafter.runner = runner
        return drafter

    module.get_spec_decode_method = get_spec_decode_method


@hooks.after("vllm_ascend.worker.model_runner_v1")
def draft_in_small_batches(module: ModuleType) -> None:
    """VLLM_SPECULATIVE_BATCH_SIZE_THRE, or additional_config.bs_threshold_for_spec_decode."""
    runner = module.NPUModelRunner
    start, propose = runner.__init__, runner.propose_draft_token_ids

    def __init__(self, vllm_config, *args, **kwargs):
        start(self, vllm_config, *args, **kwargs)
        method = self.speculative_config and self.speculative_config.method
        if drafts_with_sam(self.speculative_config):
            method = "sam"
        self.draft_gate = draft_gate(method, (vllm_config.additional_config or {}).get(KEY))

    def propose_draft_token_ids(self, *args, **kwargs):
        if not self.draft_gate(self.input_batch.num_reqs):
            return [[] for _ in range(self.input_batch.num_reqs)]
        return propose(self, *args, **kwargs)

    runner.__init__, runner.propose_draft_token_ids = __init__, propose_draft_token_ids


@hooks.after("vllm_ascend.worker.model_runner_v1")
def replay_without_drafts(module: ModuleType) -> None:
    """With SAM, a step whose rows are one token each replays graphs of its own."""

    def give_dispatcher(self, vllm_config, *args, **kwargs) -> None:
        if drafts_with_sam(self.speculative_config):
            from ascend_rl.glue.cann9_1.decode_graphs import Dispatcher

            self.cudagraph_dispatcher = Dispatcher(vllm_config)

    def keep_both(self, *args) -> None:
        if drafts_with_sam(self.speculative_config) and self.cudagraph_dispatcher.plain_sizes:
            from ascend_rl.glue.cann9_1.decode_graphs import GraphParams
            from vllm_ascend.compilation import acl_graph

            acl_graph._graph_params = GraphParams(acl_graph._graph_params)

    def select(self, longest: int) -> None:
        if drafts_with_sam(self.speculative_config):
            self.cudagraph_dispatcher.select(longest)
            self.uniform_decode_query_len = self.cudagraph_dispatcher.uniform_decode_query_len

    def select_for_step(self, *args, max_num_scheduled_tokens, **kwargs) -> None:
        select(self, max_num_scheduled_tokens)

    def select_for_capture(self, desc, *args, **kwargs) -> None:
        select(self, desc.num_tokens // (desc.num_reqs or 1))

    def select_for_dummy(self, *args, **kwargs) -> None:
        if kwargs.get("cudagraph_runtime_mode") is None:
            select(self, 0)  # a data-parallel rank without requests computes a row with drafts

    runner = module.NPUModelRunner
    then(runner, "__init__", give_dispatcher)
    then(runner, "_check_and_update_cudagraph_mode", keep_both)
    first(runner, "_determine_batch_execution_and_padding", select_for_step)
    first(runner, "_warmup_and_capture", select_for_capture)
    first(runner, "_dummy_run", select_for_dummy)


@hooks.after("vllm_ascend.worker.model_runner_v1")
def replay_by_rank(module: ModuleType) -> None:
    """additional_config.graphs_by_rank: a data-parallel rank keeps its own tokens and graph with MC2."""
    runner = module.NPUModelRunner
    synchronize = runner._sync_metadata_across_dp

    def _sync_metadata_across_dp(
        self, num_tokens, is_draft_model=False, cudagraph_mode=module.CUDAGraphMode.NONE, *args, **kwargs
    ):
        most, rows, mode = synchronize(self, num_tokens, is_draft_model, cudagraph_mode, *args, **kwargs)
        if graphs_by_rank(self.vllm_config) and self.dp_size > 1 and not is_draft_model:
            if module.select_moe_comm_method(most, self.vllm_config) == module.MoECommType.MC2:
                return num_tokens, rows.new_full(rows.shape, num_tokens), cudagraph_mode
        return most, rows, mode

    runner._sync_metadata_across_dp = _sync_metadata_across_dp


@hooks.after("vllm_ascend.ops.fused_moe.token_dispatcher")
def dispatch_by_rank(module: ModuleType) -> None:
    """MC2 takes unequal rows if it is told the most that all ranks can have."""

    def take_the_most(self, *args, **kwargs) -> None:
        config = module.get_current_vllm_config()
        if graphs_by_rank(config):
            tp = config.parallel_config.tensor_parallel_size
            self.global_bs = module.get_mc2_tokens_capacity() // tp * self.ep_world_size

    then(module.TokenDispatcherWithMC2, "__init__", take_the_most)


def graphs_by_rank(vllm_config: Any) -> bool:
    return bool((vllm_config.additional_config or {}).get("graphs_by_rank"))


@or_stop
def register() -> None:
    if not version_is("vllm", "0.23"):
        return
    if multiprocessing.current_process().name.startswith("EngineCore"):
        core_binding.bind("engine")
    for found in (hooks, experts.hooks, ascend_fixes.hooks, vllm_fixes.hooks):
        found.install()
    from vllm.platforms import current_platform

    if current_platform.device_type == "cpu":
        from ascend_rl.glue.cann9_1 import cpu_rollout

        cpu_rollout.hooks.install()

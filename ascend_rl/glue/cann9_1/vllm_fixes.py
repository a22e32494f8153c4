"""What is wrong in vLLM 0.23.0, right (docs/stacks.md, "What is wrong upstream")."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

from ascend_rl.glue.cann9_1.hooks import Hooks, first
from ascend_rl.host import idle
from ascend_rl.host.loopback import listen_on_loopback
from ascend_rl.process.ending import end_if_it_fails
from ascend_rl.process.ports import free_port
from ascend_rl.rollout.front_end import append_sampled
from ascend_rl.rollout.request_checks import check, check_prompt

hooks = Hooks()
LOOK_MS = 100  # a lost notification delays a call by no more


@hooks.after("vllm.v1.core.sched.scheduler")
def start_over_without_kv(module: ModuleType) -> None:
    """Preempt requests whose KV a connector could not load: what they sampled, and a step under way, is void.

    vLLM's "recompute" takes the computed tokens back, but leaves blocks without KV in the prefix cache.
    """
    scheduler = module.Scheduler
    find, handle = scheduler._update_requests_with_invalid_blocks, scheduler._handle_invalid_blocks

    def remember(self, scheduled, output) -> None:
        self.output_to_handle = output

    def _update_requests_with_invalid_blocks(self, *args, **kwargs):
        found = find(self, *args, **kwargs)
        if self.recompute_kv_load_failures:
            self.kv_cache_manager.evict_blocks(found[2])
        return found

    def _handle_invalid_blocks(self, *args):
        failed, output = handle(self, *args), self.output_to_handle
        if not self.recompute_kv_load_failures:
            return failed
        for request in [one for one in reversed(self.running) if one.request_id in failed]:
            index = output.req_id_to_index.get(request.request_id)
            sampled = index is not None and output.sampled_token_ids and output.sampled_token_ids[index]
            in_flight = request.num_output_placeholders > len(sampled or [])
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            request.num_output_placeholders, request.async_tokens_to_discard = 0, int(in_flight)
            self.prev_step_scheduled_req_ids.discard(request.request_id)
        return failed

    first(scheduler, "update_from_output", remember)
    scheduler._update_requests_with_invalid_blocks = _update_requests_with_invalid_blocks
    scheduler._handle_invalid_blocks = _handle_invalid_blocks


@hooks.after("vllm.v1.outputs")
def send_log_probs_as_lists(module: ModuleType) -> None:
    """From the engine; an array per request and token costs its receiver more than all else."""
    lists = module.LogprobsLists
    slice_request = lists.slice_request

    def as_lists(self, *args):
        return lists(*(part if part is None else part.tolist() for part in slice_request(self, *args)))

    lists.__annotations__.update(dict.fromkeys(lists._fields[:3], Any))
    lists.slice_request = as_lists


@hooks.after("vllm.v1.engine.logprobs")
def append_lists(module: ModuleType) -> None:
    import numpy as np

    from vllm.logprobs import FlatLogprobs

    processor = module.LogprobsProcessor
    update = processor._update_sample_logprobs

    def _update_sample_logprobs(self, lists) -> None:
        if isinstance(self.logprobs, FlatLogprobs) and self.num_logprobs == 0 and self.tokenizer is None:
            self.cumulative_logprob += append_sampled(self.logprobs, *lists[:3])
        else:
            update(self, type(lists)(*map(np.asarray, lists[:3])))

    processor._update_sample_logprobs = _update_sample_logprobs


@hooks.after("vllm.v1.engine.input_processor")
def refuse_requests(module: ModuleType) -> None:
    """Refuse a request that would end the engine for all: what vLLM's own checks let through, or fail at."""
    processor = module.InputProcessor
    check_params, check_input = processor._validate_params, processor._validate_model_input

    def _validate_params(self, params, *args) -> None:
        if isinstance(params, module.SamplingParams):
            check(params, self.model_config.get_vocab_size())
        try:
            check_params(self, params, *args)
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"sampling parameters: {error!r}") from error
        if isinstance(params, module.SamplingParams) and params.structured_outputs is not None:
            self.__dict__.setdefault("grammars", Grammars(self.vllm_config)).compile(params)

    def _validate_model_input(self, prompt, *args, **kwargs) -> None:
        if prompt["type"] == "token" and prompt["prompt_token_ids"]:
            check_prompt(prompt["prompt_token_ids"], self.model_config.get_vocab_size())
        check_input(self, prompt, *args, **kwargs)

    processor._validate_params, processor._validate_model_input = _validate_params, _validate_model_input


@hooks.after("vllm.v1.worker.gpu_input_batch")
def keep_restrictions_apart(module: ModuleType) -> None:
    """allowed_token_ids restrict their own request: rows are swapped with a copy, and left clear."""
    batch = module.InputBatch
    swap, condense = batch.swap_states, batch.condense

    def swap_states(self, i1: int, i2: int) -> None:
        mask = self.allowed_token_ids_mask_cpu_tensor
        row = None if mask is None else mask[i1].clone()
        swap(self, i1, i2)
        if mask is not None:
            mask[i2] = row

    def condense_and_clear(self) -> None:
        rows, mask = len(self._req_ids), self.allowed_token_ids_mask_cpu_tensor
        condense(self)
        if mask is not None:
            mask[self.num_reqs : rows] = False

    batch.swap_states, batch.condense = swap_states, condense_and_clear


@hooks.after("vllm.distributed.utils")
def keep_engines_on_loopback(module: ModuleType) -> None:
    """torch's store listens on all interfaces, also where it is announced at a loopback address."""
    listen_on_loopback()


@hooks.after("vllm.utils.network_utils")
def keep_ports_of_engines_free(module: ModuleType) -> None:
    """vLLM lets go of the port that the system chose, and listens there once its workers have started."""
    choose = module._get_open_port

    def _get_open_port(start_port: int | None = None, max_attempts: int | None = None) -> int:
        if start_port is None and module.envs.VLLM_PORT is None:
            return free_port("")
        return choose(start_port, max_attempts)

    module._get_open_port = _get_open_port


@end_if_it_fails
def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """vLLM's, by its own name: a process that is spawned looks this one up, before it has loaded plug-ins."""
    from vllm.v1.engine.core import EngineCoreProc

    run = EngineCoreProc.run_engine_core
    getattr(run, "of_vllm", run)(*args, **kwargs)


@hooks.after("vllm.v1.engine.core")
def end_engines_that_fail(module: ModuleType) -> None:
    """An engine that fails may wait forever for a message to be sent, and its server for the engine."""
    run_engine_core.of_vllm = module.EngineCoreProc.run_engine_core
    module.EngineCoreProc.run_engine_core = staticmethod(run_engine_core)


@hooks.after("vllm.model_executor.layers.rotary_embedding.common")
def no_flash_attn_elsewhere(module: ModuleType) -> None:
    """Rotary embeddings import flash_attn where a package of that name is found, and only ROCm uses it."""
    find = module.find_spec
    module.find_spec = lambda name: find(name) if module.current_platform.is_cuda_alike() else None


@hooks.after("vllm.distributed.device_communicators.shm_broadcast")
def sleep_when_idle(module: ModuleType) -> None:
    """ROLLOUT_SPIN_S: seconds in which a worker looks for its next call in a loop, before it waits.

    It waits for a notification, which its sender may drop (SNDHWM=1), so it looks again now and then.
    """
    condition = module.SpinCondition
    start, wait = condition.__init__, condition.wait

    def __init__(self, *args, **kwargs):
        start(self, *args, **kwargs)
        if self.is_reader and os.environ.get(idle.VARIABLE):
            self.busy_loop_s = idle.spin_and_sleep()[0]

    def look_again(self, timeout_ms: int | None = None) -> None:
        if os.environ.get(idle.VARIABLE):
            timeout_ms = min(LOOK_MS, LOOK_MS if timeout_ms is None else timeout_ms)
        wait(self, timeout_ms)

    condition.__init__, condition.wait = __init__, look_again


@hooks.after("vllm.envs")
def compile_nothing_ahead(module: ModuleType) -> None:
    """With TORCHDYNAMO_DISABLE=1 torch.compile returns the function itself, which cannot compile ahead."""
    wanted = module.environment_variables["VLLM_USE_AOT_COMPILE"]
    module.environment_variables["VLLM_USE_AOT_COMPILE"] = lambda: (
        os.environ.get("TORCHDYNAMO_DISABLE") != "1" and wanted()
    )


class Grammars:
    """Compiles grammars as the engine will, with one backend for all requests; an error there ends it."""

    def __init__(self, vllm_config: Any):
        from vllm.v1.structured_output import StructuredOutputManager

        self.manager, self.backend = StructuredOutputManager(vllm_config), None

    def compile(self, params: Any) -> None:
        from vllm.v1.structured_output.request import StructuredOutputRequest

        request, backend = (
            StructuredOutputRequest.from_sampling_params(params),
            params.structured_outputs._backend,
        )
        if request is None:
            return
        if self.backend not in (None, backend):
            raise ValueError(
                f"structured_outputs needs the {backend} backend, and this engine uses {self.backend}: "
                f"start one with structured_outputs_config.backend={backend}"
            )
        self.backend = backend
        try:
            self.manager.grammar_init(
                SimpleNamespace(sampling_params=params, structured_output_request=request)
            )
            if isinstance(request._grammar, Future):
                request._grammar.result()
        except Exception as error:
            raise ValueError(f"structured_outputs: {error}") from error

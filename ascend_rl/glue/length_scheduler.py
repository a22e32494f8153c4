"""vLLM's scheduler, synchronous or asynchronous, that admits requests in the order of `LengthScheduler`.

vLLM constructs it by its name (``scheduler_cls``), on both stacks. Before a step it puts the queue into order
and lowers the number of requests that may run to those that run and those to admit; all the rest of a step is
vLLM's. Requests that run are kept by their tokens, so that the one with the fewest is preempted first.
"""

from __future__ import annotations

from typing import Any

from ascend_rl.process.counts import count
from ascend_rl.rollout.known_lengths import KEY
from ascend_rl.rollout.length_scheduler import LengthScheduler, Request
from ascend_rl.settings.switch import refuse
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

DECIDE_STEPS = 200  # lengths so far say more after so many steps without another event
ENDED = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED
NEW = RequestStatus.WAITING, RequestStatus.PREEMPTED


class Admission:
    """Added to vLLM's Scheduler."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any):
        super().__init__(vllm_config, *args, **kwargs)
        policy = vllm_config.scheduler_config.policy
        if policy != "fcfs":
            refuse("length_scheduler", [f"scheduling_policy={policy}: it orders requests itself, use fcfs"])
        self.kv_tokens = (vllm_config.cache_config.num_gpu_blocks - 1) * self.block_size
        alone = vllm_config.parallel_config.data_parallel_size == 1
        self.lengths = LengthScheduler(self.kv_tokens, alone)
        self.due, self.steps, self.allowed = True, 0, 0

    def add_request(self, request: Any) -> None:
        if not self.requests:
            self.lengths.forget()
        super().add_request(request)
        prompt, lengths, _ = self._known(request)
        self.lengths.expect(prompt, lengths)
        if lengths:
            count("scheduled_lengths")
        self.due = True

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.status in ENDED:
            prompt, _, before = self._known(request)
            self.lengths.ended(prompt, before + request.num_output_tokens)
        self.due = True
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Any, *args: Any) -> None:
        self.lengths.preempted()
        self.due = True
        super()._preempt_request(request, *args)

    def schedule(self) -> Any:
        places, self.steps = self.max_num_running_reqs, self.steps + 1
        if self.waiting and (self.due or self.steps % DECIDE_STEPS == 0):
            self._decide(places)
        self.max_num_running_reqs = min(places, max(self.allowed, len(self.running)))
        try:
            return super().schedule()
        finally:
            self.max_num_running_reqs = places

    def _decide(self, places: int) -> None:
        queue = list(self.waiting)
        # Others wait for KV from elsewhere, for which they have room, or for a grammar.
        waiting = [request for request in queue if request.status in NEW]
        others = [request for request in queue if request.status not in NEW]
        self.running.sort(key=lambda request: -request.num_tokens)
        held = others + list(getattr(self, "skipped_waiting", ()))
        order, admitted = self.lengths.choose(
            [self._request(request) for request in (*self.running, *held)],
            [self._request(request) for request in waiting],
            places - len(self.running) - len(held),
        )
        self.waiting.clear()
        self.waiting.extend(others + [waiting[i] for i in order])
        self.allowed = len(self.running) + len(held) + admitted
        self.due = False
        count("length_scheduler", sum(i != turn for turn, i in enumerate(order)) or len(order) - admitted)

    def _known(self, request: Any) -> tuple[Any, list[float], int]:
        """What its siblings have in common, earlier lengths, tokens of the response within the prompt."""
        extra = (request.sampling_params and request.sampling_params.extra_args) or {}
        if (known := extra.get(KEY)) is None:
            return hash(tuple(request.prompt_token_ids or ())), [], 0
        return known["prompt"], known["lengths"], known.get("done", 0)

    def _request(self, request: Any) -> Request:
        prompt, _, before = self._known(request)
        most = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens) + before
        # Its last block is half empty on average; drafts need room, too.
        prompt_tokens = request.num_prompt_tokens - before + self.block_size // 2 + self.num_spec_tokens
        return Request(prompt, prompt_tokens, before + request.num_output_tokens, most)


def scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
    """The class that vLLM would take without this one, with `Admission`."""
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return type("LengthScheduler", (Admission, base), {})(vllm_config, *args, **kwargs)

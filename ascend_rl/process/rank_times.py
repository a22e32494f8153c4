"""What a training rank does with its time: forward, backward, and waiting in collectives; and its tokens.

`take` is called in the process of a rank (by Ray's ``__ray_call__``, once per step). Its first call wraps
what the frameworks call: the functions of torch.distributed, FSDP2's waits, and the forward and backward of
one micro-batch, of FSDP and of Megatron. Each span is two events on the stream that computes, or two readings
of the clock on a CPU; a collective's is what the stream waits for it, transfer included. Spans are added up
when they are over on the device, so nothing waits for it but `take`.

A rank that computes slowly waits less than the others, who wait for it. So what tells is the time without
collectives: `forward_s` and `backward_s` leave them out.

Invariants (tests/test_slow_ranks.py): results and exceptions of what is wrapped are unchanged; spans do not
overlap: a collective inside a collective is one. Cost: two events per collective and micro-batch.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "_all_gather_base", "reduce_scatter",
    "reduce_scatter_tensor", "_reduce_scatter_base", "all_to_all", "all_to_all_single", "broadcast", "reduce",
    "send", "recv", "barrier",
)  # fmt: skip
# One micro-batch: (module, class or "", name). FSDP's own forward is that of the model.
FORWARD = (
    ("verl.workers.actor.dp_actor", "DataParallelPPOActor", "_forward_micro_batch"),
    ("verl.workers.engine.fsdp.transformer_impl", "FSDPEngineWithLMHead", "forward_step"),
    ("megatron.core.pipeline_parallel.schedules", "", "forward_step"),
)
BACKWARD = (
    ("torch.autograd", "", "_engine_run_backward"),
    ("megatron.core.pipeline_parallel.schedules", "", "backward_step"),
)
WAITS = (
    ("torch._C._distributed_c10d", "Work", "wait"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup", "wait_for_unshard"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup", "finalize_backward"),
)
# What all tokens of a micro-batch go through in forward, on each stage and on the first one. Its result is
# [..., hidden size].
THROUGH = {
    "layers": ("megatron.core.transformer.transformer_block", "TransformerBlock", "forward"),
    "embedding": ("torch.nn.functional", "", "embedding"),
}
HOLDERS = ("torch.distributed", "megatron", "mindspeed", "verl")  # modules that may hold these functions


class Clock:
    """Adds up spans by kind.

    Args:
        event: makes an event that can be recorded, as torch.npu.Event(enable_timing=True); None: a CPU.
    """

    def __init__(self, event: Callable[[], Any] | None = None):
        self.event = event
        self.free: list[Any] = []
        self.open: deque[tuple[str, str, Any, Any]] = deque()  # kind, phase, begin, end
        self.local, self.lock = threading.local(), threading.Lock()
        self.phase = ""  # forward or backward; the device's backward runs in a thread of its own
        self.reset()

    def reset(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(("forward", "backward", "collectives"), 0.0)
        self.micro_batches = self.calls = 0
        self.tokens: dict[str, int] = dict.fromkeys(THROUGH, 0)

    def mark(self) -> Any:
        if self.event is None:
            return time.perf_counter()
        event = self.free.pop() if self.free else self.event()
        event.record()
        return event

    def span(self, kind: str, begin: Any, phase: str) -> None:
        end = self.mark()
        if self.event is None:
            self._add(kind, phase, end - begin)
            return
        with self.lock:
            self.open.append((kind, phase, begin, end))

    def _add(self, kind: str, phase: str, seconds: float) -> None:
        self.seconds[kind] += seconds
        if kind == "collectives" and phase:
            self.seconds[phase] -= seconds

    def drain(self) -> None:
        """Add up what is over on the device."""
        with self.lock:
            while self.open and self.open[0][3].query():
                kind, phase, begin, end = self.open.popleft()
                self._add(kind, phase, begin.elapsed_time(end) / 1000)
                self.free += [begin, end]

    def collective(self, call: Callable) -> Callable:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(self.local, "inside", False) or kwargs.get("async_op"):
                return call(*args, **kwargs)  # the latter's wait is timed
            self.local.inside, self.calls = True, self.calls + 1
            begin, phase = self.mark(), self.phase
            try:
                return call(*args, **kwargs)
            finally:
                self.local.inside = False
                self.span("collectives", begin, phase)

        return timed

    def phase_of(self, kind: str, call: Callable) -> Callable:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.phase:  # backward_step calls autograd; checkpoints compute forward in backward
                return call(*args, **kwargs)
            self.drain()
            self.phase, self.micro_batches = kind, self.micro_batches + (kind == "forward")
            begin = self.mark()
            try:
                return call(*args, **kwargs)
            finally:
                self.phase = ""
                self.span(kind, begin, "")

        return timed

    def through(self, what: str, call: Callable) -> Callable:
        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            if self.phase == "forward":
                self.tokens[what] += result.shape[:-1].numel()
            return result

        return counted

    def take(self) -> dict[str, float]:
        """Seconds and counts since the last call; waits for the device.

        ``tokens`` are those of this rank: padded ones where it computes those, and its share where it has a
        part of each sequence.
        """
        if self.open:
            self.open[-1][3].synchronize()
            self.drain()
        found = {f"{kind}_s": max(seconds, 0.0) for kind, seconds in self.seconds.items()}
        found |= {"micro_batches": self.micro_batches, "calls": self.calls}
        found["tokens"] = self.tokens["layers"] or self.tokens["embedding"]
        self.reset()
        return found


def install(clock: Clock) -> None:
    """Wrap what is loaded in this process."""
    import torch

    for places, wrap in (
        (FORWARD, functools.partial(clock.phase_of, "forward")),
        (BACKWARD, functools.partial(clock.phase_of, "backward")),
        (WAITS, clock.collective),
        *(([place], functools.partial(clock.through, what)) for what, place in THROUGH.items()),
    ):
        for module, owner, name in places:
            holder = sys.modules.get(module)
            if holder is not None and owner:
                holder = getattr(holder, owner, None)
            if hasattr(holder, name):
                setattr(holder, name, wrap(getattr(holder, name)))
    new = {}
    for name in COLLECTIVES:
        if call := getattr(torch.distributed, name, None):
            new[id(call)] = call, clock.collective(call)
    for name, module in list(sys.modules.items()):
        if name.startswith(HOLDERS):
            for key, value in list(vars(module).items()):
                if id(value) in new and value is new[id(value)][0]:
                    setattr(module, key, new[id(value)][1])


@functools.cache
def of_this_process() -> Clock:
    import torch

    npu = getattr(torch, "npu", None)
    device = npu is not None and npu.is_available()
    clock = Clock(functools.partial(npu.Event, enable_timing=True) if device else None)
    install(clock)
    return clock


def take(worker: Any) -> dict[str, Any]:
    """What this rank did since the last call; the first one, which starts to measure, finds nothing.

    Returns:
        seconds and counts of `Clock.take`; ``rank``, ``stage`` (of the pipeline), ``node`` and ``device``.
    """
    import ray

    found: dict[str, Any] = of_this_process().take()
    state, stage = sys.modules.get("megatron.core.parallel_state"), 0
    if state is not None and state.model_parallel_is_initialized():
        stage = state.get_pipeline_model_parallel_rank()
    node, devices = ray.util.get_node_ip_address(), os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
    rank = int(os.environ.get("RANK", 0))
    return found | {"rank": rank, "stage": stage, "node": node, "device": devices}

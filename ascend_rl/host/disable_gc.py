"""Garbage collection between the steps of vLLM's engine and of its worker processes, not inside them.

Problem: Python collects when enough objects were allocated, often in the middle of a decode step, while the
device waits; a full collection of a large heap takes hundreds of milliseconds. Published for Qwen3
rollouts: a decode forward of 137.64 ms on average, 135.19 without collection.
Idea: a step runs with collection off. After each one, Python collects the youngest generation, which holds
what that step allocated, and the older ones when it finds them due by its own rules; the whole heap only if
that is also paid for by a share of the time that steps have taken, or long overdue. After every step, because
Python's count of what was allocated is low when a step has freed what older ones allocated: left to it, the
young generation waits for dozens of steps and then takes as many times longer.
With the executor that verl uses (mp), operators are launched by worker processes, one for each device. There
a step is the calls execute_model and sample_tokens; collection is off but for a moment after the last of them
has been answered, and after other calls. The heap is frozen after the start, as vLLM does in the engine's.
Invariants: no collection during a step; the collector is restored however a step ends, exceptions and
SystemExit included; if it was off already, nothing is done; full collections that are not overdue take at
most ``SHARE`` of the time of steps, plus one. Cost: two calls per step, and the collections.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

from ascend_rl.process.counts import count
from ascend_rl.settings.switch import switched_on

SHARE = 0.02  # of the time of steps, for full collections
OVERDUE = 10  # times the threshold of Python: then a full collection needs no payment, and memory is bounded
NEVER = 1 << 30  # a threshold no count reaches
STEP = ("execute_model", "sample_tokens")  # a worker's calls within a step


def collections() -> int:
    """How often Python has collected in this process, any generation."""
    return sum(generation["collections"] for generation in gc.get_stats())


class Allocated:
    """Allocating one makes Python collect what is due."""


class Collector:
    """Lets Python collect when it is called, between steps."""

    def __init__(self) -> None:
        self.credit_s = self.full_s = 0.0  # paid for full collections; what the last one took

    def between_steps(self, step_s: float) -> None:
        """Switch collection on, and collect; ``step_s``: what the step has taken."""
        self.credit_s += SHARE * step_s
        thresholds, fulls = gc.get_threshold(), gc.get_stats()[2]["collections"]
        before = collections()
        overdue = gc.get_count()[2] > OVERDUE * thresholds[2]
        wait = self.credit_s < self.full_s and not overdue
        gc.set_threshold(min(1, thresholds[0]), thresholds[1], NEVER if wait else thresholds[2])
        begin = time.perf_counter()
        gc.enable()
        _ = [Allocated(), Allocated()]  # one is not above a threshold of 1
        gc.set_threshold(*thresholds)
        if gc.get_stats()[2]["collections"] > fulls:
            self.full_s = time.perf_counter() - begin
            self.credit_s = min(self.credit_s - self.full_s, 0.0)
        count("gc_between", collections() - before)


class CallCollector:
    """In the loop of a worker process: collects between steps, with ROLLOUT_DISABLE_GC=1."""

    def __init__(self) -> None:
        self.on = switched_on("ROLLOUT_DISABLE_GC") and gc.isenabled()
        self.collector, self.since = Collector(), time.perf_counter()
        if self.on:
            self.freeze()
            gc.disable()
        self.seen = collections()

    def freeze(self) -> None:
        """Leave what exists, such as the model, out of all later collections."""
        gc.collect()
        gc.freeze()

    def after(self, method: str | bytes, output: Any) -> None:
        """Collect, unless the step continues: ``method`` returned ``output``, which has been handed on."""
        if method == "execute_model" and output is None:  # sample_tokens follows
            return
        if method in STEP:
            count("gc_within", collections() - self.seen)
        if self.on:
            self.collect(method)
        self.seen = collections()

    def collect(self, method: str | bytes) -> None:
        if method == "compile_or_warm_up_model":  # the last call of the start
            self.freeze()
        self.collector.between_steps(time.perf_counter() - self.since)
        gc.disable()
        self.since = time.perf_counter()


def collect_between(step: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The method ``step`` of an engine; with ROLLOUT_DISABLE_GC=1 it collects after the step, not in it.

    Counts collections within steps, and with asynchronous scheduling the steps begun while another ran.
    """

    def watched(engine: Any) -> bool:
        before, under_way = collections(), getattr(engine, "batch_queue", None)
        count("scheduled_ahead", int(bool(under_way)))
        try:
            return step(engine)
        finally:
            count("gc_within", collections() - before)

    @functools.wraps(step)
    def quiet(engine: Any) -> bool:
        if not switched_on("ROLLOUT_DISABLE_GC") or not gc.isenabled():
            return watched(engine)
        collector = engine.__dict__.setdefault("_collector", Collector())
        begin = time.perf_counter()
        gc.disable()
        try:
            executed = watched(engine)
            collector.between_steps(time.perf_counter() - begin)
            return executed
        finally:
            gc.enable()

    return quiet

"""Garbage collection waits for the end of a step of vLLM's EngineCoreProc."""

from __future__ import annotations

import gc
import queue
import time

import psutil
import pytest

from ascend_rl.host import disable_gc
from vllm.utils.gc_utils import freeze_gc_heap


class Cycle:
    """Garbage that only a collection frees."""

    alive = 0

    def __init__(self):
        self.me, self.load = self, [[i] for i in range(40)]
        Cycle.alive += 1

    def __del__(self):
        Cycle.alive -= 1


class Steps:
    """A process of vLLM's engine core whose model allocates; the step is vLLM's own."""

    def __init__(self):
        from vllm.v1.engine.core import EngineCoreProc

        self.core = object.__new__(EngineCoreProc)
        self.core.output_queue, self.core.post_step = queue.Queue(), lambda executed: None
        self.core.step_fn, self.inside, self.collected = self.model, False, []
        self.error = None

    def model(self):
        self.inside = True
        self.enabled = gc.isenabled()
        try:
            self.made = [Cycle() for _ in range(30)]
            if self.error:
                raise self.error
            return {0: "outputs"}, True
        finally:
            self.inside = False

    def watch(self, phase, info):
        if phase == "start":
            self.collected.append((self.inside, info["generation"]))

    def __call__(self, count=1):
        for _ in range(count):
            assert self.core._process_engine_step() is True
            assert self.core.output_queue.get_nowait() == (0, "outputs")


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.setenv("ROLLOUT_DISABLE_GC", "1")
    steps, thresholds = Steps(), gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own, as on an NPU; patches/install.py sets others for a CPU
    freeze_gc_heap()  # as vLLM's engine does when it has started
    gc.collect()  # Python waits for a quarter of the heap it saw last; that of earlier tests is not meant
    gc.callbacks.append(steps.watch)
    yield steps
    gc.callbacks.remove(steps.watch)
    gc.enable()
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_collections_wait_and_memory_does_not_grow(steps):
    alive, resident = [], []
    for step in range(10_000):
        steps()
        alive.append(Cycle.alive)
        if step % 1000 == 999:
            resident.append(psutil.Process().memory_info().rss)
        assert gc.isenabled()
    assert not any(inside for inside, _ in steps.collected)
    assert [generation for _, generation in steps.collected].count(0) > 0.8 * len(alive)  # after every step
    assert max(alive) < 120 * 30  # without collection all of them, 30 a step
    assert resident[-1] - resident[0] < 8 * 2**20, resident


def test_off_it_is_as_upstream(steps, monkeypatch):
    monkeypatch.delenv("ROLLOUT_DISABLE_GC")
    steps(200)
    assert steps.enabled and any(inside for inside, _ in steps.collected)


@pytest.mark.parametrize("error", [RuntimeError("model"), SystemExit(), KeyboardInterrupt()], ids=repr)
def test_the_collector_is_on_again_after_an_error(steps, error):
    steps.error = error
    with pytest.raises(type(error)):
        steps()
    assert not steps.enabled and gc.isenabled()


def test_what_was_off_stays_off(steps):
    gc.disable()
    steps(200)
    assert not gc.isenabled() and steps.collected == []


def test_full_collections_keep_to_their_budget(steps, monkeypatch):
    """With a heap whose collection takes longer than many steps, full ones get their share and one more."""
    heap = [[i] for i in range(200_000)]
    spent, began = [0.0], [0.0]

    def watch(phase, info):
        if phase == "start":
            began[0] = time.perf_counter()
        elif info["generation"] == 2:
            spent[0] += time.perf_counter() - began[0]

    gc.callbacks.append(watch)
    begin = time.perf_counter()
    steps(1500)
    elapsed = time.perf_counter() - begin
    gc.callbacks.remove(watch)
    full = [generation for _, generation in steps.collected].count(2)
    assert full >= 1
    longest = steps.core._collector.full_s
    assert spent[0] <= disable_gc.SHARE * elapsed + 6 * longest  # the first ones, and overdue ones
    del heap

"""Garbage collection waits for the end of a step of vLLM's EngineCoreProc."""

from __future__ import annotations

import gc
import inspect
import json
import os
import queue
import subprocess
import sys
import time

import psutil
import pytest
from spec_engines import random_model

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
    assert max(alive) < 120 * 30  # without collection all of them, 30 per step
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


WATCH = (
    f"import gc, os, sys\n{inspect.getsource(Cycle)}"
    + '''
class Watch:
    """In a worker process: garbage in each forward, and how often Python collected in a step and between."""

    def begin(self):
        gc.set_threshold(700, 10, 10)  # Python's own, as on an NPU
        self.inside, self.steps, self.collected, self.most = False, 0, {True: 0, False: 0}, 0
        execute, sample = self.execute_model, self.sample_tokens

        def execute_model(*args, **kwargs):
            self.inside, self.steps = True, self.steps + 1
            self.made = [Cycle() for _ in range(30)]
            output = execute(*args, **kwargs)
            self.inside = output is None
            return output

        def sample_tokens(*args, **kwargs):
            output = sample(*args, **kwargs)
            self.inside, self.most = False, max(self.most, Cycle.alive)
            return output

        def watch(phase, info):
            self.collected[self.inside] += phase == "start"

        self.execute_model, self.sample_tokens = execute_model, sample_tokens
        gc.callbacks.append(watch)

    def report(self):
        return {"process": os.getpid(), "steps": self.steps, "inside": self.collected[True],
                "between": self.collected[False], "most": self.most, "frozen": gc.get_freeze_count(),
                "sam": "ascend_rl.speculation.sam" in sys.modules}
'''
)
RUN = """
import json, os, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    os.environ["ROLLOUT_DISABLE_GC"] = sys.argv[2]
    llm = LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=256,
              max_num_seqs=4, num_gpu_blocks_override=64, distributed_executor_backend="mp",
              worker_extension_cls="watching_worker.Watch")
    llm.collective_rpc("begin")
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)
    print(json.dumps(llm.collective_rpc("report")[0] | {"parent": os.getpid()}))
"""


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """What a worker process of the mp executor, which verl uses, reports with the switch on and off."""
    path = tmp_path_factory.mktemp("worker")
    random_model(path / "model")
    (path / "watching_worker.py").write_text(WATCH)
    (path / "run.py").write_text(RUN)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    found = {}
    for switch in ("0", "1"):
        command = [sys.executable, path / "run.py", path / "model", switch]
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
        found[switch] = json.loads(next(x for x in reversed(run.stdout.splitlines()) if x.startswith("{")))
    return found


@pytest.mark.weekly
def test_a_worker_process_collects_between_its_steps(workers):
    off, on = workers["0"], workers["1"]
    for worker in (off, on):
        assert worker["process"] != worker["parent"] and worker["steps"] >= 100
    assert off["inside"] >= off["steps"]  # else there was nothing to fix
    assert on["inside"] == 0 and on["between"] >= on["steps"]


@pytest.mark.weekly
def test_the_heap_of_a_worker_process_is_frozen_and_does_not_grow(workers):
    frozen = {switch: worker["frozen"] > 100_000 for switch, worker in workers.items()}
    assert frozen == {"0": False, "1": True}
    assert workers["1"]["most"] < 40 * 30  # without collection all of them, 30 per step


@pytest.mark.weekly
def test_a_worker_without_sam_compiles_nothing_for_it(workers):
    """ascend_rl.speculation.sam compiles where it is imported; vLLM itself imports numba."""
    assert not any(worker["sam"] for worker in workers.values())

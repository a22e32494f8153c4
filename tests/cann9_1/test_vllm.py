"""Hooks of vLLM 0.23.0 that need no device."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from message_queue import ends

from ascend_rl.host import idle


@pytest.mark.parametrize("spin, looks, waits", [("0.01", 10, 3), ("", 300, 0)])
def test_a_worker_without_a_call_waits_after_its_loop(monkeypatch, spin, looks, waits):
    """By a clock that only looks (1 ms each) and waits advance; and it still gets the next call."""
    from vllm.distributed.device_communicators import shm_broadcast

    monkeypatch.setenv(idle.VARIABLE, spin)
    writer, reader = ends()
    writer.enqueue("a call")
    assert reader.dequeue(timeout=60) == "a call"
    looked, waited = [], []

    def poll(timeout):
        waited.append(timeout / 1000)
        return []

    with monkeypatch.context() as still:
        still.setattr(shm_broadcast, "time", SimpleNamespace(monotonic=lambda: sum(looked) + sum(waited)))
        still.setattr(shm_broadcast, "sched_yield", lambda: looked.append(0.001))
        still.setattr(reader._spin_condition, "poller", SimpleNamespace(poll=poll))
        reader._spin_condition.record_read()
        with pytest.raises(TimeoutError):
            reader.dequeue(timeout=0.3)
    assert len(looked) == pytest.approx(looks, abs=1) and len(waited) == waits
    writer.enqueue({"a": "call"})
    assert reader.dequeue(timeout=60) == {"a": "call"}


def test_a_call_without_its_notification_arrives(monkeypatch):
    """The sender drops a notification while the one before is on its way."""
    monkeypatch.setenv(idle.VARIABLE, "0.01")
    writer, reader = ends()
    monkeypatch.setattr(writer._spin_condition, "notify", lambda: None)
    threading.Timer(0.2, writer.enqueue, ["a call"]).start()
    before = time.monotonic()
    assert reader.dequeue(timeout=20) == "a call" and time.monotonic() - before < 10


@pytest.mark.parametrize("disable, ahead", [("1", False), ("0", True), (None, True)])
def test_nothing_is_compiled_ahead_without_dynamo(monkeypatch, disable, ahead):
    """From the outside: test_quickstart.test_its_model_is_exported_and_evaluated."""
    import torch

    from vllm import envs

    if disable is None:
        monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    else:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", disable)
    assert envs.VLLM_USE_AOT_COMPILE is ahead
    if not ahead:
        assert not hasattr(torch.compile(lambda x: x), "aot_compile")


@pytest.mark.parametrize(
    "given, bind, used", [("uni", "nobind", "uni"), ("uni", "0", "mp"), ("mp", "nobind", "mp")]
)
def test_the_worker_stays_in_its_engine_where_openmp_needs_nothing(tiny, monkeypatch, given, bind, used):
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bind)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    engine = {"max_model_len": 64, "enforce_eager": True, "distributed_executor_backend": given}
    config = EngineArgs(str(tiny / "model"), **engine).create_engine_config()
    assert config.parallel_config.distributed_executor_backend == used

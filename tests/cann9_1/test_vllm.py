"""Hooks of vLLM 0.23.0 that need no device."""

from __future__ import annotations

import threading
import time

import pytest
from message_queue import ends

from ascend_rl.host import idle


@pytest.mark.parametrize("spin, looks", [("0.01", (1, 40)), ("", (41, 1000))])
def test_a_worker_without_a_call_waits_after_its_loop(monkeypatch, spin, looks):
    """Of some 300 looks in 0.3 s without the setting, and it still gets the next call."""
    from vllm.distributed.device_communicators import shm_broadcast

    monkeypatch.setenv(idle.VARIABLE, spin)
    yields = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: yields.append(time.sleep(0.001)))
    writer, reader = ends()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.3)
    assert looks[0] <= len(yields) <= looks[1]
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

"""A worker process of vLLM without a call sleeps, and still gets the next one."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from message_queue import ends

from ascend_rl.host import idle
from ascend_rl.settings.switch import CannotWork


@pytest.fixture
def waiting(monkeypatch):
    """Called with the settings: the ends of vLLM's queue of calls, and the sleeps of the one that reads."""
    from vllm.distributed.device_communicators import shm_broadcast

    def queue(sleeps: bool, spin: str):
        # vLLM keeps its variables once an engine has started in this process.
        monkeypatch.setitem(vars(shm_broadcast.envs), "VLLM_SLEEP_WHEN_IDLE", sleeps)
        monkeypatch.setenv(idle.VARIABLE, spin)
        writer, reader = ends()
        slept = []

        def sleep(seconds):
            slept.append(seconds)
            time.sleep(seconds)

        clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
        monkeypatch.setattr(shm_broadcast, "time", clock)
        return writer, reader, slept

    return queue


@pytest.mark.parametrize(
    ("switch", "spin", "sleeps"),
    [
        (True, "0.002", {0.002}),
        (True, "0.3", {0.1}),
        (True, "", set()),  # vLLM's own 3 s
        (False, "0.002", set()),
    ],
)
def test_a_reader_sleeps_after_its_loop(waiting, switch, spin, sleeps):
    writer, reader, slept = waiting(switch, spin)
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.6)
    assert set(slept) == sleeps
    writer.enqueue({"a": "call"})
    assert reader.dequeue(timeout=60) == {"a": "call"}


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf"])
def test_what_is_not_a_time_is_refused(monkeypatch, given):
    monkeypatch.setenv(idle.VARIABLE, given)
    with pytest.raises(CannotWork, match=f"{idle.VARIABLE}={given}: give seconds > 0"):
        idle.spin_and_sleep()

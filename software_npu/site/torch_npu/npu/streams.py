"""Streams and events. What is called runs immediately: csrc/streams.h says what that changes."""

from __future__ import annotations

import os
from concurrent.futures import Future

import torch

import torch_npu
from software_npu import _C

from .utils import device_index


class Stream(torch.Stream):
    def __new__(cls, device=None, priority: int = 0, **kwargs):
        if kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=f"npu:{device_index(device)}", priority=priority)

    def wait_event(self, event) -> None:
        event.wait(self)

    def wait_stream(self, stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event=None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    @property
    def npu_stream(self) -> int:
        return self.stream_id

    def __eq__(self, other) -> bool:
        return isinstance(other, torch.Stream) and (self.device, self.stream_id) == (
            other.device,
            other.stream_id,
        )

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))


def _named(stream) -> Stream:
    return Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def current_stream(device=None) -> Stream:
    return _named(_C.current_stream(device_index(device)))


def default_stream(device=None) -> Stream:
    index = device_index(device)
    return Stream(stream_id=0, device_index=index, device_type=current_stream(index).device_type)


def set_stream(stream: Stream) -> None:
    torch_npu._C._npu_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


class StreamContext:
    """What is called within is of the stream, and of its device. None changes nothing."""

    def __init__(self, stream: Stream | None):
        self.stream = stream

    def __enter__(self) -> Stream | None:
        if self.stream is not None:
            self.device = _C.current_device()
            self.before = _C.current_stream(self.stream.device_index)
            set_stream(self.stream)
        return self.stream

    def __exit__(self, *error) -> None:
        if self.stream is not None:
            _C.set_stream(self.before)
            _C.set_device(self.device)


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)


class Event(torch.Event):
    """A point in a stream; ``elapsed_time`` (ms) needs ``enable_timing``."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **kwargs
    ):
        event = super().__new__(
            cls, "npu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )
        event.timed = enable_timing
        return event

    def record(self, stream: Stream | None = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Stream | None = None) -> None:
        super().wait(current_stream() if stream is None else stream)

    def elapsed_time(self, other: Event) -> float:
        """torch.Event's own takes no event of a subclass since torch 2.11."""
        if not (self.timed and other.timed):
            raise ValueError("both events must be created with enable_timing=True")
        if not (self.event_id and other.event_id):
            raise ValueError("both events must be recorded before the time between them is taken")
        return _C.elapsed_ms(self.event_id, other.event_id)


class ExternalEvent:
    """An event within a graph that the host records: ``wait`` and ``reset`` are captured."""

    def __init__(self):
        self._event = _C.ExternalEvent()

    def record(self, stream: Stream | None = None) -> None:
        self._event.record(current_stream() if stream is None else stream)

    def wait(self, stream: Stream | None = None) -> None:
        self._event.wait(current_stream() if stream is None else stream)

    def reset(self, stream: Stream | None = None) -> None:
        self._event.reset(current_stream() if stream is None else stream)


class SyncLaunchStream(Stream):
    pass


def carry_clocks() -> None:
    """Whoever takes the result of a future comes after what the thread that set it has waited for."""
    set_result, result = Future.set_result, Future.result

    def set_with_clock(self, value):
        self.npu_clock = _C.host_clock()
        set_result(self, value)

    def result_with_clock(self, timeout=None):
        value = result(self, timeout)
        if hasattr(self, "npu_clock"):
            _C.host_waits(self.npu_clock)
        return value

    Future.set_result, Future.result = set_with_clock, result_with_clock


if os.environ.get("SOFTWARE_NPU_RACES") == "1":
    carry_clocks()

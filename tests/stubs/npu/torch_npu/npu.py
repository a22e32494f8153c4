"""torch.npu: streams of a device that runs everything at once; for MindSpeed, the namespace of torch.cuda,
once that is the CPU's (``mirror_cuda``)."""

from __future__ import annotations

import contextlib
import itertools
import types

import torch

GiB = 1 << 30
allocator_settings: list[str] = []  # every setting of the caching allocator, in order
memory = types.ModuleType("torch_npu.npu.memory")
memory._set_allocator_settings = allocator_settings.append
memory.NPUPluggableAllocator = memory.MemPool = object  # only named in annotations
streams = types.ModuleType("torch_npu.npu.streams")
mstx = types.ModuleType("torch_npu.npu.mstx")  # only named, by verl's profiler
config = types.SimpleNamespace(allow_internal_format=False)


def is_available() -> bool:
    return True


def mirror_cuda() -> None:
    for name, value in vars(torch.cuda).items():
        if not name.startswith("__"):
            globals()[name] = value


class Stream:
    npu_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def nothing(self, *args) -> None:
        pass

    wait_stream = wait_event = synchronize = record_event = nothing


class Event(Stream):
    record = wait = reset = Stream.nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, end) -> float:
        return 0.0


class ExternalEvent(Event):
    pass


class NPUGraph:
    """Only named: graphs are not captured here."""


streams.Stream, streams.Event = Stream, Event
_stream = Stream()


@contextlib.contextmanager
def stream(selected):
    yield selected


def current_stream(device=None) -> Stream:
    return _stream


default_stream = current_stream


def do_nothing(*args, **kwargs) -> None:
    pass


synchronize = set_stream = set_device = empty_cache = reset_peak_memory_stats = manual_seed_all = do_nothing
ipc_collect = set_compile_mode = _subscribe_report = _unsubscribe_report = do_nothing


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def get_device_name(device=None) -> str:
    return "Ascend910_9391"


def get_soc_version() -> int:
    return 250  # A3, as acl.get_soc_name says


_calls = itertools.count(1)


def mem_get_info(device=None) -> tuple[int, int]:
    """(free, total) bytes. A little less is free at each call: vllm-ascend expects loading to take memory."""
    return 8 * GiB - next(_calls), 8 * GiB


def memory_stats(device=None) -> dict[str, int]:
    return {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0}


def max_memory_allocated(device=None) -> int:
    return 0

"""The figures of torch.npu's memory; allocators that are plugged in, and pools."""

from __future__ import annotations

import contextlib
import os
import re

import torch

from software_npu import _C

from .utils import device_index

__all__ = [
    "empty_cache",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
]

# The options of torch_npu 2.8.0.post2's caching allocator. Each parse forgets the first three.
FORGOTTEN = ("max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions")
OPTIONS = (*FORGOTTEN, "expandable_segments", "base_addr_aligned_kb", "page_size", "segment_size_mb")
EXCLUDE_SEGMENTS = ("max_split_size_mb", "garbage_collection_threshold")
_options: dict[str, str] | None = None


def _parse(text: str, kept: dict[str, str], supported: tuple[str, ...]) -> dict[str, str]:
    """The options in force after ``text``, such as "expandable_segments:True", where ``kept`` were."""
    options = {name: value for name, value in kept.items() if name not in FORGOTTEN}
    for setting in filter(None, re.split(r",(?![^\[]*\])", text.replace(" ", ""))):
        name, _, value = setting.partition(":")
        if name not in supported:
            raise RuntimeError(f"torch_npu.npu.memory._set_allocator_settings() unsupported setting: {name}")
        options[name] = value
    if options.get("expandable_segments") == "True" and any(name in options for name in EXCLUDE_SEGMENTS):
        raise RuntimeError(
            "`max_split_size_mb` or `garbage_collection_threshold`, cannot be enabled with "
            "`expandable_segments`, please set `expandable_segments` to `False`."
        )
    return options


def allocator_options() -> dict[str, str]:
    """The options in force, in the stand-in only: those of PYTORCH_NPU_ALLOC_CONF, and what was set later."""
    global _options
    if _options is None:
        _options = _parse(os.environ.get("PYTORCH_NPU_ALLOC_CONF", ""), {}, OPTIONS)
    return _options


def _set_allocator_settings(settings: str) -> None:
    """Only expandable_segments can be set; the options of FORGOTTEN go back to their defaults."""
    global _options
    _options = _parse(settings, allocator_options(), ("expandable_segments",))


def memory_stats(device=None) -> dict[str, int]:
    return _C.memory_figures(device_index(device))


def memory_allocated(device=None) -> int:
    """Bytes of the tensors on a device, each rounded up to 512."""
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device=None) -> int:
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device=None) -> int:
    """What was allocated at most since ``empty_cache``."""
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device=None) -> int:
    return memory_stats(device)["reserved_bytes.all.peak"]


memory_cached, max_memory_cached = memory_reserved, max_memory_reserved


def mem_get_info(device=None) -> tuple[int, int]:
    """(free, total) bytes; other processes take of them where they share the devices."""
    index = device_index(device)
    return _C.total_bytes() - _C.used_bytes(index), _C.total_bytes()


def reset_peak_memory_stats(device=None) -> None:
    _C.reset_peaks(device_index(device))


reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device=None) -> None:
    """Nothing is accumulated but the number of allocations."""


def empty_cache() -> None:
    _C.empty_cache()


def set_per_process_memory_fraction(fraction: float, device=None) -> None:
    _C.set_memory_fraction(device_index(device), float(fraction))


def memory_summary(device=None, abbreviated: bool = False) -> str:
    return "\n".join(f"{name}: {value}" for name, value in memory_stats(device).items())


class NPUPluggableAllocator:
    """Functions of a library that allocate and free: ``void* f(ssize_t, int, void*)``."""

    def __init__(self, path_to_so_file: str, alloc_fn_name: str, free_fn_name: str):
        self._allocator = _C.PluggedAllocator(str(path_to_so_file), alloc_fn_name, free_fn_name)


def change_current_allocator(allocator: NPUPluggableAllocator) -> None:
    _C.use_allocator(allocator._allocator)


class MemPool:
    """Memory from one allocator; None is the driver's."""

    def __init__(self, allocator=None):
        self.allocator = allocator


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device=None):
    """This thread's allocations on NPUs come from the pool."""
    before = _C.use_allocator(pool.allocator)
    try:
        yield
    finally:
        _C.use_allocator(before)


def caching_allocator_alloc(size: int, device=None, stream=None) -> int:
    storage = torch.UntypedStorage(size, device=f"npu:{device_index(device)}")
    _held[storage.data_ptr()] = storage
    return storage.data_ptr()


def caching_allocator_delete(address: int) -> None:
    del _held[address]


_held: dict[int, torch.UntypedStorage] = {}

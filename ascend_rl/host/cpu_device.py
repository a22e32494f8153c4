"""What verl expects of an accelerator and a CPU does not have, so that the same trainer code runs on both.

verl calls ``get_torch_device()`` (``torch.npu``, ``torch.cuda``, here ``torch.cpu``) for memory figures,
cache control and the generator state. ``torch.cpu`` lacks these: figures become 0, cache control does
nothing, the generator is torch's own.
"""

from __future__ import annotations

import torch


def complete_torch_cpu() -> None:
    """Add the missing functions of an accelerator namespace to ``torch.cpu``; what exists stays as it is."""
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        _set_missing(name, lambda *args, **kwargs: 0)
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        _set_missing(name, lambda *args, **kwargs: None)
    _set_missing("get_rng_state", torch.get_rng_state)
    _set_missing("set_rng_state", torch.set_rng_state)


def _set_missing(name: str, function) -> None:
    if not hasattr(torch.cpu, name):
        setattr(torch.cpu, name, function)

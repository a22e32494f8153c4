"""Gloo with one device for all groups of a process, in place of one for each.

A device has a thread that wakes 100 times a second, also with nothing to do, and Megatron makes dozens of
groups.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta


def install() -> None:
    import torch.distributed as dist

    Gloo = dist.ProcessGroupGloo

    @functools.cache
    def devices(pid: int) -> list:
        """Of this process: a fork has none of its parent's threads."""
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        return [Gloo.create_device(interface=name) for name in names] or [Gloo.create_default_device()]

    class ProcessGroupGloo(Gloo):
        def __init__(self, store, rank, size, timeout=timedelta(minutes=30)):
            options = Gloo._Options()
            options._devices = devices(os.getpid())
            options._timeout, options._threads = timeout, 2 * len(options._devices)
            super().__init__(store, rank, size, options)

    dist.ProcessGroupGloo = dist.distributed_c10d.ProcessGroupGloo = ProcessGroupGloo

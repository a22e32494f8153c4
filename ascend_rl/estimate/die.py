"""The memory of a die: units, its budget, and the largest size that fits."""

from __future__ import annotations

from collections.abc import Callable

GIB, MIB = 2**30, 2**20
HBM_GIB = 64.0  # a die of Atlas A3
RESERVE_GIB = 6.0  # ten HCCL communicators of both processes, each 2 * HCCL_BUFFSIZE=300 MB
DIES_PER_NODE = 16


def largest(fits: Callable[[int], bool], high: int) -> int:
    """The largest n in [0, high] that fits, if all smaller ones do; 0 if none does."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low

"""Copies between addresses of the host and of a device."""

from __future__ import annotations

import ctypes

from software_npu import _C

SUCCESS, INVALID = 0, 107000


def memcpy(to: int, most_bytes: int, source: int, count_bytes: int, kind: int) -> int:
    """0, or the code of an error; ``kind``: 1 to the device, 2 to the host, 3 within the device.

    Raises:
        RuntimeError: memory of a device that is unmapped.
    """
    if count_bytes > most_bytes or kind not in (0, 1, 2, 3):
        return INVALID
    for address in (to, source):
        if _C.without_memory(address):
            raise RuntimeError(f"memcpy: the memory at {address:#x} is unmapped")
    ctypes.memmove(to, source, count_bytes)
    return SUCCESS

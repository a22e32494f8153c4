from __future__ import annotations

import torch

from software_npu import _C


def device_index(device, optional: bool = False) -> int:
    """The number of an NPU given as number, name, torch.device or None (the current one).

    Raises:
        ValueError: another type of device.
        RuntimeError: there is no such NPU.
    """
    if device is None:
        return _C.current_device()
    if not isinstance(device, int):
        device = torch.device(device)
        if device.type != "npu":
            raise ValueError(f"Expected a npu device, but got: {device}")
        device = _C.current_device() if device.index is None else device.index
    if device >= _C.device_count() or (device < 0 and not optional):
        raise RuntimeError(f"invalid device npu:{device}: there are {_C.device_count()} NPUs")
    return device


_get_device_index = device_index

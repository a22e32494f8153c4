"""How a tensor of an NPU goes to another process: as a handle of its memory, which both then share.

Needs a driver that can (SOFTWARE_NPU_DRIVER, 25.3.rc1 or newer), and a sender that lives until the
receiver has it. As with torch_npu, the seventh part of a handle is the device, which a receiver may replace.
"""

from __future__ import annotations

import os
import re

import torch
from torch.multiprocessing import reductions

from software_npu import _C

__all__ = ["rebuild_npu_tensor"]

FIRST_DRIVER = (25, 3)
_reduce_tensor = reductions.reduce_tensor  # the CPU's


def rebuild_npu_tensor(
    kind, size, stride, offset, storage_kind, dtype, device, handle, storage_bytes, requires_grad
):
    memory = _C.shared_memory(*handle, storage_bytes, device).untyped_storage()
    tensor = torch.empty(0, dtype=dtype, device=f"npu:{device}").set_(memory, offset, size, stride)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def reduce_tensor(tensor: torch.Tensor):
    """A function and arguments that make a tensor over the same memory in another process.

    Raises:
        RuntimeError: the driver cannot share memory, the memory is of a pool, or came from a process itself.
    """
    if tensor.device.type != "npu":
        return _reduce_tensor(tensor)
    driver = os.environ.get("SOFTWARE_NPU_DRIVER", "25.3.rc1")
    if tuple(int(number) for number in re.findall(r"\d+", driver)[:2]) < FIRST_DRIVER:
        raise RuntimeError(f"driver {driver} cannot share memory between processes: 25.3.rc1 can")
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError("a tensor that autograd has computed cannot go to another process: detach it")
    storage = tensor.untyped_storage()
    return rebuild_npu_tensor, (
        type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset(), type(storage), tensor.dtype,
        tensor.device.index, _C.share_memory(tensor), storage.nbytes(), tensor.requires_grad,
    )  # fmt: skip


reductions.reduce_tensor = reduce_tensor
reductions.init_reductions()

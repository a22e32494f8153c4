"""What is asked of the compiled part of torch_npu."""

import torch
from software_npu._C import TaskGroup as _NPUTaskGroupHandle  # noqa: F401

from software_npu import _C
from software_npu.kernels.inference import weak_ref_tensor as _weak_ref_tensor  # noqa: F401

from . import _distributed_c10d  # noqa: F401


def _npu_setStream(stream_id: int, device_index: int, device_type: int) -> None:
    """Make that stream the current one of its device, and the device the current one."""
    _C.set_device(device_index)
    _C.set_stream(torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))

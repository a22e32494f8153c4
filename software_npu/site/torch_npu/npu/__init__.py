"""torch.npu: what torch.cuda is for a GPU."""

from __future__ import annotations

import os
import types

import torch

from software_npu import _C

from . import graphs, memory, mstx, random, streams
from .graphs import (  # noqa: F401
    NPUGraph,
    graph,
    graph_pool_handle,
    graph_task_group_begin,
    graph_task_group_end,
    graph_task_update_begin,
    graph_task_update_end,
    is_current_stream_capturing,
)
from .memory import *  # noqa: F403
from .random import *  # noqa: F403
from .streams import (  # noqa: F401
    Event,
    ExternalEvent,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
)
from .utils import device_index

__all__ = ["graphs", "memory", "mstx", "random", "streams"]

config = types.SimpleNamespace(allow_internal_format=False)
matmul = types.SimpleNamespace(allow_hf32=False)
conv = types.SimpleNamespace(allow_hf32=True)
npugraph_ex = types.ModuleType("torch_npu.npu.npugraph_ex")
_initialized = True
# The first of the numbers that a series has, by how the names of its chips begin.
_SERIES = {"ascend310p": 200, "ascend910b": 220, "ascend910_93": 250}


def is_available() -> bool:
    return _C.device_count() > 0


def device_count() -> int:
    return _C.device_count()


def current_device() -> int:
    return _C.current_device()


def set_device(device) -> None:
    _C.set_device(device_index(device))


class device:
    """``with torch.npu.device(1): ...``; None or a negative number changes nothing."""

    def __init__(self, device):
        self.index = -1 if device is None else device_index(device, optional=True)

    def __enter__(self):
        self.before = _C.current_device()
        if self.index >= 0:
            _C.set_device(self.index)

    def __exit__(self, *error) -> None:
        _C.set_device(self.before)


class device_of(device):
    def __init__(self, tensor):
        super().__init__(tensor.get_device() if tensor.device.type == "npu" else None)


def synchronize(device=None) -> None:
    """Everything has run already; refused while a graph is captured, and where it would hang."""
    device_index(device)
    _C.synchronize()


def get_device_name(device=None) -> str:
    return get_device_properties(device).name


def get_device_properties(device=None) -> types.SimpleNamespace:
    """Those of a die: SOFTWARE_NPU_CHIP, an Atlas A3 if that is not set."""
    device_index(device)
    return types.SimpleNamespace(
        name=_chip().capitalize(),
        total_memory=_C.total_bytes(),
        cube_core_num=24,
        vector_core_num=48,
        L2_cache_size=0,
    )


def get_device_capability(device=None) -> None:
    """None, as on an NPU."""


def _chip() -> str:
    return os.environ.get("SOFTWARE_NPU_CHIP", "ascend910_9391")


def get_soc_version() -> int:
    """The number of the chip's series.

    Raises:
        ValueError: SOFTWARE_NPU_CHIP is unknown.
    """
    for beginning, number in _SERIES.items():
        if _chip().startswith(beginning):
            return number
    raise ValueError(f"SOFTWARE_NPU_CHIP={_chip()}: it must begin with one of {', '.join(_SERIES)}")


def can_device_access_peer(device, peer) -> bool:
    return device_index(device) != device_index(peer)


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_initialized() -> bool:
    return True


def init() -> None:
    """Nothing is left to do."""


_lazy_init = init


def _lazy_call(function, **kwargs) -> None:
    function()


def _is_in_bad_fork() -> bool:
    """A device cannot be used again after a fork; this one can."""
    return False


def utilization(device=None) -> int:
    return 0


def _do_nothing(*args, **kwargs) -> None:
    """For what steers the device and has no effect on results."""


ipc_collect = set_compile_mode = set_option = set_sync_debug_mode = set_op_timeout_ms = _do_nothing
_subscribe_report = _unsubscribe_report = _do_nothing


def _launch_host_func(_stream, function, data) -> None:
    function(data)


class _TensorType(type):
    """torch.npu.FloatTensor: makes such a tensor, and is the type of those there are."""

    def __instancecheck__(cls, value) -> bool:
        return isinstance(value, torch.Tensor) and value.is_npu and value.dtype is cls.dtype

    def __call__(cls, *args) -> torch.Tensor:
        if args and all(isinstance(arg, int) for arg in args):  # sizes
            return torch.empty(args, dtype=cls.dtype, device="npu")
        return (
            torch.tensor(*args, dtype=cls.dtype, device="npu")
            if args
            else torch.empty(0, dtype=cls.dtype, device="npu")
        )


def _make_typed(dtype: torch.dtype) -> _TensorType:
    return _TensorType("Tensor", (), {"dtype": dtype})


FloatTensor, HalfTensor, BFloat16Tensor = map(_make_typed, (torch.float32, torch.float16, torch.bfloat16))
DoubleTensor, LongTensor, IntTensor = map(_make_typed, (torch.float64, torch.int64, torch.int32))
ByteTensor, BoolTensor = map(_make_typed, (torch.uint8, torch.bool))


class _Generators:
    """torch.npu.default_generators[i]"""

    def __len__(self) -> int:
        return _C.device_count()

    def __getitem__(self, index: int) -> torch.Generator:
        return _C.default_generator(index)


default_generators = _Generators()

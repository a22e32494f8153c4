"""Importing this makes programs for a GPU use the NPU: names of torch.cuda, devices "cuda", backend "nccl".

As the real one, it replaces what torch.cuda has by what torch.npu has under the same name, and nothing else
of torch.cuda; functions of torch that take a device read "cuda" as "npu"; torch.jit.script does nothing.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.utils._device

import torch_npu

FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "frombuffer", "full", "full_like",
    "linspace", "load", "logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "randperm", "range", "scalar_tensor", "set_default_device",
    "tensor", "zeros", "zeros_like",
)  # fmt: skip
METHODS = (
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "pin_memory", "to",
)  # fmt: skip
OF_DEVICE = (
    "get_device_properties", "get_device_name", "get_device_capability", "set_device", "synchronize",
    "mem_get_info", "memory_stats", "memory_summary", "memory_allocated", "max_memory_allocated",
    "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats", "default_stream", "current_stream",
)  # fmt: skip
KEYWORDS = ("device", "device_type", "map_location", "device_id")


def on_npu(value):
    """ "npu" for "cuda", in a name, a device, or a mapping of names."""
    if isinstance(value, str):
        return value.replace("cuda", "npu")
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("npu", value.index) if value.index is not None else torch.device("npu")
    if isinstance(value, dict):
        return {on_npu(key): on_npu(item) for key, item in value.items()}
    return value


def keyword(value):
    return f"npu:{value}" if type(value) is int else on_npu(value)


def reads_cuda_as_npu(function, numbers: bool = False):
    """``numbers``: an integer by position is a device too."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if numbers:
            args = (args[0], *(keyword(arg) for arg in args[1:]))
        else:
            args = map(on_npu, args)
        given = {name: keyword(kwargs[name]) for name in KEYWORDS if kwargs.get(name) is not None}
        return function(*args, **kwargs | given)

    return call


def reads_nccl_as_hccl(function):
    def replaced(value):
        return value.replace("nccl", "hccl") if isinstance(value, str) else value

    @functools.wraps(function)
    def call(*args, **kwargs):
        if "backend" in kwargs:
            kwargs["backend"] = replaced(kwargs["backend"])
        return function(*map(replaced, args), **kwargs)

    return call


def wrap(owner, names, wrapper=reads_cuda_as_npu) -> None:
    for name in names:
        if (function := getattr(owner, name, None)) is not None:
            setattr(owner, name, wrapper(function))


def names_of_cuda() -> None:
    for module in ("memory", "random"):
        mine, theirs = getattr(torch_npu.npu, module), getattr(torch.cuda, module)
        for name in mine.__all__:
            setattr(theirs, name, getattr(mine, name))
    for name, value in vars(torch_npu.npu).items():
        if not name.startswith("_") and name not in ("memory", "random", "streams", "annotations"):
            setattr(torch.cuda, name, value)
    torch.cuda.CUDAGraph = torch_npu.npu.NPUGraph
    torch.cuda.DoubleTensor = torch_npu.npu.FloatTensor
    wrap(torch.cuda, OF_DEVICE)
    for module in (torch.cuda, torch.cuda.random):  # those of an NPU do not look at the type of a device
        wrap(module, ("get_rng_state", "set_rng_state"))


def unscripted(obj, *args, **kwargs):
    return obj


torch.utils._device._device_constructors()  # remembers functions as they are: those called in the end
names_of_cuda()
wrap(torch, FACTORIES)
wrap(torch.Tensor, METHODS)
torch.Tensor.to = reads_cuda_as_npu(torch.Tensor.to.__wrapped__, numbers=True)
wrap(torch.nn.Module, ("to", "to_empty"), functools.partial(reads_cuda_as_npu, numbers=True))
torch.Tensor.cuda, torch.nn.Module.cuda = torch.Tensor.npu, torch.nn.Module.npu
torch.Tensor.is_cuda = torch.Tensor.is_npu
torch.amp.autocast_mode.autocast.__init__ = reads_cuda_as_npu(torch.amp.autocast_mode.autocast.__init__)
torch.utils._device.DeviceContext.__init__ = reads_cuda_as_npu(torch.utils._device.DeviceContext.__init__)
dist.init_process_group = reads_nccl_as_hccl(reads_cuda_as_npu(dist.init_process_group))
dist.distributed_c10d._new_group_with_tag = reads_nccl_as_hccl(dist.distributed_c10d._new_group_with_tag)
dist.is_nccl_available = dist.is_hccl_available
dist.ProcessGroup._get_backend = reads_cuda_as_npu(dist.ProcessGroup._get_backend)
torch.jit.script = torch.jit.script_method = unscripted

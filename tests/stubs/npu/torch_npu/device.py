"""Host memory as the NPU, for programs that really compute with torch_npu on a CPU (vllm-ascend's worker).

    import torch_npu.device        # before vllm_ascend

What names the device "npu" gets the CPU; a backend "hccl" is gloo; kernels registered for the device serve
the CPU; memory is never pinned. Real operators: operators.py. This holds in the thread that imports it.
"""

from __future__ import annotations

import functools
import sys
import types

import torch
from torch.overrides import TorchFunctionMode

from . import npu, operators  # noqa: F401
from ._C._distributed_c10d import ProcessGroupHCCL


def on_host(value):
    named = isinstance(value, torch.device) and value.type == "npu"
    named = named or isinstance(value, str) and value.partition(":")[0] == "npu"
    return torch.device("cpu") if named else value


class HostMemory(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.pin_memory:
            return args[0]
        if getattr(function, "__name__", "") == "all_gather_into_tensor":  # HCCL counts elements only
            args = (args[0].view(-1), args[1].reshape(-1), *args[2:])
        if function is torch.histc and not args[0].is_floating_point():  # the device counts integers too
            return function(args[0].float(), *args[1:], **(kwargs or {})).to(args[0].dtype)
        kwargs = {name: on_host(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cpu"
        return function(*map(on_host, args), **kwargs)


def module(name: str, **attributes) -> None:
    """Make a submodule of torch_npu that the real package has."""
    made = types.ModuleType(f"torch_npu.{name}")
    made.__dict__.update(attributes)
    sys.modules[made.__name__] = made
    parent, _, leaf = made.__name__.rpartition(".")
    setattr(sys.modules[parent], leaf, made)


module("op_plugin")
module("op_plugin.atb")
module("op_plugin.atb._atb_ops", _register_atb_extensions=npu.do_nothing)
module("profiler")
module("profiler.dynamic_profile", init=npu.do_nothing, step=npu.do_nothing)
sys.modules |= {part.__name__: part for part in (npu.memory, npu.streams)}

torch.utils.rename_privateuse1_backend("npu")
sys.modules["torch.npu"] = npu
torch._C._get_accelerator = lambda check=None: torch.device("cpu")  # torch.distributed.barrier asks
torch.Tensor.npu = lambda self, *args, **kwargs: self

_groups = []  # torch holds the C++ half of a process group only


def gloo(store, rank: int, world: int, timeout):
    _groups.append(ProcessGroupHCCL(store, rank, world, timeout))
    return _groups[-1]


torch.distributed.Backend.register_backend("hccl", gloo, devices=["npu", "cpu"])

_impl = torch.library.Library.impl


def on_npu(function):
    """Within an operator the mode is off that called it."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with HostMemory():
            return function(*args, **kwargs)

    return call


def impl(self, operator, function, dispatch_key="", **kwargs):
    if self.ns == "vllm" and dispatch_key == "PrivateUse1":  # torch registers its own kernels for both
        dispatch_key, function = "CPU", on_npu(function)
    return _impl(self, operator, function, dispatch_key, **kwargs)


torch.library.Library.impl = impl
HostMemory().__enter__()

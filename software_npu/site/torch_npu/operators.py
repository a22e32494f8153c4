"""torch_npu's operators under the schemas of its released wheel, where SOFTWARE_NPU_WHEELS names them.

The file is JSON: {"npu": [schema, ...], "atb": [...], "_C_ascend": [...], "atb names": {module: [name]}}.
A call with a wrong name, argument or type is refused by torch's dispatcher as on a device. A right one
reaches a kernel of software_npu.kernels, or fails by name. Kernels take tensors of an NPU only. Those in
DIFFERENTIABLE have gradients: the kernel is computed again in the backward pass, by autograd on the host.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import types
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

import torch_npu
from software_npu import _C
from software_npu.kernels import inference, training

NAMESPACES = ("npu", "atb", "_C_ascend")
libraries: list[torch.library.Library] = []  # an operator lives as long as its library


def for_device(name: str, kernel):
    """A kernel that is reached by way of a device only."""

    @functools.wraps(kernel)
    def call(*args, **kwargs):
        if not _C.runs_for_device():
            raise NotImplementedError(f"{name} was called with tensors of the cpu; it takes those of an npu")
        return kernel(*args, **kwargs)

    return call


def to_host(value):
    return _C.as_cpu(value) if isinstance(value, torch.Tensor) and value.is_npu else value


class Recomputed(torch.autograd.Function):
    """An operator whose backward pass differentiates its kernel on the host."""

    @staticmethod
    def forward(ctx, operator, kernel, spec, *leaves):
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        with torch._C._AutoDispatchBelowAutograd():
            results = operator(*args, **kwargs)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.save_for_backward(*(leaves[i] for i in tensors))
        others = [None if i in tensors else leaf for i, leaf in enumerate(leaves)]
        ctx.rest = kernel, spec, others, tensors
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, *gradients):
        kernel, spec, others, tensors = ctx.rest
        leaves = list(others)
        wanted = ctx.needs_input_grad[3:]
        device, inputs = None, []
        for i, saved in zip(tensors, ctx.saved_tensors, strict=True):
            device = saved.device.index if saved.is_npu else device
            leaves[i] = to_host(saved).detach()
            if wanted[i]:
                leaves[i].requires_grad_()
                inputs.append(i)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        with torch.enable_grad():
            results = kernel(*args, **kwargs)
        results = results if isinstance(results, tuple) else (results,)
        pairs = [(r, to_host(g)) for r, g in zip(results, gradients, strict=True) if g is not None]
        outputs = [result for result, _ in pairs]
        found = torch.autograd.grad(
            outputs, [leaves[i] for i in inputs], [g for _, g in pairs], allow_unused=True
        )
        by_leaf = dict(zip(inputs, found, strict=True))
        return (
            None,
            None,
            None,
            *(
                None if by_leaf.get(i) is None else _C.as_npu(by_leaf[i].contiguous(), device)
                for i in range(len(leaves))
            ),
        )


def with_gradient(operator, kernel):
    @functools.wraps(kernel)
    def call(*args, **kwargs):
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
            return Recomputed.apply(operator, kernel.__wrapped__, spec, *leaves)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    return call


class Packet:
    """An operator as torch_npu has it; its variant ``out`` takes a list ``out=``."""

    def __init__(self, packet):
        self._packet = packet
        self.__name__ = packet.__name__

    def __call__(self, *args, **kwargs):
        return self._packet(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._packet, name)

    def out(self, *args, out=None, **kwargs):
        overload = self._packet.out
        if out is not None:
            arguments = overload._schema.arguments
            written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
            kwargs |= dict(zip(written, out, strict=True))
        return overload(*args, **kwargs)


def attribute(namespace: str, name: str):
    packet = getattr(getattr(torch.ops, namespace), name)
    return Packet(packet) if "out" in packet.overloads() else packet


def register(file: Path) -> None:
    written = json.loads(file.read_text())
    for namespace in NAMESPACES:
        library = torch.library.Library(namespace, "FRAGMENT")
        libraries.append(library)
        schemas = written[namespace]
        for schema in schemas:
            library.define(schema)
        names = {re.split(r"\(", schema)[0].strip() for schema in schemas}
        for name, kernel in inference.KERNELS[namespace].items():
            if name not in names:
                continue  # of another version
            library.impl(name, for_device(f"{namespace}::{name}", kernel), "CPU")
            if namespace == "npu" and name.partition(".")[0] in training.DIFFERENTIABLE:
                operator = getattr(torch.ops.npu, name).default
                library.impl(name, with_gradient(operator, kernel), "AutogradPrivateUse1")
    for name in {re.split(r"[.(]", schema)[0] for schema in written["npu"]}:
        setattr(torch_npu, name, attribute("npu", name))
    torch_npu.atb = types.ModuleType("torch_npu.atb")
    sys.modules["torch_npu.atb"] = torch_npu.atb
    for module, home in (("torch_npu", torch_npu), ("torch_npu.atb", torch_npu.atb)):
        for name in written["atb names"][module]:
            setattr(home, name, attribute("atb", name))


if os.environ.get("SOFTWARE_NPU_WHEELS"):
    register(Path(os.environ["SOFTWARE_NPU_WHEELS"]))


def histc(self, bins=100, min=0, max=0):
    """The device counts integers too."""
    host = _C.as_cpu(self)
    counts = torch.histc(host.float() if not host.is_floating_point() else host, bins, min, max)
    return _C.as_npu(counts.to(host.dtype), self.device.index)


_aten = torch.library.Library("aten", "IMPL")
_aten.impl("histc", histc, "PrivateUse1")

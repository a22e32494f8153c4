"""torch.utils.cpp_extension.load for sources that CANN's compiler and libraries are needed for.

Where there is a kernel for each function of such an extension, loading it gives those, under the schemas of
its C++ functions; nothing is compiled. Others are refused by name. What does not link with torch_npu is
compiled as ever.
"""

from __future__ import annotations

import functools
import types
from pathlib import Path

import torch

from software_npu.kernels import compiled

from .imports import after_import
from .operators import for_device, with_gradient

_library = torch.library.Library("software_npu_extension", "DEF")
_made: dict[str, types.ModuleType] = {}


def make(name: str) -> types.ModuleType:
    """The module of an extension; its functions are operators, so that devices and types are checked."""
    module = types.ModuleType(name)
    for function in compiled.EXTENSIONS[name]:
        for schema in function.schemas:
            given = f"{name}__{schema}"
            operator = given.partition("(")[0]
            _library.define(given)
            _library.impl(operator, for_device(operator, function.kernel), "CPU")
        packet = getattr(torch.ops.software_npu_extension, f"{name}__{function.name}")
        if function.differentiable:
            _library.impl(f"{name}__{function.name}", with_gradient(packet.default, function.kernel),
                          "AutogradPrivateUse1")  # fmt: skip
        setattr(module, function.name, function.adapter(packet) if function.adapter else packet)
    return module


def replacing(load):
    @functools.wraps(load)
    def call(name, sources, *args, extra_ldflags=None, **kwargs):
        if not any(flag.endswith("-ltorch_npu") for flag in extra_ldflags or ()):
            return load(name, sources, *args, extra_ldflags=extra_ldflags, **kwargs)
        if missing := [str(source) for source in sources if not Path(source).is_file()]:
            raise FileNotFoundError(f"sources of the extension {name}: {', '.join(missing)}")
        if name not in compiled.EXTENSIONS:
            raise NotImplementedError(f"the software NPU has no kernels for the extension {name}")
        if name not in _made:
            _made[name] = make(name)
        return _made[name]

    return call


def replace_load(module: types.ModuleType) -> None:
    module.load = replacing(module.load)


after_import("torch.utils.cpp_extension", replace_load)

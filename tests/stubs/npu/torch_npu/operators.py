"""torch_npu's operators under the schemas of the released wheels, for vllm-ascend on a CPU.

    import torch_npu.operators        # NPU_OPERATORS names the file that tests/patched/npu_ground.py wrote

A call with a wrong name, argument or type is refused by torch's dispatcher as on a device. A right one
reaches the kernels of software_npu, or fails with NotImplementedError. The operators are the
attributes of ``torch_npu`` and ``torch_npu.atb`` that they are in the real package.
"""

from __future__ import annotations

import json
import os
import re
import sys
import types
from pathlib import Path

import torch

import torch_npu
from software_npu.kernels import inference

NAMESPACES = ("npu", "atb", "_C_ascend")
_written = json.loads(Path(os.environ["NPU_OPERATORS"]).read_text())
_libraries = {namespace: torch.library.Library(namespace, "FRAGMENT") for namespace in NAMESPACES}

for _namespace, _library in _libraries.items():
    for _schema in _written[_namespace]:
        _library.define(_schema)
    for _operator, _kernel in inference.KERNELS[_namespace].items():
        _library.impl(_operator, _kernel, "CPU")

for _name in {re.split(r"[.(]", schema)[0] for schema in _written["npu"]}:
    setattr(torch_npu, _name, getattr(torch.ops.npu, _name))
torch_npu.atb = types.ModuleType("torch_npu.atb")
sys.modules["torch_npu.atb"] = torch_npu.atb
for _name in _written["atb names"]["torch_npu"]:
    setattr(torch_npu, _name, getattr(torch.ops.atb, _name))
for _name in _written["atb names"]["torch_npu.atb"]:
    setattr(torch_npu.atb, _name, getattr(torch.ops.atb, _name))

"""torch_npu without an NPU: importing it makes the device "npu", ``torch.npu`` and the backend "hccl".

With this directory on PYTHONPATH, ``import torch`` does it (entry point torch.backends, unless
TORCH_DEVICE_BACKEND_AUTOLOAD=0). The device itself is in csrc/ of the folder above.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

# Imported before torch: torch would import this module a second time, while it is half done.
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_given = os.environ.get(_AUTOLOAD)
os.environ[_AUTOLOAD] = "0"
import torch  # noqa: E402

if _given is None:
    del os.environ[_AUTOLOAD]
else:
    os.environ[_AUTOLOAD] = _given

__version__ = importlib.metadata.version("torch_npu")  # the first dist-info on the path: README.md
unsupported_dtype = [torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8]


def _find_software_npu() -> None:
    """The package above this directory, which need not be on the path."""
    if importlib.util.find_spec("software_npu") is None:
        home = Path(__file__).resolve().parents[2]
        spec = importlib.util.spec_from_file_location(
            "software_npu", home / "__init__.py", submodule_search_locations=[str(home)]
        )
        sys.modules["software_npu"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["software_npu"])


_find_software_npu()

from software_npu import build  # noqa: E402

if "software_npu._C" not in sys.modules:
    torch.utils.rename_privateuse1_backend("npu")
    build.load("software_npu._C", "_C")

from . import _C, npu  # noqa: E402, F401

torch._register_device_module("npu", npu)
sys.modules["torch.npu"] = npu
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

from . import distributed, extensions, operators, profiler, record, vllm_ascend_c  # noqa: E402, F401
from .multiprocessing import reductions as _reductions  # noqa: E402, F401
from .utils.collect_env import get_cann_version  # noqa: E402

torch.version.cann = get_cann_version()


def _autoload() -> None:
    """What torch calls at the end of its import; importing this module has done it all."""

"""Stand-in for torch_npu: an NPU namespace that records what it is told. Put tests/stubs/npu on PYTHONPATH to
have it.

As the real package does, importing it adds ``torch.npu``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[4]))  # software_npu has the kernels

from . import _C, npu  # noqa: F401
from .kernels import *  # noqa: F403
from .npu import allocator_settings  # noqa: F401

__version__ = "2.8.0.post2"
unsupported_dtype = ()
torch.npu = npu

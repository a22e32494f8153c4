"""The kernels of software_npu, on tensors of the CPU."""

from software_npu.kernels.training import *  # noqa: F403
from software_npu.kernels.training import calls  # noqa: F401

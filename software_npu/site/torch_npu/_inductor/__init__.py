"""torch.compile with triton-ascend: the import opens a context on the current NPU, and that is all here."""

import torch

torch.empty(1, device="npu")

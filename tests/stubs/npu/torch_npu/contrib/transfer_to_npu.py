"""The real one makes torch.cuda mean torch.npu; here both mean the CPU."""

import sys

import cuda_on_cpu

from torch_npu import npu

cuda_on_cpu.install()
npu.mirror_cuda()
sys.modules.update(transformer_engine=None, grouped_gemm=None)  # packages for CUDA, which no NPU has

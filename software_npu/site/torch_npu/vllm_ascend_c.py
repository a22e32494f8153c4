"""Finds vllm_ascend.vllm_ascend_C, the compiled part of vllm-ascend: what runs without CANN is in csrc.

With SOFTWARE_NPU_VLLM_ASCEND=1 also vllm_ascend._build_info, which compiling writes: it says the series of
SOFTWARE_NPU_CHIP, as if vllm-ascend had been compiled for it. Else the tree's own says what that is for.
Triton kernels that its runner and MindSpeed launch are replaced by those of software_npu.kernels.triton.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

from software_npu import build
from software_npu.kernels import triton

from .imports import after_import

NAME = "vllm_ascend.vllm_ascend_C"
BUILD_INFO = "vllm_ascend._build_info"
SERIES = {200: "_310P", 220: "A2", 250: "A3"}  # by torch.npu.get_soc_version()


class BuildInfo:
    """The module that vllm-ascend's setup.py writes."""

    @staticmethod
    def create_module(spec) -> None:
        return None

    @staticmethod
    def exec_module(module) -> None:
        from .npu import get_soc_version

        module.__device_type__ = SERIES[get_soc_version()]


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == NAME:
            return importlib.util.spec_from_file_location(
                name, build.build() / f"vllm_ascend_C{build.SUFFIX}"
            )
        if name == BUILD_INFO and os.environ.get("SOFTWARE_NPU_VLLM_ASCEND") == "1":
            return importlib.machinery.ModuleSpec(name, BuildInfo)
        return None


sys.meta_path.insert(0, Finder)
for _module in triton.KERNELS:
    after_import(_module, triton.stand_in)

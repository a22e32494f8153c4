"""Finds vllm_ascend.vllm_ascend_C, the compiled part of vllm-ascend: what runs without CANN is in csrc."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys

from software_npu import build

NAME = "vllm_ascend.vllm_ascend_C"


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != NAME:
            return None
        return importlib.util.spec_from_file_location(name, build.build() / f"vllm_ascend_C{build.SUFFIX}")


sys.meta_path.insert(0, Finder)

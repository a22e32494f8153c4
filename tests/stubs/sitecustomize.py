"""Run at the start of every Python process that has this directory on PYTHONPATH, Ray workers included.

The stand-ins for CUDA go in just before megatron-core is imported, and only then: vLLM's processes, which
have no use for them, keep the real torch. Python runs one sitecustomize only, so this one runs the next.
"""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


class BeforeMegatron(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "megatron.core":
            sys.meta_path.remove(self)
            import cuda_on_cpu

            cuda_on_cpu.install()


sys.meta_path.insert(0, BeforeMegatron())

later = sys.path[sys.path.index(os.path.dirname(__file__)) + 1 :]
if following := PathFinder.find_spec("sitecustomize", later):
    following.loader.exec_module(module_from_spec(following))

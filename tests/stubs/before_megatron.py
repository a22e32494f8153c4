"""For the start of a process: what to install once it turns out to be one of Megatron's.

That is just before megatron-core is imported, and only then: vLLM's processes, which have no use for the
stand-ins, keep the real torch.
"""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


class BeforeMegatron(MetaPathFinder):
    def __init__(self, install: Callable[[], None]):
        self.install = install

    def find_spec(self, name, path=None, target=None):
        if name == "megatron.core":
            sys.meta_path.remove(self)
            self.install()


def call(install: Callable[[], None], directory: str) -> None:
    """Python runs one sitecustomize only, so the one in ``directory``, which calls this, has the next run."""
    sys.meta_path.insert(0, BeforeMegatron(install))
    later = sys.path[sys.path.index(directory) + 1 :]
    if following := PathFinder.find_spec("sitecustomize", later):
        following.loader.exec_module(module_from_spec(following))

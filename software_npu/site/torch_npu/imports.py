"""Change a module right after its import, without importing it here."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType


class After:
    """Finds one module where Python does, and calls ``change`` with it once it is executed."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]):
        self.name, self.change = name, change

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.change(module)

        spec.loader.exec_module = exec_module
        return spec


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, After(name, change))

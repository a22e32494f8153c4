"""Changes to a framework's module that are made once it has been imported, whoever imports it.

A hook is a function of the module. It runs immediately if the module is already there. A plug-in that fails
must not be passed over: verl logs that at DEBUG only, and the run would continue without what was asked for.
So it ends the process.
"""

from __future__ import annotations

import functools
import importlib.metadata
import traceback
from collections.abc import Callable
from types import ModuleType

import wrapt

Hook = Callable[[ModuleType], None]


class Hooks(dict[str, list[Hook]]):
    """Module name -> hooks, in the order in which they run."""

    def after(self, module: str) -> Callable[[Hook], Hook]:
        def add(function: Hook) -> Hook:
            self.setdefault(module, []).append(function)
            return function

        return add

    def install(self) -> None:
        for name, functions in self.items():
            for function in functions:
                wrapt.register_post_import_hook(or_stop(function), name)


def or_stop(function: Callable) -> Callable:
    """The function, but an exception ends the process: SystemExit passes every `except Exception`."""

    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            traceback.print_exc()
            where = f"{function.__module__}.{function.__qualname__}"
            raise SystemExit(f"ERROR: the plug-in {where} failed: {type(error).__name__}: {error}") from error

    return call


def first(owner: type, name: str, call: Callable[..., None]) -> None:
    """Have the method of a class call `call` with its arguments before it does anything."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(*args, **kwargs):
        call(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, method)


def then(owner: type, name: str, call: Callable[..., None]) -> None:
    """Have the method of a class call `call` with its arguments once it has returned."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(*args, **kwargs):
        result = original(*args, **kwargs)
        call(*args, **kwargs)
        return result

    setattr(owner, name, method)


def version_is(distribution: str, release: str) -> bool:
    """Whether the installed version is `release`, or a patch release or build of it.

    >>> version_is("wrapt", "0.0")
    False
    """
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return (version.partition("+")[0] + ".").startswith(release + ".")

"""Compile Python modules before their first import, on all cores.

uv installs only sources, and with PYTHONDONTWRITEBYTECODE set Python never keeps what it compiled: every
process of a run compiles its modules again, ten CPU seconds for vLLM's, fifteen for a rollout server's.
Test directories and the large parts of packages that no run imports, a third of the work, are left out.

Invariants: afterwards an import of anything else from the given directories compiles nothing, whatever the
environment says; a file is only written if Python would not use the existing one.
Cost: 15 s on two idle cores for all packages of the CPU environment, by its progress bar; half a second
when nothing changed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import py_compile
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

SKIPPED = {"__pycache__", ".git", "test", "tests"}
# Of transformers' models, all but those that vLLM, verl or a recipe imports.
UNUSED = re.compile(
    r"/(ray/(data|llm|rllib|train|tune)|openai/resources|sympy/physics|transformers/models/"
    r"(?!auto|bloom|deepseek|encoder_decoder|gemma3|llama|mistral|mixtral|qwen|siglip|whisper)[^/]+)$"
)


def compile_modules(directories: Iterable[Path]) -> int:
    """Compile stale modules below these directories, with a progress bar; returns the number of modules."""
    sizes = {path: os.path.getsize(path) for path in stale(directories)}
    found = sorted(sizes, key=sizes.get, reverse=True)  # largest first, so that no core ends with a long one
    if not found:
        return 0
    with ProcessPoolExecutor() as pool, progress(sum(sizes.values())) as advance:
        for path, _ in zip(found, pool.map(compile_one, found, chunksize=8), strict=True):
            advance(sizes[path])
    return len(found)


@contextlib.contextmanager
def progress(total_bytes: int) -> Iterator[Callable[[int], object]]:
    """A progress bar, if the target Python already has tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count_bytes: None
        return
    seconds = 0.1 if sys.stderr.isatty() else 10  # in a file each update is a line
    described = {"desc": "compiling Python modules", "unit": "B", "unit_scale": True}
    with tqdm(total=total_bytes, mininterval=seconds, **described) as bar:
        yield bar.update


def stale(directories: Iterable[Path]) -> Iterator[str]:
    """Sources whose bytecode Python would not use."""
    for directory in directories:
        for folder, names, files in os.walk(directory):
            names[:] = [
                name for name in names if name not in SKIPPED and not UNUSED.search(f"{folder}/{name}")
            ]
            paths = (os.path.join(folder, name) for name in files if name.endswith(".py"))
            yield from (path for path in paths if not is_compiled(path))


def is_compiled(path: str) -> bool:
    """Whether the bytecode is for this Python and for the source's time and size (PEP 552)."""
    try:
        with open(importlib.util.cache_from_source(path), "rb") as file:
            header = file.read(16)
    except OSError:
        return False
    source = os.stat(path)
    fields = (0, int(source.st_mtime), source.st_size)
    return header == importlib.util.MAGIC_NUMBER + b"".join(
        (field & 0xFFFFFFFF).to_bytes(4, "little") for field in fields
    )


def compile_one(path: str) -> None:
    """Write the bytecode of one source; files that are not valid Python (templates) are left alone."""
    with contextlib.suppress(py_compile.PyCompileError, SyntaxError, ValueError):
        py_compile.compile(path, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)

"""A directory of safetensors files: reading rows in place, and the headers of new files.

A file is 8 bytes (the length of the header), the header (JSON: for each tensor dtype, shape and byte range),
and the values. The library of that name maps whole files; here byte ranges are read into given memory.

Which files: those that transformers loads, model.safetensors before the ones that an index names.

Invariants (tests/test_converter.py): damaged files, indexes that do not fit their files, and tensors that do
not fit the model are errors before anything is read. Cost: the headers, once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ascend_rl.settings.switch import CannotWork
from ascend_rl.weights.files import fingerprint, read_exactly
from ascend_rl.weights.torch_dist import ITEMSIZE

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Described:
    """A tensor without its values."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Stored(Described):
    """A tensor in a safetensors file; ``start`` is the absolute offset of its values."""

    file: str
    start: int


def space_for(rows: int, row_bytes: int, buffer: np.ndarray | None) -> np.ndarray:
    """[rows, row_bytes] uint8 to read into: the beginning of ``buffer``, or new."""
    size = rows * row_bytes
    return (np.empty(size, np.uint8) if buffer is None else buffer[:size]).reshape(rows, row_bytes)


class Source(Protocol):
    """Weights by Hugging Face's names, whatever holds them."""

    directory: Path
    tensors: Mapping[str, Described]

    def rows(self, name: str, row: int, rows: int, buffer: np.ndarray | None = None) -> np.ndarray:
        """[rows, row_bytes] uint8 of a tensor from ``row`` on, in ``buffer`` if one is given."""

    def fingerprint(self) -> str:
        """What tells these weights from others in the same place."""

    def close(self) -> None: ...


class Safetensors:
    """The safetensors of a directory, opened for reading byte ranges; every header is checked on opening."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.tensors: dict[str, Stored] = {}
        self._content = hashlib.sha256()
        self._fds: dict[str, int] = {}
        self._check_config()
        try:
            indexed = self._indexed()
            found = set(indexed.values()) or {path.name for path in directory.glob("*.safetensors")}
            for file in sorted({SINGLE} if (directory / SINGLE).is_file() else found):
                self._read_header(file)
            if not self._fds:
                raise CannotWork(
                    f"{directory} has no *.safetensors file; weights in other formats are not read"
                )
            for name, file in indexed.items():
                if name not in self.tensors or self.tensors[name].file != file:
                    raise CannotWork(
                        f"{INDEX} promises {name} in {file}, which does not have it; download both again"
                    )
        except BaseException:
            self.close()
            raise

    def _indexed(self) -> dict[str, str]:
        """The file of each tensor by the index; empty where there is none, or transformers ignores it.

        Raises:
            CannotWork: it is damaged.
        """
        index, files = self.directory / INDEX, {}
        single = (self.directory / SINGLE).is_file()
        try:
            if index.exists():
                found = json.loads(index.read_text())["weight_map"]
                files = {str(name): str(file) for name, file in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if not single:
                raise CannotWork(f"{index} is damaged ({error}); download it again") from error
        if single and index.exists() and set(files.values()) != {SINGLE}:
            print(f"{index} is ignored, as by transformers: {SINGLE} is beside it", file=sys.stderr)
            return {}
        return files

    def _check_config(self) -> None:
        config = None
        with contextlib.suppress(OSError, ValueError):
            config = json.loads((self.directory / "config.json").read_text())
        if isinstance(config, dict) and (named := config.get("transformers_weights")):
            raise CannotWork(
                f"{self.directory}/config.json names {named} as transformers_weights, which is not read; "
                "use a model without"
            )

    def _read_header(self, file: str) -> None:
        path = self.directory / file
        try:
            fd = self._fds[file] = os.open(path, os.O_RDONLY)
            status = os.fstat(fd)
            length = int.from_bytes(os.pread(fd, 8, 0), "little")
            raw = os.pread(fd, min(length, status.st_size), 8)
            entries = json.loads(raw)
        except OSError as error:
            raise CannotWork(f"{path}: {error.strerror}; the index names it, download it again") from error
        except ValueError as error:
            raise CannotWork(f"{path} is not a safetensors file ({error}); download it again") from error
        self._content.update(file.encode() + b"\n" + fingerprint(fd) + raw)
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            if name in self.tensors:
                raise CannotWork(
                    f"{name} is in {self.tensors[name].file} and in {file}; remove the stale file"
                )
            self.tensors[name] = self._stored(file, name, entry, 8 + length, status.st_size)

    def _stored(self, file: str, name: str, entry: dict, values: int, file_bytes: int) -> Stored:
        """A header's ``entry``; ``values`` is the offset at which the values of the file begin."""
        where = f"{self.directory / file}: {name}"
        if entry["dtype"] not in DTYPES:
            raise CannotWork(f"{where} has dtype {entry['dtype']}; {', '.join(DTYPES)} are supported")
        begin, end = entry["data_offsets"]
        stored = Stored(DTYPES[entry["dtype"]], tuple(entry["shape"]), file, values + begin)
        if end - begin != math.prod(stored.shape) * ITEMSIZE[stored.dtype]:
            raise CannotWork(f"{where} {stored.shape} has {end - begin} bytes; the file is damaged")
        if values + end > file_bytes:
            raise CannotWork(f"{where} ends beyond the file, which is cut off; download it again")
        return stored

    def fingerprint(self) -> str:
        return self._content.hexdigest()

    def rows(self, name: str, row: int, rows: int, buffer: np.ndarray | None = None) -> np.ndarray:
        """[rows, row_bytes] uint8."""
        stored = self.tensors[name]
        out = space_for(rows, stored.row_bytes, buffer)
        where = f"{self.directory / stored.file}: {name}"
        read_exactly(
            self._fds[stored.file], memoryview(out).cast("B"), stored.start + row * stored.row_bytes, where
        )
        return out

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, list[tuple[int, int]]]:
    """What a file with these tensors, name -> (dtype, shape), begins with; offset and length of each one's
    values, one behind the other.
    """
    entries: dict = {"__metadata__": {"format": "pt"}}
    places, position = [], 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * ITEMSIZE[dtype]
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape)}
        entries[name]["data_offsets"] = [position, position + size]
        places.append((position, size))
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [(len(head) + start, size) for start, size in places]

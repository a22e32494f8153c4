"""The weights that verl's FSDP trainers save, FSDP1 and FSDP2, at any world size: read in place, row by row.

Each rank writes ``model_world_size_W_rank_R.pt``, a ``torch.save`` archive of its rows of every parameter as
DTensors. Loading them, as verl's model merger does, takes the memory of the whole model in float32, runs what
the pickles say, and on NPU checkpoints needs torch_npu. But values lie in the archive as they are, one record
a storage; the pickle says which. So it is read here by an unpickler that builds nothing but descriptions, and
rows are then read from the files like those of any other checkpoint.

Which rows: DTensors are cut over axis 0 in the order of the ranks; in a hybrid mesh (ddp, fsdp) the first
fsdp ranks hold them all, and the others the same again. Invariants (tests/test_export.py): the rows of the
ranks are exactly those of the parameter; anything else is an error that names the file and the tensor.
Cost: O(parameters * ranks) to open, no memory for values.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import hashlib
import json
import math
import os
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ascend_rl.settings.switch import CannotWork
from ascend_rl.weights.checkpoints import SHARD
from ascend_rl.weights.files import fingerprint, read_exactly
from ascend_rl.weights.safetensors import Described, space_for
from ascend_rl.weights.torch_dist import (
    BAD_ARCHIVE,
    ITEMSIZE,
    STORAGES,
    Noted,
    contiguous,
    noted,
    record_start,
    unpickled,
)

DTYPE_OF = {storage: dtype for dtype, storage in STORAGES.items()}
# torch_npu's has the same arguments first.
REBUILD = {("torch._utils", "_rebuild_tensor_v2"), ("torch_npu.utils.storage", "_rebuild_npu_tensor")}
DESCRIPTIONS = ("torch.distributed.", "torch.serialization", "torch_npu.")


@dataclass(frozen=True)
class _Local:
    """A tensor in an archive: where its values are, in elements of its storage's record."""

    dtype: str
    record: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _typed(function, kind, arguments: tuple, state: object) -> object:
    """``torch._tensor._rebuild_from_type_v2``: a tensor, or a DTensor, whose state has the local one."""
    made = function(*arguments)
    if isinstance(made, Noted):
        made.state = state
    return made


class _ShardUnpickler(pickle.Unpickler):
    """Reads what a shard says about its tensors; refuses what no tensor needs."""

    def find_class(self, module: str, name: str):
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) in REBUILD:
            return lambda storage, offset, shape, strides, *_: _Local(
                *storage, offset, tuple(shape), tuple(strides)
            )
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _typed
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name.endswith("Storage"):
            return DTYPE_OF.get(name, name)
        if module == "torch" or module.startswith(DESCRIPTIONS) or name == "_rebuild_wrapper_subclass":
            return noted(name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no tensor needs")

    def persistent_load(self, pid):
        _, dtype, record, _, _ = pid
        return dtype, record


def _shape_and_local(tensor: object) -> tuple[tuple[int, ...], _Local]:
    """The whole shape of a saved parameter, and the rows of this rank.

    Raises:
        ValueError: it is not a tensor, or cut in another way than FSDP cuts.
    """
    if isinstance(tensor, _Local):
        return tensor.shape, tensor
    try:
        _, _, shape, *_ = tensor.arguments
        slots = tensor.state if isinstance(tensor.state, dict) else tensor.state[1]
        local, placements = slots["_local_tensor"], slots["_spec"].state["placements"]
        cuts = [placement.state["dim"] if _is(placement, "Shard") else None for placement in placements]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"is not saved as a tensor that is known here ({error!r})") from error
    replicas = [_is(placement, "Replicate") for placement in placements[:-1]]
    if not all(replicas) or not (cuts[-1] == 0 or _is(placements[-1], "Replicate")):
        kinds = ", ".join(type(placement).__name__ for placement in placements)
        raise ValueError(f"is cut as ({kinds}) over the axes {cuts}; only FSDP's cut of axis 0 is read")
    return tuple(shape), local


def _is(placement: object, kind: str) -> bool:
    return type(placement).__name__ == kind


class FsdpShards:
    """The model shards of a directory, opened for reading rows: a `Source`."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.tensors: dict[str, Described] = {}
        self._pieces: dict[str, list[tuple[int, int, int, int]]] = collections.defaultdict(list)
        self._fds: dict[int, int] = {}
        self._content = hashlib.sha256()
        self.world_size = self._world_size()
        try:
            for rank in range(self.world_size):
                if not self._read(rank):
                    break  # the ranks that follow hold the same again
        except BaseException:
            self.close()
            raise
        self._check()

    def _path(self, rank: int) -> Path:
        return self.directory / f"model_world_size_{self.world_size}_rank_{rank}.pt"

    def _world_size(self) -> int:
        """From fsdp_config.json, or from the names of the files if they agree."""
        sizes = {int(m[2]) for p in self.directory.glob("model_*.pt") if (m := SHARD.fullmatch(p.name))}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            sizes = {int(json.loads((self.directory / "fsdp_config.json").read_text())["world_size"])}
        if len(sizes) != 1:
            raise CannotWork(
                f"{self.directory} holds shards of the world sizes {sorted(sizes)}; leave those of one save"
            )
        return sizes.pop()

    def _read(self, rank: int) -> bool:
        """Note where a rank's rows are; False if all rows are known before it."""
        if self.tensors and all(self._known(name) == t.shape[0] for name, t in self.tensors.items()):
            return False
        path = self._path(rank)
        try:
            fd = self._fds[rank] = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CannotWork(
                f"{path}: {error.strerror}; rank {rank} of {self.world_size} did not save here. "
                "Copy the shards of all nodes into one directory"
            ) from error
        self._content.update(path.name.encode() + b"\n" + fingerprint(fd))
        try:
            with open(fd, "rb", closefd=False) as file, zipfile.ZipFile(file) as archive:
                names = {name.partition("/")[2]: name for name in archive.namelist()}
                with archive.open(names["data.pkl"]) as stream:
                    content = unpickled(_ShardUnpickler(stream))
                for name, tensor in content.items():
                    self._note(rank, name, tensor, archive, names)
        except (*BAD_ARCHIVE, AttributeError, IndexError, TypeError) as error:
            raise CannotWork(f"{path} is not a shard of a model, or damaged: {error}") from error
        return True

    def _note(self, rank: int, name: str, tensor: object, archive: zipfile.ZipFile, names: dict) -> None:
        where = f"{self._path(rank)}: {name}"
        try:
            shape, local = _shape_and_local(tensor)
        except ValueError as error:
            raise CannotWork(f"{where} {error}") from error
        if local.dtype not in ITEMSIZE:
            raise CannotWork(f"{where} has dtype {local.dtype}; {', '.join(ITEMSIZE)} are supported")
        described = self.tensors.setdefault(name, Described(local.dtype, shape))
        if (described.dtype, described.shape) != (local.dtype, shape):
            raise CannotWork(f"{where} is {local.dtype} {shape}, on rank 0 {described}")
        if local.shape[1:] != shape[1:] or not contiguous(local.shape, local.strides):
            raise CannotWork(f"{where} has {local.shape} of {shape}, or not contiguously; save it again")
        rows = local.shape[0]
        if not rows or self._known(name) == shape[0]:  # nothing of it here, or the same again
            return
        entry = archive.getinfo(names[f"data/{local.record}"])
        begin = local.offset * ITEMSIZE[local.dtype]
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size < begin + rows * described.row_bytes:
            raise CannotWork(f"{where}: {entry.file_size} bytes are too few; the file is damaged")
        start = record_start(self._fds[rank], 0, entry) + begin
        self._pieces[name].append((self._known(name), rows, rank, start))

    def _known(self, name: str) -> int:
        """Rows that are noted already."""
        pieces = self._pieces.get(name)
        return pieces[-1][0] + pieces[-1][1] if pieces else 0

    def _check(self) -> None:
        found = {name: (self._known(name), tensor.shape[0]) for name, tensor in self.tensors.items()}
        wrong = [f"{name} {known} of {rows}" for name, (known, rows) in found.items() if known != rows]
        if wrong or not found:
            raise CannotWork(
                f"{self.directory}: the {self.world_size} shards do not make whole tensors, "
                f"rows of {', '.join(wrong[:8])}; leave the files of one save there"
            )

    def fingerprint(self) -> str:
        return self._content.hexdigest()

    def rows(self, name: str, row: int, rows: int, buffer: np.ndarray | None = None) -> np.ndarray:
        """[rows, row_bytes] uint8."""
        width, pieces = self.tensors[name].row_bytes, self._pieces[name]
        out = space_for(rows, width, buffer)
        done = 0
        nth = bisect.bisect_right(pieces, (row, math.inf)) - 1
        while done < rows:
            first, count, rank, start = pieces[nth]
            skip = row + done - first
            take = min(rows - done, count - skip)
            where = f"{self._path(rank)}: {name}"
            read_exactly(
                self._fds[rank], memoryview(out[done : done + take]).cast("B"), start + skip * width, where
            )
            done += take
            nth += 1
        return out

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

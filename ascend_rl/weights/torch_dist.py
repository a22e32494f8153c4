"""Megatron's torch_dist checkpoint as bytes on disk: where every tensor chunk lies, to write and read it
in place.

A torch_dist checkpoint is a directory with ``metadata.json`` (the format), ``common.pt`` (what is not
sharded), ``.metadata`` (a pickled ``torch.distributed.checkpoint`` Metadata: for each key its shape, and for
each chunk of it a file, an offset and a length) and ``*.distcp`` files, which are concatenated ``torch.save``
archives, one a chunk. The public way to write one needs every tensor of a rank in memory. But an archive is a
zip with one stored (uncompressed) record of raw values, and its size follows from dtype and shape. So the
place of every value is known before the first byte is read, and a chunk can be streamed to it by any thread
in any order.

Invariants (tests/test_torch_dist.py): an archive is a valid zip that ``torch.load(weights_only=True)`` reads;
its pickle is the one ``torch.save`` writes; the values start at a multiple of 64 bytes; reading finds the
values in archives of ``torch.save`` too; and (tests/test_unpickling.py) no pickle of a checkpoint runs code:
its classes are not imported, and one that is not listed here is an error. Cost: O(1) per chunk besides the
values themselves.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ascend_rl.settings.switch import CannotWork
from ascend_rl.weights.files import Place, fingerprint, read_exactly

ALIGNMENT_BYTES = 64
ZIP_LIMIT_BYTES = 2**32 - 2**20  # larger archives need zip64; chunks are kept far below this
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# By torch's names, as strings: torch takes seconds and 600 MB to import, and copying bytes needs none of it.
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
BAD_ARCHIVE = (OSError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError)
STORAGES = {"bfloat16": "BFloat16Storage", "float16": "HalfStorage", "float32": "FloatStorage"}


def aligned(position_bytes: int) -> int:
    return -position_bytes % ALIGNMENT_BYTES + position_bytes


# ---------------------------------------------------------------------------------------------------- writing


def _tuple(values: tuple[int, ...]) -> bytes:
    items = b"".join(pickle.dumps(value, 2)[2:-1] for value in values)
    if len(values) > 3:
        return b"(" + items + b"t"
    return items + (b"\x85", b"\x86", b"\x87")[len(values) - 1]


def tensor_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The pickle that ``torch.save`` makes of a contiguous tensor, without the tensor: protocol 2, opcode by
    opcode.
    """
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    storage = f"ctorch\n{STORAGES[dtype]}\nq\x02".encode()
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00(("
        + (b"X\x07\0\0\0storageq\x01" + storage + b"X\x01\0\0\x000q\x03X\x03\0\0\0cpuq\x04")
        + (pickle.dumps(math.prod(shape), 2)[2:-1] + b"tq\x05QK\0")
        + (_tuple(shape) + b"q\x06" + _tuple(strides) + b"q\x07")
        + b"\x89ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b."
    )


def _entry(name: str, size_bytes: int, crc: int, padding: bytes) -> tuple[bytes, bytes]:
    """The local header of a stored zip entry, and its central one up to the header's offset."""
    common = struct.pack("<HHHHHIII", 20, 0x0800, 0, 0, 0x21, crc, size_bytes, size_bytes)
    local = b"PK\3\4" + common + struct.pack("<HH", len(name), len(padding)) + name.encode() + padding
    central = b"PK\1\2" + struct.pack("<H", 20) + common + struct.pack("<HHHHHI", len(name), 0, 0, 0, 0, 0)
    return local, central


@dataclass(frozen=True)
class Archive:
    """The ``torch.save`` archive of one chunk: ``head``, then the values, then ``tail``.

    >>> archive = Archive("bfloat16", (1, 3))
    >>> archive.values_offset % 64, archive.values_bytes
    (0, 6)
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def values_bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def values_offset(self) -> int:
        return len(self._head(0)[0])

    @property
    def length(self) -> int:
        return sum(len(part) for part in self.frame(0)) + self.values_bytes

    def _head(self, crc: int) -> tuple[bytes, list[tuple[bytes, str, int]]]:
        head, directory = b"", []
        small = (
            ("archive/data.pkl", tensor_pickle(self.dtype, self.shape)),
            ("archive/byteorder", b"little"),
        )
        for name, content in small:
            local, central = _entry(name, len(content), zlib.crc32(content), b"")
            directory.append((central, name, len(head)))
            head += local + content
        name = "archive/data/0"
        start = len(head) + 30 + len(name) + 4  # local header, name, header of the padding
        local, central = _entry(
            name,
            self.values_bytes,
            crc,
            struct.pack("<2sH", b"FB", aligned(start) - start) + b"Z" * (aligned(start) - start),
        )
        directory.append((central, name, len(head)))
        return head + local, directory

    def frame(self, crc: int) -> tuple[bytes, bytes]:
        """What goes before and after the values, whose crc32 is ``crc``."""
        if self.values_bytes > ZIP_LIMIT_BYTES:
            raise CannotWork(f"a chunk of {self.values_bytes} bytes is too large for one archive")
        head, directory = self._head(crc)
        position = len(head) + self.values_bytes
        local, central = _entry("archive/version", 2, zlib.crc32(b"3\n"), b"")
        directory.append((central, "archive/version", position))
        tail = local + b"3\n"
        directory_start = position + len(tail)
        listing = b"".join(
            central + struct.pack("<I", offset) + name.encode() for central, name, offset in directory
        )
        end = struct.pack("<HHHHIIH", 0, 0, len(directory), len(directory), len(listing), directory_start, 0)
        return head, tail + listing + b"PK\5\6" + end


def object_archive(value: object) -> bytes:
    """``torch.save`` of a plain object, without its random serialization id: equal input, equal bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (
            ("data.pkl", pickle.dumps(value, 2)),
            ("byteorder", b"little"),
            ("version", b"3\n"),
        ):
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return stream.getvalue()


@dataclass(frozen=True)
class _Global:
    """A class or function of torch, by name."""

    module: str
    name: str

    def __call__(self):
        raise NotImplementedError("only pickled")


class _Made:
    """What a pickle says about an object: ``function(*arguments)`` makes it, then ``state`` is set."""

    def __init__(self, function: _Global, arguments: tuple, state: object = None):
        self.function, self.arguments, self.state = function, arguments, state


class _NamePickler(pickle._Pickler):
    """Pickles the objects above like real ones, without importing torch (which the C pickler would)."""

    def reducer_override(self, item):
        if isinstance(item, _Made):
            return item.function, item.arguments, item.state
        return item.name if isinstance(item, _Global) else NotImplemented

    def save_global(self, item, name=None):
        if not isinstance(item, _Global):
            return super().save_global(item, name)
        self.write(pickle.GLOBAL + f"{item.module}\n{item.name}\n".encode())
        self.memoize(item)


_DCP = "torch.distributed.checkpoint.metadata"
_NEW = _Global("copyreg", "__newobj__")
_SIZE = _Global("torch", "Size")


def _instance(name: str, state: object, module: str = _DCP) -> _Made:
    return _Made(_NEW, (_global(module, name),), state)


@functools.cache
def _global(module: str, name: str) -> _Global:
    return _Global(module, name)


def _size(values: tuple[int, ...]) -> _Made:
    return _Made(_SIZE, (tuple(int(value) for value in values),))


def metadata(
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    chunks: Iterable[tuple[str, tuple[int, ...], tuple[int, ...], Place]],
    objects: Iterable[tuple[str, Place]],
) -> bytes:
    """The pickled ``.metadata``, whose classes are those of ``torch.distributed.checkpoint``.

    Args:
        tensors: key -> (dtype, shape).
        chunks: (key, offsets, sizes, place) of each.
        objects: (key, place) of each.
    """
    layout = _Made(_Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = _Made(_Global(_DCP, "_MEM_FORMAT_ENCODING"), (0,))
    entries: dict[str, _Made] = {}
    parts: dict[str, list[_Made]] = {key: [] for key in tensors}
    storage: dict[_Made, _Made] = {}

    def place_of(place: Place) -> _Made:
        state = {"relative_path": place.file, "offset": place.offset, "length": place.length}
        return _instance("_StorageInfo", state, "torch.distributed.checkpoint.filesystem")

    for key, (dtype, shape) in tensors.items():
        described = (_global("torch", dtype), layout, False, contiguous, False)
        properties = _instance("TensorProperties", described)
        state = {"properties": properties, "size": _size(shape), "chunks": parts[key]}
        entries[key] = _instance("TensorStorageMetadata", state)
    for key, offsets, sizes, place in chunks:
        offset = _size(offsets)
        index = _instance("MetadataIndex", {"fqn": key, "index": len(parts[key]), "offset": offset})
        storage[index] = place_of(place)
        parts[key].append(_instance("ChunkStorageMetadata", {"offsets": offset, "sizes": _size(sizes)}))
    for key, place in objects:
        entries[key] = _instance("BytesStorageMetadata", {})
        storage[_instance("MetadataIndex", {"fqn": key, "index": None})] = place_of(place)
    content = {"state_dict_metadata": entries, "planner_data": {}, "storage_data": storage}
    content |= {"storage_meta": None, "version": None}
    # Megatron keeps the original shape of flattened tensors here (optimizer state only), so: nothing for each
    # key.
    content["mcore_data"] = {key: {} for key in tensors}
    stream = io.BytesIO()
    _NamePickler(stream, 2).dump(_instance("Metadata", content))
    return stream.getvalue()


# ---------------------------------------------------------------------------------------------------- reading


class _FileSlice(io.RawIOBase):
    """A read-only view of part of a file, for zipfile."""

    def __init__(self, fd: int, offset: int, length: int):
        self.fd, self.offset, self.length, self.position = fd, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[
            whence
        ] + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self.length - self.position)
        data = os.pread(
            self.fd, left if size is None or size < 0 else min(size, left), self.offset + self.position
        )
        self.position += len(data)
        return data


def record_start(fd: int, archive_offset: int, entry: zipfile.ZipInfo) -> int:
    """Where in the file the bytes of an archive's stored record begin."""
    header = archive_offset + entry.header_offset
    name_length, extra_length = struct.unpack("<HH", os.pread(fd, 4, header + 26))
    return header + 30 + name_length + extra_length


def contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether values of these strides lie one behind the other, in order."""
    expected = (math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return 0 in shape or all(
        size == 1 or stride == wanted for size, stride, wanted in zip(shape, strides, expected, strict=True)
    )


class Noted:
    """An object of a pickle: its class is not imported, its arguments and its state are kept."""

    def __init__(self, *arguments: object):
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


def noted(name: str) -> type:
    """A class of that name, of this pickle only: a pickle can set attributes of the classes it is given."""
    return type(name, (Noted,), {})


def unpickled(reader: pickle.Unpickler) -> object:
    """What a pickle of unknown origin holds.

    Raises:
        pickle.UnpicklingError: it is damaged, or holds what ``reader`` does not know.
    """
    try:
        return reader.load()
    except Exception as error:  # what a pickle says may go wrong in any way
        raise pickle.UnpicklingError(str(error) or type(error).__name__) from error


# The classes of a .metadata, of torch and megatron-core; TensorProperties has moved.
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_FILES, _PLANNER = (f"torch.distributed.checkpoint.{name}" for name in ("filesystem", "planner"))
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
DESCRIBED = {
    *((_DCP, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((_DCP, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    *((module, "TensorProperties") for module in (_DCP, _OLD)),
    *((_FILES, name) for name in ("_StorageInfo", "_StoragePrefix")),
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType")),
    *((_PLANNER, name) for name in ("TensorWriteData", "BytesIOWriteData")),
    *((_MEGATRON, name) for name in ("MCoreSavePlan", "MCoreMetadata")),
    (_OLD, "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),  # where the checkpoint was saved
}
TORCH_DTYPES = frozenset(
    "bfloat16 float16 float32 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz bool "
    "uint8 uint16 uint32 uint64 int8 int16 int32 int64 complex64 complex128".split()
)


class _MetadataUnpickler(pickle.Unpickler):
    """Reads what a ``.metadata`` says; its classes are only names here."""

    def find_class(self, module: str, name: str):
        if (module, name) in DESCRIBED:
            return noted(name)
        if module == "torch" and name in TORCH_DTYPES:
            return name
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("copyreg", "__newobj__"):
            return lambda kind, *arguments: kind(*arguments)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no checkpoint needs")


def metadata_of(directory: Path) -> dict:
    """The fields of the ``Metadata`` in a checkpoint's ``.metadata``.

    Raises:
        CannotWork: there is no checkpoint, or it is damaged.
    """
    try:
        with (directory / ".metadata").open("rb") as file:
            content = unpickled(_MetadataUnpickler(file))
        return {key: content.state[key] for key in ("state_dict_metadata", "storage_data")}
    except (OSError, pickle.UnpicklingError, AttributeError, KeyError, TypeError) as error:
        raise CannotWork(f"{directory} is not a complete Megatron checkpoint: {error}") from error


class _TensorUnpickler(pickle.Unpickler):
    """Reads dtype, numel, storage offset, shape and strides of a saved tensor; refuses to build anything
    else.
    """

    def find_class(self, module: str, name: str):
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *_: (
                *storage,
                offset,
                tuple(shape),
                tuple(strides),
            )
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name in STORAGES.values():
            return next(dtype for dtype, storage in STORAGES.items() if storage == name)
        raise pickle.UnpicklingError(f"unexpected {module}.{name}")

    def persistent_load(self, pid):
        _, dtype, record, _, numel = pid
        return dtype, record, numel


def _sizes(values: Iterable) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


@dataclass(frozen=True)
class StoredChunk:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


class Checkpoint:
    """A torch_dist checkpoint opened for reading rows of its tensors in place, however it was sharded."""

    def __init__(self, directory: str | os.PathLike):
        self.directory = Path(directory)
        try:
            found = json.loads((self.directory / "metadata.json").read_text())
            backend = found.get("sharded_backend")
        except (OSError, ValueError, AttributeError) as error:
            raise CannotWork(f"{directory} is not a complete Megatron checkpoint: {error}") from error
        if backend != "torch_dist":
            raise CannotWork(f"{directory} is a '{backend}' checkpoint; torch_dist is needed")
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.objects: list[str] = []
        self._chunks: dict[str, list[StoredChunk]] = {}
        self._by_index: dict[str, dict[tuple[int, ...], list[StoredChunk]]] = {}
        content = metadata_of(self.directory)
        try:
            self._describe(content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, CannotWork):
                raise
            raise CannotWork(
                f"{self.directory / '.metadata'} is damaged: {error!r}; save it again"
            ) from error
        self._files: dict[str, int] = {}
        self._values: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def _describe(self, content: dict) -> None:
        places = {}
        for index, info in content["storage_data"].items():
            file, offset, length = (info.state[key] for key in ("relative_path", "offset", "length"))
            if Path(file).name != file:
                raise CannotWork(
                    f"{self.directory / '.metadata'} names the file {file}; only its own are read"
                )
            corner = index.state.get("offset")
            places[index.state["fqn"], corner and tuple(corner)] = Place(file, int(offset), int(length))
        for key, entry in content["state_dict_metadata"].items():
            if type(entry).__name__ != "TensorStorageMetadata":
                self.objects.append(key)
                continue
            properties = entry.state["properties"].state
            dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
            self.tensors[key] = (str(dtype), _sizes(entry.state["size"]))
            self._chunks[key] = []
            for chunk in entry.state["chunks"]:
                offsets = _sizes(chunk.state["offsets"])
                if (key, offsets) not in places:
                    raise CannotWork(f"{self.directory}: {key} has no data for its chunk at {offsets}")
                place = places[key, offsets]
                self._chunks[key].append(StoredChunk(offsets, _sizes(chunk.state["sizes"]), place))

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def fingerprint(self) -> str:
        """Of the index and of all files that it names."""
        files = {chunk.place.file for chunks in self._chunks.values() for chunk in chunks}
        content = hashlib.sha256()
        for file in [".metadata", *sorted(files)]:
            content.update(file.encode() + b"\n" + fingerprint(self._open(file)))
        return content.hexdigest()

    def _open(self, file: str) -> int:
        with self._lock:
            if file not in self._files:
                try:
                    self._files[file] = os.open(self.directory / file, os.O_RDONLY)
                except OSError as error:
                    raise CannotWork(
                        f"{self.directory / file}: {error.strerror}; the checkpoint is incomplete"
                    ) from error
            return self._files[file]

    def _covering(self, key: str, index: tuple[int, ...]) -> list[StoredChunk]:
        """The chunks of ``key`` that hold rows of the matrix at ``index`` of its leading axes."""
        with self._lock:
            if key not in self._by_index:
                table: dict[tuple[int, ...], list[StoredChunk]] = collections.defaultdict(list)
                for chunk in self._chunks[key]:
                    leading = range(len(index))
                    ranges = (
                        range(chunk.offsets[axis], chunk.offsets[axis] + chunk.sizes[axis])
                        for axis in leading
                    )
                    for covered in itertools.product(*ranges):
                        table[covered].append(chunk)
                self._by_index[key] = dict(table)
            return self._by_index[key].get(index, [])

    def _values_start(self, key: str, chunk: StoredChunk) -> tuple[int, int]:
        """File descriptor and absolute offset of a chunk's values, once checked against ``.metadata``."""
        place, (dtype, _) = chunk.place, self.tensors[key]
        fd = self._open(place.file)
        start = self._values.get((place.file, place.offset))
        if start is not None:
            return fd, start
        where = f"{self.directory / place.file}: {key} at {chunk.offsets}"
        try:
            with zipfile.ZipFile(_FileSlice(fd, place.offset, place.length)) as archive:
                names = {name.partition("/")[2]: name for name in archive.namelist()}
                found = unpickled(_TensorUnpickler(io.BytesIO(archive.read(names["data.pkl"]))))
                stored_dtype, record, _, offset, shape, strides = found
                entry = archive.getinfo(names[f"data/{record}"])
        except (*BAD_ARCHIVE, ValueError, TypeError) as error:
            raise CannotWork(f"{where}: not a tensor archive ({error}); the file is damaged") from error
        if tuple(shape) != chunk.sizes or stored_dtype != dtype:
            raise CannotWork(f"{where}: holds {stored_dtype} {shape}, .metadata says {dtype} {chunk.sizes}")
        if not contiguous(shape, strides) or entry.compress_type != zipfile.ZIP_STORED:
            raise CannotWork(f"{where}: values are not stored contiguously; save it again with megatron-core")
        if entry.file_size < (offset + math.prod(shape)) * ITEMSIZE[dtype]:
            raise CannotWork(f"{where}: {entry.file_size} bytes are too few for {shape}; the file is damaged")
        start = record_start(fd, place.offset, entry) + offset * ITEMSIZE[dtype]
        self._values[place.file, place.offset] = start
        return fd, start

    def read_rows(self, key: str, index: tuple[int, ...], row: int, out: np.ndarray) -> None:
        """Fill ``out`` [rows, row_bytes] uint8 from ``row`` on, of the matrix at ``index`` of leading axes.

        A tensor of shape [layers, rows] counts as rows of one value.
        """
        dtype, shape = self.tensors[key]
        depth, rows, filled_bytes = len(index), len(out), 0
        columns = math.prod(shape[depth + 1 :])
        for chunk in self._covering(key, index):
            chunk_row, chunk_rows = chunk.offsets[depth], chunk.sizes[depth]
            first, last = max(row, chunk_row), min(row + rows, chunk_row + chunk_rows)
            if first >= last:
                continue
            fd, start = self._values_start(key, chunk)
            width = math.prod(chunk.sizes[depth + 1 :]) * ITEMSIZE[dtype]
            left = sum(chunk.offsets[depth + 1 :]) * ITEMSIZE[dtype]
            nth = 0
            for axis in range(depth):
                nth = nth * chunk.sizes[axis] + index[axis] - chunk.offsets[axis]
            position = start + (nth * chunk_rows + first - chunk_row) * width
            target = out[first - row : last - row]
            if width == columns * ITEMSIZE[dtype]:
                read_exactly(
                    fd, memoryview(target).cast("B"), position, f"{self.directory / chunk.place.file}: {key}"
                )
            else:
                part = np.empty((last - first, width), np.uint8)
                read_exactly(
                    fd, memoryview(part).cast("B"), position, f"{self.directory / chunk.place.file}: {key}"
                )
                target[:, left : left + width] = part
            filled_bytes += (last - first) * width
        if filled_bytes != out.nbytes:
            raise CannotWork(
                f"{self.directory}: {key} {index} rows {row}:{row + rows} have {filled_bytes} bytes "
                f"of {out.nbytes}; "
                "chunks are missing or overlap"
            )


def shard_key(key: str, index: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """The unique key of a sharded object, as megatron-core names it: ``key/shard_<offsets>_<shape>``."""
    return f"{key}/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, shape))}"

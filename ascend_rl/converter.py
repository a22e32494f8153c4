"""Qwen3 weights between Hugging Face safetensors and a Megatron torch_dist checkpoint, as a list of byte
ranges.

Frameworks convert by building both models in memory. Yet no value changes: a Megatron tensor is rows of
Hugging Face tensors in another order (query, key and value rows interleaved by group, gate above up, layers
and experts as leading axes). From config.json and the safetensors headers alone this module computes which
rows go where, and, as the place of every chunk in the output is known too (``ascend_rl.torch_dist``), workers
stream them in any order, block by block.

Invariants (tests/test_converter.py): every tensor of the model is read exactly once, and missing, extra or
misshapen ones are errors; the output depends on input and options only, not on workers, kills or resumes;
what the journal names is on the disk; nothing is overwritten; the output directory appears complete, by one
rename, or not at all. Cost: O(bytes) time, one read and one write; memory O(workers * block + number of
chunks), whatever the model's size.

Example, 2 query heads, 1 group: linear_qkv.weight[layer] = rows of q_proj, then of k_proj, then of v_proj.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

try:  # ten times the speed of zlib's, which costs a conversion a fifth of its time
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

from ascend_rl import torch_dist
from ascend_rl.torch_dist import (
    ITEMSIZE,
    Archive,
    Checkpoint,
    ConversionError,
    Place,
    read_exactly,
    write_exactly,
)

VERSION = 1
BLOCK_BYTES = 1 << 20  # what a worker holds at a time; about the size of an L2 cache
CHUNK_BYTES = 256 << 20  # larger tensors (embeddings) are split by rows: a reader loads whole chunks
FILE_BYTES = 4 << 30
COMMIT_BYTES = 1 << 30  # finished chunks are journaled after this much data was synced
GROUPED_EP = 32  # --layout grouped: experts of one rank at this EP size share a chunk
SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
NOT_THE_MODEL = ("optimizer.", "chained_", "rng_state", "opt_param_scheduler", "rerun_state_machine")
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
)
NAMED = 8  # how many wrong tensors an error names


# ------------------------------------------------------------------------------------------- names and shapes


@dataclass(frozen=True)
class Model:
    """What config.json says about the shapes of a Qwen3 or Qwen3-MoE model (``experts`` is 0 for a dense
    one).
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    vocabulary: int
    ffn: int
    experts: int
    tied: bool

    @classmethod
    def from_directory(cls, directory: Path) -> Model:
        path = directory / "config.json"
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConversionError(
                f"{path}: {error}; --hf_model_path must be a Hugging Face model directory"
            ) from error
        return cls.from_config(config, str(path))

    @classmethod
    def from_config(cls, config: dict, where: str = "config.json") -> Model:
        kind = config.get("model_type")
        if kind not in ("qwen3", "qwen3_moe"):
            raise ConversionError(f"{where}: model_type '{kind}' is not supported, only qwen3 and qwen3_moe")
        for name, wanted in (
            ("attention_bias", (False, None)),
            ("quantization_config", (None,)),
            ("mlp_only_layers", ([], None)),
            ("decoder_sparse_step", (1, None)),
        ):
            if config.get(name) not in wanted:
                raise ConversionError(
                    f"{where}: {name}={config[name]} is not supported, verl builds Qwen3 without it"
                )
        moe = kind == "qwen3_moe"
        names = [
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
        ]
        names += ["moe_intermediate_size", "num_experts"] if moe else ["intermediate_size"]
        values = {name: config.get(name) for name in names}
        for name, value in values.items():
            if not isinstance(value, int) or value < 1:
                raise ConversionError(f"{where}: {name} must be a positive integer, is {value}")
        layers, hidden, heads, groups, vocabulary = (values[name] for name in names[:5])
        if heads % groups:
            raise ConversionError(f"{where}: {heads} attention heads cannot share {groups} key-value heads")
        return cls(
            layers,
            hidden,
            heads,
            groups,
            config.get("head_dim") or (hidden // heads if moe else 128),
            vocabulary,
            values[names[5]],
            values["num_experts"] if moe else 0,
            bool(config.get("tie_word_embeddings", False)),
        )


@dataclass(frozen=True)
class Piece:
    """``rows`` rows of a Hugging Face tensor from ``row`` on."""

    name: str
    row: int
    rows: int


@dataclass(frozen=True)
class Matrix:
    """A Megatron tensor: at each index of its ``leading`` axes (layer, expert) a matrix or vector of
    ``shape``.
    """

    key: str
    leading: tuple[int, ...]
    shape: tuple[int, ...]
    pieces: Callable[[tuple[int, ...]], list[Piece]]
    cuts: tuple[int, ...] = ()  # rows at which megatron-core begins another chunk

    @property
    def size(self) -> tuple[int, ...]:
        return (*self.leading, *self.shape)


def hf_tensors(model: Model) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the Hugging Face model, in its order."""
    hidden, dim, ffn = model.hidden, model.head_dim, model.ffn
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocabulary, hidden)}
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        shapes[attention + "q_proj.weight"] = (model.heads * dim, hidden)
        shapes[attention + "k_proj.weight"] = shapes[attention + "v_proj.weight"] = (
            model.groups * dim,
            hidden,
        )
        shapes[attention + "o_proj.weight"] = (hidden, model.heads * dim)
        shapes[attention + "q_norm.weight"] = shapes[attention + "k_norm.weight"] = (dim,)
        if model.experts:
            shapes[mlp + "gate.weight"] = (model.experts, hidden)
        for unit in [f"{mlp}experts.{expert}." for expert in range(model.experts)] or [mlp]:
            shapes[unit + "gate_proj.weight"] = shapes[unit + "up_proj.weight"] = (ffn, hidden)
            shapes[unit + "down_proj.weight"] = (hidden, ffn)
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (
            hidden,
        )
    shapes["model.norm.weight"] = (hidden,)
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocabulary, hidden)
    return shapes


def mcore_tensors(model: Model) -> list[Matrix]:
    """The tensors of verl's Megatron model (Transformer Engine's names), and the rows they are made of."""
    hidden, dim, ffn, vocabulary = model.hidden, model.head_dim, model.ffn, model.vocabulary
    queries = model.heads // model.groups * dim  # rows of q_proj per group

    def whole(name: str, rows: int) -> Callable[[tuple[int, ...]], list[Piece]]:
        return lambda index: [Piece(name.format(*index), 0, rows)]

    def qkv(index: tuple[int, ...]) -> list[Piece]:
        attention = f"model.layers.{index[0]}.self_attn."
        parts = (("q_proj.weight", queries), ("k_proj.weight", dim), ("v_proj.weight", dim))
        return [
            Piece(attention + name, group * rows, rows)
            for group in range(model.groups)
            for name, rows in parts
        ]

    def gate_up(unit: str) -> Callable[[tuple[int, ...]], list[Piece]]:
        names = (unit + "gate_proj.weight", unit + "up_proj.weight")
        return lambda index: [Piece(name.format(*index), 0, ffn) for name in names]

    layer, ours = "model.layers.{0}.", "decoder.layers."
    attention = ours + "self_attention."
    layers = (model.layers,)
    tensors = [
        Matrix(
            "embedding.word_embeddings.weight",
            (),
            (vocabulary, hidden),
            whole("model.embed_tokens.weight", vocabulary),
        ),
        Matrix(
            attention + "linear_qkv.layer_norm_weight",
            layers,
            (hidden,),
            whole(layer + "input_layernorm.weight", hidden),
        ),
        Matrix(attention + "linear_qkv.weight", layers, (model.groups * (queries + 2 * dim), hidden), qkv),
        Matrix(
            attention + "q_layernorm.weight", layers, (dim,), whole(layer + "self_attn.q_norm.weight", dim)
        ),
        Matrix(
            attention + "k_layernorm.weight", layers, (dim,), whole(layer + "self_attn.k_norm.weight", dim)
        ),
        Matrix(
            attention + "linear_proj.weight",
            layers,
            (hidden, model.heads * dim),
            whole(layer + "self_attn.o_proj.weight", hidden),
        ),
    ]
    norm = whole(layer + "post_attention_layernorm.weight", hidden)
    if model.experts:
        unit, experts, axes = (
            layer + "mlp.experts.{1}.",
            ours + "mlp.experts.experts.",
            (model.layers, model.experts),
        )
        tensors += [
            Matrix(ours + "pre_mlp_layernorm.weight", layers, (hidden,), norm),
            Matrix(
                ours + "mlp.router.weight",
                layers,
                (model.experts, hidden),
                whole(layer + "mlp.gate.weight", model.experts),
            ),
            Matrix(experts + "linear_fc1.weight", axes, (2 * ffn, hidden), gate_up(unit), (ffn,)),
            Matrix(
                experts + "linear_fc2.weight", axes, (hidden, ffn), whole(unit + "down_proj.weight", hidden)
            ),
        ]
    else:
        tensors += [
            Matrix(ours + "mlp.linear_fc1.layer_norm_weight", layers, (hidden,), norm),
            Matrix(
                ours + "mlp.linear_fc1.weight", layers, (2 * ffn, hidden), gate_up(layer + "mlp."), (ffn,)
            ),
            Matrix(
                ours + "mlp.linear_fc2.weight",
                layers,
                (hidden, ffn),
                whole(layer + "mlp.down_proj.weight", hidden),
            ),
        ]
    tensors.append(
        Matrix("decoder.final_layernorm.weight", (), (hidden,), whole("model.norm.weight", hidden))
    )
    if not model.tied:
        tensors.append(
            Matrix("output_layer.weight", (), (vocabulary, hidden), whole("lm_head.weight", vocabulary))
        )
    return tensors


def extra_states(model: Model) -> list[str]:
    """Keys of the empty per-module states that Megatron's layers and Transformer Engine's ask for when they
    load.
    """
    per_layer = [
        f"decoder.layers.self_attention.{name}"
        for name in ("linear_qkv", "core_attention", "linear_proj", "q_layernorm", "k_layernorm")
    ]
    per_layer += (
        ["decoder.layers.pre_mlp_layernorm"]
        if model.experts
        else ["decoder.layers.mlp.linear_fc1", "decoder.layers.mlp.linear_fc2"]
    )
    per_expert = [f"decoder.layers.mlp.experts.experts.{name}" for name in ("linear_fc1", "linear_fc2")]
    keys = [torch_dist.shard_key("decoder.final_layernorm._extra_state", (0,), (1,))]
    for names, shape in ((per_layer, (model.layers,)), (per_expert, (model.layers, model.experts))):
        keys += [
            torch_dist.shard_key(f"{n}._extra_state", i, shape) for n in names for i in np.ndindex(*shape)
        ]
    return keys


@dataclass(frozen=True)
class Chunk:
    """Part of a Megatron tensor that is stored in one piece: whole matrices or some rows of one, in this
    order.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...]


def clip(pieces: Sequence[Piece], first: int, last: int) -> list[Piece]:
    """What of ``pieces``, one above the other, is in the rows [first, last).

    >>> clip([Piece("q", 0, 4), Piece("k", 0, 2)], 3, 5)
    [Piece(name='q', row=3, rows=1), Piece(name='k', row=0, rows=1)]
    """
    result, start = [], 0
    for piece in pieces:
        low, high = max(first, start), min(last, start + piece.rows)
        if low < high:
            result.append(Piece(piece.name, piece.row + low - start, high - low))
        start += piece.rows
    return result


def chunks_of(
    matrix: Matrix, itemsize: int, experts_per_chunk: int, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Chunk]:
    """Cut a tensor where megatron-core cuts it at TP 1, and further where a chunk would exceed
    ``chunk_bytes``.
    """
    rows, rest = matrix.shape[0], matrix.shape[1:]
    row_bytes = math.prod(rest) * itemsize
    together = experts_per_chunk if len(matrix.leading) == 2 else 1
    rows_at_once = max(1, chunk_bytes // (row_bytes * together))
    bounds = [0, *matrix.cuts, rows]
    spans = [
        (first, min(first + rows_at_once, end))
        for start, end in itertools.pairwise(bounds)
        for first in range(start, end, rows_at_once)
    ]
    for index in np.ndindex(*matrix.leading[:1], *(size // together for size in matrix.leading[1:])):
        corner = (*index[:1], *(i * together for i in index[1:]))
        covered = [(*corner[:-1], corner[-1] + i) for i in range(together)] if len(corner) == 2 else [corner]
        pieces = [matrix.pieces(each) for each in covered]
        for first, last in spans:
            yield Chunk(
                matrix.key,
                (*corner, first, *(0 for _ in rest)),
                (*(1 for _ in corner[:1]), *(together for _ in corner[1:]), last - first, *rest),
                tuple(piece for each in pieces for piece in clip(each, first, last)),
            )


# ------------------------------------------------------------------------------------------- safetensors


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file; ``start`` is the absolute offset of its values."""

    file: str
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * ITEMSIZE[self.dtype]


class Safetensors:
    """The safetensors of a directory, opened for reading byte ranges; every header is checked on opening."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.tensors: dict[str, Stored] = {}
        self.fingerprint = hashlib.sha256()
        self._fds: dict[str, int] = {}
        index = directory / "model.safetensors.index.json"
        try:
            indexed = json.loads(index.read_text())["weight_map"] if index.exists() else None
        except (ValueError, KeyError) as error:
            raise ConversionError(f"{index} is damaged ({error}); download it again") from error
        files = (
            sorted(set(indexed.values()))
            if indexed
            else sorted(path.name for path in directory.glob("*.safetensors"))
        )
        if not files:
            raise ConversionError(
                f"{directory} has no *.safetensors file; weights in other formats are not read"
            )
        for file in files:
            self._read_header(file)
        for name, file in (indexed or {}).items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise ConversionError(
                    f"{index.name} promises {name} in {file}, which does not have it; download both again"
                )

    def _read_header(self, file: str) -> None:
        path = self.directory / file
        try:
            fd = self._fds[file] = os.open(path, os.O_RDONLY)
            status = os.fstat(fd)
            length = int.from_bytes(os.pread(fd, 8, 0), "little")
            raw = os.pread(fd, min(length, status.st_size), 8)
            header = json.loads(raw)
        except OSError as error:
            raise ConversionError(
                f"{path}: {error.strerror}; the index names it, download it again"
            ) from error
        except ValueError as error:
            raise ConversionError(f"{path} is no safetensors file ({error}); download it again") from error
        self.fingerprint.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode() + raw)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if name in self.tensors:
                raise ConversionError(
                    f"{name} is in {self.tensors[name].file} and in {file}; remove the stale file"
                )
            if entry["dtype"] not in SAFETENSORS_DTYPES:
                raise ConversionError(
                    f"{path}: {name} has dtype {entry['dtype']}; "
                    f"{', '.join(SAFETENSORS_DTYPES)} are supported"
                )
            begin, end = entry["data_offsets"]
            stored = Stored(
                file, 8 + length + begin, SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"])
            )
            if end - begin != math.prod(stored.shape) * ITEMSIZE[stored.dtype]:
                raise ConversionError(
                    f"{path}: {name} {stored.shape} has {end - begin} bytes; the file is damaged"
                )
            if 8 + length + end > status.st_size:
                raise ConversionError(
                    f"{path}: {name} ends beyond the file, which is cut off; download it again"
                )
            self.tensors[name] = stored

    def check(self, model: Model) -> None:
        """Refuse missing, extra and misshapen tensors, by name."""
        wanted = hf_tensors(model)
        if model.tied and "lm_head.weight" in self.tensors:
            self._check_tied()
        missing = [name for name in wanted if name not in self.tensors]
        extra = [
            name
            for name in self.tensors
            if name not in wanted and not (model.tied and name == "lm_head.weight")
        ]
        misshapen = [
            f"{name} {self.tensors[name].shape} instead of {shape}"
            for name, shape in wanted.items()
            if name in self.tensors and self.tensors[name].shape != shape
        ]
        complain(str(self.directory), missing=missing, extra=extra, misshapen=misshapen)

    def _check_tied(self) -> None:
        """A tied model may store its output layer too, if it is the embedding."""
        head, embedding = self.tensors["lm_head.weight"], self.tensors.get("model.embed_tokens.weight")
        same = embedding is not None and (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
        for row in range(0, head.shape[0] if same else 0, 1024):
            rows = min(1024, head.shape[0] - row)
            if not np.array_equal(
                self.rows("lm_head.weight", row, rows), self.rows("model.embed_tokens.weight", row, rows)
            ):
                same = False
        if not same:
            raise ConversionError(
                "lm_head.weight differs from model.embed_tokens.weight, but config.json ties them"
            )

    def rows(self, name: str, row: int, rows: int, buffer: np.ndarray | None = None) -> np.ndarray:
        """[rows, row_bytes] uint8."""
        stored = self.tensors[name]
        size = rows * stored.row_bytes
        out = (np.empty(size, np.uint8) if buffer is None else buffer[:size]).reshape(rows, stored.row_bytes)
        where = f"{self.directory / stored.file}: {name}"
        read_exactly(
            self._fds[stored.file], memoryview(out).cast("B"), stored.start + row * stored.row_bytes, where
        )
        return out

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def complain(where: str, **wrong: list[str]) -> None:
    parts = [
        f"{len(names)} {kind}: {', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"
        for kind, names in wrong.items()
        if names
    ]
    if parts:
        raise ConversionError(f"{where} does not fit config.json; {'; '.join(parts)}")


def cast(values: np.ndarray, have: str, want: str, what: str) -> np.ndarray:
    """[rows, row_bytes] uint8 of one dtype as the same of another; an overflow is an error."""
    if have == want:
        return values
    import torch

    source = torch.from_numpy(values).view(getattr(torch, have))
    result = source.to(getattr(torch, want))
    if want == "float16" and not torch.equal(result.isfinite(), source.isfinite()):
        raise ConversionError(f"{what} does not fit into float16; use --dtype bfloat16")
    return result.view(torch.uint8).numpy()


# ------------------------------------------------------------------------------------------- journaled output


@dataclass(frozen=True)
class Item:
    """A piece of output that is finished or not: ``length`` bytes of ``file`` from ``offset`` on."""

    name: str
    file: str
    offset: int
    length: int


class Progress:
    """Bytes, bytes/s and time left on stderr: a line that changes on a terminal, one every 10 s elsewhere."""

    def __init__(self, what: str, total_bytes: int, done_bytes: int = 0, quiet: bool = False):
        self.what, self.total_bytes, self.first_bytes, self.quiet = what, total_bytes, done_bytes, quiet
        self.started, self.live = time.monotonic(), sys.stderr.isatty()
        self.shown = self.started

    def show(self, done_bytes: int, last: bool = False) -> None:
        now = time.monotonic()
        if self.quiet or (not last and now - self.shown < (0.2 if self.live else 10)):
            return
        self.shown = now
        rate = (done_bytes - self.first_bytes) / max(now - self.started, 1e-9)
        left = (self.total_bytes - done_bytes) / rate if rate else 0
        share = done_bytes / self.total_bytes if self.total_bytes else 1
        bar = "#" * int(share * 30)
        amount = f"{done_bytes / 1e9:.2f}/{self.total_bytes / 1e9:.2f} GB {rate / 1e9:.2f} GB/s"
        text = f"{self.what} [{bar:<30}] {share:6.1%} {amount} ETA {left:.0f} s"
        print(
            ("\r" if self.live else "") + text,
            end="" if self.live and not last else "\n",
            file=sys.stderr,
            flush=True,
        )


class Output:
    """A directory that is written as OUTPUT.partial beside a journal, and renamed when everything is on the
    disk.
    """

    def __init__(self, path: Path, digest: str, sizes: dict[str, int], items: list[Item]):
        self.path, self.digest, self.sizes, self.items = path, digest, sizes, items
        self.partial = path.with_name(path.name + ".partial")
        self.journal = path.with_name(path.name + ".partial.journal")
        self.done: set[int] = set()
        self.complete = False
        self._fds: dict[str, int] = {}

    def __enter__(self) -> Output:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.journal_fd, self.locked = (
            os.open(self.journal, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644),
            False,
        )
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        try:
            fcntl.flock(self.journal_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.locked = os.path.samestat(os.fstat(self.journal_fd), os.stat(self.journal))
        except OSError:
            self.locked = False
        if not self.locked:
            raise ConversionError(f"another conversion is writing {self.partial}; wait for it or stop it")
        content = os.pread(self.journal_fd, os.fstat(self.journal_fd).st_size, 0)
        known = self._read_journal(content)
        if self.path.is_file() or (self.path.is_dir() and any(self.path.iterdir())):
            if not content or known is None or self.partial.exists():
                raise ConversionError(
                    f"{self.path} exists and is not overwritten; remove it or choose another --output_path"
                )
            self.complete = True  # killed between the rename and the end
            return
        if known is None and self.partial.exists():
            raise ConversionError(
                f"{self.partial} is half a conversion of other weights or with other options; "
                f"finish that one, or remove {self.partial} and {self.journal}"
            )
        self.done = known if known and self.partial.exists() else set()
        self._check_space()
        self.partial.mkdir(exist_ok=True)
        for file, size in self.sizes.items():
            fd = self._fds[file] = os.open(self.partial / file, os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(fd, size)
        # Rewritten rather than appended to: a kill may have left half a line at its end.
        lines = [json.dumps({"conversion": self.digest}), *(str(number) for number in sorted(self.done))]
        os.ftruncate(self.journal_fd, 0)
        os.write(self.journal_fd, "".join(line + "\n" for line in lines).encode())
        os.fsync(self.journal_fd)
        sync_directory(self.path.parent)

    def _read_journal(self, content: bytes) -> set[int] | None:
        """Numbers of the finished items; None for the journal of another conversion."""
        head, *lines = content.split(b"\n")[:-1] or [b""]  # what follows the last newline was cut off
        if not head:
            return set()
        try:
            if json.loads(head)["conversion"] != self.digest:
                return None
            return {int(line) for line in lines}
        except (ValueError, KeyError, TypeError):
            return None

    def _check_space(self) -> None:
        there = sum(f.stat().st_blocks * 512 for f in self.partial.glob("*")) if self.partial.exists() else 0
        needed = max(0, sum(self.sizes.values()) - there) + (16 << 20)
        disk = os.statvfs(self.path.parent)
        free = disk.f_bavail * disk.f_frsize
        if free < needed:
            raise ConversionError(
                f"{self.path.parent} has {free / 1e9:.2f} GB free, {needed / 1e9:.2f} GB are needed; "
                "nothing was written"
            )

    def fd(self, file: str) -> int:
        return self._fds[file]

    def commit(self, numbers: list[int]) -> None:
        """Sync what these items wrote, then say so in the journal, then let go of the cached pages."""
        for file in {self.items[number].file for number in numbers}:
            os.fdatasync(self._fds[file])
        os.write(self.journal_fd, "".join(f"{number}\n" for number in numbers).encode())
        os.fdatasync(self.journal_fd)
        self.done.update(numbers)
        for number in numbers:
            item = self.items[number]
            os.posix_fadvise(self._fds[item.file], item.offset, item.length, os.POSIX_FADV_DONTNEED)

    def add_file(self, name: str, content: bytes) -> None:
        """A small file, synced with all others when the output is published."""
        fd = self._fds[name] = os.open(self.partial / name, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(fd, len(content))
        write_exactly(fd, content, 0)

    def publish(self) -> None:
        for fd in self._fds.values():
            os.fsync(fd)
        sync_directory(self.partial)
        os.rename(self.partial, self.path)
        sync_directory(self.path.parent)

    def __exit__(self, *_: object) -> None:
        if self.locked and not self.partial.exists():  # published, or nothing begun
            self.journal.unlink(missing_ok=True)
        for fd in (*self._fds.values(), self.journal_fd):
            os.close(fd)
        self._fds.clear()


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def in_parallel(
    numbers: Sequence[int],
    work: Callable[[int, np.ndarray], None],
    size: Callable[[int], int],
    workers: int,
    progress: Progress,
    commit: Callable[[list[int]], None] | None = None,
) -> None:
    """``work(number, buffer)`` for all numbers in threads (their time is spent in system calls).

    The first error ends it, after a last commit of what was finished.
    """
    waiting, lock, changed = iter(numbers), threading.Lock(), threading.Event()
    finished: list[int] = []
    errors: list[BaseException] = []
    done_bytes, stop = progress.first_bytes, False

    def worker() -> None:
        nonlocal done_bytes
        buffer = np.empty(BLOCK_BYTES, np.uint8)
        try:
            while not stop and not errors:
                with lock:
                    number = next(waiting, None)
                if number is None:
                    return
                work(number, buffer)
                with lock:
                    finished.append(number)
                    done_bytes += size(number)
        except BaseException as error:
            errors.append(error)
        finally:
            changed.set()

    threads = [
        threading.Thread(target=worker, daemon=True) for _ in range(max(1, min(workers, len(numbers))))
    ]
    for thread in threads:
        thread.start()
    uncommitted = 0

    def flush(least_bytes: int) -> None:
        nonlocal uncommitted
        with lock:
            batch = finished[uncommitted:]
        if commit and batch and sum(map(size, batch)) >= least_bytes:
            commit(batch)
            uncommitted += len(batch)

    try:
        while any(thread.is_alive() for thread in threads):
            changed.wait(0.05)
            progress.show(done_bytes)
            flush(COMMIT_BYTES)
            if not any(thread.is_alive() for thread in threads):
                break
            changed.clear()
    finally:
        stop = True
        for thread in threads:
            thread.join()
        flush(0)
    if errors:
        raise errors[0]
    progress.show(done_bytes, last=True)


# -------------------------------------------------------------------------------- the two directions


@dataclass(frozen=True)
class Options:
    layout: str = "default"  # default: a chunk per expert (TEGroupedMLP); grouped: per EP rank (GroupedMLP)
    ep_size: int = 0  # grouped: at which EP size a chunk holds one rank's experts; 0 chooses
    dtype: str | None = None  # None keeps the dtype of the source
    workers: int = 4
    verify: bool = False
    shard_bytes: int = 5 * 10**9  # --to hf: largest safetensors file
    quiet: bool = False


def experts_per_chunk(model: Model, options: Options) -> int:
    if options.layout == "default" or not model.experts:
        return 1
    ep_size = options.ep_size or math.gcd(model.experts, GROUPED_EP)
    if model.experts % ep_size:
        raise ConversionError(f"--ep_size {ep_size} does not divide the {model.experts} experts of the model")
    return model.experts // ep_size


def plan_mcore(
    model: Model, source: Safetensors, options: Options
) -> tuple[list[Chunk], list[Item], dict[str, int], dict[str, tuple[str, tuple[int, ...]]]]:
    """Chunks in order of layers, the place of each, the sizes of files, dtype and shape of tensors."""
    together = experts_per_chunk(model, options)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    ordered: list[tuple[int, Chunk]] = []
    for nth, matrix in enumerate(mcore_tensors(model)):
        dtypes = {
            source.tensors[p.name].dtype: p.name
            for index in np.ndindex(*matrix.leading)
            for p in matrix.pieces(index)
        }
        if options.dtype is None and len(dtypes) > 1:
            first, second = list(dtypes.items())[:2]
            raise ConversionError(
                f"{matrix.key} would mix {first[1]} ({first[0]}) and {second[1]} ({second[0]}); "
                "choose one with --dtype"
            )
        dtype = options.dtype or next(iter(dtypes))
        tensors[matrix.key] = (dtype, matrix.size)
        for chunk in chunks_of(matrix, ITEMSIZE[dtype], together):
            layer = chunk.offsets[0] if matrix.leading else (-1 if nth == 0 else model.layers)
            ordered.append((layer, chunk))
    ordered.sort(key=lambda pair: pair[0])
    items, sizes, file_number, position = [], {}, 0, 0
    for _, chunk in ordered:
        length = Archive(tensors[chunk.key][0], chunk.sizes).length
        if position and position + length > FILE_BYTES:
            file_number, position = file_number + 1, 0
        file = f"__0_{file_number}.distcp"
        items.append(Item(f"{chunk.key} {chunk.offsets}", file, position, length))
        position = torch_dist.aligned(position + length)
        sizes[file] = position
    return [chunk for _, chunk in ordered], items, sizes, tensors


def digest_of(*parts: object) -> str:
    return hashlib.sha256(json.dumps([VERSION, *map(str, parts)]).encode()).hexdigest()


def to_mcore(
    hf_path: str | os.PathLike, output_path: str | os.PathLike, options: Options = Options()
) -> Path:
    """Convert a Hugging Face directory to a torch_dist checkpoint at ``output_path``."""
    model, source = Model.from_directory(Path(hf_path)), Safetensors(Path(hf_path))
    with contextlib.closing(source):
        source.check(model)
        chunks, items, sizes, tensors = plan_mcore(model, source, options)
        digest = digest_of(
            "mcore", model, experts_per_chunk(model, options), options.dtype, source.fingerprint.hexdigest()
        )

        def copy(number: int, buffer: np.ndarray) -> None:
            chunk, item = chunks[number], items[number]
            dtype, fd, crc = tensors[chunk.key][0], output.fd(item.file), 0
            archive = Archive(dtype, chunk.sizes)
            position = item.offset + archive.values_offset
            for name, row, rows in blocks(chunk.pieces, source):
                values = cast(
                    source.rows(name, row, rows, grow(buffer, rows * source.tensors[name].row_bytes)),
                    source.tensors[name].dtype,
                    dtype,
                    name,
                )
                data = memoryview(np.ascontiguousarray(values)).cast("B")
                crc = crc32(data, crc)
                write_exactly(fd, data, position)
                position += len(data)
            head, tail = archive.frame(crc)
            write_exactly(fd, head, item.offset)
            write_exactly(fd, tail, position)

        with Output(Path(output_path), digest, sizes, items) as output:
            if not output.complete:
                run(output, copy, options, "to mcore")
                finish_mcore(output, model, options, chunks, tensors)
                if options.verify:
                    checkpoint = Checkpoint(output.partial)
                    with contextlib.closing(checkpoint):
                        compare(model, source, checkpoint, options, "hf")
                output.publish()
    return Path(output_path)


def run(output: Output, work: Callable[[int, np.ndarray], None], options: Options, what: str) -> None:
    size = lambda number: output.items[number].length  # noqa: E731
    total = sum(item.length for item in output.items)
    progress = Progress(what, total, sum(map(size, output.done)), options.quiet)
    left = [number for number in range(len(output.items)) if number not in output.done]
    try:
        in_parallel(left, work, size, options.workers, progress, output.commit)
    except OSError as error:
        raise ConversionError(
            f"{output.partial}: {error}; what is finished is kept, run the same command again"
        ) from error


def blocks(pieces: Sequence[Piece], source: Safetensors) -> Iterator[tuple[str, int, int]]:
    """Cut pieces into (name, row, rows) of about a block."""
    for piece in pieces:
        rows_at_once = max(1, BLOCK_BYTES // max(1, source.tensors[piece.name].row_bytes))
        for row in range(piece.row, piece.row + piece.rows, rows_at_once):
            yield piece.name, row, min(rows_at_once, piece.row + piece.rows - row)


def grow(buffer: np.ndarray, size: int) -> np.ndarray:
    return buffer if len(buffer) >= size else np.empty(size, np.uint8)


def finish_mcore(output: Output, model: Model, options: Options, chunks: list[Chunk], tensors: dict) -> None:
    empty = torch_dist.object_archive([None])
    output.add_file("__0_extra.distcp", empty)
    state = Place("__0_extra.distcp", 0, len(empty))
    placed = (
        (chunk.key, chunk.offsets, chunk.sizes, Place(item.file, item.offset, item.length))
        for chunk, item in zip(chunks, output.items, strict=True)
    )
    output.add_file(
        ".metadata", torch_dist.metadata(tensors, placed, ((key, state) for key in extra_states(model)))
    )
    output.add_file("common.pt", torch_dist.object_archive({}))
    about = {
        "by": "converter_hf_to_mcore.py",
        "layout": options.layout,
        "experts_per_chunk": experts_per_chunk(model, options),
    }
    output.add_file("converted_from.json", json.dumps(about | {"model": asdict(model)}, indent=1).encode())
    output.add_file("metadata.json", json.dumps(torch_dist.FORMAT).encode())


@dataclass(frozen=True)
class Origin:
    """Rows of a Hugging Face tensor from ``hf_row`` on, as rows of a Megatron tensor at ``index`` from
    ``row`` on.
    """

    key: str
    index: tuple[int, ...]
    row: int
    hf_row: int
    rows: int


def origins(model: Model) -> dict[str, list[Origin]]:
    """For each Hugging Face tensor, where Megatron keeps its rows."""
    result: dict[str, list[Origin]] = {name: [] for name in hf_tensors(model)}
    for matrix in mcore_tensors(model):
        for index in np.ndindex(*matrix.leading):
            row = 0
            for piece in matrix.pieces(index):
                result[piece.name].append(Origin(matrix.key, index, row, piece.row, piece.rows))
                row += piece.rows
    return {name: sorted(parts, key=lambda part: part.hf_row) for name, parts in result.items()}


def check_checkpoint(model: Model, checkpoint: Checkpoint) -> None:
    """Refuse missing, extra and misshapen tensors; a vocabulary padded by Megatron is cut."""
    wanted = {matrix.key: matrix.size for matrix in mcore_tensors(model)}
    padded = ("embedding.word_embeddings.weight", "output_layer.weight")
    misshapen = []
    for key, size in wanted.items():
        dtype, found = checkpoint.tensors.get(key, ("bfloat16", size))
        if dtype not in ITEMSIZE:
            raise ConversionError(
                f"{checkpoint.directory}: {key} has dtype {dtype}; {', '.join(ITEMSIZE)} are supported"
            )
        if found != size and not (key in padded and found[0] > size[0] and found[1:] == size[1:]):
            misshapen.append(f"{key} {found} instead of {size}")
    complain(
        str(checkpoint.directory),
        missing=[key for key in wanted if key not in checkpoint.tensors],
        extra=[key for key in checkpoint.tensors if key not in wanted and not key.startswith(NOT_THE_MODEL)],
        misshapen=misshapen,
    )


def read_hf_rows(parts: list[Origin], checkpoint: Checkpoint, row: int, out: np.ndarray) -> None:
    """Fill ``out`` [rows, row_bytes] from ``row`` on of the Hugging Face tensor that ``parts`` make up."""
    for part in parts:
        first, last = max(row, part.hf_row), min(row + len(out), part.hf_row + part.rows)
        if first < last:
            checkpoint.read_rows(
                part.key, part.index, part.row + first - part.hf_row, out[first - row : last - row]
            )


def to_hf(
    mcore_path: str | os.PathLike,
    hf_path: str | os.PathLike,
    output_path: str | os.PathLike,
    options: Options = Options(),
) -> Path:
    """Convert a torch_dist checkpoint, sharded in any way, to safetensors with the configuration of
    ``hf_path``.
    """
    hf_path = Path(hf_path)
    model, checkpoint = Model.from_directory(hf_path), Checkpoint(mcore_path)
    with contextlib.closing(checkpoint):
        check_checkpoint(model, checkpoint)
        parts = origins(model)
        items, sizes, headers = plan_hf(model, checkpoint, parts, options)
        shapes = hf_tensors(model)
        stamp = (Path(mcore_path) / ".metadata").stat().st_mtime_ns
        digest = digest_of(
            "hf", model, options.dtype, options.shard_bytes, stamp, sorted(checkpoint.tensors.items())
        )

        def copy(number: int, buffer: np.ndarray) -> None:
            item = items[number]
            have = checkpoint.tensors[parts[item.name][0].key][0]
            want = options.dtype or have
            rows, row_bytes = shapes[item.name][0], math.prod(shapes[item.name][1:]) * ITEMSIZE[have]
            rows_at_once, position = max(1, BLOCK_BYTES // row_bytes), item.offset
            for row in range(0, rows, rows_at_once):
                count = min(rows_at_once, rows - row)
                values = grow(buffer, count * row_bytes)[: count * row_bytes].reshape(count, row_bytes)
                read_hf_rows(parts[item.name], checkpoint, row, values)
                data = memoryview(np.ascontiguousarray(cast(values, have, want, item.name))).cast("B")
                write_exactly(output.fd(item.file), data, position)
                position += len(data)

        with Output(Path(output_path), digest, sizes, items) as output:
            if not output.complete:
                run(output, copy, options, "to hf")
                for file, header in headers.items():
                    write_exactly(output.fd(file), header, 0)
                finish_hf(output, hf_path, options)
                if options.verify:
                    written = Safetensors(output.partial)
                    with contextlib.closing(written):
                        written.check(model)
                        compare(model, written, checkpoint, options, "mcore")
                output.publish()
    return Path(output_path)


def plan_hf(
    model: Model, checkpoint: Checkpoint, parts: dict[str, list[Origin]], options: Options
) -> tuple[list[Item], dict[str, int], dict[str, bytes]]:
    """Place of every tensor, the files' sizes and the files' headers."""
    files: list[dict[str, tuple[str, tuple[int, ...], int]]] = [{}]
    for name, shape in hf_tensors(model).items():
        dtype = options.dtype or checkpoint.tensors[parts[name][0].key][0]
        if {checkpoint.tensors[part.key][0] for part in parts[name]} != {
            checkpoint.tensors[parts[name][0].key][0]
        }:
            raise ConversionError(f"{name} is stored in different dtypes; save the checkpoint again")
        size = math.prod(shape) * ITEMSIZE[dtype]
        if files[-1] and sum(entry[2] for entry in files[-1].values()) + size > options.shard_bytes:
            files.append({})
        files[-1][name] = (dtype, shape, size)
    items, sizes, headers = [], {}, {}
    for nth, content in enumerate(files):
        file = f"model-{nth + 1:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        entries: dict = {"__metadata__": {"format": "pt"}}
        position = 0
        for name, (dtype, shape, size) in content.items():
            entries[name] = {
                "dtype": DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [position, position + size],
            }
            position += size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = len(text).to_bytes(8, "little") + text
        start = len(headers[file])
        items += [
            Item(name, file, start + entries[name]["data_offsets"][0], content[name][2]) for name in content
        ]
        sizes[file] = start + position
    return items, sizes, headers


def finish_hf(output: Output, hf_path: Path, options: Options) -> None:
    """The index, and everything of the Hugging Face directory that is not weights."""
    if len(output.sizes) > 1:
        total = sum(item.length for item in output.items)
        index = {
            "metadata": {"total_size": total},
            "weight_map": {item.name: item.file for item in output.items},
        }
        output.add_file("model.safetensors.index.json", json.dumps(index, indent=2).encode())
    for path in sorted(hf_path.iterdir()):
        if not stat.S_ISREG(path.stat().st_mode) or path.name.endswith(WEIGHT_SUFFIXES):
            continue
        if path.name == "config.json" and options.dtype:
            config = json.loads(path.read_text())
            names = [key for key in ("torch_dtype", "dtype") if key in config] or ["torch_dtype"]
            config |= dict.fromkeys(names, options.dtype)
            output.add_file(path.name, json.dumps(config, indent=2).encode())
        else:
            output.add_file(path.name, path.read_bytes())


def compare(model: Model, hf: Safetensors, checkpoint: Checkpoint, options: Options, source: str) -> None:
    """Read both sides again, row by row, through the checkpoint's own index: any difference is an error.

    ``source`` (hf or mcore) is the side whose values are cast before they are compared.
    """
    parts, names = origins(model), list(hf_tensors(model))

    def check(number: int, buffer: np.ndarray) -> None:
        name = names[number]
        stored, dtype = hf.tensors[name], checkpoint.tensors[parts[name][0].key][0]
        row_bytes = stored.row_bytes // ITEMSIZE[stored.dtype] * ITEMSIZE[dtype]
        rows_at_once = max(1, BLOCK_BYTES // stored.row_bytes)
        for row in range(0, stored.shape[0], rows_at_once):
            rows = min(rows_at_once, stored.shape[0] - row)
            theirs = hf.rows(name, row, rows, grow(buffer, rows * stored.row_bytes))
            ours = np.empty((rows, row_bytes), np.uint8)
            read_hf_rows(parts[name], checkpoint, row, ours)
            if source == "hf":
                theirs = cast(theirs, stored.dtype, dtype, name)
            else:
                ours = cast(ours, dtype, stored.dtype, name)
            if not np.array_equal(ours, theirs):
                wrong = row + int(np.flatnonzero((ours != theirs).any(-1))[0])
                raise ConversionError(
                    f"{name} differs from {parts[name][0].key} in row {wrong}; the copy is bad"
                )

    def size(number: int) -> int:
        stored = hf.tensors[names[number]]
        return math.prod(stored.shape) * ITEMSIZE[stored.dtype]

    progress = Progress("verify", sum(map(size, range(len(names)))), quiet=options.quiet)
    in_parallel(range(len(names)), check, size, options.workers, progress)


def verify(hf_path: str | os.PathLike, mcore_path: str | os.PathLike, options: Options = Options()) -> None:
    """Check that a checkpoint holds exactly the weights of a Hugging Face directory (cast to its dtype)."""
    model, hf, checkpoint = (
        Model.from_directory(Path(hf_path)),
        Safetensors(Path(hf_path)),
        Checkpoint(mcore_path),
    )
    with contextlib.closing(hf), contextlib.closing(checkpoint):
        hf.check(model)
        check_checkpoint(model, checkpoint)
        compare(model, hf, checkpoint, replace(options, dtype=None), "hf")

"""Qwen2 and Qwen3 weights between Hugging Face safetensors and a Megatron torch_dist checkpoint, as a list of
byte ranges.

Frameworks convert by building both models in memory. Yet no value changes: a Megatron tensor is rows of
Hugging Face tensors in another order (`qwen3`). config.json and the safetensors headers alone say which rows
go where, and the place of every chunk in the output is known too (`torch_dist`). So threads (`workers`) copy
them in any order, block by block, into a directory that survives kills (`journal`).

Invariants (tests/test_converter.py): every tensor of the model is read exactly once, and missing, extra or
misshapen ones are errors; the output depends on input and options only, not on workers, kills or resumes;
nothing is overwritten; the output directory appears complete, by one rename, or not at all. Cost: O(bytes)
time, one read and one write; memory O(workers * block + number of chunks), whatever the model's size.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

try:  # ten times the speed of zlib's, which costs a conversion a fifth of its time
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

from ascend_rl.settings.model import Model
from ascend_rl.settings.switch import CannotWork
from ascend_rl.weights import torch_dist
from ascend_rl.weights.files import Place, write_exactly
from ascend_rl.weights.journal import Output
from ascend_rl.weights.qwen3 import (
    PADDED,
    Chunk,
    Rows,
    chunks_of,
    clip,
    extra_states,
    hf_stacks,
    hf_tensors,
    mcore_tensors,
    read_model,
)
from ascend_rl.weights.safetensors import Described, Safetensors, Source, header, space_for
from ascend_rl.weights.torch_dist import ITEMSIZE, Archive, Checkpoint
from ascend_rl.weights.workers import Progress, Scratch, in_parallel

VERSION = 1
BLOCK_BYTES = 1 << 20  # what a worker holds at a time; about the size of an L2 cache
CHUNK_BYTES = 256 << 20  # larger tensors (embeddings) are split by rows: a reader loads whole chunks
FILE_BYTES = 4 << 30
GROUPED_EP = 32  # --layout grouped: experts of one rank at this EP size share a chunk
WIDER = {"float16": "bfloat16", "bfloat16": "float32"}
NAMED = 8  # how many wrong tensors an error names
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
        raise CannotWork(f"--ep_size {ep_size} does not divide the {model.experts} experts of the model")
    return model.experts // ep_size


# -------------------------------------------------------------------- is it this model?


def check_hf(model: Model, source: Source) -> None:
    """Refuse missing, extra and misshapen tensors, by name."""
    wanted, found = hf_tensors(model), source.tensors
    if model.tied and "lm_head.weight" in found:
        _check_tied(source)
        wanted["lm_head.weight"] = found["lm_head.weight"].shape
    complain(
        source.directory,
        missing=[name for name in wanted if name not in found],
        extra=[name for name in found if name not in wanted],
        misshapen=[
            f"{name} {found[name].shape} instead of {shape}"
            for name, shape in wanted.items()
            if name in found and found[name].shape != shape
        ],
    )


def _check_tied(source: Source) -> None:
    """A tied model may store its output layer too, if it is the embedding."""
    head, embedding = (source.tensors.get(n) for n in ("lm_head.weight", "model.embed_tokens.weight"))
    same = embedding is not None and (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    if not same or any(
        not np.array_equal(
            source.rows("lm_head.weight", *rows), source.rows("model.embed_tokens.weight", *rows)
        )
        for rows in bands(head.shape[0], head.row_bytes)
    ):
        raise CannotWork("lm_head.weight differs from model.embed_tokens.weight, but config.json ties them")


def check_checkpoint(model: Model, checkpoint: Checkpoint) -> None:
    """Refuse missing, extra and misshapen tensors; a vocabulary padded by Megatron is cut."""
    wanted = {matrix.key: matrix.size for matrix in mcore_tensors(model)}
    misshapen = []
    for key, size in wanted.items():
        dtype, found = checkpoint.tensors.get(key, ("bfloat16", size))
        if dtype not in ITEMSIZE:
            raise CannotWork(
                f"{checkpoint.directory}: {key} has dtype {dtype}; {', '.join(ITEMSIZE)} are supported"
            )
        if found != size and not (key in PADDED and found[0] > size[0] and found[1:] == size[1:]):
            misshapen.append(f"{key} {found} instead of {size}")
    complain(
        checkpoint.directory,
        missing=[key for key in wanted if key not in checkpoint.tensors],
        extra=[key for key in checkpoint.tensors if key not in wanted and not key.startswith(NOT_THE_MODEL)],
        misshapen=misshapen,
    )


def complain(where: Path, **wrong: list[str]) -> None:
    parts = [
        f"{len(names)} {kind}: {', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"
        for kind, names in wrong.items()
        if names
    ]
    if parts:
        raise CannotWork(f"{where} does not fit config.json; {'; '.join(parts)}")


# -------------------------------------------------------------------- copying rows


def bands(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut rows into (first row, rows) of about a block.

    >>> list(bands(5, BLOCK_BYTES // 2))
    [(0, 2), (2, 2), (4, 1)]
    """
    at_once = max(1, BLOCK_BYTES // row_bytes)
    for row in range(0, rows, at_once):
        yield row, min(at_once, rows - row)


def cast(values: np.ndarray, have: str, want: str, what: str) -> np.ndarray:
    """[rows, row_bytes] uint8 of one dtype as the same of another; an overflow is an error."""
    if have == want:
        return values
    import torch

    source = torch.from_numpy(values).view(getattr(torch, have))
    result = source.to(getattr(torch, want))
    if ITEMSIZE[want] == 2 and not torch.equal(result.isfinite(), source.isfinite()):
        raise CannotWork(f"{what} does not fit into {want}; use --dtype {WIDER[want]}")
    return result.view(torch.uint8).numpy()


def read_rows(stack: Sequence[Rows], checkpoint: Checkpoint, row: int, out: np.ndarray) -> None:
    """Fill ``out`` [rows, row_bytes] from ``row`` on of the Hugging Face tensor that is this ``stack``."""
    filled = 0
    for part in clip(stack, row, row + len(out)):
        checkpoint.read_rows(part.name, part.index, part.row, out[filled : filled + part.rows])
        filled += part.rows


def write_all(output: Output, copy, options: Options, what: str) -> None:
    """``copy(number, scratch)`` for each place of ``output`` that is not finished."""
    sizes = [place.length for place in output.places]
    left = [number for number in range(len(sizes)) if number not in output.done]
    progress = Progress(what, sum(sizes), sum(sizes[number] for number in output.done), options.quiet)
    try:
        in_parallel(copy, left, sizes, options.workers, progress, output.commit)
    except OSError as error:
        raise CannotWork(
            f"{output.partial}: {error}; what is finished is kept, run the same command again"
        ) from error


def digest_of(*parts: object) -> str:
    return hashlib.sha256(json.dumps([VERSION, *map(str, parts)]).encode()).hexdigest()


# -------------------------------------------------------------------- Hugging Face to Megatron


@dataclass(frozen=True)
class McorePlan:
    """The content of a checkpoint before it is written.

    Attributes:
        tensors: key -> (dtype, shape).
        chunks, places: what is copied, in order of layers, and where each archive lies.
        sizes: bytes of each file.
    """

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    chunks: list[Chunk]
    places: list[Place]
    sizes: dict[str, int]

    def archive(self, number: int) -> Archive:
        chunk = self.chunks[number]
        return Archive(self.tensors[chunk.key][0], chunk.sizes)


def plan_mcore(model: Model, source: Safetensors, options: Options) -> McorePlan:
    tensors, chunks = {}, []
    for matrix in mcore_tensors(model):
        names = (part.name for index in np.ndindex(*matrix.leading) for part in matrix.stack(index))
        dtypes = {source.tensors[name].dtype: name for name in names}
        if options.dtype is None and len(dtypes) > 1:
            first, second = list(dtypes.items())[:2]
            raise CannotWork(
                f"{matrix.key} would mix {first[1]} ({first[0]}) and {second[1]} ({second[0]}); "
                "choose one with --dtype"
            )
        dtype = options.dtype or next(iter(dtypes))
        after_layers = -1 if not tensors else model.layers  # the embedding comes first
        tensors[matrix.key] = (dtype, matrix.size)
        for chunk in chunks_of(matrix, ITEMSIZE[dtype], experts_per_chunk(model, options), CHUNK_BYTES):
            chunks.append((chunk.offsets[0] if matrix.leading else after_layers, chunk))
    plan = McorePlan(tensors, [chunk for _, chunk in sorted(chunks, key=lambda pair: pair[0])], [], {})
    file_number, position = 0, 0
    for number in range(len(plan.chunks)):
        length = plan.archive(number).length
        if position and position + length > FILE_BYTES:
            file_number, position = file_number + 1, 0
        plan.places.append(Place(f"__0_{file_number}.distcp", position, length))
        position = torch_dist.aligned(position + length)
        plan.sizes[plan.places[-1].file] = position
    return plan


def to_mcore(
    hf_path: str | os.PathLike, output_path: str | os.PathLike, options: Options = Options()
) -> Path:
    """Convert a Hugging Face directory to a torch_dist checkpoint at ``output_path``."""
    model, source = read_model(hf_path), Safetensors(Path(hf_path))
    with contextlib.closing(source):
        check_hf(model, source)
        plan = plan_mcore(model, source, options)
        digest = digest_of(
            "mcore", model, experts_per_chunk(model, options), options.dtype, source.fingerprint()
        )

        def copy(number: int, scratch: Scratch) -> None:
            archive, place = plan.archive(number), plan.places[number]
            fd, crc, position = output.fd(place.file), 0, place.offset + archive.values_offset
            for part in plan.chunks[number].stack:
                stored = source.tensors[part.name]
                for row, rows in bands(part.rows, stored.row_bytes):
                    values = source.rows(part.name, part.row + row, rows, scratch(rows * stored.row_bytes))
                    values = np.ascontiguousarray(cast(values, stored.dtype, archive.dtype, part.name))
                    data = memoryview(values).cast("B")
                    crc = crc32(data, crc)
                    write_exactly(fd, data, position)
                    position += len(data)
            head, tail = archive.frame(crc)
            write_exactly(fd, head, place.offset)
            write_exactly(fd, tail, position)

        with Output(Path(output_path), digest, plan.sizes, plan.places, [source.directory]) as output:
            if not output.complete:
                write_all(output, copy, options, "to mcore")
                finish_mcore(output, model, options, plan)
                if options.verify:
                    checkpoint = Checkpoint(output.partial)
                    with contextlib.closing(checkpoint):
                        compare(source, MegatronWeights(model, checkpoint), options)
                output.publish()
    return Path(output_path)


def finish_mcore(output: Output, model: Model, options: Options, plan: McorePlan) -> None:
    """Everything of a checkpoint that is not weights."""
    empty = torch_dist.object_archive([None])
    output.add_file("__0_extra.distcp", empty)
    state = Place("__0_extra.distcp", 0, len(empty))
    chunks = (
        (chunk.key, chunk.offsets, chunk.sizes, place)
        for chunk, place in zip(plan.chunks, plan.places, strict=True)
    )
    states = ((key, state) for key in extra_states(model))
    output.add_file(".metadata", torch_dist.metadata(plan.tensors, chunks, states))
    output.add_file("common.pt", torch_dist.object_archive({}))
    about = {
        "by": "converter_hf_to_mcore.py",
        "layout": options.layout,
        "experts_per_chunk": experts_per_chunk(model, options),
    }
    output.add_file("converted_from.json", json.dumps(about | {"model": asdict(model)}, indent=1).encode())
    output.add_file("metadata.json", json.dumps(torch_dist.FORMAT).encode())


# -------------------------------------------------------------------- Megatron to Hugging Face


@dataclass(frozen=True)
class HfPlan:
    """The content of safetensors files before they are written.

    Attributes:
        names, places: what is copied, and where its values lie.
        headers: what each file begins with.
        sizes: bytes of each file.
    """

    names: list[str]
    places: list[Place]
    headers: dict[str, bytes]
    sizes: dict[str, int]


class MegatronWeights:
    """A Megatron checkpoint by Hugging Face's names: a `Source`."""

    def __init__(self, model: Model, checkpoint: Checkpoint):
        self.directory, self.checkpoint, self.stacks = checkpoint.directory, checkpoint, hf_stacks(model)
        self.tensors: dict[str, Described] = {}
        for name, shape in hf_tensors(model).items():
            dtypes = {checkpoint.tensors[part.name][0] for part in self.stacks[name]}
            if len(dtypes) > 1:
                raise CannotWork(f"{name} is stored in different dtypes; save the checkpoint again")
            self.tensors[name] = Described(dtypes.pop(), shape)

    def rows(self, name: str, row: int, rows: int, buffer: np.ndarray | None = None) -> np.ndarray:
        out = space_for(rows, self.tensors[name].row_bytes, buffer)
        read_rows(self.stacks[name], self.checkpoint, row, out)
        return out

    def fingerprint(self) -> str:
        return self.checkpoint.fingerprint()

    def close(self) -> None:
        self.checkpoint.close()


def plan_hf(model: Model, source: Source, options: Options) -> HfPlan:
    files: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    file_bytes = 0
    for name, shape in hf_tensors(model).items():
        dtype = options.dtype or source.tensors[name].dtype
        size = math.prod(shape) * ITEMSIZE[dtype]
        if files[-1] and file_bytes + size > options.shard_bytes:
            files.append({})
            file_bytes = 0
        files[-1][name] = (dtype, shape)
        file_bytes += size
    plan = HfPlan([name for content in files for name in content], [], {}, {})
    for nth, content in enumerate(files, 1):
        file = f"model-{nth:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        plan.headers[file], ranges = header(content)
        plan.places.extend(Place(file, offset, length) for offset, length in ranges)
        plan.sizes[file] = sum(ranges[-1])
    return plan


def to_hf(
    mcore_path: str | os.PathLike,
    hf_path: str | os.PathLike,
    output_path: str | os.PathLike,
    options: Options = Options(),
) -> Path:
    """Convert a torch_dist checkpoint, sharded in any way, to safetensors with the configuration of
    ``hf_path``.
    """
    model, checkpoint = read_model(hf_path), Checkpoint(mcore_path)
    with contextlib.closing(checkpoint):
        check_checkpoint(model, checkpoint)
        return write_hf(model, MegatronWeights(model, checkpoint), Path(hf_path), Path(output_path), options)


def write_hf(model: Model, source: Source, hf_path: Path, output_path: Path, options: Options) -> Path:
    """Write a source that was checked as safetensors with the configuration of ``hf_path``."""
    plan, others = plan_hf(model, source, options), other_files(hf_path, options)
    digest = digest_of("hf", model, options.dtype, options.shard_bytes, source.fingerprint())

    def copy(number: int, scratch: Scratch) -> None:
        name, place = plan.names[number], plan.places[number]
        stored, position = source.tensors[name], place.offset
        for row, rows in bands(stored.shape[0], stored.row_bytes):
            values = source.rows(name, row, rows, scratch(rows * stored.row_bytes))
            values = np.ascontiguousarray(cast(values, stored.dtype, options.dtype or stored.dtype, name))
            data = memoryview(values).cast("B")
            write_exactly(output.fd(place.file), data, position)
            position += len(data)

    with Output(output_path, digest, plan.sizes, plan.places, [source.directory, hf_path]) as output:
        if not output.complete:
            write_all(output, copy, options, "to hf")
            finish_hf(output, others, plan)
            if options.verify:
                written = Safetensors(output.partial)
                with contextlib.closing(written):
                    check_hf(model, written)
                    compare(source, written, options)
            output.publish()
    return output_path


def other_files(hf_path: Path, options: Options) -> dict[str, bytes]:
    """Everything of the Hugging Face directory that is not weights, as it is with the output's dtype.

    Raises:
        CannotWork: a file cannot be read.
    """
    files = {}
    try:
        for path in sorted(hf_path.iterdir()):
            if path.name.endswith(WEIGHT_SUFFIXES) or not stat.S_ISREG(path.stat().st_mode):
                continue
            files[path.name] = path.read_bytes()
    except OSError as error:
        raise CannotWork(f"{error.filename}: {error.strerror}; get it again, or remove it") from error
    if options.dtype:
        config = json.loads(files["config.json"])
        names = [key for key in ("torch_dtype", "dtype") if key in config] or ["torch_dtype"]
        files["config.json"] = json.dumps(config | dict.fromkeys(names, options.dtype), indent=2).encode()
    return files


def finish_hf(output: Output, others: dict[str, bytes], plan: HfPlan) -> None:
    """Headers, index, and everything that is not weights."""
    for file, content in plan.headers.items():
        write_exactly(output.fd(file), content, 0)
    if len(plan.sizes) > 1:
        where = {name: place.file for name, place in zip(plan.names, plan.places, strict=True)}
        total = sum(place.length for place in plan.places)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        output.add_file("model.safetensors.index.json", json.dumps(index, indent=2).encode())
    for name, content in others.items():
        output.add_file(name, content)


# -------------------------------------------------------------------- verifying


def compare(source: Source, copy: Source, options: Options) -> None:
    """Read both sides again, row by row, through the indexes of their own: any difference is an error.

    The values of ``source`` are cast to the dtype that ``copy`` has them in.
    """
    names = [name for name in copy.tensors if name in source.tensors]
    sizes = [math.prod(copy.tensors[n].shape) * ITEMSIZE[copy.tensors[n].dtype] for n in names]

    def check(number: int, scratch: Scratch) -> None:
        name = names[number]
        have, want = source.tensors[name], copy.tensors[name]
        for row, rows in bands(have.shape[0], have.row_bytes):
            original = source.rows(name, row, rows, scratch(rows * have.row_bytes))
            expected = cast(original, have.dtype, want.dtype, name)
            found = copy.rows(name, row, rows)
            if not np.array_equal(expected, found):
                wrong = row + int(np.flatnonzero((expected != found).any(-1))[0])
                raise CannotWork(
                    f"{name} differs between {source.directory} and {copy.directory} in row {wrong}; "
                    "the copy is bad"
                )

    progress = Progress("verify", sum(sizes), quiet=options.quiet)
    in_parallel(check, range(len(names)), sizes, options.workers, progress)


def verify(hf_path: str | os.PathLike, mcore_path: str | os.PathLike, options: Options = Options()) -> None:
    """Check that a checkpoint holds exactly the weights of a Hugging Face directory (cast to its dtype)."""
    model = read_model(hf_path)
    hf, checkpoint = Safetensors(Path(hf_path)), Checkpoint(mcore_path)
    with contextlib.closing(hf), contextlib.closing(checkpoint):
        check_hf(model, hf)
        check_checkpoint(model, checkpoint)
        compare(hf, MegatronWeights(model, checkpoint), options)

"""Rules about what is in the files of a run: data, weights, tokenizers, and the checkpoint to resume from.

A download that left Git LFS pointers, a data set that was never converted, a batch larger than the data: each
ends a run after Ray, the models and the engines have started. Here the files are opened, as far as they are
on this machine: the schema and the rows of a parquet file, the header of each shard of weights.

Invariants (tests/test_lint_files.py): no finding on what ascend_rl.data and Hugging Face write; what is not
on this machine is not judged. Cost: a few reads a file, and the column data_source where there is no reward.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ascend_rl.lint import pinned
from ascend_rl.lint.setup import LOADS_WEIGHTS, MEGATRON, ROLLOUT, Hit, Setup, local_path, rule

DATA = ("data.train_files", "data.val_files")
POINTER = b"version https://git-lfs"
DOWNLOAD = "download it again (bash download_weights.sh MODEL --out DIR resumes), or: git lfs pull"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZERS = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken", "tokenizer*.py")
SUFFIXES = (".parquet", ".json", ".jsonl")
ROWS = 100_000  # of a file, in which data_source is looked at
MOST_JSON = 100 << 20  # bytes that are read here; of larger files nothing is known


def problem(file: Path) -> str:
    """Why the content of a file cannot be what its name says; empty where it may be."""
    try:
        return _problem(file, file.stat().st_size)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def _problem(file: Path, size: int) -> str:
    with file.open("rb") as stream:
        start = stream.read(64)
        if not start:
            return "it is empty"
        if start.startswith(POINTER):
            return "it is a Git LFS pointer, not the file"
        if file.suffix == ".parquet":
            stream.seek(max(size - 4, 0))
            whole = start[:4] == b"PAR1" == stream.read(4) and size >= 12
            return "" if whole else "it is not parquet" if start[:4] != b"PAR1" else "its end is missing"
        if file.suffix == ".safetensors":
            return _cut_off(file, size)
    return ""


def _cut_off(file: Path, size: int) -> str:
    """Of safetensors: the header says how long the file is."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= size - 8:
            return "it is not safetensors, or its header is cut off"
        try:
            header = json.loads(stream.read(length))
            ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return "its header is not that of safetensors"
    missing = 8 + length + max(ends, default=0) - size
    return f"{missing} bytes of it are missing" if missing > 0 else ""


# Data.


def data_files(s: Setup, key: str) -> list[Path]:
    """The files of a key that are on this machine, where verl's own dataset reads them."""
    if key not in s.given or s.get("data.custom_cls.path"):
        return []
    value = s.get(key)
    paths = [local_path(one) for one in (value if isinstance(value, list) else [value])]
    read = (path for path in paths if path and path.suffix in SUFFIXES and path.is_file())
    return [path for path in read if not s.made(path)]


@cache
def table(file: Path, stamp: tuple[int, int]) -> tuple[int, dict[str, str], str]:
    """(rows, {column: type}, what is wrong) of a parquet or JSON file; ``stamp`` is for the cache alone."""
    if why := problem(file):
        return 0, {}, why
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet

            found = pyarrow.parquet.ParquetFile(file)
            return found.metadata.num_rows, {one.name: str(one.type) for one in found.schema_arrow}, ""
        if file.stat().st_size > MOST_JSON:
            return -1, {}, ""
        with file.open(encoding="utf-8") as stream:
            if file.suffix == ".jsonl":
                rows = [json.loads(line) for line in stream if line.strip()]
            else:
                text = stream.read()
                given = json.loads(text) if text.lstrip().startswith("[") else None
                rows = given or [json.loads(line) for line in text.splitlines() if line.strip()]
        return len(rows), {name: _kind(value) for row in rows[:100] for name, value in row.items()}, ""
    except ImportError:
        return -1, {}, ""
    except (ValueError, OSError, AttributeError) as error:  # ArrowInvalid is a ValueError
        return 0, {}, f"it cannot be read: {str(error).splitlines()[0][:120]}"


def _kind(value: Any) -> str:
    """The type of a JSON value, as pyarrow writes it."""
    if isinstance(value, list):
        return f"list<element: {_kind(value[0])}>" if value else "list<element: null>"
    if isinstance(value, dict):
        return f"struct<{', '.join(f'{name}: {_kind(one)}' for name, one in value.items())}>"
    return "string" if isinstance(value, str) else type(value).__name__


def _read(file: Path) -> tuple[int, dict[str, str], str]:
    status = file.stat()
    return table(file, (status.st_mtime_ns, status.st_size))


def _rewarded(s: Setup) -> bool:
    """Whether a rule scores the responses, by a reward manager of verl; a reward model needs no truth."""
    model = s.get("reward.reward_model.enable") or s.get("reward_model.enable")
    own = s.get("reward.reward_manager.source", "register") != "register" or s.get(
        "reward_model.reward_loop_source"
    )
    return not model and not own


def _columns(s: Setup, kinds: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(what is wrong, what to do) with the columns of a file."""
    prompt, convert = s.get("data.prompt_key", "prompt"), "convert it: python -m ascend_rl.data -h"
    names = ", ".join(sorted(kinds)[:8])
    if prompt not in kinds:
        chats = [name for name, kind in kinds.items() if "role:" in kind]
        fix = f"data.prompt_key={chats[0]}, or {convert}" if chats else convert
        yield f"it has no column '{prompt}', only {names}", fix
        return
    if not re.search(r"list|array|null", kinds[prompt]):
        yield f"'{prompt}' is {kinds[prompt]}, not a list of messages with role and content", convert
    if _rewarded(s):
        wanted = {"data_source": "", "reward_model": "ground_truth"}
        for name, inner in wanted.items():
            if name not in kinds:
                yield f"it has no column '{name}', which the reward manager reads", convert
            elif inner and "struct" in kinds[name] and f"{inner}:" not in kinds[name]:
                yield f"'{name}' has no '{inner}', which the reward manager reads", convert


@rule(
    "data.content",
    "error",
    "data files hold rows in the form that verl reads: prompt, data_source, reward_model.ground_truth",
    why="the run ends when the data are loaded, or with the first reward",
    fix="download or convert it again: python -m ascend_rl.data -h",
)
def data_content(s):
    for key in DATA:
        for file in data_files(s, key):
            rows, kinds, why = _read(file)
            if why:
                pointer = "pointer" in why or "missing" in why or "empty" in why
                yield key, f"{file}: {why}", DOWNLOAD if pointer else "give a parquet or JSON file"
            elif rows >= 0 and kinds:
                yield from ((key, f"{file}: {what}", fix) for what, fix in _columns(s, kinds))


@rule(
    "data.rows",
    "error",
    "the data fill a batch",
    why="verl drops the last batch where it is not full and stops: 'Train dataloader is empty!'",
    fix="lower data.train_batch_size (and ppo_mini_batch_size), or give more data",
)
def data_rows(s):
    batch = s.number("data.gen_batch_size", 0) or s.number("data.train_batch_size")
    name = "data.gen_batch_size" if s.get("data.gen_batch_size") else "data.train_batch_size"
    for key, least, most in (
        (DATA[0], batch, "data.train_max_samples"),
        (DATA[1], 1, "data.val_max_samples"),
    ):
        limit, value = s.number(most, -1), s.get(key)
        if key == DATA[0] and 0 < limit < least:
            yield most, f"{limit} rows, and {name} is {least}"
            continue
        files = data_files(s, key)
        found = [_read(file) for file in files]
        whole = len(files) == len(value if isinstance(value, list) else [value])
        rows = sum(one[0] for one in found)
        if files and whole and rows < least and all(one[0] >= 0 and not one[2] for one in found):
            where = f"{name} is {least}" if key == DATA[0] else "the validation needs one"
            fix = "give validation data" if key == DATA[1] else ""
            yield (key, f"{rows} rows, and {where}", *([fix] if fix else []))


@cache
def known_sources() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The data sources that verl's own reward knows: names, and how others may begin."""
    names: list[str] = []
    begins: list[str] = []
    for file in pinned.sources("verl", "utils/reward_score/__init__.py"):
        function = next(
            node
            for node in ast.parse(file.read_text()).body
            if getattr(node, "name", "") == "default_compute_score"
        )
        for node in ast.walk(function):
            if isinstance(node, ast.Compare) and ast.unparse(node.left) == "data_source":
                names += [item.value for item in ast.walk(node) if isinstance(item, ast.Constant)]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "data_source.startswith":
                begins += [item.value for item in ast.walk(node) if isinstance(item, ast.Constant)]
    return tuple(names), tuple(begins)


@cache
def sources_of(file: Path, stamp: tuple[int, int]) -> frozenset[str]:
    """The values of data_source in the first ROWS rows."""
    if file.suffix != ".parquet":
        lines = file.read_text(encoding="utf-8").splitlines()[:ROWS] if file.suffix == ".jsonl" else []
        return frozenset(str(json.loads(line).get("data_source")) for line in lines if line.strip())
    import pyarrow.parquet

    found: set[str] = set()
    for part in pyarrow.parquet.ParquetFile(file).iter_batches(ROWS, columns=["data_source"]):
        found |= set(map(str, part.column(0).unique().to_pylist()))
        break
    return frozenset(found)


@rule(
    "data.source",
    "error",
    "verl's own reward knows the data_source of every row, or a reward function is given",
    why="verl raises NotImplementedError with the first reward, after the first rollout",
    fix="reward.custom_reward_function.path=ascend_rl/recipe/math_reward.py, or a function of your own",
)
def data_source(s):
    own = s.get("reward.custom_reward_function.path") or s.get("custom_reward_function.path")
    names, begins = known_sources()
    if own or not names or not _rewarded(s):
        return
    for key in DATA:
        for file in data_files(s, key):
            rows, kinds, why = _read(file)
            if why or rows < 1 or "data_source" not in kinds:
                continue
            status = file.stat()
            found = sources_of(file, (status.st_mtime_ns, status.st_size))
            unknown = sorted(one for one in found if one not in names and not one.startswith(begins))
            if unknown:
                yield (
                    key,
                    f"{file}: data_source {', '.join(map(repr, unknown[:3]))} without a reward function",
                )


# Weights and tokenizers.


def _reads_weights(s: Setup) -> bool:
    """Whether the run reads Hugging Face's weights of the model, or brings none or others."""
    if s.get(f"{ROLLOUT}.load_format") not in ("dummy", None) and s.vllm:
        return True
    other = s.megatron and s.get(f"{MEGATRON}.use_dist_checkpointing")
    return not other and all(s.get(key, True) for key in LOADS_WEIGHTS)


def _models(s: Setup) -> Iterator[tuple[str, Path, bool]]:
    """(key, directory, whether its weights are read) of the models that are here."""
    keys = [("actor_rollout_ref.model.path", _reads_weights(s))]
    if "critic.model.path" in s.given:
        keys.append(("critic.model.path", True))
    if s.get("reward.reward_model.enable"):
        keys.append(("reward.reward_model.model_path", True))
    for key, weights in keys:
        path = local_path(s.get(key))
        if path and (path / "config.json").is_file() and not s.made(path):
            yield key, path, weights


def _weights(folder: Path) -> Iterator[tuple[str, str]]:
    """(what is wrong, what to do) with the weights in a directory."""
    indexes = [*folder.glob("*.index.json")]
    kinds = [index for index in indexes if index.name.startswith(("model.safetensors", "pytorch_model"))]
    if (folder / "model.safetensors").is_file():
        files = {"model.safetensors"}
    elif kinds:
        index = min(kinds, key=lambda file: "pytorch" in file.name)  # safetensors first, as transformers
        try:
            files = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            yield f"{index.name}: {problem(index) or 'it lists no shards'}", DOWNLOAD
            return
    else:
        files = {path.name for pattern in WEIGHTS for path in folder.glob(pattern)}
        if not files:
            yield "there are no weights (*.safetensors)", DOWNLOAD
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield f"{missing[0]}{more} of {len(files)} shards is missing", DOWNLOAD
    for name in sorted(files - set(missing)):
        if why := problem(folder / name):
            yield f"{name}: {why}", DOWNLOAD


@rule(
    "paths.weights",
    "error",
    "weights are whole: every shard of the index is there, no pointer of Git LFS, not cut off",
    why="loading the model fails on every die",
    fix=DOWNLOAD,
)
def paths_weights(s):
    for key, folder, weights in _models(s):
        try:
            json.loads((folder / "config.json").read_text())
        except ValueError:
            yield key, f"{folder}/config.json: {problem(folder / 'config.json') or 'it is not JSON'}"
            continue
        if weights:
            yield from ((key, f"{folder}: {what}", fix) for what, fix in _weights(folder))


@rule(
    "paths.tokenizer",
    "error",
    "there is a tokenizer beside the model, or where tokenizer_path says",
    why="verl and vLLM stop when they load it",
    fix="copy the tokenizer's files of the model there (tokenizer.json, tokenizer_config.json)",
)
def paths_tokenizer(s):
    key = "actor_rollout_ref.model.tokenizer_path"
    folders = [(key, folder) for folder in [local_path(s.get(key))] if folder and folder.is_dir()]
    if not s.get(key):
        folders = [(where, folder) for where, folder, _ in _models(s) if where.startswith("actor")]
    for where, folder in folders:
        found = [file for pattern in TOKENIZERS for file in folder.glob(pattern)]
        if not found:
            yield where, f"{folder} has no tokenizer"
        for file in found:
            if (file.name.startswith("tokenizer.") or file.name == "vocab.json") and (why := problem(file)):
                yield where, f"{file}: {why}", DOWNLOAD


@rule(
    "train.resume_step",
    "error",
    "resume_from_path ends in global_step_<N>, a checkpoint of verl",
    why="verl reads the number of the step from all that follows global_step_: ValueError when it loads",
    fix="name the directory of the step",
)
def resume_step(s):
    key, path = "trainer.resume_from_path", str(s.get("trainer.resume_from_path"))
    if s.get("trainer.resume_mode") != "resume_path" or "global_step_" not in path:
        return  # train.resume says so
    if not re.fullmatch(r"\d+", path.rpartition("global_step_")[2]):
        step = re.match(r".*global_step_\d+", path)
        better = s.override(key, step[0]) if step else ""
        hit: Hit = (key, f"'{path}'", f"give {step[0]}" if step else "name the step", better)
        yield hit
    elif (folder := local_path(path)) and folder.is_dir() and not (folder / "actor").is_dir():
        yield key, f"there is no actor/ in {path}", "give a directory that verl saved"

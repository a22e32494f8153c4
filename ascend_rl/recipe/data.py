"""Prepare the recipes' data sets for verl: fetch, check every row, drop repetitions, write parquet.

    python -m ascend_rl.data deepscaler --out data/deepscaler                       # from ModelScope
    python -m ascend_rl.data dapo_math --out data/dapo_math --source hf             # from Hugging Face
    python -m ascend_rl.data gsm8k --out data/gsm8k --source train.jsonl --source test.jsonl

Published sets are not ready to train on: DAPO-Math-17k repeats each of its 17 thousand problems 100 times,
AIME 2024 each of its 30 problems 32 times, and others have rows without an answer. A bad row does not stop a
run, but it trains nothing or rewards nonsense.

Every row becomes ``data_source``, ``prompt`` (a list of chat messages), ``ability``, ``reward_model`` with
the ``ground_truth``, and ``extra_info`` (split and index). Prompts ask for the answer in the form that
math_reward.py reads. Rows with an empty problem or answer, a problem of more than ``--max-chars`` or an
answer of more than 200 characters are dropped, and so is the second of two problems that differ only in white
space; if two such rows disagree about the answer, both are dropped. Dropped rows are counted and reported. A
file appears under its name only when it is complete. Memory and time are linear in the rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ascend_rl.recipe.math_reward import last_box
from ascend_rl.settings.numbers import whole
from ascend_rl.settings.switch import CannotWork

BOXED = "Let's think step by step and output the final answer within \\boxed{}."
HASHES = 'Let\'s think step by step and output the final answer after "####".'
LONGEST_ANSWER = 200  # characters


@dataclass(frozen=True)
class Problem:
    prompt: list[dict]  # chat messages
    answer: str


def text_of(value) -> str:
    """The text of a column's value; empty where the column is null.

    >>> text_of(0), text_of(None), text_of(float("nan"))
    ('0', '', '')
    """
    return "" if value is None or value != value else str(value)


def from_deepscaler(row: dict) -> Problem:
    """DeepScaleR-Preview: problem, answer, solution."""
    answer = text_of(row["answer"]).strip() or last_box(text_of(row.get("solution")))
    return asked(row["problem"], answer, BOXED)


def from_verl(row: dict) -> Problem:
    """DAPO-Math-17k and its AIME-2024 have verl's format; their prompts ask for a last line "Answer: ..."."""
    prompt = [{"role": text_of(m["role"]), "content": text_of(m["content"])} for m in row["prompt"] or []]
    return Problem(prompt, text_of((row["reward_model"] or {"ground_truth": None})["ground_truth"]).strip())


def from_gsm8k(row: dict) -> Problem:
    """GSM8K: question, answer; the part that counts follows ####."""
    return asked(row["question"], text_of(row["answer"]).rpartition("####")[2].replace(",", ""), HASHES)


def from_aime(row: dict) -> Problem:
    """AIME, in verl's format or as problem and answer, column names in upper or lower case."""
    if "reward_model" in row:
        return from_verl(row)
    row = {key.lower(): value for key, value in row.items()}
    return asked(row["problem"], row["answer"], BOXED)


def asked(problem, answer, instruction: str) -> Problem:
    """A problem with the instruction below it; empty if there is no problem."""
    problem = text_of(problem).strip()
    content = f"{problem}\n\n{instruction}" if problem else ""
    return Problem([{"role": "user", "content": content}], text_of(answer).strip())


@dataclass(frozen=True)
class Dataset:
    convert: Callable[[dict], Problem]
    data_source: str
    files: dict[str, str]  # split: file in the repository
    hf: str
    modelscope: str


DATASETS = {
    "deepscaler": Dataset(
        from_deepscaler,
        "deepscaler",
        {"train": "deepscaler.json"},
        hf="agentica-org/DeepScaleR-Preview-Dataset",
        modelscope="agentica-org/DeepScaleR-Preview-Dataset",
    ),
    "dapo_math": Dataset(
        from_verl,
        "math_dapo",
        {"train": "data/dapo-math-17k.parquet"},
        hf="BytedTsinghua-SIA/DAPO-Math-17k",
        modelscope="BytedTsinghua-SIA/DAPO-Math-17k",
    ),
    "gsm8k": Dataset(
        from_gsm8k,
        "openai/gsm8k",
        {"train": "main/train-00000-of-00001.parquet", "test": "main/test-00000-of-00001.parquet"},
        hf="openai/gsm8k",
        modelscope="modelscope/gsm8k",
    ),
    "aime": Dataset(
        from_aime,
        "aime_2024",
        {"test": "data/aime-2024.parquet"},
        hf="BytedTsinghua-SIA/AIME-2024",
        modelscope="BytedTsinghua-SIA/AIME-2024",
    ),
    "math500": Dataset(
        from_aime,
        "math500",
        {"test": "test.jsonl"},
        hf="HuggingFaceH4/MATH-500",
        modelscope="AI-ModelScope/MATH-500",
    ),
}


def read_rows(path: Path) -> Iterator[dict]:
    """The rows of a .parquet, .jsonl or .json (a list) file, one at a time if the format allows.

    Raises:
        CannotWork: it has another format, or is damaged.
    """
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(4096):
                yield from batch.to_pylist()
        elif path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                yield from (json.loads(line) for line in lines if line.strip())
        elif path.suffix == ".json":
            yield from json.loads(path.read_text(encoding="utf-8"))
        else:
            raise CannotWork(f"{path}: give a .parquet, .jsonl or .json file")
    except CannotWork:
        raise
    except ValueError as error:  # also of pyarrow and json
        raise CannotWork(f"{path} is damaged: {error}") from error


def clean(
    rows: Iterable[dict], convert: Callable[[dict], Problem], max_chars: int
) -> tuple[list[Problem], Counter]:
    """The problems worth training on, in their order, and how many rows were dropped for each reason.

    Raises:
        CannotWork: a row lacks a column, so the file belongs to another data set.
    """
    kept: dict[str, Problem | None] = {}  # None: rows disagree about the answer
    dropped: Counter = Counter()
    for number, row in enumerate(rows):
        try:
            problem = convert(row)
        except (KeyError, TypeError, AttributeError) as error:
            raise CannotWork(
                f"row {number} has the columns {sorted(row)}; this data set has others ({error!r})"
            ) from None
        text = problem.prompt[-1]["content"] if problem.prompt else ""
        key = re.sub(r"\s+", " ", text).strip()
        if not key:
            dropped["no problem"] += 1
        elif not problem.answer:
            dropped["no answer"] += 1
        elif len(text) > max_chars:
            dropped[f"problem longer than {max_chars} characters"] += 1
        elif len(problem.answer) > LONGEST_ANSWER:
            dropped[f"answer longer than {LONGEST_ANSWER} characters"] += 1
        elif key not in kept:
            kept[key] = problem
        elif kept[key] is not None and kept[key].answer == problem.answer:
            dropped["repeated"] += 1
        else:
            dropped["same problem, other answer"] += 1 + (kept[key] is not None)
            kept[key] = None
    return [problem for problem in kept.values() if problem is not None], dropped


def write(path: Path, problems: list[Problem], data_source: str, split: str) -> None:
    """Write verl's parquet; ``path`` appears only when complete."""
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "data_source": data_source,
            "prompt": problem.prompt,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(problems)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), partial)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def fetch(dataset: Dataset, source: str, split: str) -> Path:
    """Download a split's file, or resume the download; returns its path in the cache.

    Raises:
        CannotWork: there is no such client, or no file that is what the hub says it is.
    """
    file, repository = dataset.files[split], dataset.hf if source == "hf" else dataset.modelscope
    try:
        return from_hf(repository, file) if source == "hf" else from_modelscope(repository, file)
    except CannotWork:
        raise
    except Exception as error:  # each client has its own
        said = (str(error).splitlines() or [repr(error)])[0]
        raise CannotWork(
            f"{file} of {repository} cannot be fetched from {source} ({said}); fetch it elsewhere and give "
            "the file: --data FILE (evaluate), --source FILE (data)"
        ) from error


def from_hf(repository: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    path = Path(hf_hub_download(repository, file, repo_type="dataset"))
    content = path.resolve()  # the client looks at its size only; its name there says what is in it
    if damaged(content):
        path.unlink()
        content.unlink(missing_ok=True)
        raise CannotWork(f"{file} of {repository} is damaged and was removed: try again")
    return path


def from_modelscope(repository: str, file: str) -> Path:
    try:
        from modelscope.hub.snapshot_download import dataset_snapshot_download
    except ImportError:
        raise CannotWork(
            "ModelScope's client is not installed: pip install modelscope, or give --source hf or a file"
        ) from None
    # Of a single file the client checks nothing, of a snapshot size and sha256.
    path = Path(dataset_snapshot_download(repository, allow_file_pattern=[file]), file)
    if not path.exists():
        raise CannotWork(f"{repository} of ModelScope has no {file}; give --source hf or a file")
    return path


def damaged(path: Path) -> bool:
    """A file of Hugging Face's cache is not what it is named after: its sha256, or git's sha1 of it."""
    if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", path.name):
        return False  # a cache without symbolic links has other names
    content = path.read_bytes()
    git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return path.name not in (hashlib.sha256(content).hexdigest(), git.hexdigest())


def prepare(
    name: str, out: Path, sources: list[str], max_chars: int = 20_000
) -> dict[str, tuple[int, Counter]]:
    """Write ``out/SPLIT.parquet`` for each split; ``sources``: ["modelscope"], ["hf"] or one file per split.

    Returns:
        split -> (rows written, rows dropped by reason).
    """
    from tqdm import tqdm

    dataset, report = DATASETS[name], {}
    remote = sources in (["modelscope"], ["hf"])
    if not remote and len(sources) != len(dataset.files):
        raise CannotWork(
            f"{name} has the splits {', '.join(dataset.files)}: give a --source file for each, in this order"
        )
    for split, place in zip(dataset.files, sources * len(dataset.files) if remote else sources, strict=False):
        path = fetch(dataset, place, split) if remote else Path(place)
        rows = tqdm(read_rows(path), desc=f"{name} {split}", unit=" rows", leave=False)
        problems, dropped = clean(rows, dataset.convert, max_chars)
        if not problems:
            raise CannotWork(f"{path}: no usable rows ({dict(dropped)})")
        write(out / f"{split}.parquet", problems, dataset.data_source, split)
        report[split] = len(problems), dropped
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m ascend_rl.data",
        description="Prepare a data set for verl.",
        epilog="""Examples:
  python -m ascend_rl.data deepscaler --out data/deepscaler
  python -m ascend_rl.data gsm8k --out data/gsm8k --source train.jsonl --source test.jsonl

Writes train.parquet and test.parquet into --out.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=DATASETS)
    parser.add_argument("--out", type=Path, required=True, help="directory of train.parquet and test.parquet")
    parser.add_argument(
        "--source",
        action="append",
        metavar="modelscope|hf|FILE",
        help="where from (modelscope); a file for each split: .parquet, .jsonl or .json",
    )
    parser.add_argument("--max-chars", type=whole(), default=20_000, help="longest problem (20000)")
    args = parser.parse_args()
    try:
        report = prepare(args.name, args.out, args.source or ["modelscope"], args.max_chars)
    except (ValueError, OSError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    for split, (rows, dropped) in report.items():
        reasons = "".join(f"; dropped {count}: {reason}" for reason, count in dropped.items())
        print(f"{args.out / split}.parquet: {rows} rows{reasons}")
    return 0

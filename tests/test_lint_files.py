"""lint/files.py: data, weights and checkpoints that cannot be read are found; a normal set-up has no finding.

Every damage is done to files that were found whole before: rows in the form of ascend_rl.data, and a tiny
model saved by transformers.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ascend_rl.lint import files as lint_files
from ascend_rl.lint import lint as linter

ROOT = Path(__file__).resolve().parent.parent
FSDP = ROOT / "tests/samples/lint/fsdp.bash"
OURS = ("data.content", "data.rows", "data.source", "paths.weights", "paths.tokenizer", "train.resume_step")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.fixture
def found(tmp_path) -> Callable[..., dict[str, str]]:
    """{rule of this file: what it says} of the FSDP sample with overrides, as where it runs."""
    script = tmp_path / "train.bash"
    script.write_text(f'. "{FSDP}"\nrun "$@"\n')

    def lint(*words: str) -> dict[str, str]:
        findings = linter.lint(script, None, words, here=True)
        return {
            one.check: f"{one.where} {one.why} {one.fix} {one.override}"
            for one in findings
            if one.check in OURS
        }

    return lint


def row(source: str = "openai/gsm8k", **more) -> dict:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": "1+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
    } | more


def write(path: Path, rows: list[dict]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    else:
        path.write_text(json.dumps(rows))
    return str(path)


SMALL = ("data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_whole_data_are_fine(found, tmp_path, suffix):
    train = write(tmp_path / f"train.{suffix}", [row()] * 32)
    halves = [write(tmp_path / f"{half}.{suffix}", [row("math_dapo"), row("aime2025")] * 8) for half in "ab"]
    assert found(f"data.train_files={train}", f"data.val_files={train}", *SMALL) == {}
    assert found(f"data.train_files=[{','.join(halves)}]", *SMALL) == {}


def rows(*given: dict, count: int = 64) -> Callable[[Path], object]:
    return lambda file: write(file, [*given, *given[:1] * count][:count])


def text(content: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(content)


RAW = {"question": "1+1?", "answer": "2"}
DAMAGED: list[tuple[str, str, Callable[[Path], object], str]] = [  # (rule, name, how, what is said)
    ("data.content", "raw.parquet", rows(RAW), "'prompt', only answer, question"),
    ("data.content", "raw.jsonl", rows(RAW), "'prompt', only answer, question"),
    ("data.content", "text.parquet", rows(row(prompt="1+1?")), "list of messages"),
    ("data.content", "chat.parquet", rows(row(prompt="x", chat=row()["prompt"])), "list of messages"),
    ("data.content", "truth.parquet", rows(row(reward_model={"style": "x"})), "ground_truth"),
    ("data.content", "pointer.parquet", text(POINTER), "Git LFS pointer"),
    ("data.content", "pointer.jsonl", text(POINTER), "Git LFS pointer"),
    ("data.content", "empty.parquet", Path.touch, "it is empty"),
    ("data.content", "page.parquet", text("<html>404</html>"), "not parquet"),
    ("data.content", "lines.jsonl", text("{\n"), "cannot be read"),
    ("data.rows", "few.parquet", rows(row(), count=31), "31 rows, and data.train_batch_size is 32"),
    ("data.rows", "few.jsonl", rows(row(), count=31), "31 rows"),
    ("data.source", "own.parquet", rows(row(), row("my/math")), "'my/math'"),
    ("data.source", "own.jsonl", rows(row("aim")), "'aim'"),
]


@pytest.mark.parametrize(("rule", "name", "damage", "said"), DAMAGED, ids=lambda value: str(value)[:24])
def test_data_that_end_a_run(found, tmp_path, rule, name, damage, said):
    damage(tmp_path / name)
    for key in ("train_files", "val_files"):
        if rule == "data.rows" and key == "val_files":
            continue
        told = found(f"data.{key}={tmp_path / name}", *SMALL)
        assert set(told) == {rule} and said in told[rule] and f"data.{key}" in told[rule]


def test_a_file_whose_end_is_missing(found, tmp_path):
    file = Path(write(tmp_path / "train.parquet", [row(extra_info={"index": n}) for n in range(64)]))
    file.write_bytes(file.read_bytes()[:-100])
    assert "its end is missing" in found(f"data.train_files={file}")["data.content"]


def test_what_decides_how_many_rows_are_needed(found, tmp_path):
    train = f"data.train_files={write(tmp_path / 'train.parquet', [row()] * 80)}"
    assert "data.rows" not in found(train, *SMALL)
    assert (
        "80 rows, and data.gen_batch_size is 96"
        in found(train, "+data.gen_batch_size=96", *SMALL)["data.rows"]
    )
    assert "data.train_max_samples 16 rows" in found(train, "data.train_max_samples=16", *SMALL)["data.rows"]
    none = f"data.val_files={write(tmp_path / 'val.parquet', [row()])}"
    assert "data.rows" not in found(train, none, *SMALL)
    pq.write_table(pq.read_table(tmp_path / "val.parquet").slice(0, 0), tmp_path / "val.parquet")
    assert "0 rows" in found(train, none, *SMALL)["data.rows"]


def test_a_reward_or_a_data_set_of_ones_own_decides_itself(found, tmp_path):
    own = write(tmp_path / "own.parquet", [row("my/math")] * 64)
    reward = f"reward.custom_reward_function.path={ROOT}/ascend_rl/recipe/math_reward.py"
    assert found(f"data.train_files={own}", reward, *SMALL) == {}
    assert (
        found(
            f"data.train_files={own}", f"custom_reward_function.path={ROOT}/ascend_rl/recipe/tiny.py", *SMALL
        )
        == {}
    )
    raw = write(tmp_path / "raw.parquet", [{"question": "x", "messages": row()["prompt"]}] * 64)
    assert "data.prompt_key=messages" in found(f"data.train_files={raw}")["data.content"]
    assert found(f"data.train_files={raw}", "data.custom_cls.path=my.py", "data.custom_cls.name=My") == {}


def test_the_sources_are_those_that_verl_rewards():
    from verl.utils.reward_score import default_compute_score

    names, begins = lint_files.known_sources()
    assert "openai/gsm8k" in names and "math_dapo" in names and begins == ("aime",)
    with pytest.raises(NotImplementedError):
        default_compute_score("my/math", "", "")
    assert default_compute_score("aime2025", "Answer: 2", "2") is not None


# Weights.


@pytest.fixture
def model(tiny, tmp_path) -> Path:
    """A copy of the tiny model, in two shards with an index, as transformers saves large ones."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    shutil.copytree(tiny / "model", folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    loaded = AutoModelForCausalLM.from_pretrained(tiny / "model")
    loaded.save_pretrained(folder, max_shard_size="300KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def cut(length: int) -> Callable[[Path], object]:
    return lambda folder: shard(folder).write_bytes(shard(folder).read_bytes()[:length])


def without(pattern: str) -> Callable[[Path], object]:
    return lambda folder: [file.unlink() for file in folder.glob(pattern)]


def pointer(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / (name or shard(folder).name)).write_text(POINTER)


BROKEN: list[tuple[str, Callable[[Path], object], str]] = [  # (rule, how, what is said)
    ("paths.weights", lambda folder: shard(folder).unlink(), "shards is missing"),
    ("paths.weights", pointer(""), "Git LFS pointer"),
    ("paths.weights", cut(0), "it is empty"),
    ("paths.weights", cut(-9), "9 bytes of it are missing"),
    ("paths.weights", cut(99), "cut off"),
    ("paths.weights", without("*.safetensors*"), "no weights"),
    ("paths.weights", pointer("model.safetensors.index.json"), "pointer"),
    ("paths.weights", pointer("config.json"), "config.json: it is a Git LFS pointer"),
    ("paths.tokenizer", without("tokenizer*"), "has no tokenizer"),
    ("paths.tokenizer", pointer("tokenizer.json"), "Git LFS pointer"),
]


@pytest.mark.parametrize(("rule", "damage", "said"), BROKEN, ids=lambda value: str(value)[:24])
def test_weights_that_cannot_be_loaded(found, model, rule, damage, said):
    path = f"actor_rollout_ref.model.path={model}"
    assert found(path) == {}
    damage(model)
    told = found(path)
    assert set(told) == {rule} and said in told[rule] and re.search("download|copy", told[rule])


def test_weights_that_are_not_read_may_be_missing(found, model, tiny):
    """A run with random weights, one with a Megatron checkpoint; a tokenizer from elsewhere."""
    for file in [*model.glob("*.safetensors*"), *model.glob("tokenizer*")]:
        file.unlink()
    path = [f"actor_rollout_ref.model.path={model}", f"actor_rollout_ref.model.tokenizer_path={tiny}/model"]
    assert set(found(*path)) == {"paths.weights"}
    assert found(*path, "+actor_rollout_ref.actor.load_weight=False") == {}
    (model / "pytorch_model.bin").write_bytes(b"x" * 64)
    assert found(*path) == {}


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("global_step_20", False),
        ("global_step_20/", True),
        ("global_step_20/actor", True),
        ("global_step_20.partial", True),
        ("global_step_", True),
        ("global_step_10", True),  # without an actor
    ],
)
def test_a_path_to_resume_from(found, tmp_path, path, wrong):
    (tmp_path / "global_step_20/actor").mkdir(parents=True)
    (tmp_path / "global_step_10").mkdir()
    told = found("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/{path}")
    assert set(told) == ({"train.resume_step"} if wrong else set())
    if wrong and "20" in path:
        assert told["train.resume_step"].endswith(f"trainer.resume_from_path={tmp_path}/global_step_20")
    assert found(f"trainer.resume_from_path={tmp_path}/{path}") == {}  # mode auto does not read it

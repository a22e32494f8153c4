"""Data sets: columns become verl's, bad and repeated rows go, a file appears complete or not at all."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ascend_rl.recipe import data
from ascend_rl.recipe.math_reward import compute_score
from ascend_rl.settings.switch import CannotWork

# Rows as published, hand-written.
DEEPSCALER = [
    {"problem": "What is $1+1$?", "answer": "2", "solution": "It is $\\boxed{2}$."},
    {"problem": "What is $2+2$?", "answer": "", "solution": "So \\boxed{4}."},
    {"problem": "Unknown", "answer": "", "solution": ""},
    {"problem": "  ", "answer": "1", "solution": ""},
    {"problem": "What is  $1+1$?\n", "answer": "2", "solution": "again"},
    {"problem": "Proof?", "answer": "x" * 201, "solution": ""},
    {"problem": "Long " + "x" * 20_000, "answer": "1", "solution": ""},
]


def dapo(question: str, truth: str | None, index: str) -> dict:
    text = f'Solve it. The last line is Answer: $Answer.\n\n{question}\n\nRemember "Answer:".'
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": text, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


DAPO = [dapo("3*4?", "12", "a")] * 3 + [dapo("5-5?", "0", "b"), dapo("6?", "6", "c"), dapo("6?", "7", "d")]
AIME_HF = [{"id": 60, "problem": "Find N.", "solution": "so 073", "answer": "073", "url": "u"}]
AIME_OTHER = [{"ID": "2024-I-1", "Problem": "Find M.", "Solution": "...", "Answer": 204}]


def rows_of(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def save(path: Path, rows: list[dict]) -> str:
    if path.suffix == ".parquet":
        import pyarrow

        pq.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_deepscaler(tmp_path):
    report = data.prepare("deepscaler", tmp_path / "out", [save(tmp_path / "d.json", DEEPSCALER)])
    rows = rows_of(tmp_path / "out/train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["2", "4"]  # the second from its solution
    assert rows[0] == {
        "data_source": "deepscaler",
        "ability": "math",
        "prompt": [{"role": "user", "content": f"What is $1+1$?\n\n{data.BOXED}"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
    }
    assert report == {
        "train": (
            2,
            {
                "no answer": 1,
                "no problem": 1,
                "repeated": 1,
                "answer longer than 200 characters": 1,
                "problem longer than 20000 characters": 1,
            },
        )
    }


def test_dapo_math_drops_repetitions_and_contradictions(tmp_path):
    report = data.prepare("dapo_math", tmp_path, [save(tmp_path / "d.parquet", DAPO)])
    rows = rows_of(tmp_path / "train.parquet")
    assert [row["prompt"] for row in rows] == [DAPO[0]["prompt"], DAPO[3]["prompt"]]  # the prompt is theirs
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["12", "0"]
    assert report["train"][1] == {"repeated": 2, "same problem, other answer": 2}


def test_a_third_row_of_a_contradiction_does_not_bring_it_back(tmp_path):
    rows = [dapo("6?", truth, "x") for truth in "677"] + [dapo("1?", "1", "y")]
    report = data.prepare("dapo_math", tmp_path, [save(tmp_path / "d.parquet", rows)])
    assert report["train"] == (1, {"same problem, other answer": 3})


@pytest.mark.parametrize(("rows", "truth"), [(AIME_HF, "073"), (AIME_OTHER, "204"), (DAPO[:1] * 32, "12")])
def test_aime_in_its_published_forms(tmp_path, rows, truth):
    data.prepare("aime", tmp_path, [save(tmp_path / "a.jsonl", rows)])
    (row,) = rows_of(tmp_path / "test.parquet")
    assert row["reward_model"]["ground_truth"] == truth and row["extra_info"]["split"] == "test"


def test_gsm8k_from_the_command_line_and_its_reward(root, tmp_path):
    samples = root / "tests/samples/gsm8k"
    command = [
        sys.executable,
        "-m",
        "ascend_rl.data",
        "gsm8k",
        "--out",
        tmp_path,
        "--source",
        samples / "train.jsonl",
        "--source",
        samples / "test.jsonl",
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{tmp_path}/train.parquet: 40 rows\n{tmp_path}/test.parquet: 40 rows\n" == run.stdout
    for row in rows_of(tmp_path / "train.parquet"):
        truth = row["reward_model"]["ground_truth"]
        assert row["prompt"][0]["content"].endswith(data.HASHES)
        assert compute_score(row["data_source"], f"It is\n#### {truth}", truth)["score"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.parquet", "train.parquet"]


def test_verl_reads_what_is_written(tiny, tmp_path):
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer

    from verl.utils.dataset.rl_dataset import RLHFDataset

    data.prepare("dapo_math", tmp_path, [save(tmp_path / "d.parquet", DAPO)])
    config = {"max_prompt_length": 512, "filter_overlong_prompts": True, "cache_dir": str(tmp_path)}
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    dataset = RLHFDataset(str(tmp_path / "train.parquet"), tokenizer, OmegaConf.create(config))
    assert len(dataset) == 2 and dataset[0]["reward_model"]["ground_truth"] == "12"


def test_another_data_set_is_refused_and_nothing_is_left(tmp_path):
    source = save(tmp_path / "d.json", DEEPSCALER)
    with pytest.raises(CannotWork, match=r"row 0 has the columns \['answer', 'problem', 'solution'\]"):
        data.prepare("gsm8k", tmp_path / "out", [source, source])
    with pytest.raises(CannotWork, match="give a --source file for each"):
        data.prepare("gsm8k", tmp_path / "out", [source])
    with pytest.raises(CannotWork, match="no usable rows"):
        data.prepare("deepscaler", tmp_path / "out", [save(tmp_path / "e.jsonl", DEEPSCALER[2:4])])
    assert not (tmp_path / "out").exists()


def test_a_kill_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    data.prepare("deepscaler", tmp_path, [save(tmp_path / "d.json", DEEPSCALER)])
    before = (tmp_path / "train.parquet").read_bytes()
    monkeypatch.setattr(data.os, "fsync", lambda fd: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        data.prepare("deepscaler", tmp_path, [save(tmp_path / "d.json", DEEPSCALER[:1])])
    assert (tmp_path / "train.parquet").read_bytes() == before


GSM8K = [{"question": "1+1?", "answer": "It is\n#### 2"}, {"question": "2+2?", "answer": "#### 1,000"}]
MATH500 = [{"problem": "1+1?", "answer": "2", "solution": "..."}, {"problem": "2+2?", "answer": 4}]
TWO = [{"problem": f"{n}?", "answer": str(n), "solution": ""} for n in (1, 2)]
AIME_TWO = [
    row | {"Problem": f"Find {row['Answer']}."} for row in (AIME_OTHER[0], AIME_OTHER[0] | {"Answer": 5})
]
PLACES = [  # the columns that may be null, as (data set, rows, path to the value)
    *(("deepscaler", TWO, (key,)) for key in ("problem", "answer")),
    *(
        ("dapo_math", DAPO[3:5], path)
        for path in (("reward_model", "ground_truth"), ("prompt", 0, "content"))
    ),
    *(("dapo_math", DAPO[3:5], path) for path in (("reward_model",), ("prompt",))),
    *(("aime", DAPO[3:5], path) for path in (("reward_model", "ground_truth"), ("prompt",))),
    *(("aime", AIME_TWO, (key,)) for key in ("Problem", "Answer")),
    *(("math500", MATH500, (key,)) for key in ("problem", "answer")),
    *(("gsm8k", GSM8K, (key,)) for key in ("question", "answer")),
]


@pytest.mark.parametrize("null", [None, float("nan"), "", "  "])
@pytest.mark.parametrize(("name", "rows", "place"), PLACES)
def test_a_null_is_one_dropped_row(name, rows, place, null):
    """Wherever it is: the other rows are kept, and no text is made of it."""
    rows = copy.deepcopy(rows)
    at = rows[0]
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = None if place[-1] in ("prompt", "reward_model") else null
    kept, dropped = data.clean(rows, data.DATASETS[name].convert, 20_000)
    assert len(kept) == 1 and sum(dropped.values()) == 1
    assert not {"none", "nan"} & set(f"{kept[0].answer} {kept[0].prompt[-1]['content']}".lower().split())


def test_numbers_are_answers_too():
    for answer in (0, 7, 0.5):
        for name, row in (
            ("deepscaler", {"problem": "1?", "answer": answer, "solution": ""}),
            ("gsm8k", {"question": "1?", "answer": answer}),
            ("math500", {"problem": "1?", "answer": answer}),
            ("dapo_math", DAPO[0] | {"reward_model": {"ground_truth": answer}}),
        ):
            assert data.clean([row], data.DATASETS[name].convert, 20_000)[0][0].answer == str(answer)


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl", "x.json"])
def test_damaged_files_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"PAR1 \x00\xff")
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        data.prepare("deepscaler", tmp_path, [str(tmp_path / name)])


@pytest.fixture
def modelscope(tmp_path):
    """A stub for the network: a `modelscope` that puts two of a model's three files in place."""
    program = tmp_path / "bin/modelscope"
    program.parent.mkdir()
    program.write_text("""#!/bin/bash
echo "$@" >>"$(dirname "$0")/calls"
while [ "$1" != --local_dir ]; do shift; done
echo {} >"$2/config.json"
[ $# -gt 2 ] && exit
echo '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}' \\
    >"$2/model.safetensors.index.json"
echo x >"$2/model-1.safetensors"
""")
    program.chmod(0o755)

    def download(*arguments) -> tuple[subprocess.CompletedProcess, str]:
        command = ["bash", Path(data.__file__).parents[2] / "download_weights.sh", *map(str, arguments)]
        environment = {"PATH": f"{program.parent}:/usr/bin:/bin"}
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        return run, program.with_name("calls").read_text() if program.with_name("calls").exists() else ""

    return download


def test_weights_are_checked_for_completeness(modelscope, tmp_path):
    run, calls = modelscope("Qwen/Tiny", "--out", tmp_path / "m")
    assert run.returncode == 1 and "missing: model-2.safetensors" in run.stderr
    assert calls == f"download --model Qwen/Tiny --local_dir {tmp_path}/m\n"
    (tmp_path / "m/model-2.safetensors").write_text("x")
    assert modelscope("Qwen/Tiny", "--out", tmp_path / "m")[0].returncode == 0


def test_weights_that_do_not_fit_are_not_begun(modelscope, tmp_path):
    (tmp_path / "bin/df").write_text("#!/bin/bash\necho Avail; echo 400\n")
    (tmp_path / "bin/df").chmod(0o755)
    run, calls = modelscope("Qwen/Qwen3-235B-A22B", "--out", tmp_path / "m")
    assert run.returncode == 1 and "needs 440 GB" in run.stderr and "400 GB free" in run.stderr and not calls
    run, calls = modelscope("Qwen/Qwen3-235B-A22B", "--out", tmp_path / "m", "--random-init")
    assert run.returncode == 0 and " config.json generation_config.json " in calls
    assert "safetensors" not in calls


def test_bad_arguments_for_weights_are_explained(modelscope, tmp_path):
    cases = (["Qwen3", "--out", "m"], "OWNER/NAME"), (["a/b"], "--out"), (["--x"], "unknown argument")
    for arguments, message in cases:
        run, calls = modelscope(*arguments)
        assert run.returncode == 1 and message in run.stderr and not calls

"""The main commands in a terminal of 80 columns: nothing is wider, and pictures in docs/ are up to date."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

from screenshots import COLUMNS, file_of, picture, screen  # noqa: E402

MODELS = ("qwen3-235b-a22b --dies 128", "qwen3-32b --dies 64 --fsdp 2", "qwen3-235b-a22b --dies 16")


@pytest.mark.parametrize("name", ["preflight", "memory_plan", "dry_run"])  # "run" and "report" take minutes
def test_pictures_of_terminals_are_up_to_date(name, tmp_path):
    command, lines = screen(name, str(tmp_path))
    assert file_of(name).read_text() == picture(name, command, lines), f"python bench/screenshots.py {name}"


@pytest.mark.parametrize("options", MODELS)
def test_plans_fit_the_screen(options, capsys):
    from ascend_rl.estimate import memory_plan

    memory_plan.main(["--model", *options.split()])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= COLUMNS

"""Every numeric option of every command refuses what is outside its bounds, in one line."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_rl.settings.numbers import real, whole

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("text", ["0", "-1", "1001", "1e3", "nan", "", "9" * 5000, "0x10"])
def test_whole_numbers(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from 1 to 1000"):
        whole(high=1000)(text)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-0.1", "1.1", "", "1,0", "1e400"])
def test_real_numbers(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number from 0 to 1"):
        real(high=1)(text)


def test_bounds_belong_to_the_numbers():
    assert [whole(0, 9)(text) for text in ("0", "9")] == [0, 9]
    assert [real(1, 2)(text) for text in ("1", "2", "1.5")] == [1, 2, 1.5]


def options() -> list[tuple[str, ast.Call]]:
    """(file, call) of each add_argument in the commands of the package and beside it."""
    files = [*ROOT.glob("*.py"), *(ROOT / "ascend_rl").rglob("*.py"), *(ROOT / "patches").glob("*.py")]
    calls = ((file, node) for file in files for node in ast.walk(ast.parse(file.read_text())))
    return [
        (file.name, node)
        for file, node in calls
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
    ]


def test_no_option_takes_just_any_number():
    found = options()
    kinds = [(file, {k.arg: ast.unparse(k.value) for k in node.keywords}) for file, node in found]
    assert len(kinds) > 100 and sum("whole(" in kind.get("type", "") for _, kind in kinds) > 20
    assert not [
        kind for kind in kinds if kind[1].get("type") in ("int", "float") and "choices" not in kind[1]
    ]


@pytest.mark.parametrize(
    "command",
    [
        "-m ascend_rl.export x --out y --shard-gb nan",
        "-m ascend_rl.memory_plan --model qwen3-32b --dies 99999999999",
        "-m ascend_rl.evaluate x --data y --out z --n 0",
        "converter_hf_to_mcore.py --hf_model_path x --output_path y --to hf --mcore_path z --shard_gb inf",
    ],
)
def test_a_command_ends_with_a_line_about_it(command):
    run = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    assert "number from" in run.stderr.splitlines()[-1] and "Traceback" not in run.stderr

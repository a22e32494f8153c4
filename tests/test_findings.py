"""lint/findings.py: people read whole words, grouped, errors last; corrections can be pasted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ascend_rl.lint.findings import Finding, corrections, paste, render

ROOT = Path(__file__).resolve().parent.parent
KEY = "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity"
FINDINGS = [
    Finding("error", "a.one", KEY, "why " * 60, "give a value", f"+{KEY}=full"),
    Finding("warning", "b.two", "$A", "slow", "export A=1"),
    Finding("info", "c.three", "x", "not checked", "see docs/faq.md"),
    Finding("warning", "b.two", "$B", "slow", "export A=1"),
]


@pytest.mark.parametrize("columns", [80, 200])
def test_no_word_is_broken_and_no_line_is_too_long(columns, capsys):
    render(FINDINGS, Console(width=columns))
    lines = capsys.readouterr().out.splitlines()
    words = {word for finding in FINDINGS for word in (finding.where, finding.override) if word}
    assert all(any(word in line for line in lines) for word in words)
    long = [line for line in lines if len(line) > min(columns, 120)]
    assert all(len(line.split()) <= 2 for line in long)  # only a key that is longer than the line
    assert len(lines) <= 20  # also with 80 columns


def test_groups_come_with_errors_last(capsys):
    render(FINDINGS, Console(width=100))
    shown = capsys.readouterr().out
    order = [shown.index(check) for check in ("c.three", "b.two", "a.one")]
    assert order == sorted(order) and shown.count("b.two") == 1 and "$A, $B" in shown
    assert shown.splitlines()[-1] == "1 error, 2 warnings, 1 info"


def test_corrections_are_words_for_a_shell():
    text = corrections([*FINDINGS, Finding("error", "d.four", "trainer.logger", "?", "choose", "a=[x, y]")])
    assert text.splitlines() == ["export A=1", f"+{KEY}=full \\", "'a=[x, y]'"]
    assert corrections([Finding("error", "e", "key", "?", "think")]) == "# key: think"


def test_a_fix_that_is_a_command_line_is_pasted():
    fixes = {
        "set a.use_torch_compile=False": "a.use_torch_compile=False",
        "export TASK_QUEUE_ENABLE=1": "export TASK_QUEUE_ENABLE=1",
        "+...override_transformer_config.position_embedding_type=rope, and quotes": "",
        "raise it; the recipes use prompt + response": "",
    }
    assert {fix: paste(Finding("error", "x", "y", "z", fix)) for fix in fixes} == fixes


@pytest.mark.parametrize(
    "module",
    [
        "preflight",
        "lint",
        "memory_plan",
        "step_time",
        "report",
        "rehearsal",
        "data",
        "tiny",
        "evaluate",
        "export",
    ],
)
def test_help_has_two_examples_and_says_what_is_written(module):
    command = [sys.executable, "-m", f"ascend_rl.{module}", "-h"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(re.findall(rf"^ +python -m ascend_rl\.{module} ", said, re.M)) >= 2
    assert re.search(r"\b[Ww]rites\b", said)


SCRIPTS = sorted(path for path in ROOT.glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_have_two_examples_and_say_what_they_write(script):
    said = subprocess.run(["bash", script, "-h"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    examples = re.search(r"^Example:(.*?)^\w+:", said, re.M | re.S)[1]
    assert len(re.findall(rf"{script.name} ", examples + " ")) + examples.count(f"{script.name}\n") >= 2
    assert re.search(r"^Writes:", said, re.M)

"""The mutation command on a module of its own: what it changes, and the outcome."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import mutations

pytestmark = pytest.mark.long

TOY = '''
"""A text with 1 and 2."""
import logging, sys

__all__ = ["share", "countdown"]
LIMIT: int = 1 + 1


def share(total: int, parts: int) -> list[int]:
    if parts < 1:
        raise ValueError(f"parts={parts + 0}: give at least " + str(1))
    logging.info("sharing", total, 2 * parts)
    return [(total + i) // parts for i in range(parts)]


def countdown(n):
    while n > 0:
        n -= 1
    return n


def same(x):
    return x + 0  # no mutation: of integers


def main():
    print(share(int(sys.argv[1]), 2))


if __name__ == "__main__":
    main()
'''.lstrip()

TESTS = """
import os, subprocess, sys
import pytest
from hypothesis import given, strategies as st
from toy import countdown, same, share


@given(total=st.integers(0, 100), parts=st.integers(1, 9))
def test_shares(total, parts):
    assert sum(share(total, parts)) == total


def test_no_parts():
    with pytest.raises(ValueError):
        share(1, 0)


def test_countdown(tmp_path):
    assert countdown(5) <= 0
    open("here", "w").close()
    (tmp_path / "there").touch()


def test_command():
    # As ranks start, whose stubs have a sitecustomize of their own.
    environment = os.environ | {"PYTHONPATH": f"STUBS:{os.environ['PYTHONPATH']}"}
    command = [sys.executable, "-m", "toy", "7"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert answer.stdout.endswith("[3, 4]\\n")
"""


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "tests").mkdir()
    stubs = Path(__file__).resolve().parent / "stubs"
    (tmp_path / "tests/test_toy.py").write_text(TESTS.replace("STUBS", str(stubs)))
    return tmp_path


def mutate(directory, root, *arguments):
    environment = os.environ | {"PYTHONPATH": f"{directory}:{root}", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.mutate", "toy.py", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def changed(line: str) -> set[str]:
    return {mutation.after for mutation in mutations(line)}


@pytest.mark.parametrize("line, after", [
    ("a < b", {"a <= b", "a >= b"}),
    ("a == b", {"a != b"}),
    ("a in b", {"a not in b"}),
    ("a * b", {"a // b"}),
    ("a -= b", {"a += b", "pass"}),
    ("a and b", {"a or b"}),
    ("not a", {"a"}),
    ("-a", {"a"}),
    ("-1", {"0", "-2"}),
    ("1", {"0", "2"}),
    ("True", {"False"}),
    ("0.5", {"1.0"}),
    ("x[a:b]", {"x[:b]", "x[a:]"}),
    ("x[1:]", {"x[0:]", "x[2:]"}),
    ("y = min(a, x.any())", {"y = max(a, x.any())", "y = min(a, x.all())"}),
    ("y = sorted(a)", {"y = sorted(a, reverse=True)"}),
    ("while a: break", {"while not a: break", "while a: continue"}),
    ("[x for x in y if f(x)]", {"[x for x in y if not f(x)]"}),
    ("raise ValueError(1 + 1)", {"pass"}),
    ("f(a)", {"pass"}),
    ("a.b = c", {"pass"}),
    ("a: int = b", set()),
    ("'a' + b", set()),
    ("assert a < b, f'{1 + 1}'", set()),
    ("logger.info(1 + 1)", set()),
    ("y = zip(a, b, strict=True)", set()),
    ("def f(a: 'x' = 1) -> g(1): ...", {"def f(a: 'x' = 0) -> g(1): ...", "def f(a: 'x' = 2) -> g(1): ..."}),
    ("a < b  # no mutation: a reason", set()),
    ("a < b  # no mutation", {"a <= b  # no mutation", "a >= b  # no mutation"}),
])  # fmt: skip
def test_what_is_changed(line, after):
    assert changed(line) == after


def test_statements_go_where_they_are_alone():
    lines = TOY.splitlines()
    touched = {lines[mutation.line - 1].strip() for mutation in mutations(TOY)}
    assert touched == {
        "LIMIT: int = 1 + 1",
        "if parts < 1:",
        'raise ValueError(f"parts={parts + 0}: give at least " + str(1))',
        "return [(total + i) // parts for i in range(parts)]",
        "while n > 0:",
        "n -= 1",
        "print(share(int(sys.argv[1]), 2))",
    }


def test_survivors_are_named_and_files_stay(toy, root):
    before = {path: path.read_bytes() for path in toy.rglob("*") if path.is_file()}
    done = mutate(toy, root, "--deadline", "5")
    assert done.returncode == 1, done.stdout + done.stderr
    *survivors, summary = done.stdout.splitlines()
    # Nothing tests LIMIT, and of countdown(5) only that it is not positive.
    limits = ["LIMIT: int = " + sum for sum in ("1 - 1", "0 + 1", "2 + 1", "1 + 0", "1 + 2")]
    assert [line[4:] for line in survivors if line.startswith("  + ")] == [*limits, "while n >= 0:", "n -= 2"]
    assert survivors[:2] == ["toy.py:5", "  - LIMIT: int = 1 + 1"]
    # Without end: n is not changed (twice), or grows.
    assert summary.startswith("toy.py: killed 16 of 23 (70%), 3 of them by the deadline of "), summary
    assert {path: path.read_bytes() for path in toy.rglob("*") if path.is_file()} == before


def test_processes_of_the_tests_run_the_mutation(toy, root):
    """Of a line that only runs in another process; above the bar the command succeeds."""
    line = str(
        TOY.splitlines().index("    print(share(int(sys.argv[1]), 2))") + 1
    )  # 1 -> 0 or 2, 2 -> 3, pass
    done = mutate(toy, root, "--only", line, "-k", "command")
    assert (done.returncode, done.stdout.count("+")) == (0, 0), done.stdout + done.stderr
    assert done.stdout.startswith("toy.py: killed 4 of 4 (100%)")


def test_a_sample_is_the_same_each_time(toy, root):
    first, again, other, everything = (
        mutate(toy, root, "--list", *arguments).stdout
        for arguments in (["--sample", "5"], ["--sample", "5"], ["--sample", "5", "--seed", "1"], [])
    )
    assert first == again != other and first.count("toy.py:") == 5 < everything.count("toy.py:")


@pytest.mark.parametrize("tests, message", [
    ("import toy\ndef test_it(): assert False", "assert False"),
    ("def test_it(): pass", "do not import toy"),
    ("import toy", "exit status 5"),
])  # fmt: skip
def test_without_a_mutation_the_tests_must_pass(toy, root, tests, message):
    (toy / "tests/test_toy.py").write_text(tests)
    done = mutate(toy, root)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""


def test_lines_without_mutations_are_no_success(toy, root):
    done = mutate(toy, root, "--only", "1")
    assert done.returncode == 2 and "no mutations" in done.stderr

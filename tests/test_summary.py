"""tests/summary.py and run_tests.sh on runs of pytest with each outcome."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from summary import cases, summary

TESTS = """
import pytest
def test_well(): pass
def test_ill(): raise LookupError("log\\nmore\\nOSError: gone")
@pytest.mark.skip(reason="no checkout")
@pytest.mark.parametrize("i", [1, 2])
def test_absent(i): pass
@pytest.fixture
def broken(): raise OSError
def test_broken(broken): pass
@pytest.fixture
def left():
    yield
    raise OSError
def test_left(left): pass
"""


def run(directory, name: str, text: str):
    (directory / f"test_{name}.py").write_text(text)
    file = directory / f"{name}.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        f"--junitxml={file}",
        "-p",
        "no:cacheprovider",
        f"test_{name}.py",
    ]
    subprocess.run([*command, f"--rootdir={directory}"], cwd=directory, capture_output=True)
    return file


def test_every_outcome_is_counted_and_named(tmp_path):
    files = [run(tmp_path, "one", TESTS), run(tmp_path, "two", "def test_two(): pass")]
    well, text = summary(files, 75, True)
    assert not well
    lines = text.splitlines()
    assert lines[-1] == "2 passed, 1 failed, 2 error, 2 skipped in 1 min 15 s"
    assert "SKIPPED 2: no checkout" in lines
    assert {
        "FAILED test_one.py::test_ill: LookupError: log ... OSError: gone",
        'ERROR test_one.py::test_broken: failed on setup with "OSError"',
        'ERROR test_one.py::test_left: failed on teardown with "OSError"',
    } <= set(lines)
    assert any(line.startswith("seconds and processor seconds, by file; ") for line in lines)
    assert any(line.endswith("test_two.py::test_two") for line in lines)


def test_a_run_that_died_is_no_success(tmp_path):
    files = [run(tmp_path, "two", "def test_two(): pass"), tmp_path / "absent.xml"]
    assert summary(files[:1], 1, False) == (True, "\n1 passed in 0 min 1 s")
    well, text = summary(files, 1, False)
    assert not well and "FAILED absent" in text


def test_one_process_runs_a_file_and_the_other_the_next(root, tmp_path):
    """Else fixtures are made twice, and what a test leaves for the next is not there. Both note times."""
    files = ["tests/test_switch.py", "tests/test_prompt_memory.py"]
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "-p", "no:cacheprovider", *files]
    command.append(f"--junitxml={tmp_path}/two.xml")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    out = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=True).stdout
    ran = re.findall(r"^\[(gw\d)\] .* PASSED (tests/\w+\.py)::", out, re.M)
    assert len(ran) > 10 and len({worker for worker, _ in ran}) == 2
    assert len(set(ran)) == len(files), ran
    noted = cases(tmp_path / "two.xml")
    assert len(noted) == len(ran) and 0.05 < sum(case.cpu_s for case in noted)

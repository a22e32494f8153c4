"""tests/warm.py: answers by number, and errors in a forked process are reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from warm import Warm


@pytest.fixture
def warm():
    warm = Warm(["colorsys"])
    yield warm
    warm.stop()


def told(number: int, name: str) -> tuple:
    loaded = "colorsys" in sys.modules
    return number, os.environ.get(name), loaded, os.getpid()


def goes_wrong(number: int, how: str) -> None:
    print("said before")
    if number == 0:
        time.sleep(300)
    if how == "raises":
        raise LookupError("nothing there")
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(number: int) -> int:
    return subprocess.Popen(["sleep", "300"]).pid


def test_answers_come_by_number_from_processes_of_their_own(warm):
    for variable in ("one", "two"):
        answers = warm.run(3, told, "NAME", NAME=variable)
        assert [answer[:3] for answer in answers] == [(number, variable, True) for number in range(3)]
        assert len({answer[3] for answer in answers}) == 3


@pytest.mark.parametrize(
    "how, message", [("raises", "LookupError: nothing there"), ("dies", "process 1 died")]
)
def test_what_goes_wrong_is_told_immediately_with_the_output_and_the_next_job_runs(warm, how, message):
    with pytest.raises(AssertionError, match=message) as error:
        warm.run(2, goes_wrong, how)
    assert "said before" in str(error.value) or how == "dies"  # a killed process has not flushed
    assert warm.run(1, told, "NAME")[0][:3] == (0, None, True)


def test_a_hang_meets_the_deadline(warm):
    with pytest.raises(AssertionError, match=r"no answer from \[0\] in 5 s") as error:
        warm.run(1, goes_wrong, "", seconds=5)
    assert "goes_wrong (test_warm.py" in error.value.__notes__[0]


def test_what_a_process_started_ends_with_it(warm):
    (pid,) = warm.run(1, leaves)
    end = time.monotonic() + 300
    while (
        "sleep"
        in subprocess.run(["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True).stdout
    ):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_import_that_fails_is_left_to_the_function(tmp_path):
    (tmp_path / "half.py").write_text("import colorsys\nraise OSError('no driver')\n")
    warm = Warm(["half"], str(tmp_path))
    (answer,) = warm.run(1, told, "NAME")
    warm.stop()
    assert answer[2] is False

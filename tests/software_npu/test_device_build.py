"""The build: once, by one of several processes, whole or not at all; what is missing is named."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = """#!/bin/sh
[ "$1" = --version ] && {{ echo a compiler; exit; }}
for last; do :; done
echo "$last" >> {log}
sleep 0.2
case "$last" in *{broken}*) echo "no such header"; exit 1;; esac
: > "$last"
"""


@pytest.fixture
def compiler(tmp_path):
    """Writes a compiler that makes empty files, and a list of them; one that breaks at a name, if given."""

    def write(broken="nothing"):
        path = tmp_path / "compiler"
        path.write_text(COMPILER.format(log=tmp_path / "log", broken=broken))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return write


def start(directory, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "software_npu.build", "--directory", directory],
        cwd=ROOT, env=os.environ | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.long
def test_one_of_several_processes_builds_and_later_ones_find_it(tmp_path, compiler):
    cxx, builds = compiler(), tmp_path / "builds"
    both = [start(builds, CXX=cxx) for _ in range(2)]
    printed = {process.communicate()[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    (target,) = printed
    target = Path(target.strip())
    made = (tmp_path / "log").read_text().split()
    assert len(made) == len(set(made)) == 5
    assert {path.name.split(".")[0] for path in target.iterdir()} == {
        "_C", "libsoftware_npu_driver", "vllm_ascend_C",
    }  # fmt: skip
    assert start(builds, CXX=cxx).communicate()[0].strip() == str(target)
    assert (tmp_path / "log").read_text().split() == made
    again = start(builds, CXX="", PATH="")  # what is built needs no compiler
    assert again.communicate()[0].strip() == str(target)


def test_a_failed_build_leaves_nothing_and_shows_what_was_said(tmp_path, compiler):
    builds = tmp_path / "builds"
    process = start(builds, CXX=compiler(broken="python.o"))
    assert "no such header" in process.communicate()[1] and process.returncode == 1
    assert [path.name for path in builds.iterdir()] == [".lock"]
    process = start(builds, CXX=compiler())
    assert process.communicate() and process.returncode == 0


def test_without_a_compiler_the_package_is_named(tmp_path):
    process = start(tmp_path, CXX="", PATH=str(tmp_path))
    assert "install g++ (apt-get install g++" in process.communicate()[1] and process.returncode == 1


def test_other_sources_are_another_build(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from software_npu import build

    name = build.name_of(build.find_compiler())
    copy = tmp_path / "csrc"
    copy.mkdir()
    for path in build.SOURCES.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCES", copy)
    assert build.name_of(build.find_compiler()) == name
    (copy / "memory.cpp").write_text((copy / "memory.cpp").read_text() + " ")
    assert build.name_of(build.find_compiler()) != name

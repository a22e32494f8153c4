"""MindSpeed, if its checkout is present, finds openEuler's C++ headers when it builds operators."""

from __future__ import annotations

import subprocess
import sys

import pytest
from test_mindspeed import MINDSPEED, needs_mindspeed

pytestmark = needs_mindspeed

INCLUDE_PATHS = """
import glob, sys
from mindspeed.op_builder.builder import MindSpeedOpBuilder

class Builder(MindSpeedOpBuilder):
    def sources(self):
        return []

find = glob.glob
glob.glob = lambda pattern: find(sys.argv[1] + pattern)  # another root directory
print("\\n".join(Builder("one").include_paths()))
"""


def include_paths(root, system) -> list[str]:
    """Of the builder on a machine with the files of ``system``."""
    path = f"{MINDSPEED}:{root}/tests/stubs/npu:{root}/tests/stubs"
    environment = {"PYTHONPATH": path, "ASCEND_HOME_PATH": str(system), "PATH": "/usr/bin:/bin"}
    run = subprocess.run([sys.executable, "-c", INCLUDE_PATHS, str(system)], env=environment, check=True,
                         capture_output=True, text=True)  # fmt: skip
    return run.stdout.split()


@pytest.mark.parametrize("machine", ["aarch64", "x86_64"])
def test_headers_of_openeuler_are_found(root, tmp_path, machine):
    library = tmp_path / "usr/include/c++/12"
    (library / f"{machine}-openEuler-linux/bits").mkdir(parents=True)
    (library / f"{machine}-openEuler-linux/bits/of_the_machine.h").touch()
    (library / "of_the_library").write_text("#include <bits/of_the_machine.h>\n")
    flags = [f"-I{path}" for path in include_paths(root, tmp_path)]
    subprocess.run(["c++", "-fsyntax-only", "-x", "c++", "-", *flags], input="#include <of_the_library>\n",
                   check=True, text=True)  # fmt: skip


def test_elsewhere_nothing_is_added(root, tmp_path):
    (tmp_path / "usr/include/c++/12/aarch64-linux-gnu").mkdir(parents=True)
    assert not [path for path in include_paths(root, tmp_path) if "c++" in path]

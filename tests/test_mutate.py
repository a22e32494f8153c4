"""tests/mutate.sh runs mutmut on a module: the module's tests kill most changes, the others are listed."""

import re
import subprocess

import pytest


@pytest.mark.long
def test_most_changes_of_a_module_are_killed(root):
    command = ["bash", "tests/mutate.sh", "ascend_rl/settings/switch.py"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    tested = int(re.findall(r"(\d+)/\1 ", done.stdout)[-1])
    assert 0 < done.stdout.count(": survived") < tested / 3 and tested > 10

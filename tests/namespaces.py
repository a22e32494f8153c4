"""Commands in namespaces of their own."""

from __future__ import annotations

import os
import subprocess

import pytest


def unshare(kind: str) -> list[str]:
    """The start of a command that runs in a new namespace of this kind: mount or net.

    Skips the test where the system permits none; CI must permit it.
    """
    command = ["unshare", f"--{kind}"]
    made = subprocess.run([*command, "true"], capture_output=True, text=True)
    if made.returncode:
        assert os.environ.get("CI") != "true", made.stderr
        pytest.skip(f"no namespaces of {kind} here: {made.stderr.strip()}")
    return command

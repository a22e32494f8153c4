"""verl asks an NPU that is there for the driver's version: a container may have another set than 0 and 1."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ranks import SITE
from wheels import CHIPS

PROGRAM = """
from verl.utils.device import is_support_ipc
print(is_support_ipc())
"""


@pytest.mark.parametrize(("driver", "shared"), [("25.3.rc1", "True"), ("25.2.0", "False")])
def test_one_npu_is_enough(root, driver, shared):
    """Two dies, which are NPU 0 of an Atlas A3; the handles of memory need driver 25.3."""
    node = root / "software_npu/node"
    environment = os.environ | {
        "PATH": f"{node}/bin:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")])),
        "ASCEND_HOME_PATH": f"{node}/cann",
        "SOFTWARE_NPU_CHIP": CHIPS["A3"],
        "SOFTWARE_NPU_COUNT": "2",
        "SOFTWARE_NPU_DRIVER": driver,
        "VERL_PLATFORM": "",
    }
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split()[-1] == shared

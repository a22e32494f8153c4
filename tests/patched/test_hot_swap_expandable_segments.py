"""verl.utils.device.set_expandable_segments reaches torch_npu's allocator, under the name torch_npu knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from ranks import SITE

PROGRAM = """
import json, torch
from verl.utils.device import get_device_name, set_expandable_segments
set_expandable_segments(False)
set_expandable_segments(True)
print(json.dumps([get_device_name(), torch.npu.memory.allocator_settings]))
"""


def test_npu_allocator_is_switched(root):
    path = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    device, settings = json.loads(run.stdout.splitlines()[-1])
    assert device == "npu"
    assert settings == ["expandable_segments:False", "expandable_segments:True"]


def test_a_machine_without_accelerator_does_nothing():
    from verl.utils.device import set_expandable_segments

    set_expandable_segments(True)

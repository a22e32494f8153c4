"""verl's Tracking on a disk that fills: metrics and TensorBoard's file lose steps, training loses nothing."""

from __future__ import annotations

import os
import subprocess
import sys

from namespaces import unshare

from ascend_rl.recipe.report_figures import read_part

# Steps 1-3 fit. Then the disk is full, until step 200.
TRAIN = """
import os, sys
from verl.utils.tracking import Tracking
place = sys.argv[1]
tracking = Tracking("p", "e", ["file", "tensorboard", "console"], config={})
figures = {f"actor/figure_{i}": float(i) for i in range(50)}
for step in range(1, 4):
    tracking.log(figures, step)
with open(f"{place}/filler", "wb", buffering=0) as filler:
    try:
        while filler.write(bytes(512)) == 512:
            pass
    except OSError:
        pass
for step in range(4, 200):
    tracking.log(figures, step)
os.remove(f"{place}/filler")
tracking.logger["file"].fp.again = 0  # the time of the next attempt
for step in range(200, 203):
    tracking.log(figures, step)
print("TRAINED", flush=True)
"""


def test_a_full_disk_ends_no_run(tmp_path):
    (tmp_path / "out").mkdir()
    prepare = f"""
        mount -t tmpfs -o size=32k none {tmp_path}/out
        "$@"; status=$?
        cp {tmp_path}/out/metrics.jsonl {tmp_path}/metrics.jsonl
        exit $status
    """
    environ = os.environ | {
        "VERL_FILE_LOGGER_PATH": f"{tmp_path}/out/metrics.jsonl",
        "TENSORBOARD_DIR": f"{tmp_path}/out/tensorboard",
    }
    command = [
        *unshare("mount"),
        "bash",
        "-uc",
        prepare,
        "bash",
        sys.executable,
        "-c",
        TRAIN,
        f"{tmp_path}/out",
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "TRAINED" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stderr.count("the run continues without") == 2, (
        done.stderr
    )  # one warning each, not one per step
    steps = [row["step"] for row in read_part(tmp_path / "metrics.jsonl")]  # which refuses a damaged line
    assert steps[:3] == [1, 2, 3] and steps[-3:] == [200, 201, 202] and len(steps) < 202, steps

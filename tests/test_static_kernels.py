"""Static kernels that a run installed are gone when it has ended, and those of others are not.

Instead of CANN and torchair, a worker writes and installs a package where torchair would, and the package's
uninstall script removes it, as CANN's does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ascend_rl.settings.static_kernels import LAUNCH, build_dir, uninstall

OWN, OTHER = "static_kernel_20260101000000000001_7", "static_kernel_20260101000000000002_8"
# Compiles and installs a package, and is killed or waits to be.
WORKER = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace as Is
from ascend_rl.rollout.npu_graph import static_kernels
aclgraph = Is(_aclnn_static_shape_kernel_build_dir=None)
static_kernels(aclgraph, Is(
    additional_config={"enable_static_kernel": True}, speculative_config=None,
    parallel_config=Is(local_world_size=1, data_parallel_size_local=1, data_parallel_size=1),
    compilation_config=Is(cudagraph_capture_sizes=[8]), scheduler_config=Is(max_num_seqs=8)))
where = Path(aclgraph._aclnn_static_shape_kernel_build_dir or "nowhere")
outputs = where / "aclnn_static_shape_kernel_outputs/ts1_pid7_outputs"
outputs.mkdir(parents=True)
(outputs / f"{sys.argv[1]}.run").touch()
os.system(sys.argv[2])
if sys.argv[3] == "killed":
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(600)
"""


INSTALL = """
mkdir -p "$PLACE/$1"
cat >"$PLACE/$1/uninstall.sh" <<END
#!/usr/bin/env bash
rm -r "$PLACE/$1" && echo $1 >>"$PLACE/../removed"
END
chmod +x "$PLACE/$1/uninstall.sh"
"""


@pytest.fixture
def cann(tmp_path):
    """ASCEND_HOME_PATH, where packages are installed, one of others, and how another one is."""
    home = tmp_path / "Ascend/ascend-toolkit/latest"
    packages = home / "opp/static_kernel/ai_core"
    packages.mkdir(parents=True)
    (home.parent / "8.5.0").symlink_to("latest")  # CANN has several names for a directory
    (tmp_path / "install.sh").write_text(f"PLACE={packages}\n{INSTALL}")
    subprocess.run(["bash", tmp_path / "install.sh", OTHER], check=True)
    return home, packages


def launcher(root: Path, tmp_path: Path, short_tmp: Path, cann, how: str) -> tuple[list[str], dict[str, str]]:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "train_it.sh").write_text("")
    install = f"bash {tmp_path}/install.sh {OWN}"
    (tmp_path / "env.sh").write_text(f"python {tmp_path}/worker.py {OWN} '{install}' {how}; exit")
    variables = {
        "OUTPUT_DIR": str(tmp_path / "out"), "LOG_DIR": str(tmp_path / "logs"), "SKIP_PREFLIGHT": "1",
        "ASCEND_HOME_PATH": str(cann[0]), "TMPDIR": str(short_tmp),
    }  # fmt: skip
    command = ["bash", "ray_start_npu.sh", f"{tmp_path}/train_it.sh", f"{tmp_path}/env.sh"]
    return command, os.environ | variables


def test_a_worker_that_is_killed(root, tmp_path, short_tmp, cann):
    command, environ = launcher(root, tmp_path, short_tmp, cann, "killed")
    run = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=600)
    assert run.returncode == 137, run.stderr
    assert [path.name for path in cann[1].iterdir()] == [OTHER]
    assert (cann[1].parent / "removed").read_text().split() == [OWN]  # once


def test_a_launcher_that_is_killed(root, tmp_path, short_tmp, cann):
    """What it left is ended and uninstalled by --stop."""
    command, environ = launcher(root, tmp_path, short_tmp, cann, "waits")
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, cwd=root, env=environ, stderr=stderr, start_new_session=True)
        until = time.monotonic() + 300
        while not (cann[1] / OWN / "uninstall.sh").exists():
            assert time.monotonic() < until and process.poll() is None, (tmp_path / "stderr").read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (cann[1] / OWN).exists()
    command = ["bash", "ray_start_npu.sh", "--stop"]
    stop = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=600)
    assert stop.returncode == 0, stop.stderr
    assert [path.name for path in cann[1].iterdir()] == [OTHER] and not list(short_tmp.glob("ascend-rl-*"))


def test_without_a_launcher_torchair_decides(tmp_path):
    assert build_dir({}) is build_dir({LAUNCH: str(tmp_path / "gone")}) is None
    assert uninstall(tmp_path, {}) == []


def test_what_cannot_be_uninstalled_is_named(tmp_path, cann, capfd):
    home, packages = cann
    subprocess.run(["bash", tmp_path / "install.sh", OWN], check=True)
    (packages / OWN / "uninstall.sh").write_text("#!/bin/sh\nexit 3\n")
    outputs = Path(build_dir({LAUNCH: str(tmp_path)}), "a", "b")
    outputs.mkdir(parents=True)
    (outputs / f"{OWN}.run").touch()
    assert uninstall(tmp_path, {"ASCEND_HOME_PATH": str(home)}) == []
    assert f"{OWN} are still installed" in capfd.readouterr().out

"""Static kernels that a run installs in CANN are uninstalled when it ends, however its processes end.

Problem: with static kernels torchair compiles packages and installs them in CANN. It uninstalls them in exit
handlers, which a worker that is killed does not run; vLLM gives its workers four seconds
(vllm-ascend#6128). They then stay for all later runs.
Idea: in a run of the launcher they are built in the directory of the launch. When all processes have ended,
the launcher runs the uninstall script of each package that it finds there; for a launcher that was killed,
the next one does, or --stop.
Invariants: packages of others are left alone; without a launcher torchair decides, as upstream.
Cost: one script per package, DEADLINE_S in all; what is left is named.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

LAUNCH = "ASCEND_RL_LAUNCH"  # the directory of the launch that this process belongs to
BUILT = "static_kernels"
DEADLINE_S = 45.0  # less than --stop waits for a launcher


def build_dir(environ: Mapping[str, str] | None = None) -> str | None:
    """Where torchair builds packages; None: where it wants. It takes no symbolic link on the way."""
    environ = os.environ if environ is None else environ  # looked up now: datasets.map replaces it
    launch = environ.get(LAUNCH)
    if not launch or not os.path.isdir(launch):
        return None
    path = os.path.join(os.path.realpath(launch), BUILT)
    os.makedirs(path, exist_ok=True)
    return path


def uninstall(launch: Path, environ: Mapping[str, str] | None = None) -> list[str]:
    """Uninstall what was built in a launch and is still installed; returns the packages' names."""
    environ = os.environ if environ is None else environ
    home, done, until = environ.get("ASCEND_HOME_PATH"), [], time.monotonic() + DEADLINE_S
    for package in sorted((launch / BUILT).glob("*/*/*.run")) if home else ():
        for script in Path(home).parent.glob(f"*/opp/static_kernel/ai_core/{package.stem}/uninstall.sh"):
            try:
                left_s = max(until - time.monotonic(), 0.0)
                subprocess.run([str(script)], check=True, capture_output=True, timeout=left_s)
                done.append(package.stem)
                break  # the same directory may have several names
            except (OSError, subprocess.SubprocessError) as error:
                print(f"static kernels {package.stem} are still installed: {error}; run {script}", flush=True)
    return done

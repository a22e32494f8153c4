"""What a launcher runs on its node once all nodes are there: operators, Ray, and on the head the training.

Started by launch.py below supervise, after ENV_SCRIPT was sourced, so that Ray's actors see
its variables. It gets its job as JSON:

    {"ray": command that lasts as long as Ray, "control": [the head's address, port],
     "nodes": addresses of all nodes, "npus": of each, "deadline_s": for Ray on all nodes,
     "logs": this node's folder, "train": command, null on a worker}

A worker's status is that of `ray start --block`; the head's that of "train", or 1 if Ray lacks NPUs for too
long or ends. Whatever is left running then is supervise's to stop.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ascend_rl.host import core_binding
from ascend_rl.launch import warm_start
from ascend_rl.launch.launch_plan import endpoint, npus_here
from ascend_rl.launch.supervise import descendants
from ascend_rl.settings import stack
from ascend_rl.settings.switch import switched_on

REMIND_S = 30.0
OPERATORS_DEADLINE_S = 600.0
POLL_S = 1.0
TELL_S = 10.0  # for the training to say what it lost
# Of MindSpeed: those that the recipes use. Each is a C++ extension that would else be built in the first
# step, by one rank of a node while the others wait for its lock.
OPERATORS = (
    "RotaryPositionEmbeddingOpBuilder",
    "RingAttentionUpdateOpBuilder",
    "GMMOpBuilder",
    "GMMV2OpBuilder",
    "FusedAdamWV2OpBuilder",
    "MatmulAddOpBuilder",
    "GroupMatmulAddOpBuilder",
)
BUILD_OPERATOR = f"""{"" if stack.NAME == stack.DEFAULT else "import verl  # and with it the hooks"}
import sys, mindspeed.op_builder as builders
builder = getattr(builders, sys.argv[1], None)
print("built" if builder and builder().load() else "this MindSpeed has no " + sys.argv[1])
"""


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def why_no_operators() -> str:
    """Why MindSpeed's operators cannot be built here; "" if they can."""
    if not npus_here():
        return "no NPU"
    if not importlib.util.find_spec("mindspeed"):
        return "no MindSpeed"
    return "" if shutil.which(os.environ.get("CXX", "c++")) else "no C++ compiler"


def build_operators(folder: Path, deadline_s: float = OPERATORS_DEADLINE_S) -> list[str]:
    """Build all operators at the same time, each with its log in ``folder``.

    Returns:
        Names of those that failed; the run may not need them, so it continues.
    """
    folder.mkdir(parents=True, exist_ok=True)
    running, failed = {}, []
    for name in OPERATORS:
        with (folder / f"{name}.log").open("w") as file:
            command = [sys.executable, "-c", BUILD_OPERATOR, name]
            running[name] = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    until = time.monotonic() + deadline_s
    for name, process in running.items():
        try:
            if process.wait(max(0.0, until - time.monotonic())):
                failed.append(name)
        except subprocess.TimeoutExpired:
            process.kill()
            failed.append(f"{name} (not done after {deadline_s:g} s)")
    return failed


def wait_for_control(
    address: str, port: int, deadline_s: float, alive: Callable[[], bool] = lambda: True
) -> str:
    """Wait until Ray's control service answers; returns why it does not."""
    until = time.monotonic() + deadline_s
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
            return ""
        except OSError as error:
            if not alive():
                return f"Ray did not start on {endpoint(address, port)}; see the lines above"
            if time.monotonic() > until:
                return f"Ray on {endpoint(address, port)} did not answer within {deadline_s:g} s: {error}"
        time.sleep(0.1)


def wait_for_npus(job: dict, until: float, alive: Callable[[], bool]) -> str:
    """Wait until Ray has the NPUs of all nodes; returns what is missing."""
    import ray

    wanted, reminded, known = job["npus"] * len(job["nodes"]), time.monotonic(), None
    ray.init(address=endpoint(*job["control"]), log_to_driver=False, logging_level="ERROR")
    try:
        while True:
            counts = {
                node["NodeManagerAddress"]: int(node["Resources"].get("NPU", 0))
                for node in ray.nodes()
                if node["Alive"]
            }
            missing = [
                f"{address} ({counts.get(address, 0)} of {job['npus']} NPUs)"
                for address in job["nodes"]
                if counts.get(address, 0) < job["npus"]
            ]
            text = f"Ray has {sum(counts.values())} of {wanted} NPUs"
            if not missing:
                say(f"{text}; training starts")
                return ""
            text += f"; missing: {', '.join(missing)}"
            now = time.monotonic()
            if not alive():
                return "Ray on this node ended; see the lines above"
            if now > until:
                return f"after {job['deadline_s']:g} s {text}; see Ray's logs of these nodes"
            if counts != known or now - reminded > REMIND_S:
                known, reminded = counts, now
                say(text)
            time.sleep(0.2)
    finally:
        ray.shutdown()


def start_ray(command: list[str]) -> subprocess.Popen:
    """`ray start`, whose raylet need not wait for its agents, as on a busy machine."""
    service = subprocess.Popen(command)
    threading.Thread(target=announce_agent, args=[service], daemon=True).start()
    return service


def announce_agent(service: subprocess.Popen) -> None:
    """Write down the port of the raylet's dashboard agent, as the agent itself does later.

    The raylet waits for this file even if it knows the port, and ends if it is not there within 15 s, which
    an agent, a Python program, may need to start on a busy machine.
    """
    names = ("session_dir", "node_id", "listen-port")
    while service.poll() is None:
        for pid in [pid for pid, name in descendants(service.pid).items() if name == "raylet"]:
            line = ""
            with contextlib.suppress(OSError):  # it ended meanwhile
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            found = [re.search(rf"--{name}=(\S+)", line) for name in names]
            if all(found):
                directory, node, port = (match[1] for match in found)
                path = Path(directory, f"dashboard_agent_listen_port_{node}")
                path.with_suffix(".early").write_text(port)
                path.with_suffix(".early").rename(path)
                return
        time.sleep(0.05)


def train(command: list[str], alive: Callable[[], bool]) -> int | None:
    """The exit status of the training; None if Ray ended and the training did not within TELL_S.

    `ray start` may end after its port is open: it gives up when the raylet does not register in time.
    """
    process = subprocess.Popen(command)
    while alive():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(TELL_S)
    return None


def main(job: dict) -> int:
    if reason := why_no_operators():
        say(f"MindSpeed's operators are not built: {reason} here")
    elif failed := build_operators(folder := Path(job["logs"], "operators")):
        say(f"operators that could not be built: {', '.join(failed)}; see {folder}")
    core_binding.bind("others")  # Ray, its actors and the driver inherit it; those with a device leave it
    if switched_on("WARM_START") and len(job["nodes"]) == 1:
        folder = Path(tempfile.mkdtemp(prefix="warm-"))
        os.environ["WARM_PYTHON"] = str(warm_start.start(folder, warm_start.MODULES + warm_start.WITH_RAY))
    until, status = time.monotonic() + job["deadline_s"], None
    if job["train"] is None:
        problem = wait_for_control(*job["control"], job["deadline_s"])
        if not problem:
            status = start_ray(job["ray"]).wait()
    else:
        service = start_ray(job["ray"])

        def alive() -> bool:
            return service.poll() is None

        problem = wait_for_control(*job["control"], job["deadline_s"], alive)
        if not problem and len(job["nodes"]) > 1:
            problem = wait_for_npus(job, until, alive)
        if not problem:
            os.environ["RAY_ADDRESS"] = endpoint(*job["control"])
            status = train(job["train"], alive)
            problem = f"Ray on this node ended (status {service.poll()}); see the lines above"
    if status is not None:
        return status if status >= 0 else 128 - status
    print(f"ERROR: {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))

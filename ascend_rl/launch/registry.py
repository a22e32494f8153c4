"""The launches of this user on this node: what runs, what a killed launcher left, and how to end both.

A launch is a directory in TMPDIR with launch.json in it, locked (flock) for as long as its launcher lives,
and named by ASCEND_RL_LAUNCH in the environment of whatever it starts. --status and --stop go by these.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ascend_rl.launch.launch_plan import Plan, endpoint
from ascend_rl.launch.supervise import descendants, processes
from ascend_rl.settings import static_kernels
from ascend_rl.settings.switch import CannotWork

MARK = static_kernels.LAUNCH
STOP_PATIENCE_S = 60.0
LONGEST_ENTRY = 1 << 16
# What launch.json has at least.
ENTRY = {"pid": int, "born": int, "nnodes": int, "ports": list}
ENTRY |= dict.fromkeys(("run", "role", "address", "head", "log", "started"), str)


@contextlib.contextmanager
def registered(plan: Plan) -> Iterator[Path]:
    """The directory of Ray's and all temporary files of this launch; removed at the end."""
    directory = Path(tempfile.mkdtemp(prefix="ascend-rl-"))
    try:
        with (directory / "launch.json").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            json.dump(
                {
                    "pid": os.getpid(),
                    "born": born(os.getpid()),
                    "run": plan.run,
                    "role": plan.role,
                    "nnodes": plan.nnodes,
                    "address": plan.address,
                    "head": endpoint(plan.head, plan.ray_port),
                    "ports": [plan.ray_port, plan.launch_port],
                    "log": str(plan.log_file),
                    "started": time.strftime("%Y-%m-%d %H:%M:%S"),
                },
                file,
            )
            file.flush()
            os.environ[MARK] = str(directory)
            tempfile.tempdir = str(directory)  # of supervise(); so that --stop removes it after a SIGKILL
            yield directory
    finally:
        tempfile.tempdir = None
        forget(directory)


def launches() -> list[tuple[Path, dict, bool]]:
    """(directory, launch.json, whether its launcher lives) of this user's launches on this node.

    TMPDIR is anybody's to write to: what is not a regular file of this user, in a directory of this user that
    nobody else can write to, is not looked at, whoever this user is. What is no launch.json is no launch.
    """
    found = []
    for path in sorted(Path(tempfile.gettempdir()).glob("ascend-rl-*/launch.json")):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if not own(path.parent.lstat(), stat.S_ISDIR):
                continue
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                if not own(os.fstat(file.fileno()), stat.S_ISREG):
                    continue
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    alive = False
                except BlockingIOError:
                    alive = True
                entry = json.loads(file.read(LONGEST_ENTRY))
            if isinstance(entry, dict) and all(isinstance(entry.get(k), kind) for k, kind in ENTRY.items()):
                found.append((path.parent, entry, alive))
    return found


def status() -> int:
    """Print this user's launches on this node; 0 if any is running."""
    found = [(entry, alive, len(leftovers(directory))) for directory, entry, alive in launches()]
    for entry, alive, left in found:
        if alive:
            print("running:", describe(entry))
        elif left:
            print(f"stale:   {describe(entry)}: killed, {left} processes are left; --stop ends them")
    if any(alive for _, alive, _ in found):
        return 0
    print("no run on this node")
    return 1


def stop(run: str) -> int:
    """End a launch on this node, and what a killed launcher left; 0 if that worked."""
    found = [(directory, entry, alive) for directory, entry, alive in launches() if run in ("", entry["run"])]
    if len({entry["run"] for _, entry, alive in found if alive}) > 1:
        names = ", ".join(sorted({entry["run"] for _, entry, _ in found}))
        raise CannotWork(f"several runs are on this node: {names}; say which with --run-name")
    if not found:
        print(f"no run{f' {run!r}' if run else ''} on this node")
        return 1
    for _, entry, alive in found:
        print("stopping", describe(entry))
        if alive and born(entry["pid"]) != entry["born"]:
            print("ERROR: its launcher is in another container: stop it there", file=sys.stderr)
            return 1
    until, again = time.monotonic() + STOP_PATIENCE_S, 0.0
    while any(alive and (directory / "launch.json").exists() for directory, _, alive in found):
        if time.monotonic() > again:  # the first one may leave it a grace time
            again = time.monotonic() + 1
            for entry in [entry for _, entry, alive in found if alive]:
                with contextlib.suppress(ProcessLookupError):
                    if born(entry["pid"]) == entry["born"]:
                        os.kill(entry["pid"], signal.SIGTERM)
        if time.monotonic() > until:
            print(f"ERROR: still there after {STOP_PATIENCE_S:g} s; see its log", file=sys.stderr)
            return 1
        time.sleep(0.1)
    for directory, _, alive in found:
        if not alive:
            remove_stale(directory)
    return 0


def describe(entry: dict) -> str:
    return (
        f"run '{entry['run']}' ({entry['role']} {entry['address']} of {entry['nnodes']} node(s), Ray at "
        f"{entry['head']}, pid {entry['pid']}, since {entry['started']}, log {entry['log']})"
    )


def stop_command(entry: dict) -> str:
    return f"bash ray_start_npu.sh --stop --run-name {entry['run']}"


def leftovers(directory: Path) -> set[int]:
    """This user's processes that carry a launch's mark, and their descendants (a title may hide theirs)."""
    found = set()
    for pid in processes():
        with contextlib.suppress(OSError):
            marked = f"{MARK}={directory}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
            if marked and Path(f"/proc/{pid}").stat().st_uid == os.geteuid():
                found.add(pid)
    for pid in list(found):
        found |= descendants(pid).keys()
    return found - {os.getpid()}


def remove_stale(directory: Path) -> None:
    """End what a killed launcher left, politely first, and remove its directory."""
    for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 30.0)):
        until, told = time.monotonic() + patience_s, set()
        while (pids := leftovers(directory)) and time.monotonic() < until:
            for pid in pids - told:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            told |= pids
            time.sleep(0.1)
    forget(directory)


def forget(directory: Path) -> None:
    """The end of a launch whose processes have ended."""
    static_kernels.uninstall(directory)
    shutil.rmtree(directory, ignore_errors=True)


def own(about: os.stat_result, kind: Callable[[int], bool]) -> bool:
    """Whether a file is of this kind, belongs to this user, and nobody else may write to it."""
    return kind(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022


def born(pid: int) -> int:
    """When a process started, in clock ticks since the boot, which tells it from a later one; 0 for none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0

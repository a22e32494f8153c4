"""One truth over all nodes: what a run must find alike on each of them, compared before Ray starts.

A run on several nodes reads its code, settings, models and data on each node, but only the head's are seen
by whoever starts it. An old checkout or another variable on one node gives no error: it gives another loss.
So each launcher collects what its node has (`collect`), a worker's goes to the head with its first message
(rendezvous.py), and the head names what differs, with both values (`differences`).

- Compared: this repository, patched trees, Python packages that must fit, driver, CANN, firmware, both
  scripts and the run they lead to (dry_run: overrides, variables that frameworks read), size of each file
  or directory that the run names, clocks. Not: what belongs to a host (addresses, interfaces, visible dies,
  cache directories), and secrets.
- If checkpoints are on, their directory is proved to be shared: the head writes a file there, each worker
  finds it and writes one too.

SKIP_PREFLIGHT=1 on the head compares nothing. Cost: one dry run, and reading all code; no framework is
imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ascend_rl.launch.launch_plan import ROOT, Plan
from ascend_rl.lint.dry_run import Run, dry_run
from ascend_rl.lint.tuning import table
from ascend_rl.preflight import node_facts
from ascend_rl.settings.hidden import is_secret
from ascend_rl.settings.switch import CannotWork

CLOCK_S = 10.0  # more is no drift, but a clock that nobody sets
SEEN_S = 5.0  # until another node's new file must be seen: NFS caches directories
PACKAGES = ("ray", "torch", "torch_npu", "transformers")
NONE, OFFERED = "none", ".shared-"
PREFIXES = tuple(
    "ACL_ ASCEND_ ASDOPS_ ATB_ CORE_BINDING CUDA_ GLOO_ HCCL_ HDP_ HYDRA_ MEGATRON_ NCCL_ NPU_ OMP_ "
    "PYTORCH_ RAY_ ROLLOUT_ TORCH USE_ VERL_ VLLM_".split()
)
OF_A_HOST = re.compile(
    "^ASCEND_RL_|(_IP|_IFNAME|_ADDR|_ADDRESS|_PATH|_HOME|_DIR|_ROOT|_FILE|_RANK|_RANK_LOCAL|VISIBLE_DEVICES|DOCKER_RUNTIME)$"
)
# What to do about a difference, by the start of its name.
FIXES = {
    "this repository": "bring the same commit to all nodes, without local edits",
    "frameworks/": "run: bash apply_all_patches.sh there; an edit must be on all nodes",
    "package ": "start the same image on all nodes",
    "driver": "install one HDK release on all hosts",
    "firmware": "install one HDK release on all hosts",
    "CANN": "start the same image on all nodes",
    "TRAIN_SCRIPT": "give the same script on all nodes",
    "ENV_SCRIPT": "give the same script on all nodes",
    "override ": "give the same overrides and variables on all nodes",
    "variable ": "set it alike on all nodes, or in ENV_SCRIPT",
    "path ": "give all nodes the same files at the same place",
}


def digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12] if path else NONE


def overrides(run: Run) -> dict[str, str]:
    """Hydra's overrides, the last of each key, without secrets.

    >>> overrides(Run("verl.trainer.main_ppo", ("+a.b=1", "a.b=2", "c='x'")))
    {'a.b': '2', 'c': 'x'}
    """
    found = {}
    for word in run.args:
        key, _, value = word.partition("=")
        if not is_secret(key):
            found[key.lstrip("+")] = value.strip("'\"")
    return found


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those that the frameworks read, and that belong to no host.

    >>> variables({"HCCL_BUFFSIZE": "512", "HCCL_IF_IP": "10.0.0.1", "RAY_AUTH_TOKEN": "x", "HOME": "/root"})
    {'HCCL_BUFFSIZE': '512'}
    """
    known = {entry.name for entry in table() if entry.variable}
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(PREFIXES) or name in known) and not OF_A_HOST.search(name) and not is_secret(name)
    }


def size(path: Path) -> str:
    """A file's bytes; the files and bytes below a directory, without hidden ones; or why it has none."""
    try:
        if path.is_file():
            return f"{path.stat().st_size} bytes"
        if not path.is_dir():
            return NONE
        sizes = []
        for place, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
            sizes += [Path(place, name).stat().st_size for name in names if not name.startswith(".")]
        return f"{len(sizes)} files of {sum(sizes)} bytes"
    except OSError as error:
        return error.strerror or str(error)


def inputs(given: Mapping[str, str], written: tuple[str, ...]) -> list[str]:
    """Paths among the values of overrides, but those below what the run writes itself.

    >>> inputs({"data.train_files": "[/data/a, /data/b]", "hydra.run.dir": "/out/hydra", "n": "4"}, ("/out",))
    ['/data/a', '/data/b']
    """
    words = [word.strip(" '\"") for value in given.values() for word in value.strip("[]").split(",")]
    paths = [word for word in words if word.startswith(("/", "~/")) or (Path(word).suffix and "/" in word)]
    return sorted({path for path in paths if not path.startswith(written)})


def collect(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """What this node has: name -> value, "none" where it has nothing.

    Args:
        plan: of this node.
        environ: what ENV_SCRIPT and TRAIN_SCRIPT will start with.
    """
    env_script = Path(plan.env_script) if plan.env_script else None
    with ThreadPoolExecutor() as pool:
        code = pool.submit(node_facts.code_facts, ROOT)
        trees = pool.submit(node_facts.tree_facts, ROOT)
        run = dry_run(Path(plan.script), env_script, plan.overrides, environ)
        given = overrides(run)
        paths = inputs(given, (str(plan.output_dir), str(plan.log_dir.parent)))
        sizes = dict(zip(paths, pool.map(size, (Path(path).expanduser() for path in paths)), strict=True))
    ignored: list = []
    found = {
        "this repository": code.result()["hash"][:12],
        "TRAIN_SCRIPT": f"{Path(plan.script).name} {digest(plan.script)}",
        "ENV_SCRIPT": f"{Path(plan.env_script).name} {digest(plan.env_script)}".lstrip(),
        "driver": node_facts.version_of([node_facts.ASCEND / "driver/version.info"], ignored, "") or NONE,
        "firmware": node_facts.version_of([node_facts.ASCEND / "firmware/version.info"], ignored, "") or NONE,
        "CANN": node_facts.version_of(node_facts.cann_files(environ, node_facts.ASCEND), ignored, "") or NONE,
        "package python": platform.python_version(),
    }
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[f"package {name}"] = importlib.metadata.version(name)
    found |= {f"frameworks/{name}": tree["hash"][:12] for name, tree in trees.result().items()}
    found |= {f"override {key}": value for key, value in given.items()}
    found |= {f"variable {name}": value for name, value in variables(run.env or environ).items()}
    found |= {f"path {path}": value for path, value in sizes.items()}
    return found


def differences(head: Mapping[str, str], node: Mapping[str, str], offset_s: float = 0.0) -> list[str]:
    """What a node has otherwise than the head, each with both values and what to do.

    >>> differences({"driver": "25.5", "path /m": "9 bytes"}, {"driver": "25.3", "path /m": "9 bytes"})
    ['driver is 25.3 there and 25.5 on the head: install one HDK release on all hosts']
    """
    found = []
    for name in dict.fromkeys([*head, *node]):
        here, there = head.get(name, NONE), node.get(name, NONE)
        if here != there:
            fix = next(text for start, text in FIXES.items() if name.startswith(start))
            found.append(f"{name} is {there} there and {here} on the head: {fix}")
    if abs(offset_s) > CLOCK_S:
        way = "ahead of" if offset_s > 0 else "behind"
        found.append(
            f"its clock is {abs(offset_s):.0f} s {way} the head's: set both by NTP (chronyc makestep)"
        )
    return found


# Shared storage.


def checkpoints(found: Mapping[str, str]) -> Path | None:
    """Where a run of several nodes saves checkpoints, by what `collect` found; None if it saves none."""
    every = found.get("override trainer.save_freq", "")
    place = found.get("override trainer.default_local_dir", "")
    return Path(place).expanduser().absolute() if place and every.isdigit() and int(every) else None


def offer(directory: Path) -> Path:
    """On the head: a new file in the directory, for the others to find.

    Raises:
        CannotWork: it cannot be written.
    """
    file = directory / f"{OFFERED}{secrets.token_hex(8)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise CannotWork(f"no checkpoint can be written to {directory}: {error.strerror}") from error
    return file


def shared(directory: Path, name: str) -> str:
    """On a worker: why the head's file is not found here, or none can be written beside it; or ""."""
    until = time.monotonic() + SEEN_S
    while not (directory / name).exists():
        if time.monotonic() > until:
            return (
                f"{directory} is not the head's: a file written there is not found here, on "
                f"{filesystem(directory)}; checkpoints need storage that all nodes mount: set OUTPUT_DIR"
            )
        time.sleep(0.1)
    own = directory / f"{name}-{secrets.token_hex(4)}"
    try:
        own.touch()
        own.unlink()
    except OSError as error:
        return f"no checkpoint can be written to {directory} here: {error.strerror}"
    return ""


def filesystem(path: Path) -> str:
    """The type of file system that holds a path, or would: "overlay (local to the container)"."""
    mounts = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    holding = [
        (len(point), kind.split()[0])
        for where, kind in mounts
        if path.is_relative_to(point := where.split()[4].replace("\\040", " "))
    ]
    kind = max(holding, default=(0, "an unknown file system"))[1]  # of two on one point the last is seen
    return f"{kind} (local to the container)" if kind in ("overlay", "tmpfs") else kind


class Agreement:
    """A node's side: what the head asks each worker, how a worker answers, what the head makes of it.

    Args:
        plan: of this node.
        environ: see `collect`.

    Raises:
        CannotWork: the head cannot write where checkpoints go.
    """

    def __init__(self, plan: Plan, environ: Mapping[str, str]):
        self.plan, self.environ = plan, environ
        self.ask, self.file = "", None
        self.found: dict[str, str] = {}
        if plan.role == "head" and not plan.on("SKIP_PREFLIGHT"):
            self.ask, self.found = "facts", collect(plan, environ)
            if directory := checkpoints(self.found):
                self.file = offer(directory)
                self.ask = self.file.name

    def answer(self, ask: str) -> dict | None:
        """On a worker: what this node has, and whether it sees the head's file; None if nothing is asked."""
        if not ask:
            return None
        self.found = self.found or collect(self.plan, self.environ)
        directory = checkpoints(self.found) if ask.startswith(OFFERED) else None
        return {"found": self.found, "storage": shared(directory, ask) if directory else ""}

    def judge(self, node: Mapping, ahead_s: float) -> list[str]:
        """On the head: what stands against a node."""
        if not self.ask:
            return []
        if not node.get("answer"):
            return ["its launcher has another version: bring the same commit to all nodes"]
        storage = [node["answer"]["storage"]] if node["answer"]["storage"] else []
        return differences(self.found, node["answer"]["found"], ahead_s) + storage

    def close(self) -> None:
        """Remove the file that the others have found."""
        if self.file:
            with contextlib.suppress(OSError):
                self.file.unlink()
                self.file.parent.rmdir()  # if it is empty

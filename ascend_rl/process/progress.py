"""Signs of progress within a step, for whoever waits: a response, a micro-batch.

A step of a large model takes hours, so its end says too little about a hang. The launcher names a file in the
environment of all that it starts; `sign` adds a byte to it, and the launcher sees the file change. Each node
has its own. Cost: one small write a response and micro-batch; nothing without the variable.

A training worker says once which rank it is, and on which die (`name_rank`), for whoever explains a hang or
warns of a die.

The launcher also ends a run of which a process dies that must not. Who can replace some of these processes
says so with `answer_for`: from then on their deaths are his.
"""

from __future__ import annotations

import contextlib
import os

FILE = "ASCEND_RL_PROGRESS"
VLLM = "vllm"


def sign() -> None:
    """Report that work continues; never raises."""
    if path := os.environ.get(FILE):
        with contextlib.suppress(OSError):
            os.utime(path)  # a full disk takes no byte
            with open(path, "ab", buffering=0) as file:
                file.write(b".")


def answer_for(processes: str) -> None:
    """Take the deaths of a kind of processes on this node from the launcher.

    Raises:
        OSError: if it cannot be told.
    """
    if path := os.environ.get(FILE):
        open(f"{path}.{processes}", "ab").close()


def name_rank() -> None:
    """Say the rank that RANK gives this process, and its die if it sees one only; never raises."""
    if path := os.environ.get(FILE):
        with contextlib.suppress(OSError):
            with open(f"{path}.ranks", "a") as file:
                die = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
                file.write(f"{os.getpid()} {os.environ.get('RANK', '')} {die if die.isdigit() else ''}\n")


def _named(path: str) -> list[list[str]]:
    """[pid, rank, die] of each worker; the last two may be empty."""
    with contextlib.suppress(OSError):
        with open(f"{path}.ranks") as file:
            return [[*line.rstrip("\n").split(" "), "", ""][:3] for line in file]
    return []


def ranks(path: str) -> dict[int, str]:
    """The launcher's side of `name_rank`: pid -> rank."""
    return {int(pid): rank for pid, rank, _ in _named(path)}


def rank_of_die(path: str) -> dict[int, str]:
    """The launcher's side of `name_rank`: die -> rank, for workers that see one die."""
    return {int(die): rank for _, rank, die in _named(path) if rank and die}


def answered_for(path: str, processes: str) -> bool:
    """The launcher's side of `answer_for`; ``path`` is what it put into the environment."""
    return os.path.exists(f"{path}.{processes}")

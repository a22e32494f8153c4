"""Where the processes of a run are that hangs: stacks of all of them, and who is not where the others are.

Each Python process of the run can be asked for its stacks (process/at_start.py); one that cannot is asked by
py-spy, where that is installed. What a node finds goes into OUTPUT_DIR/hang/NODE.txt, with the output of
npu-smi; a few words for each process go to the head, which compares the processes of a kind over all nodes:

- a stopped process (SIGSTOP, a debugger) is the odd one;
- otherwise, if some wait in a collective of torch.distributed, those that do not;
- otherwise those that are not in the function where most are.

Collectives of HCCL return at once; such a rank waits where its results are read, which the third rule covers.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ascend_rl.host import npu_tools
from ascend_rl.process import at_start
from ascend_rl.process.progress import ranks

ANSWER_S, ALL_S, OTHERS_S = 2.0, 60.0, 90.0  # of one process, of a node's, of the other nodes
QUIET_S = 0.1  # after the last line of an answer
SPY_S = 20.0
FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')  # of faulthandler
SPIED = re.compile(r"^ {4}(?P<name>.+?) \((?P<file>.+?):(?P<line>\d+)\)$")  # of py-spy
KIND = re.compile(r"^(ray::\w+|VLLM::[A-Za-z]+)")
COLLECTIVE = re.compile(r"/torch/distributed/distributed_c10d\.py$")
OF_TORCH = re.compile(r"/torch/(distributed/(distributed_c10d|c10d_logger)|utils/_contextlib)\.py$")
MOST_SHOWN = 8


@dataclass(frozen=True)
class Process:
    """One process of the run: who it is, and where its work is."""

    node: str
    pid: int
    name: str  # as it calls itself
    rank: str  # of the training; "" for others
    stopped: bool
    waits: str  # the collective it is in, or ""
    place: str  # function (file:line) of its own code

    @property
    def kind(self) -> str:
        """Processes of a kind do the same; "" for what is one of its kind."""
        found = KIND.match(self.name)
        return found[1] if found else ""

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.name}, " if self.rank else f"{self.name} ("
        where = f"waits in {self.waits}, called by {self.place}" if self.waits else f"is in {self.place}"
        return f"{who}pid {self.pid}, {self.node}) {'is stopped; it ' if self.stopped else ''}{where}"


def frames(text: str) -> list[list[tuple[str, str, int]]]:
    """(function, file, line) of each thread, the innermost first; the main thread first."""
    threads: list[list[tuple[str, str, int]]] = []
    spied = False
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
            spied = spied or line.endswith('"')
        elif threads and (found := FRAME.match(line) or SPIED.match(line)):
            threads[-1].append((found["name"], found["file"], int(found["line"])))
    return threads if spied else threads[::-1]


def where(text: str) -> tuple[str, str]:
    """(collective or "", place) of a process by its stacks: of a thread in a collective, else of the main.

    >>> where('Thread 0x1 (most recent call first):\\n  File "/a/b.py", line 3 in f')
    ('', 'f (b.py:3)')
    """
    found = [thread for thread in frames(text) if thread]
    for thread in found:
        calls = [n for n, (_, file, _) in enumerate(thread) if COLLECTIVE.search(file)]
        if calls:
            theirs = [n for n in range(calls[0], len(thread)) if not OF_TORCH.search(thread[n][1])]
            outer = theirs[0] if theirs else len(thread)
            names = [thread[n][0] for n in calls if n < outer]
            return names[-1], shown(thread[outer]) if theirs else "?"
    return "", shown(found[0][0]) if found else "unknown code: it did not answer"


def shown(frame: tuple[str, str, int]) -> str:
    name, file, line = frame
    return f"{name} ({os.path.basename(file)}:{line})"


def odd(processes: Iterable[Process]) -> list[Process]:
    """Those that are not where the others of their kind are; none if there is no such majority."""
    kinds: dict[str, list[Process]] = defaultdict(list)
    for process in processes:
        if process.kind:
            kinds[process.kind].append(process)
    found: list[Process] = []
    for group in kinds.values():
        waiting = [p for p in group if p.waits and not p.stopped]
        places = Counter(function(p) for p in group)
        common, count = places.most_common(1)[0]
        if any(p.stopped for p in group):
            found += [p for p in group if p.stopped]
        elif waiting and len(waiting) < len(group):
            found += [p for p in group if not p.waits]
        elif 2 * count > len(group):
            found += [p for p in group if function(p) != common]
    return found


def function(process: Process) -> tuple[str, str]:
    return process.waits, process.place.rpartition(":")[0]


def summary(processes: list[Process], folder: Path, silent: list[str]) -> list[str]:
    """Lines for the user: how many are where, and who is not there."""
    groups = Counter((p.kind, *function(p)) for p in processes if p.kind)
    lines = [f"where its {len(processes)} Python processes are; all stacks are in {folder}"]
    lines += [f"no stacks from node {node}" for node in silent]
    for (kind, waits, place), count in groups.most_common(MOST_SHOWN):
        place = f"{place})" if "(" in place else place
        lines.append(f"{count} x {kind}: " + (f"waits in {waits}, called by {place}" if waits else place))
    away = odd(processes)
    lines += [f"not where the others are: {process}" for process in away[:MOST_SHOWN]]
    return lines + [f"and {len(away) - MOST_SHOWN} more"] * (len(away) > MOST_SHOWN)


class Stacks:
    """Of one node's launcher, for one start.

    Args:
        folder: OUTPUT_DIR/hang.
        node: this node's address.

    Attributes:
        others: asks all other nodes; returns what they `packed`, and the nodes that did not answer in time.
    """

    def __init__(self, folder: Path, node: str):
        self.folder, self.node = folder, node
        self.others: Callable[[float], tuple[list[dict], list[str]]] = lambda patience_s: ([], [])
        self.file, self.signs = Path(os.devnull), ""
        self.pids: Callable[[], Mapping[int, str]] = dict

    def attach(self, temporary: Path, signs: str, pids: Callable[[], Mapping[int, str]]) -> dict[str, str]:
        """Prepare what the run's processes need; returns variables for them.

        Args:
            temporary: a directory of this start.
            signs: progress.FILE of this node.
            pids: the processes of the run on this node, with their names.
        """
        self.file, self.signs, self.pids = temporary / "stacks", signs, pids
        self.file.touch()
        (site := temporary / "site").mkdir()
        shutil.copy(at_start.__file__, site / "sitecustomize.py")
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        return {at_start.VARIABLE: str(self.file), "PYTHONPATH": path}

    def collect(self) -> list[Process]:
        """Ask this node's processes, and write what they say to ``folder``."""
        until, found, texts = time.monotonic() + ALL_S, [], []
        numbers = ranks(self.signs)
        for pid, name in self.pids().items():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                title = words[0].decode(errors="replace")
                stopped = bool(re.search(r"^State:\s+[Tt]", status, re.M))
                handles = (
                    int(re.search(r"^SigCgt:\s+(\w+)", status, re.M)[1], 16) >> (at_start.SIGNAL - 1) & 1
                )
                if not handles and not name.startswith(("ray::", "VLLM::")):
                    continue  # no Python
                text = ""
                if time.monotonic() < until:
                    text = self._ask(pid) if handles and not stopped else spy(pid)
                name = title.split()[0] if title.startswith(("ray::", "VLLM::")) else name
                waits, place = where(text)
                found.append(Process(self.node, pid, name, numbers.get(pid, ""), stopped, waits, place))
                texts.append(f"== {found[-1]}\n{text}")
        with contextlib.suppress(npu_tools.ToolError):
            texts.append(f"== npu-smi info\n{npu_tools.run(['npu-smi', 'info'])}")
        with contextlib.suppress(OSError):  # a full disk: what it says to the head remains
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{self.node}.txt").write_text("\n".join(texts))
        return found

    def _ask(self, pid: int) -> str:
        begin = size = self.file.stat().st_size
        os.kill(pid, at_start.SIGNAL)
        until = quiet = time.monotonic() + ANSWER_S
        while time.monotonic() < min(until, quiet):
            time.sleep(QUIET_S / 5)
            if (now := self.file.stat().st_size) != size:
                size, quiet = now, time.monotonic() + QUIET_S
        with self.file.open(errors="replace") as file:
            file.seek(begin)
            return file.read(size - begin)

    def explain(self) -> tuple[list[str], str]:
        """For the head: lines for the user, and the odd ones in a few words for the reason of the end."""
        theirs, silent = self.others(OTHERS_S)
        processes = self.collect() + [Process(**record) for record in theirs]
        if not processes:
            return [], ""
        away = odd(processes)
        named = [f"rank {p.rank}" if p.rank else f"{p.name} (pid {p.pid})" for p in away[:MOST_SHOWN]]
        why = f", not where the others are: {', '.join(named)}" if away else ""
        return summary(processes, self.folder, silent), why


def spy(pid: int) -> str:
    """The stacks of a process that cannot be asked, by py-spy."""
    if not shutil.which("py-spy"):
        return ""
    command = ["py-spy", "dump", "--nonblocking", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=SPY_S).stdout
    return ""


def packed(processes: list[Process]) -> list[dict]:
    """For a message to the head."""
    return [asdict(process) for process in processes]

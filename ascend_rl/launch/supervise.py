"""Run one command and everything it starts to the end, or to a clear error, and leave nothing behind.

A training run is a tree of processes (bash, Ray's daemons, actors, vLLM's engines) in which a dead worker
makes the others wait forever, and whose orphans keep devices and shared memory. This process becomes the
subreaper of the tree (prctl(2)), so that every descendant stays its child even after its parent died, and
watches:

- a wanted process that dies while the command runs, no progress for too long, or the overall deadline end
  the run with a sentence that says which;
- whatever ends the run, also Ctrl-C: all descendants get SIGTERM, those left or born later SIGKILL, and
  nothing else gets either; TMPDIR of the run is removed, and so are new files in /dev/shm that a descendant
  was seen to use and nobody else uses. A new file alone proves nothing: /dev/shm may be shared with other
  programs and containers.

The output goes to a log file, and to the terminal either as it is or as one line of progress (progress.py).
Linux only; used by ray_start_npu.sh, tested with real process trees in tests/test_supervise.py.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ascend_rl.launch.alert import Alerts
from ascend_rl.launch.hang import Stacks
from ascend_rl.launch.status_line import Line, Metrics, clock, state, unless_gone
from ascend_rl.launch.time_limit import EXIT_RESUMES, TimeLimit
from ascend_rl.process.logs import LogFile
from ascend_rl.process.progress import FILE, VLLM, answered_for
from ascend_rl.rollout.rollout_progress import TERMINAL
from ascend_rl.settings.numbers import real

PR_SET_CHILD_SUBREAPER = 36
# Names (/proc/PID/comm, cut to 15 characters) of processes that only end when a run does.
ESSENTIAL = (
    "raylet",
    "gcs_server",
    "ray::TaskRunner",
    "ray::WorkerDict",
)
VLLM_ESSENTIAL = ("ray::vLLMHttpSe", "VLLM::EngineCor", "VLLM::Worker")  # unless somebody answers for them
DEATH_GRACE_S = 60.0  # processes die one by one; on a loaded machine the driver takes 15 s to end
TERM_GRACE_S = 5.0
KILL_GRACE_S = 30.0  # a process in the kernel's hands (a driver, a disk) dies only when these let go
# These patterns read whatever a model wrote, too: the time they take is linear.
STEPS_SEEN = re.compile(r"Training Progress:.{0,300}?\| (\d{1,9})/(\d{1,9})")
# Progress within a step: a generation batch of dynamic sampling (ascend_rl/rollout/dapo.py).
BATCHES_SEEN = re.compile(r"generation batch \d+: \d+ of \d+ groups found")
# States of the rollout's progress bar, and those in a line that were overwritten: the log keeps the last.
ROLLOUT_SEEN = re.compile(
    rb"((?:rollout|validation) \d+: \d+ tokens/s[^\r\n:]*):[^\r\n|]*\|[^\r\n|]*\| ([^ \r\n]+/[^ \r\n]+)"
)
OVERWRITTEN = re.compile(rb"\r(?=[^\r\n]*+\r)[^\r\n]*(?:rollout|validation) \d{1,9}:[^\r\n]*|\r +(?=\r)")
LINE_BYTES = 1 << 20  # a longer line is taken in pieces
# What scripts, launchers and, after Ray's mark, our own code in actors say is passed on to the terminal.
OURS = re.compile(r"(?:\([^)]*\) )?(\[\d\d:\d\d:\d\d\] .*)")
REASON = re.compile(r"(?:\([^)]*\) )?((?:[\w.]*(?:Error|Exception)|ERROR): .+)")
# In the log, but not among the last lines of a failed run: they explain no failure. On nodes without NPUs Ray
# looks for their type and logs that it finds no CANN, with a traceback.
NOISE = re.compile(
    r"(?:scripts|usage_lib|cli_output_helpers)\.py:\d+ -- |received SIGTERM\. Draining|step:\d+ - "
)
NO_NPU_BEGINS, NO_NPU_ENDS = "Failed to detect NPU type", "No module named 'acl'"
SHM = Path("/dev/shm")
EXIT_DEADLINE, EXIT_NOT_FOUND = 124, 127  # as timeout(1)


def processes() -> dict[int, tuple[int, str]]:
    """All processes: pid -> (parent, name); without zombies, unless other threads outlived the main one."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path("/proc", entry, "stat").read_text()
                name, _, numbers = stat[stat.index("(") + 1 :].rpartition(")")
                rest = numbers.split()
                if rest[0] not in "ZX" or int(rest[17]) > 1:
                    found[int(entry)] = (int(rest[1]), name)
    return found


def descendants(root: int) -> dict[int, str]:
    """Living processes below ``root``: pid -> name."""
    everyone = processes()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in everyone.items():
        children.setdefault(parent, []).append(pid)
    found, stack = {}, [root]
    while stack:
        for pid in children.get(stack.pop(), ()):
            found[pid] = everyone[pid][1]
            stack.append(pid)
    return found


def at_work(pids: dict[int, str]) -> str:
    """What the processes of a run that hangs are doing: who is stopped, and the calls in Ray's titles."""
    stopped, calls = [], Counter()
    for pid, name in pids.items():
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
            title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            if state in "Tt":
                stopped.append(f"{name} (pid {pid})")
            elif title.startswith("ray::") and "." in title:
                calls[title.split()[0]] += 1
    told = ", ".join(f"{count} x {call}" if count > 1 else call for call, count in calls.most_common(6))
    return f", stopped: {', '.join(stopped)}" * bool(stopped) + f", at work: {told}" * bool(told)


def is_fork(pid: int, name: str) -> bool:
    """Whether a process has its parent's name: a helper it forked (datasets' num_proc), which may end.

    So is one that is gone already.
    """
    everyone = processes()
    parent, _ = everyone.get(pid, (None, name))
    return parent is None or everyone.get(parent, (0, ""))[1] == name


def reap(statuses: dict[int, int]) -> bool:
    """Collect every child that ended, adopted ones included: pid -> exit code; returns whether any is left.

    No child left proves that no descendant is left. A look at /proc does not: it misses a process that is
    born, or whose parent dies, during the look.
    """
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        return False
    return True


def kill_descendants(statuses: dict[int, int]) -> None:
    """End all descendants, politely first.

    SIGTERM goes once to those alive now: a process born later may be what a polite one says goodbye with.
    SIGKILL goes to whatever is left, until nothing is.
    """
    send(signal.SIGTERM, descendants(os.getpid()))
    until = time.monotonic() + TERM_GRACE_S
    while reap(statuses) and time.monotonic() < until:
        time.sleep(0.05)
    until = time.monotonic() + KILL_GRACE_S
    while reap(statuses) and time.monotonic() < until:
        send(signal.SIGKILL, descendants(os.getpid()))
        time.sleep(0.05)


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@dataclass(frozen=True)
class Ending:
    """How a run ended: exit code, last step, why, and whether that was meant (a signal, its deadline)."""

    code: int
    step: int = 0
    why: str = ""
    meant: bool = False


class SharedMemory:
    """The files in /dev/shm that appeared during the run and that its processes were seen to use."""

    LOOKS = 10  # a file may be there before the process that made it is known, or has mapped it

    def __init__(self):
        self.seen, self.ours = set(os.listdir(SHM)), set()
        self.unsure: dict[str, int] = {}  # new files that nobody was seen to use: how often to look again

    def watch(self, pids: Iterable[int]) -> None:
        """Check who uses the files that are new since the last calls; cheap if there are none."""
        present = set(os.listdir(SHM))
        self.unsure |= dict.fromkeys(present - self.seen, self.LOOKS)
        if self.unsure:
            self.ours |= self.unsure.keys() & self.used_by(pids)
        left = {name: looks - 1 for name, looks in self.unsure.items() if name in present - self.ours}
        self.unsure = {name: looks for name, looks in left.items() if looks}
        self.seen = present

    def used_by(self, pids: Iterable[int]) -> set[str]:
        """Names of the files that these processes have mapped or open.

        By device and inode: glibc maps a semaphore under another name before it gets its own, and containers
        have another /dev/shm with the same numbers.
        """
        device, inodes = SHM.stat().st_dev, set()
        shown = f"{os.major(device):02x}:{os.minor(device):02x}"
        for pid in pids:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    if f"{SHM}/" in line:
                        where, inode = line.split(maxsplit=5)[3:5]
                        if where == shown:
                            inodes.add(int(inode))
                for link in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):  # closed meanwhile
                        if os.readlink(link).startswith(f"{SHM}/") and link.stat().st_dev == device:
                            inodes.add(link.stat().st_ino)
        return {entry.name for entry in os.scandir(SHM) if entry.inode() in inodes}

    def remove_orphans(self) -> None:
        for name in self.ours - self.used_by(processes()):
            with contextlib.suppress(OSError):
                (SHM / name).unlink()


class Output:
    """Copies the command's output to the log, and to the terminal as text or as a line of progress."""

    def __init__(self, log: Path, metrics: Path | None, title: str):
        self.log, self.metrics = LogFile(log), Metrics(metrics)
        self.tail: deque[str] = deque(maxlen=25)
        self.step = self.total = 0
        self.progressed = self.started = time.monotonic()
        self.began = False  # whether there was any progress
        self.rollout, self.reason = "", ""
        self.title, self.line = title, Line(f"{title}; the output is in {log}") if title else None

    def read(self, stream) -> None:
        rest = b""
        while chunk := stream.read1(1 << 16):  # a progress bar moves without ending its line
            if self.line is None:
                with unless_gone(1):
                    sys.stdout.buffer.write(chunk)
                    sys.stdout.buffer.flush()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self.take(line + b"\n")
            if len(rest) > LINE_BYTES:
                self.take(rest)
                rest = b""
            found = ROLLOUT_SEEN.findall(rest[-2000:])
            self.rollout = b", ".join(found[-1]).decode() if found else ""
        self.take(rest)

    def take(self, line: bytes) -> None:
        """A line to the log, and what it says about the run."""
        self.log.write(OVERWRITTEN.sub(b"", line))
        text = line.decode(errors="replace").rstrip()
        if found := STEPS_SEEN.findall(text):
            step, total = map(int, found[-1])
            if (step, total) != (self.step, self.total):
                self.step, self.total, self.progressed = step, total, time.monotonic()
                self.began = self.began or step > 0
        elif text:
            if BATCHES_SEEN.search(text):
                self.began, self.progressed = True, time.monotonic()
            self.keep(text)

    def say(self, text: str) -> None:
        """A line of the supervisor's own."""
        text = f"[{time.strftime('%H:%M:%S')}] {text}"
        self.log.write(f"{text}\n".encode())
        if self.line is not None:
            self.line.say(text)
        else:
            with unless_gone(2):
                print(text, file=sys.stderr, flush=True)

    def keep(self, text: str) -> None:
        """A line that may say why the run fails, or is for the user."""
        if NO_NPU_ENDS in text:
            while self.tail and NO_NPU_BEGINS not in self.tail.pop():
                pass
        elif not NOISE.search(text):
            self.tail.append(text[-300:])
            if found := REASON.match(text):
                self.reason = found[1][:300]
            if self.line is not None and (said := OURS.match(text)):
                self.line.say(said[1][:300])

    def ended_early(self) -> bool:
        """Whether the trainer has ended the run before its last step, as it does for a time limit."""
        self.metrics.read()
        return 0 < self.metrics.step < self.total

    def resumes(self, what: str) -> tuple[int, str]:
        """The exit code of a run that ``what`` ended, and a sentence."""
        self.metrics.read()
        if saved := self.metrics.saved:
            return EXIT_RESUMES, f"{what} ended it; saved at step {saved}: the same command resumes"
        return EXIT_DEADLINE, f"{what} ended it, and this start has saved no step"

    def refresh(self, last: bool = False) -> None:
        """Read the metrics and draw."""
        self.metrics.read()
        if self.line is None:
            return
        since_s = time.monotonic() - self.progressed
        if self.total:
            self.line.show(state(self.step, self.total, self.metrics, since_s, self.rollout), last)
        elif self.line.terminal:
            self.line.show([self.title, clock(since_s)], last)

    def close(self) -> None:
        self.refresh(last=True)
        self.log.close()


def explain(stacks: Stacks, output: Output) -> str:
    """Say where the processes of a run are that hangs; returns who is not where the others are."""
    lines, away = stacks.explain()
    for line in lines:
        output.say(line)
    return away


def supervise(
    command: list[str],
    log: Path,
    metrics: Path | None = None,
    title: str = "",
    deadline_s: float = 0,
    stall_s: float = 0,
    start_s: float = 0,
    ended: Callable[[], tuple[int, str] | None] = lambda: None,
    leaving: Callable[[Ending], None] = lambda ending: None,
    gate: Callable[[dict], str] = lambda first_step: "",
    limit: TimeLimit | None = None,
    stacks: Stacks | None = None,
    alerts: Alerts | None = None,
) -> int:
    """Run ``command`` as described above.

    Args:
        command: what to run, found on PATH.
        log: file that gets all output; its directory is made.
        metrics: verl's metrics.jsonl, for the line of progress and the gate.
        title: what is started; draw a line of progress that begins so instead of copying the output.
        deadline_s, stall_s, start_s: longest run, longest time between two signs of progress after the
            first, longest time to the first; 0 is no limit. Signs are verl's "Training Progress", the
            generation batches of a DAPO step, and those of process/progress.py.
        ended: asked four times a second; a status and a sentence end the run.
        leaving: told how the run ended, before what is left of it is stopped.
        gate: given the metrics of the first training step; a sentence ends the run.
        limit: by when the run must have ended.
        stacks: asks processes of the run where they are; by itself into ``hang`` beside the log.
        alerts: is told of stalls and of each step's metrics.

    Returns:
        The command's exit code, or the status of ``ended``; 124 for a deadline, 75 if ``limit`` ended the run
        and it has saved a step, 1 for a death, 127 for no such command, 128 + the number of a signal.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    caught: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup(1) stays in force
            signal.signal(number, lambda number, frame: caught.append(number))

    began_s = time.monotonic()
    limit = limit or TimeLimit()
    alerts = alerts or Alerts()
    stacks = stacks or Stacks(log.parent / "hang", "127.0.0.1")
    log.parent.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.mkdtemp(prefix="ascend-rl-")  # short: paths of Unix sockets end at 107 bytes
    statuses: dict[int, int] = {}
    seen: dict[int, str] = {}
    died: tuple[float, str] | None = None
    why = ""
    shm = SharedMemory()
    output = Output(log, metrics, title)
    watched = {TERMINAL: "1"} if (sys.stderr if title else sys.stdout).isatty() else {}
    signs = Path(temporary, "progress")
    signs.touch()
    sign = signs.stat().st_mtime_ns
    limit.attach(str(signs))
    asked = stacks.attach(Path(temporary), str(signs), lambda: descendants(os.getpid()))
    reader = None
    code, final, judged = 1, False, False
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | watched | asked | {"TMPDIR": temporary, FILE: str(signs)},
            start_new_session=True,
        )
        reader = threading.Thread(target=output.read, args=(child.stdout,), daemon=True)
        reader.start()
        while True:
            reap(statuses)
            output.refresh()
            while output.metrics.new:
                alerts.stepped(*output.metrics.new.pop(0))
            if output.metrics.first and not judged:
                judged = True
                if why := gate(output.metrics.first):
                    final = True
                    break
            if child.pid in statuses:
                code = statuses[child.pid]
                code = 128 - code if code < 0 else code
                if not code and limit.by < math.inf and output.ended_early():
                    code, why = output.resumes("the time limit")
                    final = True
                break
            now = time.monotonic()
            with contextlib.suppress(OSError):
                if (latest := signs.stat().st_mtime_ns) != sign:
                    sign, output.began, output.progressed = latest, True, now
            alive = descendants(os.getpid())
            shm.watch(alive)
            essential = ESSENTIAL if answered_for(str(signs), VLLM) else ESSENTIAL + VLLM_ESSENTIAL
            dead = [pid for pid, name in seen.items() if pid not in alive and name.startswith(essential)]
            gone = [f"process {seen[pid]} (pid {pid}) died" for pid in dead]
            died = (died or (now, gone[0])) if gone else None  # one look may miss a living process
            new = {pid: name for pid, name in alive.items() if pid not in seen and name.startswith(essential)}
            seen |= {pid: name for pid, name in new.items() if not is_fork(pid, name)}
            if caught == [signal.SIGTERM] and limit.term():
                caught.clear()
                output.say(f"SIGTERM: {limit.grace_s:g} s to save and end")
            if caught:
                code, why = 128 + caught[0], f"stopped by {signal.Signals(caught[0]).name}"
            elif died and now - died[0] > DEATH_GRACE_S:
                code, why = 1, f"{died[1]} and the run did not end by itself"
            elif elsewhere := ended():
                code, why = elsewhere
            elif limit.passed():
                code, why = output.resumes(f"the time limit, in step {output.step + 1}")
                final = True
            elif deadline_s and now - began_s > deadline_s:
                code, why, final = EXIT_DEADLINE, f"not finished after {deadline_s:g} s", True
            elif not output.began and start_s and now - began_s > start_s:
                code, why = EXIT_DEADLINE, f"no training step after {start_s:g} s{at_work(alive)}"
                alerts.send("stall", output.step, why)
                why += explain(stacks, output)
            elif output.began and stall_s and now - output.progressed > stall_s:
                code = EXIT_DEADLINE
                why = f"no progress for {stall_s:g} s after step {output.step} of {output.total}"
                why += at_work(alive)
                alerts.send("stall", output.step, why)
                why += explain(stacks, output)
            if why:
                break
            time.sleep(0.25)
    except OSError as error:
        if reader is not None:
            raise
        code, why = EXIT_NOT_FOUND, f"{command[0]} cannot be run: {error.strerror}"
    finally:
        leaving(Ending(code, output.step, why.partition("\n")[0], bool(caught) or final))
        alerts.wait()
        shm.watch(descendants(os.getpid()))
        kill_descendants(statuses)
        if reader is not None:
            reader.join(5)
        output.close()
        shutil.rmtree(temporary, ignore_errors=True)
        shm.remove_orphans()
    with unless_gone(2):
        if code and code != EXIT_RESUMES and title and not caught and output.tail:
            print("\nThe last lines of its output:\n  " + "\n  ".join(output.tail) + "\n", file=sys.stderr)
        if code:
            reason = f": {output.reason}" if output.reason and title else ""
            why = why or f"{command[0]} ended with status {code}{reason}"
            end = "\n" if "\n" in why else ". "
            mark = "" if code == EXIT_RESUMES else "ERROR: "
            print(f"{mark}{why}{end}The log is {log}", file=sys.stderr)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command and all it starts; leave nothing behind.")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--metrics", type=Path, help="verl's metrics.jsonl")
    parser.add_argument("--title", default="", help="show a line of progress, not the output")
    parser.add_argument("--deadline", type=real(), default=0, metavar="S", help="longest run (0: no limit)")
    parser.add_argument("--stall", type=real(), default=0, metavar="S", help="longest time between steps")
    parser.add_argument("--start", type=real(), default=0, metavar="S", help="longest time to the first step")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("give the command to run after --")
    return supervise(command, args.log, args.metrics, args.title, args.deadline, args.stall, args.start)


if __name__ == "__main__":
    sys.exit(main())

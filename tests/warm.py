"""A process that has imported some modules and forks on request: each fork starts at once, with fresh state.

    warm = Warm(["torch"])       # or "torch:manual_seed": a function of the module is called, too
    warm.run(2, squares, 3)      # [squares(0, 3), squares(1, 3)], each in a process of its own
    warm.stop()

Functions must be importable (top level of a test module). The process itself computes nothing, so that no
thread or state of a library is inherited.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import itertools
import math
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

PATIENCE_S = 600.0  # with what hangs; a loaded machine takes minutes where an idle one takes seconds
cpu_s = [0.0]  # processor time of jobs that ended, as long as what forked them has not: it counts with them


class Warm:
    """The process. ``path`` is its PYTHONPATH; what it forks has the sys.path of this process after it.

    It starts with the first job, and again with the next one if it dies itself. It is itself a fork where
    this process has imported the module ``like``.
    """

    def __init__(self, modules: Sequence[str], path: str = "", like: str = "", **environment: str):
        self.modules, self.path, self.like, self.environment = modules, path, like, environment
        self.process, self.cpu_s = None, 0.0
        atexit.register(self.stop)

    def _start(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="warm-")
        self.log = Path(self.directory, "log")
        (given, jobs), (answers, taken) = os.pipe(), os.pipe()
        # Without a buffer, so that select sees what was not read.
        self.jobs, self.answers = os.fdopen(jobs, "wb", 0), os.fdopen(answers, "rb", 0)
        environment = os.environ | self.environment | {"PYTHONPATH": self.path}
        with open(given) as given, open(taken, "w") as taken, self.log.open("w") as log:
            if self.like in sys.modules:
                faulthandler.cancel_dump_traceback_later()  # a fork that inherits one can set none
                files = given.fileno(), taken.fileno(), log.fileno()
                fork = multiprocessing.get_context("fork")
                self.process = fork.Process(target=self._fork, args=(files, environment))
                self.process.start()
                self.wait = self.process.join
                return
            code = "import sys; sys.path.append(sys.argv[1]); import warm; warm.serve(sys.argv[2:])"
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(Path(__file__).parent), *self.modules],
                env=environment,
                stdin=given,
                stdout=taken,
                stderr=log,
            )
            self.wait = self.process.wait

    def _fork(self, files: Sequence[int], environment: dict[str, str]) -> None:
        self.jobs.close()
        self.answers.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
        sys.stdin = open(0)
        os.environ |= environment
        sys.path[:0] = self.path.split(os.pathsep)
        serve(self.modules)

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.wait()
            self.jobs.close()
            self.answers.close()
            shutil.rmtree(self.directory, ignore_errors=True)
            cpu_s[0] -= self.cpu_s
            self.process, self.cpu_s = None, 0.0

    def run(self, count: int, function, *args, seconds: float = PATIENCE_S, **environment: str) -> list:
        """Results of ``function(number, *args)`` in ``count`` processes, by number.

        They have the variables of this process and those given, each a session that ends with it.

        Raises:
            AssertionError: one raised (shown with its output), died, or did not answer in ``seconds``.
        """
        if not self.process:
            self._start()
        directory = Path(tempfile.mkdtemp(dir=self.directory))
        own = {"PYTHONPATH": self.path} if self.path else {}
        job = {
            "count": count,
            "call": pickle.dumps((function, args)),
            "seconds": seconds,
            "path": [*filter(None, self.path.split(os.pathsep)), *sys.path],
            "environment": os.environ | own | self.environment | environment,
        }
        (directory / "job").write_bytes(pickle.dumps(job))
        for number in range(count):
            (directory / f"{number}.log").touch()
        values, until, pids, ended = {}, math.inf, [], 0
        try:
            with contextlib.suppress(BrokenPipeError):
                self.jobs.write(f"{directory}\n".encode())
            pids = [int(pid) for pid in self._line().split()]
            until = time.monotonic() + seconds
            while len(values) < count:
                number = self._ended(until - time.monotonic())
                if number is None:
                    missing = sorted(set(range(count)) - values.keys())
                    raise AssertionError(
                        f"no answer from {missing} in {seconds:.0f} s: {tail(directory, missing[0])}"
                    )
                ended += 1
                answer = directory / f"{number}.answer"
                assert answer.exists(), f"process {number} died: {tail(directory, number)}"
                value, error = pickle.loads(answer.read_bytes())
                assert error is None, f"process {number}: {tail(directory, number)}\n{error}"
                values[number] = value
        except AssertionError as error:
            if time.monotonic() > until - 15:  # a rank that hangs ends itself 10 s before
                error.add_note(stacks(pids))
            raise
        finally:
            kills = [os.killpg] if ended == len(pids) else [os.killpg, os.kill]  # not of a number used again
            for kill, pid in itertools.product(kills, pids):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
            with contextlib.suppress(AssertionError):
                while ended < len(pids) and self._ended(PATIENCE_S) is not None:
                    ended += 1
            if ended < count:
                self.stop()
        return [values[number] for number in range(count)]

    def _ended(self, seconds: float) -> int | None:
        """The number of a process that ended; None if none does so in time."""
        if not select.select([self.answers], [], [], max(0, seconds))[0]:
            return None
        number, used_s = self._line().split()
        self.cpu_s += float(used_s)
        cpu_s[0] += float(used_s)
        return int(number)

    def _line(self) -> bytes:
        line = self.answers.readline()
        assert line, f"the process that forks died: {self.log.read_text()[-3000:]}"
        return line


def stacks(sessions: Sequence[int]) -> str:
    """Where the processes of these sessions are: what hangs may be one that a rank has forked."""
    told = []
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if os.getsid(pid) in sessions:
                command = [Path(sys.executable).with_name("py-spy"), "dump", "--pid", str(pid)]
                told.append(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout)
    return "\n".join(told)


def tail(directory: Path, number: int) -> str:
    return "..." + (directory / f"{number}.log").read_text(errors="replace")[-3000:]


def serve(modules: Sequence[str]) -> None:
    """Import the modules, then fork for one job after another."""
    answers, before = os.fdopen(os.dup(1), "w"), dict(os.environ)
    os.dup2(2, 1)
    del sys.argv[1:]  # MindSpeed reads them
    try:
        for module in modules:
            name, _, function = module.partition(":")
            module = importlib.import_module(name)
            if function:
                getattr(module, function)()
    except Exception:  # what a variant of a framework lacks is the jobs' to find out, without half a module
        traceback.print_exc()
        os.dup2(answers.fileno(), 1)
        os.execv(sys.executable, sys.orig_argv[: -len(modules)])
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.freeze()
    for line in sys.stdin:
        directory = Path(line.rstrip("\n"))
        job = pickle.loads((directory / "job").read_bytes())
        numbers = {}
        for number in range(job["count"]):
            if not (pid := os.fork()):
                _live(number, job, directory, imported)
            numbers[pid] = number
        print(*numbers, file=answers, flush=True)
        for _ in numbers:
            pid, _, used = os.wait4(-1, 0)
            print(numbers[pid], used.ru_utime + used.ru_stime, file=answers, flush=True)


def _live(number: int, job: dict, directory: Path, imported: dict[str, str]) -> None:
    """The life of a forked process. Its answer is the file NUMBER.answer: a value, a traceback or None."""
    try:
        os.setsid()  # so that what it starts (megatron-core's writer of checkpoints) can be ended with it
        log = os.open(directory / f"{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ |= job["environment"] | imported
        sys.path[:] = job["path"]
        faulthandler.dump_traceback_later(max(60, job["seconds"] - 10), exit=True)
        function, args = pickle.loads(job["call"])
        answer = pickle.dumps((function(number, *args), None))
    except BaseException:
        answer = pickle.dumps((None, traceback.format_exc()))
    (directory / f"{number}.written").write_bytes(answer)
    (directory / f"{number}.written").rename(directory / f"{number}.answer")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

"""Mutation testing: change one thing in a module at a time, and see whether its tests notice.

    python -m tests.mutate ascend_rl/loss/gspo.py                # all mutations, with tests/test_gspo.py
    python -m tests.mutate ascend_rl/speculation/sam.py --sample 60 --seed 1       # the same 60 each time
    python -m tests.mutate ascend_rl/loss/gspo.py --only 83 --list       # those of one line, without tests

tests/mutations.py says what is changed and what is not. Starting pytest takes seconds, mostly for imports. So
the tests run once unchanged, this process imports the installed packages they needed, and each mutation runs
in a fork of it, with the changed code in place of the module, also in Python processes that the tests start.
Files are not changed; each fork has its own working directory and TMPDIR. Hypothesis draws the same examples
each time and does not shrink. Modules with numba run uncompiled if their tests pass that way in a minute.

Exit status: 0; 1 if fewer mutations than the bar are killed; 2 if nothing can be said, such as when the tests
fail without a mutation.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import json
import marshal
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NamedTuple

from tests.mutations import Mutation, mutations

MEMORY_BYTES = 8 << 30  # a mutation may append for ever


class Replaced(SourceFileLoader):
    """Finder and loader of one module, whose code is in a file; notes there that it was asked for."""

    def __init__(self, name, path, code):
        super().__init__(name, path)
        self.code = code

    def find_spec(self, fullname, path=None, target=None):
        if fullname == self.name:
            return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname):
        with open(self.code + ".loaded", "w"), open(self.code, "rb") as code:
            return marshal.loads(code.read())


# For Python processes that the tests start.
SITECUSTOMIZE = """import importlib.util, marshal, sys
from importlib.machinery import SourceFileLoader

{definition}
sys.meta_path.insert(0, Replaced{arguments})
"""


class Target(NamedTuple):
    name: str
    path: Path
    pytest: list[str]

    def test(self, mutation: Mutation | None, directory: Path) -> int:
        """pytest's exit status, for a new process; leaves in ``directory`` what the session imported."""
        import pytest
        from hypothesis import HealthCheck, Phase, configuration, settings

        compiled, temporary = directory / "code", directory / "tmp"
        source = self.path.read_text()
        code = mutation.code(self.path) if mutation else compile(source, self.path, "exec", dont_inherit=True)
        compiled.write_bytes(marshal.dumps(code))
        arguments = self.name, str(self.path), str(compiled)
        sitecustomize = SITECUSTOMIZE.format(definition=inspect.getsource(Replaced), arguments=arguments)
        (directory / "sitecustomize.py").write_text(sitecustomize)
        sys.meta_path.insert(0, Replaced(*arguments))
        temporary.mkdir()
        os.chdir(temporary)
        tempfile.tempdir = None
        os.environ["TMPDIR"] = str(temporary)
        os.environ["NUMBA_CACHE_DIR"] = str(directory / "numba")
        os.environ["PYTHONPATH"] = f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        if "numba" in sys.modules:
            sys.modules["numba"].config.reload_config()
        phases = (Phase.explicit, Phase.generate)
        given = {"derandomize": True, "database": None, "deadline": None}
        given["suppress_health_check"] = [HealthCheck.too_slow]  # of a slow machine, it would count as a kill
        settings.register_profile("mutate", phases=phases, **given)
        settings.load_profile("mutate")
        configuration.set_hypothesis_home_dir(str(directory / "hypothesis"))
        before = dict(os.environ)
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={directory / 'pytest'}"]
        status = pytest.main([*options, *self.pytest])
        session = {
            "modules": [name for name, module in list(sys.modules.items()) if _is_installed(module)],
            "environment": {name: value for name, value in os.environ.items() if before.get(name) != value},
        }
        (directory / "session").write_text(json.dumps(session))
        return int(status)


def _is_installed(module) -> bool:
    return str(getattr(module, "__file__", "")).startswith((sys.prefix, sys.base_prefix))


def warm_up(session: Path) -> None:
    """Import the installed packages that a session imported, in its environment."""
    found = json.loads(session.read_text())
    os.environ |= found["environment"]
    for name in found["modules"]:
        with contextlib.suppress(Exception):  # some exist only as attributes of others
            importlib.import_module(name)


def outcomes(
    runs: Iterable[tuple[Path, Callable[[Path], int]]], jobs: int, seconds: float
) -> Iterator[tuple[Path, int | None]]:
    """(directory, exit status) of functions that run in forks, ``jobs`` at a time.

    None: not done in ``seconds`` of processor time, or in 3 times as long by the clock.
    """
    waiting, running = iter(runs), {}
    try:
        while True:
            while len(running) < jobs and (run := next(waiting, None)):
                running[_fork(*run, seconds)] = run[0], time.monotonic() + 3 * seconds
            if not running:
                return
            for process, (directory, until) in list(running.items()):
                done = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if done or time.monotonic() > until:
                    del running[process]
                    status = _end(process)
                    yield directory, status if done and status != -signal.SIGXCPU else None
            time.sleep(0.01)
    finally:
        for process in running:
            _end(process)


def _fork(directory: Path, function: Callable[[Path], int], seconds: float) -> int:
    directory.mkdir()
    sys.stdout.flush()
    if process := os.fork():
        return process
    status = 70
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()  # so that what the tests start can be ended with them
        with open(os.devnull) as nothing, open(directory / "log", "w") as log:
            for stream, number in ((nothing, 0), (log, 1), (log, 2)):
                os.dup2(stream.fileno(), number)
        limits = {"CORE": 0, "DATA": MEMORY_BYTES, "CPU": math.ceil(seconds)}
        for name, limit in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, resource.RLIM_INFINITY))
        status = function(directory)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _end(process: int) -> int:
    """The exit status of a process that need not have ended, without what it started."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def run_unchanged(target: Target, directory: Path, seconds: float) -> str:
    """What is wrong with the tests, or with the module, as it is; empty if nothing."""
    ((_, status),) = outcomes([(directory, partial(target.test, None))], 1, seconds)
    if status == 0:
        loaded = (directory / "code.loaded").exists()
        return "" if loaded else f"the tests do not import {target.name}"
    why = f"did not end within {seconds:.0f} s" if status is None else f"end with exit status {status}"
    return f"without a mutation the tests {why}\n{(directory / 'log').read_text()}"


def prepare(target: Target, temporary: Path, jit: bool) -> tuple[str, float]:
    """Warm this process up; what is wrong with the target as it is, and what its tests take, in seconds."""
    plain = "numba" in target.path.read_text() and not jit
    for disable_jit, seconds in [("1", 60)] * plain + [("0", 1800)]:
        os.environ["NUMBA_DISABLE_JIT"] = disable_jit
        cold = temporary / f"cold-{disable_jit}"
        wrong = run_unchanged(target, cold, seconds)
        if not wrong:
            warm_up(cold / "session")
            started = time.monotonic()
            wrong = run_unchanged(target, temporary / "warm", 1800)
            return wrong, time.monotonic() - started
    return wrong, 0


def run_mutations(
    target: Target, chosen: list[Mutation], temporary: Path, jobs: int, seconds: float
) -> tuple[list[Mutation], int]:
    """Those that survive, and the number of those killed by their deadline."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread in a process that forks
    survived, late = set(), 0
    runs = ((temporary / str(index), partial(target.test, mutation)) for index, mutation in enumerate(chosen))
    with tqdm(total=len(chosen), unit="mutation") as bar:
        for directory, status in outcomes(runs, jobs, seconds):
            shutil.rmtree(directory, ignore_errors=True)
            late += status is None
            if status == 0:
                survived.add(int(directory.name))
            bar.set_postfix(survived=len(survived), refresh=False)
            bar.update()
    return [chosen[index] for index in sorted(survived)], late


def parse(arguments: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.mutate", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("module", type=Path, help="such as ascend_rl/loss/gspo.py, from the root of the repository")
    add("--tests", type=Path, nargs="+", metavar="FILE", help="(tests/test_<module>.py)")
    add("-k", metavar="EXPRESSION", help="pytest's choice among the tests")
    add("--sample", type=int, metavar="N", help="run N of the mutations")
    add("--seed", type=int, default=0, help="of the sample (0)")
    add("--only", type=int, action="append", metavar="LINE", help="mutations of this line; repeatable")
    add("--list", action="store_true", help="print the mutations, run nothing")
    add("--jobs", type=int, default=2, help="processes at a time (2)")
    add("--jit", action="store_true", help="compile with numba, again for each mutation")
    add("--deadline", type=float, default=10, metavar="SECONDS",
        help="of a run, unless 5 times the unchanged one is more (10)")  # fmt: skip
    add("--bar", type=float, default=90, metavar="PERCENT", help="to be killed (90)")
    options = parser.parse_args(arguments)
    options.tests = options.tests or [Path("tests", f"test_{options.module.stem}.py")]
    for file in [options.module, *options.tests]:
        if not file.is_file():
            parser.error(f"there is no {file} here; start in the root of the repository, or give --tests")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the forks too, such as under `timeout`
    source, path = options.module.read_text(), options.module.resolve()
    chosen = [m for m in mutations(source) if not options.only or m.line in options.only]
    if options.sample is not None and options.sample < len(chosen):
        indices = random.Random(options.seed).sample(range(len(chosen)), options.sample)
        chosen = [chosen[index] for index in sorted(indices)]
    if not chosen:
        print(f"there are no mutations in {options.module}, or in these lines", file=sys.stderr)
        return 2

    def show(found: list[Mutation]) -> None:
        for mutation in found:
            print(f"{options.module}:{mutation.line}\n  - {mutation.before}\n  + {mutation.after}")

    if options.list:
        show(chosen)
        return 0
    name = ".".join(path.relative_to(Path.cwd()).with_suffix("").parts)
    target = Target(name, path, [*map(str, map(Path.resolve, options.tests)), "-k", options.k or ""])
    with tempfile.TemporaryDirectory(prefix="mutate-") as temporary:
        wrong, duration = prepare(target, Path(temporary), options.jit)
        if wrong:
            print(wrong, file=sys.stderr)
            return 2
        started, seconds = time.monotonic(), max(options.deadline, 5 * duration)
        survivors, late = run_mutations(target, chosen, Path(temporary), options.jobs, seconds)
        took = time.monotonic() - started
    if options.module.read_text() != source:
        print(f"{options.module} has changed meanwhile", file=sys.stderr)
        return 2
    show(survivors)
    killed = len(chosen) - len(survivors)
    percent = 100 * killed / len(chosen)
    by_deadline = f"{late} of them by the deadline of {seconds:.0f} s"
    print(f"{options.module}: killed {killed} of {len(chosen)} ({percent:.0f}%), {by_deadline}, "
          f"{len(survivors)} survived; {took:.0f} s")  # fmt: skip
    return int(percent < options.bar)


if __name__ == "__main__":
    sys.exit(main())

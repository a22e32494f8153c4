"""Programs of warm_start.py do what Python does, and find the modules imported."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.long

LOUD = "import os; os.write(2, b'imported;')"
SHOW = """
import json, os, sys, loud
print(json.dumps([__name__, sys.argv, sys.path[0], os.getcwd(), os.environ["PLACE"], sys.stdin.read()]))
sys.exit(3)
"""
SPAWN = """
import multiprocessing, os, sys
def work(queue):
    import loud
    queue.put([os.getpid(), __name__])
    sys.exit(4)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    pid, name = queue.get()
    process.join()
    print(name, pid != os.getpid(), process.exitcode)
"""
WAIT = """
import signal, sys, time
def leave(*_):
    print("left", flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, leave)
import os
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a server that imports a module with the given source as "loud"; returns its program."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))  # a socket's path is short
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def started(source: str = LOUD, python: str = sys.executable, modules: Sequence[str] = ("loud",)) -> Path:
        (tmp_path / "loud.py").write_text(source)
        code = "import sys; from pathlib import Path; from ascend_rl.launch.warm_start import start"
        with (tmp_path / "log").open("w") as log:
            command = [python, "-c", f"{code}; start(Path(sys.argv[1]), sys.argv[2:])", str(folder), *modules]
            subprocess.run(command, check=True, stderr=log)
        return folder / "warm_python"

    yield started
    for process in psutil.process_iter(["cmdline"]):
        if str(folder / "warm_python") in (process.info["cmdline"] or ()):
            process.kill()
            process.wait(60)
    shutil.rmtree(folder)


@pytest.mark.parametrize("form", ["code", "module", "file"])
def test_it_does_what_python_does(start, form, tmp_path):
    program = start()
    (tmp_path / "show.py").write_text(SHOW)
    wanted = {
        "code": ["-c", SHOW, "a", "b c"],
        "module": ["-m", "show", "a"],
        "file": ["-B", str(tmp_path / "show.py"), "a"],
    }[form]
    place = {"cwd": "/", "env": os.environ | {"PLACE": "x\ny"}, "input": "told", "capture_output": True}
    real, warm = (subprocess.run([name, *wanted], text=True, **place) for name in (sys.executable, program))
    assert real.returncode == warm.returncode == 3
    assert json.loads(warm.stdout) == json.loads(real.stdout)
    assert real.stderr == "imported;" and warm.stderr == ""
    assert (tmp_path / "log").read_text() == "imported;"


def test_python_may_be_in_any_directory(start, tmp_path):
    odd = tmp_path / "\u914d\u65b9 #1 (it's)"
    odd.symlink_to(Path(sys.prefix))
    program = start(python=str(odd / "bin/python"))
    ran = subprocess.run([program, "-c", "import loud; print('hello')"], text=True, capture_output=True)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("hello\n", "", 0)


def test_what_it_spawns_is_warm_as_well(start, tmp_path):
    program = start()
    (tmp_path / "spawn.py").write_text(SPAWN)
    ran = subprocess.run([program, tmp_path / "spawn.py"], text=True, capture_output=True)
    assert (ran.stdout, ran.stderr) == ("__mp_main__ True 4\n", "")


def test_open_files_go_with_it(start):
    program = start()
    read, write = os.pipe()
    code = f"import os; os.write({write}, b'through'); print(os.listdir('/proc/self/fd'))"
    subprocess.run([program, "-c", code], check=True, pass_fds=[write], capture_output=True)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        assert stream.read() == b"through"  # and nobody else holds the other end


def test_each_draws_its_own_random_numbers(start):
    program = start("import numpy, random")
    code = "import numpy, random; print(random.random(), numpy.random.rand())"
    draws = [subprocess.run([program, "-c", code], capture_output=True).stdout.split() for _ in range(3)]
    assert len({number for pair in draws for number in pair}) == 6


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_program_ends_what_runs_for_it(start, number):
    program = start()
    with subprocess.Popen([program, "-c", WAIT], stdout=subprocess.PIPE, text=True) as waiting:
        fork = psutil.Process(int(waiting.stdout.readline()))
        while Path(f"/proc/{waiting.pid}/comm").read_text() != f"for {fork.pid}\n":
            time.sleep(0.01)
        waiting.send_signal(number)
        rest = waiting.stdout.read()  # to its end: the fork has closed it, too
    assert (rest, waiting.returncode) == (("left\n", 5) if number == signal.SIGTERM else ("", -number))
    psutil.wait_procs([fork], timeout=60)
    assert not fork.is_running()


def test_it_can_have_a_title(start):
    code = (
        "import setproctitle, sys; setproctitle.setproctitle('title'); print(open('/proc/self/comm').read())"
    )
    ran = subprocess.run([start("import setproctitle"), "-c", code], capture_output=True, text=True)
    assert ran.stdout.strip() == "title"


def test_it_dies_as_the_fork_died(start):
    ran = subprocess.run([start(), "-c", "import os; os.kill(os.getpid(), 9)"])
    assert ran.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "source", ["import threading; threading.Thread(target=input).start()", "raise OSError"]
)
def test_with_nobody_to_fork_it_is_an_ordinary_python(start, source, tmp_path):
    program = start(source)
    ran = subprocess.run([program, "-c", "import yaml; print(yaml.__name__)"], capture_output=True, text=True)
    assert ran.stdout == "yaml\n"
    assert subprocess.run([program, "--version"], capture_output=True, text=True).stdout.startswith(
        "Python 3"
    )


def test_ray_is_imported_for_the_workers_of_one_job(start, tmp_path):
    """Told of a program: whether Ray is there, and for which job it was imported where."""
    (tmp_path / "ray.py").write_text("import os; IN, JOB = os.getpid(), os.environ['RAY_JOB_ID']")
    program = start(modules=("setproctitle", "loud", "ray", "json.tool"))
    code = "import os, sys; print('ray' in sys.modules, end=' '); import ray; "
    code += "import setproctitle; setproctitle.setproctitle('told'); "
    code += "print(ray.IN == os.getpid(), ray.JOB, open('/proc/self/cmdline').read().strip(chr(0) + ' '))"

    def told(**variables) -> list[str]:
        ran = subprocess.run(
            [program, "-c", code], env=os.environ | variables, capture_output=True, text=True
        )
        return ran.stdout.split()

    driver, first, other = (
        {},
        {"RAY_JOB_ID": "1", "RAY_RAYLET_PID": "7"},
        {"RAY_JOB_ID": "2", "RAY_RAYLET_PID": "7"},
    )
    assert told(**driver) == ["False"]  # and no job
    assert told(**first) == told(**first) == ["True", "False", "1", "told"]
    assert told(**other) == ["False", "True", "2", "told"]
    assert told(**driver) == ["False"]
    assert told(**first) == ["True", "False", "1", "told"]

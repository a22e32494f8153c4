"""Processes that have imported torch and vLLM before they are asked for.

A run starts half a dozen Python processes, most of them one after another, and each imports the same modules
for 5 to 9 s. Here one process imports them once, then forks whatever Python is asked for:

    program = start(folder, ["torch", "vllm"])      # folder/warm_python
    warm_python -c CODE                             # as python -c CODE, in a fork

Ray reads the job of a worker from the environment when it is imported. So Ray, and what imports it, wait for
the first worker, and are then there for all workers of its job; other programs get an ordinary Python from
then on.

``warm_python`` hands over arguments, environment, directory and open files, passes signals on, and ends as
the fork ends. It takes the place of ``python`` where a program has a name for that: Ray's runtime environment
(py_executable) and multiprocessing's spawn. With no server it becomes an ordinary Python. A fork has a new
``__main__`` and random numbers of its own, but its modules have read the environment of the server.

For a laptop and tests (WARM_START=1 in internal/cpu_env.sh and in rehearsals): the many cores of a cluster
import at the same time.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import gc
import importlib
import inspect
import itertools
import json
import multiprocessing.spawn
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from ascend_rl.settings.stack import DEFAULT, NAME

MODULES = (  # that most processes of a run import
    "setproctitle", "tensordict", "torch._inductor.compile_fx", "transformers.modeling_utils", "peft",
    "datasets", "vllm.entrypoints.openai.api_server",
)  # fmt: skip
WITH_RAY = (  # and that Ray's workers import
    "ray", "verl.trainer.main_ppo", "verl.experimental.reward_loop",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "verl.workers.fsdp_workers" if NAME == DEFAULT else "verl.trainer.ppo.v1.trainer_sync",
)  # fmt: skip
OF_A_WORKER = ("RAY_JOB_ID", "RAY_RAYLET_PID")
RESUMED = {"jemalloc_bg_thd", "npu-record"}  # threads that pyarrow and the software NPU start again in a fork
MOST_FILES = 253  # that Linux passes in one message


def client(where: str) -> None:
    """The program ``warm_python``: it runs alone, without site-packages."""
    import array
    import itertools
    import json
    import os
    import signal
    import socket
    import sys

    passed_on = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until they have somewhere to go
    wanted = list(itertools.dropwhile(lambda name: name[:2] in ("-B", "-u", "-W"), sys.argv[1:]))
    answer = ""
    if wanted and (wanted[0] in ("-c", "-m") or not wanted[0].startswith("-")):
        server = socket.socket(socket.AF_UNIX)
        files = [int(name) for name in os.listdir("/proc/self/fd")]
        files = [
            file for file in files if file != server.fileno() and os.path.exists(f"/proc/self/fd/{file}")
        ]
        told = {"wanted": wanted, "files": files, "directory": os.getcwd(), "environment": dict(os.environ)}
        text = json.dumps(told).encode()
        try:
            server.connect(where)
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
            server.sendmsg([len(text).to_bytes(8, "big")], passed)
            server.sendall(text)
            answers = server.makefile()
            answer = answers.readline()
        except OSError:
            pass
    if not answer:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    pid = int(answer)
    with open("/proc/self/comm", "w") as name:  # for those who look for the process
        name.write(f"for {pid}")
    for number in passed_on:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    status = int(answers.readline() or 1)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def write_client(folder: Path) -> Path:
    """Write ``folder``/warm_python."""
    program = folder / "warm_python"
    # "#!" takes no path with spaces; to Python the command of sh is a string.
    start = f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} -SE \"$0\" \"$@\"\n' '''\n"
    program.write_text(f"{start}{inspect.getsource(client)}\n\nclient({str(folder / 'socket')!r})\n")
    program.chmod(0o700)
    return program


def receive(connection: socket.socket) -> dict:
    """A request; its ``files`` are {number here: number there}.

    Raises:
        OSError, ValueError: the other side went away.
    """
    size, files, _, _ = socket.recv_fds(connection, 8, MOST_FILES)
    text = connection.makefile("rb").read(int.from_bytes(size, "big"))
    request = json.loads(text)
    return request | {"files": dict(zip(files, request["files"], strict=True))}


def serve(server: socket.socket, with_ray: Sequence[str]) -> dict:
    """Fork for each request; returns in the forks only: the request."""
    job = None
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    forks: dict[int, socket.socket] = {}
    with server, woken, wake, selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(4096)
                elif key.fileobj is server:
                    connection, _ = server.accept()
                    try:
                        request = receive(connection)
                    except (OSError, ValueError):
                        continue
                    its_job = [request["environment"].get(name) for name in OF_A_WORKER]
                    if job is None and all(its_job) and with_ray:
                        job = its_job
                        # No more than changes: by its place in memory setproctitle finds the title.
                        os.environ |= dict(request["environment"].items() - os.environ.items())
                        load(with_ray)
                    if job not in (None, its_job):
                        connection.close()
                        for file in request["files"]:
                            os.close(file)
                        continue  # without an answer, the program becomes an ordinary Python
                    if not (pid := os.fork()):
                        signal.set_wakeup_fd(-1)
                        for other in (connection, *forks.values()):
                            other.close()
                        return request
                    for file in request["files"]:
                        os.close(file)
                    forks[pid] = connection
                    selector.register(connection, selectors.EVENT_READ, pid)
                    tell(connection, pid)
                else:  # the program in whose place the fork is was killed
                    selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)
            while forks and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection = forks.pop(ended[0])
                with contextlib.suppress(KeyError):
                    selector.unregister(connection)
                tell(connection, os.waitstatus_to_exitcode(ended[1]))
                connection.close()


def tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(f"{number}\n".encode())


def become(request: dict, program: str) -> None:
    """Do in this fork what the new process would do, with its files, directory, environment and signals."""
    above = max([*request["files"], *request["files"].values()]) + 1
    copies = {there: fcntl.fcntl(here, fcntl.F_DUPFD, above) for here, there in request["files"].items()}
    for here in request["files"]:
        os.close(here)
    for there, copy in copies.items():
        os.dup2(copy, there)
        os.close(copy)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(request["directory"])
    if request["wanted"][0] == "-c" and "setproctitle" in sys.modules:
        # Finds the title before the environment behind it moves: for vLLM's processes. Ray's own copy of this
        # library, in the workers that Ray starts as a file, finds it later, but not behind this one.
        sys.modules["setproctitle"].getproctitle()
    os.environ.clear()
    os.environ.update(request["environment"])
    multiprocessing.spawn.set_executable(program)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules and (threads := os.environ.get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(int(threads))

    kind, *rest = request["wanted"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    if kind == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy._run_module_as_main(rest[0])
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0], main.__file__ = [kind, *rest], str(Path(kind).resolve().parent), kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)


def start(folder: Path, modules: Sequence[str]) -> Path:
    """Start the server, which ends with what reaps it; returns the program ``warm_python``.

    The ``modules`` from "ray" on are imported with the first worker of Ray.
    """
    program = write_client(folder)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        server.listen(128)
        command = [sys.executable, "-m", __name__, str(server.fileno()), str(program), *modules]
        subprocess.Popen(command, pass_fds=[server.fileno()], stdin=subprocess.DEVNULL)
    return program


def load(modules: Sequence[str]) -> None:
    """Import them; end this process if they started threads that a fork lacks."""
    for name in modules:
        importlib.import_module(name)
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if lost := set(threads[1:]) - RESUMED:
        sys.exit(f"no warm start: a fork lacks the threads {lost}, which came with {' '.join(modules)}")
    gc.collect()
    gc.freeze()


def main(listening: str, program: str, *modules: str) -> None:
    server = socket.socket(fileno=int(listening))
    early = [*itertools.takewhile(lambda name: name != "ray", modules)]
    load(early)
    if "ray" in sys.modules:
        sys.exit("no warm start: Ray was imported, and keeps what the environment said of its worker then")
    become(serve(server, modules[len(early) :]), program)


if __name__ == "__main__":
    main(*sys.argv[1:])

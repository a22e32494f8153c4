"""Run a shell script where nothing starts but shells and read-only tools, and nothing is written or sent.

A script may call a program by any path and through any wrapper, so its text cannot say what it would start.
The kernel can: a seccomp filter, inherited by all that the script starts, hands each execve and each open for
writing to this module. A shell or a listed tool runs. Any other program is recorded, then becomes `true`:
the path that the kernel is about to read is overwritten. What a file would get goes to /dev/null, except
below the temporary directory of the run. Sockets, and calls that delete, rename or change files, fail;
signals reach nobody.

Without such a filter (Linux before 5.9, machines other than x86_64 and aarch64, a container that forbids it)
nothing runs: Unconfined says why. Cost: 40 ms a run, and 0.1 ms for each program.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

SHELLS = ("bash", "dash", "sh")
# They read, or run a program that is judged like any other.
TOOLS = (
    "[ arch awk basename bc cat cmp comm cut date diff dirname du egrep env expr false fgrep find fold "
    "gawk getconf grep head hostname id ls lscpu mawk md5sum mktemp nice nl nohup nproc numfmt od paste "
    "printenv printf pwd readlink realpath rev sed seq setsid sha256sum sort stat stdbuf tac tail tee "
    "test timeout tr true uname uniq wc whoami xargs"
).split()
CHANGES = {  # words with which a tool changes something
    "sed": r"-[a-zA-Z]*i|--in-place",
    "date": r"-s|--set",
    "find": "-delete",
    "hostname": r"[^-]|-F|-b|--file|--boot",
}
SYSTEM = "/usr/bin:/bin"
START_S = 60.0  # for the Python that installs the filter
GRACE_S = 1.0  # for background jobs, when the script has ended
KEPT_BYTES = 1 << 16  # of each output, from its end
CALLS = 5000  # the most programs of one run: then it is in a loop
MOST = {"RLIMIT_FSIZE": 16 << 20, "RLIMIT_AS": 4 << 30, "RLIMIT_CORE": 0}

# System calls: numbers of x86_64 and aarch64, None where there is none.
ARCH = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
EXECVE, EXECVEAT, OPEN, OPENAT, CREAT = (59, 221), (322, 281), (2, None), (257, 56), (85, None)
UNLINK, UNLINKAT = (87, None), (263, 35)
SOCKET, SECCOMP = (41, 198), (317, 277)
NOTHING = [  # succeed, and do nothing: signals, leaving the process group that is ended with the run, fchmod
    *((62, 129), (200, 130), (234, 131), (129, 138), (297, 240), (424, 424), (109, 154), (112, 157), (91, 52))
]
REFUSED = [
    *((437, 437), (425, 425), (82, None), (264, 38), (316, 276)),  # openat2, io_uring, rename
    *((83, None), (258, 34), (84, None), (86, None), (265, 37), (88, None), (266, 36)),  # mkdir, rmdir, links
    *((90, None), (268, 53), (452, 452), (92, None), (93, 55), (94, None), (260, 54)),  # chmod, chown
    *(
        (76, 45),
        (133, None),
        (259, 33),
        (132, None),
        (235, None),
        (261, None),
        (280, 88),
    ),  # truncate, mknod, utime
    *((188, 5), (189, 6), (190, 7), (197, 14), (198, 15), (199, 16)),  # attributes
    *(
        (165, 40),
        (166, 39),
        (155, 41),
        (161, 51),
        (272, 97),
        (308, 268),
        (170, 161),
        (171, 162),
    ),  # mount, hostname
    *(
        (164, 170),
        (227, 112),
        (159, 171),
        (305, 266),
        (169, 142),
        (101, 117),
        (311, 271),
        (321, 280),
    ),  # time, ptrace
    *((29, 194), (68, 186), (64, 190)),  # shared memory, queues, semaphores
]
ALLOW, ERRNO, NOTIFY, KILLED = 0x7FFF0000, 0x00050000, 0x7FC00000, 0x80000000
RECEIVE, SEND, ADD_FD = 0xC0502100, 0xC0182101, 0x40182103
GO_ON = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
AF_NETLINK = 16  # `hostname -I` reads addresses by it
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Unconfined(RuntimeError):
    """This machine cannot keep a script from starting programs, so it was not run."""


@dataclass
class Call:
    """A program that the script would have started."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = ""
    stdin: str = ""  # what it would have read, as far as it was there


@dataclass
class Outcome:
    """What a script did: the calls that were asked for, and the ends of its outputs."""

    calls: list[Call]
    out: str
    err: str
    stopped: str = ""  # why it was stopped


# The filter. `python -I -S confine.py SOCKET COMMAND...` confines itself, then becomes COMMAND.


def _program(machine: str) -> bytes:
    """The filter in BPF; each instruction is (code, jump if true, jump if false, k)."""
    column, arch = ARCH[machine]

    def number(call: tuple) -> int | None:
        return call[column]

    def load(offset: int) -> tuple:
        return 0x20, 0, 0, offset

    def give(value: int) -> tuple:
        return 0x06, 0, 0, value

    def when(call: tuple, *then: tuple) -> list[tuple]:
        """If it is this call, do `then`, which ends in give(), else jump behind it."""
        return [] if number(call) is None else [(0x15, 0, len(then), number(call)), *then]

    def opens(flags: int) -> list[tuple]:
        return [load(flags), (0x45, 0, 1, WRITES), give(NOTIFY), give(ALLOW)]

    lines = [
        load(4),
        (0x15, 1, 0, arch),
        give(KILLED),
        load(0),
        (0x35, 0, 1, 0x40000000),
        give(ERRNO | errno.EPERM),
    ]
    for call in (EXECVE, EXECVEAT, CREAT, UNLINK, UNLINKAT):
        lines += when(call, give(NOTIFY))
    lines += when(OPEN, *opens(24)) + when(OPENAT, *opens(32))
    lines += when(SOCKET, load(16), (0x15, 1, 0, AF_NETLINK), give(ERRNO | errno.EACCES), give(ALLOW))
    for call in NOTHING:
        lines += when(call, give(ERRNO))
    for call in REFUSED:
        lines += when(call, give(ERRNO | errno.EPERM))
    lines.append(give(ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _confine(channel: socket.socket) -> None:
    """Install the filter in this process and send its listener."""
    machine = platform.machine()
    program = _program(machine)
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HxxxxxxQ", len(program) // 8, ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    for name, most in MOST.items():
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard),) * 2)
    listener = libc.syscall(SECCOMP[ARCH[machine][0]], 1, 8, ctypes.byref(header))
    if listener < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    socket.send_fds(channel, [b"listener"], [listener])
    os.close(listener)


def _become(arguments: list[str]) -> None:
    channel = socket.socket(fileno=int(arguments[0]))
    try:
        if platform.machine() not in ARCH:
            raise OSError(f"{platform.machine()} is not supported")
        _confine(channel)
    except OSError as error:
        channel.send(b"!" + str(error).encode())
        raise SystemExit(1) from error
    channel.close()
    os.execv(arguments[1], arguments[1:])


# The judge, in the process that asked.


class _Memory:
    """The memory of a process that waits in a system call."""

    def __init__(self, pid: int):
        self.file = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)

    def text(self, address: int, most: int = 1 << 20) -> str:
        found = b""
        while len(found) < most:
            piece = os.pread(self.file, 4096 - (address + len(found)) % 4096, address + len(found))
            end = piece.find(b"\0")
            found += piece if end < 0 else piece[:end]
            if end >= 0 or not piece:
                break
        return os.fsdecode(found)

    def words(self, address: int) -> list[str]:
        """The strings of an array that ends with 0."""
        found = []
        while address and (
            pointer := struct.unpack("=Q", os.pread(self.file, 8, address + 8 * len(found)))[0]
        ):
            found.append(self.text(pointer))
        return found

    def write(self, address: int, text: str) -> None:
        os.pwrite(self.file, os.fsencode(text) + b"\0", address)

    def close(self) -> None:
        os.close(self.file)


def _system(names: Sequence[str]) -> dict[str, str]:
    """{name: the file it leads to} of those the system has."""
    return {name: os.path.realpath(path) for name in names if (path := shutil.which(name, path=SYSTEM))}


def _script(path: str) -> bool:
    """Whether the kernel or bash runs the file by a shell of the system."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        first = file.readline(256).strip()
        if not first.startswith(b"#!"):
            return b"\0" not in first and first[:1] not in (b"", b"\x7f")
        words = [os.path.basename(word) for word in os.fsdecode(first[2:]).split()]
        words = [word for word in words if not word.startswith("-") and "=" not in word]
        return bool(words) and (words[1] if words[0] == "env" and len(words) > 1 else words[0]) in SHELLS
    return False


class _Judge:
    """Decides about each notification of the listener."""

    def __init__(self, listener: int, keep: Callable[[list[str]], bool], room: str):
        self.listener, self.keep = listener, keep
        self.room = os.path.realpath(room) + os.sep
        self.calls: list[Call] = []
        self.count = 0
        self.unable = ""  # what this machine does not let us do
        self.allowed = _system((*SHELLS, *TOOLS))
        self.true = shutil.which("true", path="/bin:/usr/bin") or "/bin/true"
        self.null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def answer(self) -> None:
        notice = bytearray(80)
        try:
            fcntl.ioctl(self.listener, RECEIVE, notice)
        except OSError:
            return  # the process is gone
        key, pid, _, number, _, _, *args = struct.unpack("=QIIiIQ6Q", notice)
        value, error, flags = 0, errno.EACCES, 0
        try:
            with contextlib.closing(_Memory(pid)) as memory:
                value, error, flags = self.judged(key, pid, number, args, memory)
        except PermissionError as refused:
            self.unable = f"{refused.filename}: {refused.strerror}"
        except (OSError, struct.error):
            pass  # the process is gone
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.listener, SEND, bytearray(struct.pack("=QqiI", key, value, -error, flags)))

    def judged(
        self, key: int, pid: int, number: int, args: list[int], memory: _Memory
    ) -> tuple[int, int, int]:
        """(value, errno, flags) of the answer."""
        column = ARCH[platform.machine()][0]

        def is_(*calls: tuple) -> bool:
            return number in [call[column] for call in calls]

        at = is_(EXECVEAT, OPENAT, UNLINKAT)
        address = args[at]
        where = (
            f"/proc/{pid}/cwd"
            if not at or args[0] & 0xFFFFFFFF == 0xFFFFFF9C
            else f"/proc/{pid}/fd/{args[0]}"
        )
        path = os.path.join(os.readlink(where), memory.text(address, 4096))
        if is_(EXECVE, EXECVEAT):
            return self.started(pid, path, address, args[1 + at], args[2 + at], memory)
        if self.harmless(pid, path):
            return 0, 0, GO_ON
        if is_(UNLINK, UNLINKAT):
            return 0, errno.EPERM, 0
        cloexec = 0 if is_(CREAT) else args[1 + at] & os.O_CLOEXEC
        added = bytearray(struct.pack("=QIIII", key, 0, self.null, 0, cloexec))
        try:
            return fcntl.ioctl(self.listener, ADD_FD, added), 0, 0
        except OSError as refused:
            if refused.errno in (errno.EINVAL, errno.ENOTTY):
                self.unable = "its kernel hands over no files"
            raise

    def harmless(self, pid: int, path: str) -> bool:
        """Whether writing there changes nothing outside the run."""
        parts = path.replace("/dev/fd/", f"/proc/{pid}/fd/").replace("/proc/self/", f"/proc/{pid}/")
        parts = {"/dev/stdout": f"/proc/{pid}/fd/1", "/dev/stderr": f"/proc/{pid}/fd/2"}.get(path, parts)
        if parts.startswith(f"/proc/{pid}/fd/"):
            return os.readlink(parts).startswith(("pipe:", os.devnull))
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        return path == os.devnull or (real.startswith(self.room) and not os.path.islink(real))

    def started(
        self, pid: int, path: str, address: int, argv: int, environment: int, memory: _Memory
    ) -> tuple[int, int, int]:
        words = memory.words(argv)
        real, name = os.path.realpath(path), os.path.basename(path)
        if not os.path.exists(real) and "/" not in words[0]:  # a search along PATH
            return 0, 0, GO_ON
        self.count += 1
        if name != "true" and (self.allowed.get(name) == real or real in map(self.allowed.get, SHELLS)):
            if name not in CHANGES or not any(re.match(CHANGES[name], word) for word in words[1:]):
                return 0, 0, GO_ON
        elif _script(real):
            return 0, 0, GO_ON
        if self.keep(words):
            pairs = (word.split("=", 1) for word in memory.words(environment) if "=" in word)
            self.calls.append(Call(words, dict(pairs), os.readlink(f"/proc/{pid}/cwd"), _waiting(pid)))
        memory.write(address, self.true)
        return 0, 0, GO_ON


def _waiting(pid: int) -> str:
    """What is there to read at the standard input of a process: a here-document, a pipe or a file."""
    with contextlib.suppress(OSError):
        target = os.readlink(f"/proc/{pid}/fd/0")
        if target.startswith("pipe:") or os.path.isfile(target):
            file = os.open(f"/proc/{pid}/fd/0", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return os.read(file, 1 << 20).decode(errors="replace")
            finally:
                os.close(file)
    return ""


def _unconfined(why: str) -> Unconfined:
    return Unconfined(
        f"the script was not run: this machine cannot keep it from starting programs ({why}); that takes "
        "Linux 5.9 or later on x86_64 or aarch64, seccomp notifications, and access to a child's memory"
    )


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    room: str,
    keep: Callable[[list[str]], bool],
    cwd: str | None = None,
    stdin: str = "",
    timeout_s: float = 30,
) -> Outcome:
    """Run `command`, which is a shell of the system, and nothing that it starts.

    Args:
        environment: its variables.
        room: the directory below which it may write, e.g. its here-documents.
        keep: whether to keep a call, by its words; all others are forgotten.
        cwd: where it starts.
        stdin: what it reads.

    Raises:
        Unconfined: this machine cannot do it.
    """
    start_s = max(timeout_s, START_S)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(theirs.fileno()), *command],
            env=environment, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        try:
            ours.settimeout(start_s)
            message, fds, *_ = socket.recv_fds(ours, 4096, 1)
            if not fds:
                raise _unconfined(message[1:].decode() or "no answer")
            judge = _Judge(fds[0], keep, room)
            outcome = _attend(process, fds[0], judge, stdin.encode(), timeout_s)
            if judge.unable:
                raise _unconfined(judge.unable)
            return outcome
        except TimeoutError:
            return Outcome([], "", "", f"no start within {start_s:.0f} s: the machine is overloaded")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(OSError):
                    pipe.close()


def _attend(
    process: subprocess.Popen, listener: int, judge: _Judge, stdin: bytes, timeout_s: float
) -> Outcome:
    """Answer notifications and read outputs until all processes of the run have ended, or for too long."""
    outputs = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    poll = select.poll()
    for fd in (listener, *outputs):
        poll.register(fd, select.POLLIN)
    if stdin:
        poll.register(process.stdin, select.POLLOUT)
        os.set_blocking(process.stdin.fileno(), False)
    else:
        process.stdin.close()
    deadline, ended, stopped = time.monotonic() + timeout_s, False, ""
    open_ones = {listener, *outputs}
    try:
        while open_ones:
            if not ended and process.poll() is not None:
                ended, deadline = True, min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline or judge.count > CALLS:
                stopped = "" if ended else f"no end within {timeout_s:g} s: the script waits for something"
                if judge.count > CALLS:
                    stopped = f"no end within {CALLS} programs: the script is in a loop"
                break
            for fd, event in poll.poll(50):
                if fd == listener and event & select.POLLIN:
                    judge.answer()
                elif fd in outputs and (piece := os.read(fd, 1 << 16)):
                    outputs[fd] = (outputs[fd] + piece)[-KEPT_BYTES:]
                elif event & select.POLLOUT and stdin:
                    stdin = stdin[os.write(fd, stdin) :]
                    if not stdin:
                        poll.unregister(fd)
                        process.stdin.close()
                else:
                    poll.unregister(fd)
                    open_ones.discard(fd)
    finally:
        os.close(listener)
        os.close(judge.null)
    out, err = (text.decode(errors="replace") for text in outputs.values())
    return Outcome(judge.calls, out, err, stopped)


if __name__ == "__main__":
    _become(sys.argv[1:])

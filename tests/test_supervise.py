"""ascend_rl/launch/supervise.py on real trees of small processes: exit codes, output, what outlives a run.

Every process of a test carries the variable TEST_MARK, so what a run leaves behind can be found in /proc.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pty
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from namespaces import unshare

from ascend_rl.launch import supervise
from ascend_rl.process.logs import LogFile
from ascend_rl.rollout.dapo import DynamicSampling

PYTHON = sys.executable
# As verl's progress arrives through Ray, for printf.
STEP = r"(TaskRunner pid=7) \rTraining Progress:   4%%|#         | {}/80 [00:05<02:00,  1.6s/it]\n"

# PR_SET_NAME, then live for a while.
NAMED = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
time.sleep(float(sys.argv[2]))
"""
# A daemon by the book: parent, session and terminal are not the tree's, and it holds none of its pipes.
DAEMON = """
import os, pathlib, sys, time
if os.fork():
    os.wait()
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
os.closerange(0, 3)
pathlib.Path(sys.argv[1]).touch()
time.sleep(300)
"""
# The main thread ends, another one continues: /proc shows a zombie.
HEADLESS = """
import ctypes, os, pathlib, sys, threading, time
def work():
    time.sleep(0.3)
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(300)
if os.fork() == 0:
    os.closerange(0, 3)
    threading.Thread(target=work).start()
    ctypes.CDLL("libpthread.so.0").pthread_exit(None)
"""
# A process that is always somewhere else: it forks, and the parent ends, 50 times a second.
FUGITIVE = """
import os, sys, time
if os.fork() == 0:
    os.closerange(0, 3)
    end, beats = time.monotonic() + 90, os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while time.monotonic() < end:
        os.write(beats, b".")
        time.sleep(0.02)
        if os.fork():
            os._exit(0)
"""
# Make and map a file in /dev/shm, then say so.
SHM_USER = """
import mmap, pathlib, sys, time
with open(sys.argv[1], "ab+") as file:
    file.write(b"x" * 4096)
    file.flush()
    mapped = mmap.mmap(file.fileno(), 4096)
pathlib.Path(sys.argv[2]).touch()
time.sleep(300)
"""


class Runner:
    """Starts the supervisor in a directory of its own and knows every process below it."""

    def __init__(self, directory: Path):
        self.log, self.tmp = directory / "deep/train.log", directory / "tmp"
        self.tmp.mkdir()
        self.mark = f"TEST_MARK={uuid.uuid4()}"
        key, value = self.mark.split("=")
        self.environment = os.environ | {key: value, "TMPDIR": str(self.tmp)}

    def start(self, *command: str, options=(), main: tuple = ("-m", "ascend_rl.launch.supervise"), **popen):
        arguments = [PYTHON, *main, "--log", str(self.log), *map(str, options), "--", *command]
        popen = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": self.environment} | popen
        return subprocess.Popen(arguments, **popen)

    def run(self, *command: str, **how) -> subprocess.CompletedProcess:
        return self.finish(self.start(*command, **how))

    def finish(self, process: subprocess.Popen) -> subprocess.CompletedProcess:
        out, err = process.communicate(timeout=600)
        return subprocess.CompletedProcess(process.args, process.returncode, out, (err or b"").decode())

    def alive(self) -> list[int]:
        """Processes with the mark in the environment of a thread that lives; zombies have none."""
        found = set()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    if self.mark.encode() in (task / "environ").read_bytes():
                        found.add(int(pid))
        return sorted(found)


@pytest.fixture
def runner(tmp_path):
    runner = Runner(tmp_path)
    yield runner
    left = runner.alive()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left
    assert not list(runner.tmp.iterdir()), "TMPDIR of the run was left behind"


@pytest.fixture
def shm_file():
    path = Path("/dev/shm") / f"test-supervise-{uuid.uuid4()}"
    yield path
    path.unlink(missing_ok=True)


def tuned(directory: Path, **constants: float) -> tuple[str]:
    """The supervisor with other constants."""
    main = directory / "main.py"
    lines = [f"supervise.{name} = {value}" for name, value in constants.items()]
    head = ["import sys", "from ascend_rl.launch import supervise"]
    main.write_text("\n".join([*head, *lines, "sys.exit(supervise.main())"]))
    return (str(main),)


def until(condition: Callable[[], object], what: str, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what} in {seconds} s"
        time.sleep(0.02)


# Exit codes and output.


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_exit_code_is_passed_on(runner, script, code):
    result = runner.run("bash", "-c", script)
    assert result.returncode == code
    assert (f"ended with status {code}. The log is {runner.log}" in result.stderr) == bool(code)


def test_command_that_cannot_be_run(runner):
    result = runner.run("no-such-command-here")
    assert result.returncode == 127
    assert "no-such-command-here cannot be run: No such file" in result.stderr
    assert "Traceback" not in result.stderr


def test_command_is_required(runner):
    result = runner.run()
    assert result.returncode == 2 and "give the command to run after --" in result.stderr


def test_options_of_the_command_are_its_own(runner):
    result = runner.run("bash", "-c", 'echo "$@"', "bash", "--title", "--", "--log", "x")
    assert result.stdout == b"--title -- --log x\n"


def test_output_goes_to_log_and_terminal_byte_for_byte(runner):
    runner.log.parent.mkdir()
    runner.log.write_text("earlier\n")
    result = runner.run("bash", "-c", r"echo out; echo err >&2; printf 'not \xff utf-8\rno end of line'")
    assert result.stdout == b"out\nerr\nnot \xff utf-8\rno end of line"
    assert runner.log.read_bytes() == b"earlier\n" + result.stdout


def test_output_is_shown_as_it_comes(runner):
    process = runner.start("bash", "-c", "echo first; sleep 60")
    assert process.stdout.readline() == b"first\n"
    process.terminate()
    assert runner.finish(process).returncode == 143


def terminal(runner, *command: str, columns: int, until_shown: str = "", then=lambda: None, **how) -> tuple:
    """Run with the errors on a terminal; the result, and what was written there."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (40, columns))
    process = runner.start(*command, stderr=theirs, **how)
    os.close(theirs)
    shown, told = b"", False
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while True:
            shown += os.read(ours, 1000)
            if not told and until_shown.encode() in shown:
                told = True
                then()
    os.close(ours)
    return runner.finish(process), shown.decode()


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_gets_one_line_that_fits(runner, tmp_path, columns):
    """Steps, the newest figures and the times left; the rest is in the log; a failure shows its end."""
    metrics = tmp_path / "metrics.jsonl"
    common = {"training/rollout_probs_diff_mean": 0.0011, "perf/throughput": 121.7, "timing_s/step": 60}
    lines = [
        {"step": 2, "data": {"critic/rewards/mean": 0.31, "response_length/mean": 9.0} | common},
        {"step": 3, "data": {"critic/rewards/mean": 0.42, "response_length/mean": 7345.4} | common},
        {"step": 3, "data": {"val-aux/reward": 1.0}},
    ]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step":4,"data":{"critic/rew')
    wait = f"until [ -e {tmp_path}/go ]; do sleep 0.1; done"
    noise = r"2026 ERROR npu.py:82 -- Failed to detect NPU type.\nTraceback:\nError: No module named 'acl'\n"
    last = (
        r"(TaskRunner pid=7) ValueError: no such reward\nnode.py:698 -- Node 7 received SIGTERM. Draining\n"
    )
    script = (
        f"printf \"{noise}\"; head -c 39585 /dev/zero | tr '\\0' x; echo; echo '[12:00:00] recipe says'; "
        "echo '(TaskRunner pid=7) [12:00:01] server 0 died'; "
        f"printf '{STEP.format(2)}'; {wait}; printf '{STEP.format(3)}'; printf '{last}'; exit 5"
    )
    how = {"options": ("--title", "starting Ray", "--metrics", metrics), "columns": columns}
    go = {"until_shown": "step 2/80", "then": (tmp_path / "go").touch}
    result, shown = terminal(runner, "bash", "-c", script, **how, **go)
    assert result.returncode == 5 and result.stdout == b""
    before, after = shown.split("The last lines of its output:")
    assert before.startswith("\r\x1b[Kstarting Ray") and "[12:00:00] recipe says" in before
    assert "[12:00:01] server 0 died" in before and "TaskRunner" not in before
    states = [line for line in before.replace("\x1b[K", "").split("\r") if line.startswith("step ")]
    assert all(len(line.rstrip()) < columns for line in states)
    figures = "step 3/80  reward 0.42  length 7345  gap 1e-03  122 tok/s/die  next "
    assert states[-1].startswith(figures) and (" end 1:1" in states[-1]) == (columns == 200)
    assert (
        "xxxx" not in before and "acl" not in shown and "Traceback" not in shown and "Draining" not in shown
    )
    assert max(map(len, after.splitlines())) < 400
    assert shown.rstrip().endswith(f"The log is {runner.log}")
    assert "ERROR: bash ended with status 5: ValueError: no such reward" in after
    log = runner.log.read_text()
    assert "No module named 'acl'" in log and "2/80" in log and "3/80" in log and "x" * 39585 in log


def test_in_a_file_lines_are_few(runner):
    """Nothing is overwritten there: the start, and no more than one state in 10 seconds besides the last."""
    steps = "".join(f"printf '{STEP.format(i)}'; sleep 0.3; " for i in range(1, 7))
    result = runner.run("bash", "-c", steps, options=["--title", "starting"])
    first, *states = result.stderr.splitlines()
    assert result.returncode == 0 and first == f"starting; the output is in {runner.log}"
    assert 1 <= len(states) <= 3 and states[-1].split("]")[1].startswith(" step 6/80")


def test_the_first_step_can_end_a_run(runner, tmp_path):
    """Whatever the run does next: also if it ends by itself at once."""
    for after in ("sleep 300", "exit 0"):
        metrics = tmp_path / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        rows = "".join(
            json.dumps({"data": {"critic/rewards/mean": 0.5, "gap": gap}}) + "\n" for gap in (7, 8)
        )
        main = tmp_path / "main.py"
        main.write_text(
            "import sys\nfrom pathlib import Path\nfrom ascend_rl.launch.supervise import supervise\n"
            "gate = lambda row: f'gap is {row[\"gap\"]}'\n"
            "log, metrics, command = sys.argv[2], sys.argv[4], sys.argv[6:]\n"
            "sys.exit(supervise(command, Path(log), Path(metrics), gate=gate))\n"
        )
        script = f"printf '%s' '{rows}' > {metrics}; {after}"
        result = runner.run("bash", "-c", script, options=("--metrics", metrics), main=(str(main),))
        assert result.returncode == 1 and "ERROR: gap is 7. The log is" in result.stderr


# The rollout's bar as tqdm draws it for Ray: states overwrite each other, and give way to lines of the log.
ROLLOUT = (
    r"\r(pid=7) rollout 3: {} tokens/s, {} running, 0 waiting, longest {}:  50%%|#####     | "
    r"{}.00/2.00 [00:01<00:01, 1.00s/requests]"
)


def test_the_bar_of_a_rollout_is_shown_immediately_and_stays_once_in_the_log(runner, tmp_path):
    wait = f"until [ -e {tmp_path}/go ]; do sleep 0.1; done"
    script = (
        f"printf '{ROLLOUT.format(12, 2, 5, 0)}'; {wait}; "
        "printf '\\r          \\r(TaskRunner pid=7) a line\\n'; "
        f"printf '{ROLLOUT.format(34, 1, 8, 1)}{ROLLOUT.format(23, 0, 9, 2)}\\nend\\rof it\\n'; "
        'echo "terminal ${ASCEND_RL_TERMINAL:-none}"'
    )
    ours, theirs = pty.openpty()
    process = runner.start("bash", "-c", script, stdout=theirs)
    os.close(theirs)
    shown = b""
    while b"longest 5:" not in shown:
        shown += os.read(ours, 1000)
    assert b"a line" not in shown
    (tmp_path / "go").touch()
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while True:
            shown += os.read(ours, 1000)
    os.close(ours)
    assert runner.finish(process).returncode == 0
    assert shown.count(b"rollout 3:") == 3 and b"terminal 1" in shown
    log = runner.log.read_bytes().decode()
    assert log.count("rollout 3:") == 1 and "23 tokens/s, 0 running" in log
    assert "\r(TaskRunner pid=7) a line\n" in log and "end\rof it\nterminal 1\n" in log and "   \r" not in log

    runner.run("bash", "-c", script)
    assert "terminal none" in runner.log.read_text()


def test_the_line_of_the_run_tells_of_the_rollout(runner):
    script = f"printf '{STEP.format(2)}'; printf '{ROLLOUT.format(12, 2, 5, 0)}'; sleep 1; echo; sleep 1"
    result, shown = terminal(runner, "bash", "-c", script, options=["--title", "starting"], columns=200)
    assert result.returncode == 0
    states = [line for line in shown.split("\r") if "step 2/80" in line]
    expected = "rollout 3: 12 tokens/s, 2 running, 0 waiting, longest 5, 0.00/2.00"
    assert any(expected in state for state in states)
    assert "rollout" not in states[-1]  # it is over


def test_the_run_continues_when_nobody_reads_its_output(runner):
    process = runner.start("bash", "-c", "echo 0; for i in $(seq 20000); do echo $i; done")
    assert process.stdout.readline() == b"0\n"
    process.stdout.close()
    assert process.wait(300) == 0
    assert runner.log.read_bytes().endswith(b"\n20000\n")
    assert process.stderr.read() == b""


@pytest.mark.parametrize("make", [pty.openpty, os.pipe], ids=["terminal", "pipe"])
def test_the_run_continues_when_nobody_sees_the_line(runner, make):
    ours, theirs = make()
    command = ["bash", "-c", "sleep 1; echo done; exit 3"]
    process = runner.start(*command, options=["--title", "run"], stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.read(ours, 1)
    os.close(ours)  # from now on its writes fail: EIO, EPIPE
    assert process.wait(300) == 3
    assert runner.log.read_text() == "done\n"


def test_a_log_that_cannot_be_written_ends_no_run(runner):
    """A full disk: reported once, and the output still reaches the terminal."""
    runner.log = Path("/dev/full")
    result = runner.run("bash", "-c", "for i in 1 2 3; do echo line $i; sleep 0.3; done; exit 5")
    assert result.returncode == 5 and result.stdout == b"line 1\nline 2\nline 3\n"
    assert result.stderr.count("WARNING: /dev/full cannot be written (No space left on device)") == 1


def test_a_log_whose_device_is_lost_ends_nothing(capsys):
    """EIO, as of a lost NFS server: of a terminal whose other side is gone, which cannot be opened again."""
    ours, theirs = pty.openpty()
    log = LogFile(Path(os.ttyname(theirs)), retry_s=0)
    log.write(b"first\n")
    os.close(theirs)
    os.close(ours)
    for _ in range(3):
        log.write(b"line\n")
    log.close()
    assert capsys.readouterr().err.count("cannot be written (Input/output error)") == 1


def test_a_log_that_can_be_written_again_says_what_it_lacks(tmp_path):
    """On a disk of 64 KiB that is full for a while."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", small]).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        log = LogFile(small / "train.log", retry_s=0)
        log.write(b"first\n")
        (small / "big").write_bytes(b"x" * 56 * 1024)
        for _ in range(3):
            log.write(b"y" * 20_000 + b"\n")
        (small / "big").unlink()
        log.write(b"last\n")
        log.close()
        lines = (small / "train.log").read_bytes().splitlines()
    finally:
        subprocess.run(["umount", small], check=True)
    assert lines[0] == b"first" and lines[-1] == b"last"
    assert b"3 lines are missing here: No space left on device" in lines[-2]


# What is left of the tree.


@pytest.mark.parametrize("script", [DAEMON, HEADLESS, FUGITIVE], ids=["daemon", "headless", "fugitive"])
def test_descendants_die_with_the_run(runner, tmp_path, script):
    life = tmp_path / "life"
    command = '"$0" -c "$1" "$2"; setsid sleep 300 >&- 2>&- & until [ -e "$2" ]; do sleep 0.05; done; exit 3'
    assert runner.run("bash", "-c", command, PYTHON, script, str(life)).returncode == 3
    beats = life.stat().st_size
    time.sleep(0.3)
    assert runner.alive() == [] and life.stat().st_size == beats


def test_polite_processes_may_say_goodbye(runner, tmp_path):
    """Also by means of a new process, which SIGTERM would end half-way."""
    child = "trap 'sleep 0.5 && touch bye; exit' TERM; touch hello; while :; do sleep 0.1; done"
    command = f"({child}) & until [ -e hello ]; do sleep 0.1; done"
    assert runner.run("bash", "-c", command, cwd=tmp_path).returncode == 0
    assert (tmp_path / "bye").exists()


def test_a_process_that_ignores_sigterm_is_killed(runner, tmp_path):
    child = "trap '' TERM INT HUP; touch hello; while :; do sleep 0.1; done"
    command = f"({child}) & until [ -e hello ]; do sleep 0.1; done"
    started = time.monotonic()
    assert runner.run("bash", "-c", command, cwd=tmp_path).returncode == 0
    assert 5 < time.monotonic() - started < 100
    assert runner.alive() == []


def test_a_stopped_process_is_killed(runner, tmp_path):
    main = tuned(tmp_path, TERM_GRACE_S=0.5)
    assert runner.run("bash", "-c", "sleep 300 & kill -STOP $!", main=main).returncode == 0
    assert runner.alive() == []


def test_unrelated_processes_are_untouched(runner):
    """Named like the run's, in the session and process group of the supervisor, and a twin of its command."""
    names = [[PYTHON, "-c", NAMED, "raylet", "300"], ["sleep", "300"], ["bash", "-c", "sleep 300; true"]]
    others = [subprocess.Popen(command, env=os.environ) for command in names]
    try:
        command = "sleep 300 & sleep 0.5; exit 1"
        assert runner.run("bash", "-c", command).returncode == 1
        assert [other.poll() for other in others] == [None, None, None]
        assert len(Path(f"/proc/{others[2].pid}/task/{others[2].pid}/children").read_text().split()) == 1
    finally:
        for pid in Path(f"/proc/{others[2].pid}/task/{others[2].pid}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        for other in others:
            other.kill()
            other.wait(300)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_stop_everything(runner, number):
    process = runner.start(
        "bash",
        "-c",
        "setsid sleep 300 >&- 2>&- & echo ready; sleep 300",
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )  # also under nohup
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    result = runner.finish(process)
    assert result.returncode == {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}[number.name]
    assert f"stopped by {number.name}" in result.stderr
    assert runner.alive() == []


def test_impatience_does_not_stop_the_cleaning(runner, tmp_path):
    process = runner.start(
        "bash",
        "-c",
        "trap '' TERM; echo ready; while :; do sleep 0.1; done",
        main=tuned(tmp_path, TERM_GRACE_S=2),
    )
    assert process.stdout.readline() == b"ready\n"
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.5)
    assert runner.finish(process).returncode == 130
    assert runner.alive() == []


def test_ctrl_c_in_a_terminal_reaches_only_the_supervisor(runner, tmp_path):
    """Its children would end in disorder, each with a traceback; they are in a session of their own."""
    ours, theirs = pty.openpty()
    script = f"trap ': >{tmp_path}/interrupted' INT; echo ready; while :; do sleep 0.1; done"
    process = runner.start(
        "bash",
        "-c",
        script,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # becomes the session's terminal
    )
    os.close(theirs)
    shown = b""
    while b"ready" not in shown:
        shown += os.read(ours, 1000)
    os.write(ours, b"\x03")
    assert process.wait(300) == 130
    os.close(ours)
    assert not (tmp_path / "interrupted").exists()


def test_nohup_is_obeyed(runner):
    process = runner.start(
        "bash", "-c", "echo ready; sleep 1", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGHUP)
    assert runner.finish(process).returncode == 0


# Deadlines and deaths.


@pytest.mark.parametrize(
    ("options", "before", "sentence"),
    [
        (("--deadline", 1), "", "not finished after 1 s"),
        (("--deadline", 1.5), STEP.format(1), "not finished after 1.5 s"),
        (("--start", 1, "--stall", 30), "", "no training step after 1 s"),
        (("--start", 1), STEP.format(0), "no training step after 1 s"),
        (("--stall", 1, "--start", 30), STEP.format(3), "no progress for 1 s after step 3 of 80"),
        (("--stall", 1, "--title", "run"), STEP.format(3), "no progress for 1 s after step 3 of 80"),
    ],
)
def test_deadlines(runner, options, before, sentence):
    started = time.monotonic()
    result = runner.run("bash", "-c", f"printf '{before}'; sleep 300", options=options)
    assert result.returncode == 124 and f"ERROR: {sentence}. The log is {runner.log}" in result.stderr
    assert 1 <= time.monotonic() - started < 100


def test_a_stall_says_what_hangs(runner):
    """What Ray's actors are in the middle of, and who was stopped, as by a debugger or a driver."""
    script = (
        f"printf '{STEP.format(3)}'; "
        'for i in 1 2; do (exec -a ray::WorkerDict.update_actor "$0" -c "$1" ray::WorkerDict 300) & done; '
        '(exec -a ray::WorkerDict "$0" -c "$1" ray::WorkerDict 300) & '
        '"$0" -c "$1" VLLM::EngineCore 300 & engine=$!; '
        "until grep -q VLLM /proc/$engine/comm; do sleep 0.1; done; "
        "kill -STOP $engine; echo engine $engine; wait"
    )
    result = runner.run("bash", "-c", script, PYTHON, NAMED, options=("--stall", 3, "--start", 300))
    engine = result.stdout.decode().rpartition("engine ")[2].strip()
    assert (
        result.returncode == 124
        and (
            "ERROR: no progress for 3 s after step 3 of 80, stopped: VLLM::EngineCor "
            f"(pid {engine}), at work: 2 x ray::WorkerDict.update_actor, "
            f"not where the others are: VLLM::EngineCor (pid {engine}). The log is"
        )
        in result.stderr
    )


def test_deadlines_that_are_met(runner):
    """Steps come every 1.2 s, so the run is longer than --start and --stall, and no gap is."""
    steps = "".join(f"printf '{STEP.format(i)}'; sleep 1.2; " for i in range(1, 9))
    result = runner.run("bash", "-c", steps, options=("--stall", 8, "--start", 8, "--deadline", 300))
    assert result.returncode == 0, result.stderr


@pytest.mark.long
def test_generation_batches_of_a_step_are_progress(runner):
    """Of DAPO's first step too: none is longer than --start and --stall, both steps are."""
    said = DynamicSampling(prompts=2, samples=2, batch=2, unit=1, max_batches=0, data=18).said()
    batches = f"for i in 1 2 3 4; do sleep 3; echo '(TaskRunner pid=7) {said}'; done; "
    script = batches + f"printf '{STEP.format(1)}'; {batches}"
    result = runner.run("bash", "-c", script, options=("--stall", 8, "--start", 8))
    assert result.returncode == 0, result.stderr
    result = runner.run("bash", "-c", f"echo '{said}'; sleep 300", options=("--stall", 1, "--start", 300))
    assert result.returncode == 124 and "no progress for 1 s after step 0 of 0" in result.stderr


@pytest.mark.long
def test_signs_of_work_are_progress_and_noise_is_none(runner):
    """Of any process; each comes before --start and --stall end the run, which is longer than both."""
    signs = (
        "import time; from ascend_rl.process.progress import sign\nfor _ in range(6): sign(); time.sleep(2)"
    )
    result = runner.run(sys.executable, "-c", signs, options=("--stall", 8, "--start", 8))
    assert result.returncode == 0, result.stderr
    noise = "while true; do echo working; sleep 0.2; done"
    result = runner.run("bash", "-c", noise, options=("--stall", 1, "--start", 1))
    assert result.returncode == 124 and "no training step after 1 s" in result.stderr


@pytest.mark.parametrize("name", ["VLLM::EngineCor", "ray::WorkerDict.train"])
def test_death_of_an_essential_process_ends_the_run(runner, tmp_path, name):
    result = runner.run(
        "bash",
        "-c",
        '"$0" -c "$1" "$2" 2 & echo pid $!; sleep 300',
        PYTHON,
        NAMED,
        name,
        main=tuned(tmp_path, DEATH_GRACE_S=0.5),
    )
    pid = result.stdout.decode().split()[1]
    assert result.returncode == 1
    assert f"ERROR: process {name[:15]} (pid {pid}) died and the run did not end by itself" in result.stderr


@pytest.mark.parametrize(("name", "status"), [("VLLM::EngineCor", 4), ("ray::WorkerDict", 1)])
def test_a_death_that_somebody_answers_for_is_his(runner, tmp_path, name, status):
    """As rollout.server_restart does for vLLM's processes, and for no others."""
    answer = "from ascend_rl.process import progress; progress.answer_for(progress.VLLM)"
    result = runner.run(
        "bash",
        "-c",
        '"$0" -c "$3"; "$0" -c "$1" "$2" 2 & sleep 8; exit 4',
        *(PYTHON, NAMED, name, answer),
        main=tuned(tmp_path, DEATH_GRACE_S=0.5),
    )
    assert result.returncode == status, result.stderr
    assert (f"process {name[:15]}" in result.stderr) == (status == 1)
    assert not list(runner.tmp.iterdir())  # nor is the mark left


def test_a_dead_process_that_nobody_waits_for_is_dead(runner, tmp_path):
    """Its parent lives and ignores it, so it stays in /proc as a zombie, with its name."""
    negligent = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(300)"
    result = runner.run(
        PYTHON, "-c", negligent, PYTHON, "-c", NAMED, "raylet", "2", main=tuned(tmp_path, DEATH_GRACE_S=0.5)
    )
    assert result.returncode == 1 and "ERROR: process raylet" in result.stderr


@pytest.mark.parametrize(("name", "grace_s"), [("raylet", 15), ("ray::IDLE", 0.2)])
def test_other_deaths_do_not(runner, tmp_path, name, grace_s):
    """An essential process that dies when the run is about to end, and any other process."""
    result = runner.run(
        "bash",
        "-c",
        '"$0" -c "$1" "$2" 2 & sleep 3.5; exit 4',
        PYTHON,
        NAMED,
        name,
        main=tuned(tmp_path, DEATH_GRACE_S=grace_s),
    )
    assert result.returncode == 4 and "died" not in result.stderr


@pytest.mark.parametrize("status", [0, 3])
def test_the_end_may_come_from_elsewhere(runner, tmp_path, status):
    main = tmp_path / "main.py"
    main.write_text(
        "import sys\nfrom pathlib import Path\nfrom ascend_rl.launch.supervise import supervise\n"
        "end = lambda: (int(sys.argv[1]), 'node b ended') if Path('end').exists() else None\n"
        "sys.exit(supervise(['bash', '-c', 'touch end; sleep 300'], Path('log'), ended=end))"
    )
    result = subprocess.run(
        [PYTHON, main, str(status)],
        cwd=tmp_path,
        env=runner.environment,
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert result.returncode == status and runner.alive() == []
    assert result.stderr == ("ERROR: node b ended. The log is log\n" if status else "")


def test_a_fork_of_an_essential_process_may_end(runner, tmp_path):
    """As when the TaskRunner filters prompts with datasets' num_proc=1: the helper has its parent's name."""
    fork = NAMED + "import os\nif os.fork() == 0: time.sleep(1); os._exit(0)\ntime.sleep(3.5); sys.exit(4)"
    result = runner.run(PYTHON, "-c", fork, "ray::TaskRunner", "0", main=tuned(tmp_path, DEATH_GRACE_S=0.5))
    assert result.returncode == 4 and "died" not in result.stderr


# TMPDIR and shared memory.


def test_tmpdir_is_the_runs_own_and_removed(runner):
    result = runner.run("bash", "-c", 'mkdir -p "$TMPDIR/ray"; touch "$TMPDIR/ray/file"; echo "$TMPDIR"')
    path = Path(result.stdout.decode().strip())
    assert path.parent == runner.tmp and path.name.startswith("ascend-rl-")
    assert not path.exists()


def use_shm(runner, path: Path, tmp_path: Path, then: str, **how) -> subprocess.Popen:
    """A run with a child that uses ``path``, from then on. Then a file ``go`` makes it do ``then``."""
    ready = tmp_path / "ready"
    script = f'"$0" -c "$1" "$2" "$3" & until [ -e {tmp_path}/go ]; do sleep 0.05; done; {then}'
    process = runner.start("bash", "-c", script, PYTHON, SHM_USER, str(path), str(ready), **how)
    until(ready.exists, "shared memory")
    return process


@pytest.mark.parametrize("then", ["sleep 1.5; kill -9 $!; wait; sleep 0.5", "exit 7", "kill -9 $$"])
def test_shared_memory_of_the_run_is_removed(runner, shm_file, tmp_path, then):
    process = use_shm(runner, shm_file, tmp_path, then)
    assert shm_file.exists()
    (tmp_path / "go").touch()
    runner.finish(process)
    assert not shm_file.exists()


def test_shared_memory_that_others_use_is_kept(runner, shm_file, tmp_path):
    for use in (lambda file: mmap.mmap(file.fileno(), 0), lambda file: os.dup(file.fileno())):
        for name in ("ready", "go"):
            (tmp_path / name).unlink(missing_ok=True)
        process = use_shm(runner, shm_file, tmp_path, "exit 0")
        with shm_file.open("rb+") as file:
            used = use(file)
        (tmp_path / "go").touch()
        assert runner.finish(process).returncode == 0
        assert shm_file.exists()
        used.close() if isinstance(used, mmap.mmap) else os.close(used)
        shm_file.unlink()


def test_shared_memory_older_than_the_run_is_kept(runner, shm_file, tmp_path):
    """Also when the run used it and wrote to it."""
    shm_file.write_bytes(b"mine")
    process = use_shm(runner, shm_file, tmp_path, "exit 0")
    (tmp_path / "go").touch()
    assert runner.finish(process).returncode == 0
    assert shm_file.read_bytes() == b"mine" + b"x" * 4096


def test_shared_memory_that_the_run_never_used_is_kept(runner, shm_file):
    """/dev/shm may be the host's, and its users in containers whose processes cannot be seen from here."""
    process = runner.start("bash", "-c", "echo ready; sleep 1")
    assert process.stdout.readline() == b"ready\n"
    shm_file.write_bytes(b"a file of somebody else, open nowhere")
    assert runner.finish(process).returncode == 0
    assert shm_file.exists()


def test_shared_memory_that_is_used_only_after_it_was_seen_belongs_to_the_run(shm_file):
    """A file may be found before the process that made it is known: it is looked at again, not forever."""
    from ascend_rl.launch.supervise import SharedMemory

    watcher = SharedMemory()
    first, second, me = shm_file, shm_file.with_name(f"{shm_file.name}-2"), [os.getpid()]
    for file in (first, second):
        file.write_bytes(b"")
    watcher.watch([])
    with first.open("rb"):
        watcher.watch(me)
    for _ in range(SharedMemory.LOOKS):
        watcher.watch([])
    with second.open("rb"):
        watcher.watch(me)
    watcher.remove_orphans()
    kept = second.exists()
    second.unlink(missing_ok=True)
    assert kept and not first.exists()


ELSEWHERE = """
import mmap, os, pathlib, sys, time
files = pathlib.Path("/dev/shm")
for number in range(1_000_000):
    file = (files / f"psm_{number}").open("wb+")
    if os.fstat(file.fileno()).st_ino == int(sys.argv[1]):
        break
    file.close()
    (files / f"psm_{number}").unlink()
file.truncate(4096)
mapped = mmap.mmap(file.fileno(), 4096)
print(os.fstat(file.fileno()).st_ino, flush=True)
time.sleep(300)
"""


def test_another_shared_memory_has_the_same_inodes(shm_file):
    """A container's, or a test process's: what is used there is not in use here."""
    from ascend_rl.launch.supervise import SharedMemory

    watcher = SharedMemory()
    with shm_file.open("wb"):
        watcher.watch([os.getpid()])
    inode = str(shm_file.stat().st_ino)
    script = 'mount -t tmpfs tmpfs /dev/shm; exec "$0" -c "$1" "$2"'
    command = [*unshare("mount"), "bash", "-euc", script, PYTHON, ELSEWHERE, inode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as elsewhere:
        try:
            assert elsewhere.stdout.readline().strip() == inode
            assert not watcher.used_by([elsewhere.pid])
            watcher.remove_orphans()
        finally:
            elsewhere.kill()
    assert not shm_file.exists()


def test_a_semaphore_of_a_killed_process_is_removed(runner, tmp_path):
    """Python's, of a process that was started, not forked; what would remove it is killed too."""
    before, ready = set(os.listdir("/dev/shm")), tmp_path / "ready"
    program = """
import multiprocessing, os, pathlib, sys, time
from multiprocessing.resource_tracker import _resource_tracker
lock = multiprocessing.get_context("spawn").Lock()
os.kill(_resource_tracker._pid, 9)
pathlib.Path(sys.argv[1]).write_text(lock._semlock.name)
time.sleep(3)
"""
    kill = "pkill -KILL -P $$; kill -9 $$"
    process = runner.start("bash", "-c", f'{sys.executable} -c "$0" "$1" & sleep 2; {kill}', program, ready)
    runner.finish(process)
    assert f"sem.{ready.read_text()[1:]}" not in os.listdir("/dev/shm")
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("sem.mp-")}


HOSTILE = [
    "Training Progress:",
    "Training Progress: |",
    "\rrollout 1:",
    "\r",
    "\r ",
    "rollout 1:",
    "(",
    "()",
    "Error",
    "[00:00:00",
    "a.",
    "\n",
]


@pytest.mark.parametrize("unit", HOSTILE)
def test_a_megabyte_of_model_output_in_a_line_is_read_in_linear_time(unit, tmp_path):
    """The reward manager prints responses, which may be anything; none stops the launcher."""
    for before, after in (("", ""), ("\r", ""), ("\r", "\r"), ("x ", "| x/y")):
        output = supervise.Output(tmp_path / "log", None, "")
        began = time.process_time()
        output.take((before + unit * (1_000_000 // len(unit)) + after + "\n").encode())
        assert time.process_time() - began < 1
        output.close()


def test_overwritten_states_are_left_out_and_the_last_step_is_read(tmp_path):
    output = supervise.Output(tmp_path / "log", None, "")
    bar = "Training Progress:  10%|#         | {}/30 [00:10<01:30,  3.3s/it]"
    states = [f"\rrollout 1: {n} tokens/s: 1%|x| 1/2" for n in range(5)]
    output.take(("".join([bar.format(3), *states, "\r   ", "\r" + bar.format(4)]) + "\n").encode())
    output.close()
    assert (output.step, output.total) == (4, 30)
    assert (tmp_path / "log").read_bytes().decode() == bar.format(3) + "\r" + bar.format(4) + "\n"

"""lint/confine.py and dry_run.py: nothing of a script starts, is written or sent, however it tries.

Effects are counted: a program stands at an absolute path, and what it does when it starts is to write a file
and to connect to a port.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ascend_rl.lint import confine, dry_run

TRAIN = "-m verl.trainer.main_ppo a=1"


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A directory with a program at `bin/python3`, scripts that call it, and a port that it connects to."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        port.setblocking(False)
        (tmp_path / "bin").mkdir()
        program = tmp_path / "bin/python3"
        program.write_text(
            f"#!{sys.executable}\nimport pathlib, socket\npathlib.Path('{tmp_path}/started').touch()\n"
            f"socket.create_connection({port.getsockname()})\n"
        )
        program.chmod(0o755)
        (tmp_path / "inner.sh").write_text(f'#!/bin/bash\n{program} {TRAIN} "$@"\n')
        (tmp_path / "inner.sh").chmod(0o755)
        (tmp_path / "kept").write_text("kept\n")
        monkeypatch.chdir(tmp_path)
        before = snapshot(tmp_path)
        yield tmp_path
        (tmp_path / "train.sh").unlink()
        assert snapshot(tmp_path) == before
        with pytest.raises(BlockingIOError):
            port.accept()


def snapshot(directory: Path) -> set:
    return {(path, path.read_bytes() if path.is_file() else b"") for path in directory.rglob("*")}


def tried(text: str) -> dry_run.Run:
    """The dry run of a script in the current directory; {python} is the program."""
    Path("train.sh").write_text(text.replace("{python}", f"{Path.cwd()}/bin/python3") + "\n")
    return dry_run.dry_run(Path("train.sh"))


WAYS = [
    f"{{python}} {TRAIN}",
    f'PYTHON={{python}}\n"$PYTHON" {TRAIN}',
    f"exec {{python}} {TRAIN}",
    f"exec -a other {{python}} {TRAIN}",
    f"command {{python}} {TRAIN}",
    f"builtin command {{python}} {TRAIN}",
    f"env A=1 {{python}} {TRAIN}",
    f"env -i {{python}} {TRAIN}",
    f"nohup {{python}} {TRAIN} > log 2>&1 &",
    f"({{python}} {TRAIN} &)",
    f"setsid {{python}} {TRAIN}",
    f"train() {{ local a=1; {{python}} {TRAIN}; }}\ntrain",
    f"{{python}} {TRAIN} 2>&1 | tee -a log",
    f"cat kept | {{python}} {TRAIN}",
    f"set -e; set -o pipefail; {{python}} {TRAIN} | grep nothing",
    f"eval '{{python}} {TRAIN}'",
    f'eval "$(echo {{python}} {TRAIN})"',
    f"text=$({{python}} {TRAIN})",
    f"cat <({{python}} {TRAIN})",
    f"if ! {{python}} {TRAIN}; then exit 1; fi",
    f"trap '{{python}} {TRAIN}' EXIT",
    f"coproc {{python}} {TRAIN}\nwait",
    f"trap - DEBUG; shopt -u extdebug; {{python}} {TRAIN}",
    f"PATH={{python}}:${{PATH}}; PATH=$PWD/bin:/usr/bin; python3 {TRAIN}",
    f"hash -p {{python}} python3; python3 {TRAIN}",
    f"cd bin && ./python3 {TRAIN}",
    f"cd /nonesuch/folder; {{python}} {TRAIN}",
    f"set -e; source /nonesuch/env.sh; . ~/nonesuch/conda.sh; {{python}} {TRAIN}",
    f"timeout 9 nice -n 5 stdbuf -oL {{python}} {TRAIN}",
    f"echo {TRAIN} | xargs {{python}}",
    f"find kept -exec {{python}} {TRAIN} ';'",
    f"awk 'BEGIN {{ system(\"{{python}} {TRAIN}\") }}'",
    f"bash -c '{{python}} {TRAIN}'",
    f"sh -c '{{python}} {TRAIN}'",
    f"BASH_ENV= bash --norc -c '{{python}} {TRAIN}'",
    f"bash <<EOF\n{{python}} {TRAIN}\nEOF",
    "source inner.sh",
    "./inner.sh",
    "exec sh inner.sh",
    "env -i bash inner.sh",
    "echo ./inner.sh | bash",
    "sudo -E bash inner.sh",
    f"sudo bash <<EOF\n{{python}} {TRAIN}\nEOF",
    "srun --nodes 2 ./inner.sh",
    "sbatch inner.sh",
    "ssh worker bash -s < inner.sh",
    f"ssh worker 'cd /nonesuch && nohup {{python}} {TRAIN} &'",
    f"docker exec -it box bash -lc 'source env.sh; {{python}} {TRAIN}'",
    f"tmux send-keys -t run '{{python}} {TRAIN}' C-m",
    f"conda run -n verl {{python}} {TRAIN}",
    f"ray job submit --no-wait -- {{python}} {TRAIN}",
    "ray job submit -- bash inner.sh",
    f"torchrun --nproc_per_node 8 --no-python {{python}} {TRAIN}",
    "accelerate launch --num_processes 8 -m verl.trainer.main_ppo a=1",
    "torchrun --nnodes 2 --module verl.trainer.main_ppo a=1",
    "/nonesuch/env/bin/python -u -Xdev -mverl.trainer.main_ppo a=1",
    "uv run -m verl.trainer.main_ppo a=1",
    "python3 /nonesuch/verl/verl/trainer/main_ppo.py a=1",
    f"until nc -z head 6379; do sleep 5; done; {{python}} {TRAIN}",
    f"while [ ! -e ready ]; do\n  echo waiting\n  sleep 5\ndone\n{{python}} {TRAIN}",
    f"read -r answer; read -p 'continue? ' answer; {{python}} {TRAIN}",
    f"serve & kill -0 $! || exit 1; while kill -0 $!; do sleep 5; done; {{python}} {TRAIN}",
    f"ray stop --force; pkill -9 -f python; killall python; kill -9 $PPID; kill 0; {{python}} {TRAIN}",
]


@pytest.mark.parametrize("text", WAYS, ids=lambda text: text.replace(TRAIN, "-m")[-50:])
def test_nothing_starts_and_the_training_is_found(text, room):
    run = tried(text)
    assert (run.module, run.args) == ("verl.trainer.main_ppo", ("a=1",)), run.errors


WRITES = [
    "echo lost > kept",
    "echo lost >> kept",
    "echo lost >| kept",
    ": > new",
    "exec > new 2>&1; echo lost",
    "exec 3<>kept; echo lost >&3",
    "exec 3<kept; echo lost > /dev/fd/3",
    "( echo lost > new & )",
    "bash -c 'echo lost > new'",
    "env -i sh -c 'echo lost > new'",
    "cat > new <<EOF\nlost\nEOF",
    "echo lost | tee -a kept | tee new",
    "tee kept < /dev/null",
    "rm -rf kept; /bin/rm -f kept; \\rm kept; command rm kept",
    "find . -delete",
    "find . -fprint new",
    "sed -i s/kept/lost/ kept; sed --in-place=.bak s/kept/lost/ kept; sed -n 'w new' kept",
    "sort -o kept /dev/null",
    'awk \'BEGIN { print 1 > "new"; print 2 | "cat > new" }\'',
    "mkdir -p new; touch new; ln -s kept new; cp kept new; mv kept new; chmod 0 kept; truncate -s 0 kept",
    "install -d new; dd if=/dev/zero of=kept count=1; split kept",
    "tar cf new kept; git init new; wget -O new localhost; curl -o new localhost",
    "mktemp -p . XXXXXX; mkfifo new",
    "nohup ls",
]


@pytest.mark.parametrize("text", WRITES, ids=lambda text: text[:40])
def test_nothing_is_written_and_the_script_continues(text, room):
    assert tried(f"set -e\n{{ {text}\n}} || true\npython3 {TRAIN}").module == "verl.trainer.main_ppo"


def test_nothing_is_sent(room):
    """Not by bash either, which has sockets of its own, nor a signal to a process that is not of the run."""
    with socket.create_server(("127.0.0.1", 0)) as port, subprocess.Popen(["sleep", "60"]) as other:
        port.setblocking(False)
        where = f"/dev/tcp/127.0.0.1/{port.getsockname()[1]}"
        run = tried(f"echo hello > {where}\nexec 3<>{where}\nkill -9 {other.pid} $PPID\npython3 {TRAIN}")
        assert run.module and other.poll() is None
        other.kill()
        with pytest.raises(BlockingIOError):
            port.accept()


def test_values_are_what_bash_and_the_tools_say(room):
    run = tried(
        'HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\n'
        "big=$(cat <<'EOF'\n" + "x" * 200_000 + "\nEOF\n)\n"
        "lines=$(seq 3 | tail -n 1); n=$(wc -l < kept); [[ abc =~ b(.) ]]; file=$(mktemp); echo 7 > $file\n"
        "export A=$(cat $file) TMPDIR_WAS=$TMPDIR\n"
        f"python3 {TRAIN} $HERE ${{#big}} $lines $n ${{BASH_REMATCH[1]}}"
    )
    assert run.args == ("a=1", str(room), "200000", "3", "1", "c")
    assert run.env["A"] == "7" and run.env.get("TMPDIR") == os.environ.get("TMPDIR")
    assert run.env["PATH"] == os.environ["PATH"] and run.cwd == str(room)
    assert not [name for name in run.env if name.startswith(("DRY_RUN", "BASH_"))]


def test_an_environment_script_starts_nothing_either(room, monkeypatch):
    from ascend_rl.preflight import preflight

    script = room / "train.sh"
    script.write_text(f"export A=$(echo 1)\n{room}/bin/python3\nrm kept\necho lost > kept\nB=2\n")
    env, found = preflight.sourced(str(script))
    assert found == [] and (env["A"], env["PATH"], env.get("B")) == ("1", os.environ["PATH"], None)
    script.write_text("export A=1\nsource /nonesuch/env.sh\n")
    _, (finding,) = preflight.sourced(str(script))
    assert finding.severity == "error" and "/nonesuch/env.sh: No such file" in finding.why


ENDLESS = [
    "while :; do :; done",
    "sleep() { :; }; while :; do cat /dev/null; done",
    "(while :; do :; done) &\nwait",
]


@pytest.mark.parametrize("text", ENDLESS)
def test_what_never_ends_is_stopped(text, room, monkeypatch):
    monkeypatch.setattr(dry_run, "TIMEOUT_S", 0.5)
    began = time.monotonic()
    run = tried(f"{text}\npython3 {TRAIN}")
    assert not run.module and "no end within" in run.errors and time.monotonic() - began < 10


def test_background_jobs_do_not_outlive_the_run(room):
    script = Path("train.sh").absolute()
    script.write_text(
        f"set -m\n(while :; do :; done) &\nsetsid bash -c 'while : {script}; do :; done' &\npython3 {TRAIN}\n"
    )
    assert dry_run.dry_run(script).module
    until = time.monotonic() + 60
    ps = {"check": True, "capture_output": True, "text": True}
    while str(script) in subprocess.run(["ps", "-eo", "args"], **ps).stdout:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_output_is_bounded(room, monkeypatch):
    monkeypatch.setattr(dry_run, "TIMEOUT_S", 1)
    assert len(tried("while :; do echo 0123456789 >&2; done").errors) <= 2000


def decided(machine: str, number: int, first: int = 0, second: int = 0, third: int = 0) -> int:
    """What the filter of a machine says to a system call, by the rules of BPF."""
    data = struct.pack("=iIQ6Q", number, confine.ARCH[machine][1], 0, first, second, third, 0, 0, 0)
    program = list(struct.iter_unpack("=HBBI", confine._program(machine)))
    at = value = 0
    while True:
        code, yes, no, k = program[at]
        at += 1
        if code == 0x20:
            value = struct.unpack_from("=I", data, k)[0]
        elif code == 0x06:
            return k
        else:
            taken = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            at += yes if taken else no


@pytest.mark.parametrize("machine", confine.ARCH)
def test_the_filter_of_each_machine(machine):
    """Here only one of them runs."""
    column = confine.ARCH[machine][0]
    judged = (confine.EXECVE, confine.EXECVEAT, confine.CREAT, confine.UNLINK, confine.UNLINKAT)
    expected = dict.fromkeys(judged, confine.NOTIFY) | dict.fromkeys(confine.NOTHING, confine.ERRNO)
    expected |= dict.fromkeys(confine.REFUSED, confine.ERRNO | errno.EPERM)
    numbers = {call[column]: value for call, value in expected.items() if call[column] is not None}
    opens = [confine.OPENAT, *([confine.OPEN] if confine.OPEN[column] is not None else [])]
    others = {call[column] for call in (*opens, confine.SOCKET)}
    for number in range(460):
        if number not in others:
            assert decided(machine, number) == numbers.get(number, confine.ALLOW), number
    for call in opens:
        for flags in (
            os.O_RDONLY,
            os.O_WRONLY,
            os.O_RDWR,
            os.O_CREAT,
            os.O_TRUNC | os.O_CLOEXEC,
            os.O_CLOEXEC,
        ):
            args = (0, 0, flags) if call is confine.OPENAT else (0, flags, 0)
            writes = bool(flags & ~os.O_CLOEXEC)
            assert decided(machine, call[column], *args) == (confine.NOTIFY if writes else confine.ALLOW)
    allowed = {
        family for family in range(50) if decided(machine, confine.SOCKET[column], family) == confine.ALLOW
    }
    assert allowed == {socket.AF_NETLINK}


@pytest.mark.parametrize("command", ["bash ray_start_npu.sh --dry-run", "python -m ascend_rl.lint"])
def test_the_commands_start_nothing_either(command, room):
    """Nor is anything lost: the key that verl does not have is found."""
    Path("train.sh").write_text(f"{room}/bin/python3 {TRAIN}\n")
    words = [*command.replace("python", sys.executable).split(), f"{room}/train.sh"]
    environment = os.environ | {"OUTPUT_DIR": f"{room}/out"}
    root = Path(confine.__file__).resolve().parents[2]
    run = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1 and "the patched verl has no such key" in run.stdout + run.stderr


def test_a_machine_that_cannot_confine_runs_nothing(room, monkeypatch, tmp_path_factory):
    """An architecture without a filter stands for a kernel or a container that has none."""
    from ascend_rl.lint import lint

    program = (
        Path(confine.__file__)
        .read_text()
        .replace('"x86_64": (0,', '"other": (0,')
        .replace('"aarch64"', '"no"')
    )
    other = tmp_path_factory.mktemp("other") / "confine.py"
    other.write_text(program)
    monkeypatch.setattr(confine, "__file__", str(other))
    Path("train.sh").write_text("{python}\n".replace("{python}", f"{room}/bin/python3"))
    (finding,) = lint.lint("train.sh")
    assert (finding.severity, finding.check) == ("warning", "script.unconfined")
    assert "was not run" in finding.why and "Linux 5.9" in finding.why

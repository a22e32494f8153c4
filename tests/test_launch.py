"""The launcher's decisions, without Ray: choice of addresses, settings, tokens, operators.

tests/test_launcher.py runs the whole launcher on several hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespaces import unshare

from ascend_rl.launch import launch_node
from ascend_rl.launch.launch import LONGEST_SOCKET, RAY_SOCKET
from ascend_rl.launch.launch_plan import (
    NEW_TOKEN,
    SETTINGS,
    choose_addresses,
    free_port,
    gather_settings,
    make_plan,
    read_cluster_file,
    read_token,
)
from ascend_rl.settings.claim import MARK
from ascend_rl.settings.switch import CannotWork

TOKEN = "0123456789abcdef"
HEAD = [("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("ib0", "10.9.0.1"), ("eth0", "fd00::1")]
NODE = [("lo", "127.0.0.1"), ("eth0", "10.0.0.2"), ("ib0", "10.9.0.2"), ("eth0", "fd00::2")]


def no_route(target):
    raise AssertionError("the route was asked for")


# Who is the head, and what is this node's address.


@pytest.mark.parametrize(
    ("settings", "mine", "expected"),
    [
        ({"MASTER_ADDR": "10.0.0.1"}, HEAD, ("head", "10.0.0.1", "10.0.0.1", [])),
        ({"MASTER_ADDR": "fd00:0:0::1"}, HEAD, ("head", "fd00::1", "fd00::1", [])),
        ({"MASTER_ADDR": "10.0.0.1"}, NODE, ("worker", "route to 10.0.0.1", "10.0.0.1", [])),
        ({"MASTER_ADDR": "10.0.0.1", "SOCKET_IFNAME": "ib0"}, NODE, ("worker", "10.9.0.2", "10.0.0.1", [])),
        ({"MASTER_ADDR": "fd00::1", "SOCKET_IFNAME": "eth0"}, NODE, ("worker", "fd00::2", "fd00::1", [])),
        (
            {"MASTER_ADDR": "10.0.0.1", "SOCKET_IFNAME": "10.9.0.0/16"},
            NODE,
            ("worker", "10.9.0.2", "10.0.0.1", []),
        ),
        ({"MASTER_ADDR": "10.0.0.1", "RANK": "0"}, HEAD, ("head", "10.0.0.1", "10.0.0.1", [])),
        ({"MASTER_ADDR": "10.0.0.1", "RANK": "3"}, NODE, ("worker", "route to 10.0.0.1", "10.0.0.1", [])),
        # Some schedulers tell the head "localhost"; /etc/hosts may map a machine's own name to loopback.
        (
            {"MASTER_ADDR": "localhost", "RANK": "0", "SOCKET_IFNAME": "eth0"},
            HEAD,
            ("head", "10.0.0.1", "10.0.0.1", []),
        ),
        (
            {"MASTER_ADDR": "127.0.0.1", "RANK": "0"},
            HEAD,
            ("head", "route to 192.0.2.1", "route to 192.0.2.1", []),
        ),
        ({"NODES": "10.9.0.1, 10.9.0.2"}, HEAD, ("head", "10.9.0.1", "10.9.0.1", ["10.9.0.1", "10.9.0.2"])),
        ({"NODES": "10.9.0.1 10.9.0.2"}, NODE, ("worker", "10.9.0.2", "10.9.0.1", ["10.9.0.1", "10.9.0.2"])),
    ],
)
def test_role_and_addresses(settings, mine, expected):
    source = (lambda target: f"route to {target}") if "route" in str(expected) else no_route
    assert choose_addresses(dict.fromkeys(SETTINGS, "") | settings, mine, source) == expected


@pytest.mark.parametrize(
    ("settings", "mine", "sentence"),
    [
        ({}, HEAD, "say where the head is"),
        ({"MASTER_ADDR": "<head ip>"}, HEAD, "'<head ip>' is not an address"),
        ({"MASTER_ADDR": "127.0.0.1"}, HEAD, "is another machine on each node; .*eth0 10.0.0.1"),
        (
            {"MASTER_ADDR": "10.0.0.1", "RANK": "0"},
            NODE,
            "RANK=0, but MASTER_ADDR 10.0.0.1 is not an address of",
        ),
        ({"MASTER_ADDR": "10.0.0.1", "RANK": "1"}, HEAD, "RANK=1, but MASTER_ADDR 10.0.0.1 is an address of"),
        ({"MASTER_ADDR": "10.0.0.1", "SOCKET_IFNAME": "ib0"}, HEAD, "ib0 is 10.9.0.1; make them agree"),
        (
            {"MASTER_ADDR": "10.0.0.1", "SOCKET_IFNAME": "eth7"},
            NODE,
            "eth7 has no IPv4 address.*ib0 10.9.0.2",
        ),
        ({"MASTER_ADDR": "fd00::1", "SOCKET_IFNAME": "ib0"}, NODE, "ib0 has no IPv6 address"),
        ({"MASTER_ADDR": "10.0.0.1", "SOCKET_IFNAME": "10.0.0/8"}, NODE, "give an interface"),
        (
            {"NODES": "10.0.0.1,10.0.0.3"},
            NODE,
            "none of NODES, 10.0.0.1, 10.0.0.3, is an address of this node",
        ),
        ({"NODES": "10.0.0.1,10.0.0.2", "MASTER_ADDR": "10.0.0.2"}, NODE, "not the first of NODES"),
    ],
)
def test_contradictions_are_explained(settings, mine, sentence):
    with pytest.raises(CannotWork, match=sentence):
        choose_addresses(dict.fromkeys(SETTINGS, "") | settings, mine, no_route)


# Settings.


def test_cluster_file(tmp_path):
    path = tmp_path / "cluster.env"
    path.write_text(
        "# two nodes\n\nNODES='10.0.0.1, 10.0.0.2'   # head first\nexport NPUS_PER_NODE=16\n"
        'RAY_START_ARGS="--a=1 --b=2"\nLOG_DIR=$HOME/x\n'
    )
    assert read_cluster_file(path) == {
        "NODES": "10.0.0.1, 10.0.0.2",
        "NPUS_PER_NODE": "16",
        "RAY_START_ARGS": "--a=1 --b=2",
        "LOG_DIR": "$HOME/x",
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("NNODE=2", "cluster.env:1: unknown setting NNODE; did you mean NNODES?"),
        ("\nHCCL_BUFFSIZE=300", "cluster.env:2: unknown setting HCCL_BUFFSIZE; .*ENV_SCRIPT"),
        ("NNODES: 2", "cluster.env:1: expected KEY=VALUE"),
        ("RUN_NAME=my run", "quoted if it has spaces: RUN_NAME=my run"),
        ("NODES='10.0.0.1", "cluster.env:1: No closing quotation"),
        ("NNODES=2\nNNODES=3", "cluster.env:2: NNODES is set twice"),
        (None, "cannot be read: No such file"),
    ],
)
def test_mistakes_in_a_cluster_file(tmp_path, text, sentence):
    path = tmp_path / "cluster.env"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CannotWork, match=sentence):
        read_cluster_file(path)


def test_precedence():
    """Flag, variable, file, scheduler, default."""

    def value(flag=None, variable=None, file=None, scheduler=None):
        environ = {"NNODES": variable, "WORLD_SIZE": scheduler}
        return gather_settings(
            {"NNODES": flag},
            {k: v for k, v in environ.items() if v is not None},
            {"NNODES": file} if file else {},
        )["NNODES"]

    assert [
        value("1", "2", "3", "4"),
        value(None, "2", "3", "4"),
        value(None, None, "3", "4"),
        value(None, "", None, "4"),
        value(),
    ] == ["1", "2", "3", "4", ""]


def plan(tmp_path, environ=None, mine=HEAD, **settings):
    script = tmp_path / "train_x.sh"
    script.touch()
    values = gather_settings(settings, environ or {}, {})
    return make_plan(values, str(script), "", [], {"CLUSTER_TOKEN": TOKEN} | (environ or {}), mine)


def test_a_schedulers_variables_are_enough(tmp_path, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "VLLM_HOST_IP"):  # set by tests/conftest.py
        monkeypatch.delenv(name)
    environ = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.9.0.1", "MASTER_PORT": "7000"}
    made = plan(tmp_path, environ, NODE, SOCKET_IFNAME="ib0")
    assert (made.role, made.address, made.head, made.nnodes) == ("worker", "10.9.0.2", "10.9.0.1", 4)
    assert (made.ray_port, made.launch_port) == (7000, 7001)
    variables = made.environment()
    assert variables["HCCL_IF_IP"] == variables["VLLM_HOST_IP"] == "10.9.0.2"
    for name in ("HCCL", "GLOO", "TP"):
        assert variables[f"{name}_SOCKET_IFNAME"] == "ib0"
    command = made.ray_start(tmp_path, free_port)
    assert "--address=10.9.0.1:7000" in command and "--head" not in command


def test_one_node_keeps_to_itself(tmp_path):
    """Whatever a scheduler says of addresses and ranks."""
    made = plan(tmp_path, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "nowhere"}, NODE)
    assert (made.role, made.address, made.head, made.nnodes) == ("head", "127.0.0.1", "127.0.0.1", 1)
    assert made.token == TOKEN
    variables = made.environment()
    assert {variables[f"{name}_SOCKET_IFNAME"] for name in ("HCCL", "GLOO", "TP")} == {"lo"}
    assert variables["HCCL_IF_IP"] == variables["VLLM_HOST_IP"] == "127.0.0.1"
    assert variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0" and "MASTER_ADDR" not in variables
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in plan(tmp_path, NODES="10.0.0.1,10.0.0.2").environment()


def test_what_the_user_set_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "bond0")
    variables = plan(tmp_path, NNODES="2", MASTER_ADDR="fd00::1").environment()
    assert variables["GLOO_SOCKET_IFNAME"] == "bond0" and variables["TP_SOCKET_IFNAME"] == "eth0"
    assert variables["HCCL_SOCKET_FAMILY"] == "AF_INET6"


def test_the_dashboard_is_asked_for(tmp_path):
    off = plan(tmp_path).ray_start(tmp_path, free_port)
    given = plan(tmp_path, DASHBOARD_PORT="8265", RAY_START_ARGS="--labels 'a=b c'")
    on = given.ray_start(tmp_path, free_port)
    assert "--include-dashboard=false" in off and not [word for word in off if "dashboard-host" in word]
    assert {"--include-dashboard=true", "--dashboard-host=127.0.0.1", "--dashboard-port=8265"} <= set(on)
    assert on[-2:] == ["--labels", "a=b c"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"NNODES": "two"}, "NNODES must be a number from 1 to 100000, it is 'two'"),
        ({"NPUS_PER_NODE": "0"}, "NPUS_PER_NODE must be a number from 1 to 1024"),
        ({"NNODES": "2", "NODES": "10.0.0.1"}, "NNODES is 2, but NODES lists 1"),
        (
            {"NNODES": "1", "NODES": "10.0.0.1,10.0.0.2"},
            "NODES lists 2 addresses: spare nodes are for two nodes",
        ),
        (
            {"NNODES": "2", "MASTER_ADDR": "10.0.0.1", "RANK": "2"},
            "RANK must be a number from 0 to 1, it is '2'",
        ),
        ({"RAY_PORT": "65535"}, "RAY_PORT must be a number from 1 to 65534"),
        ({"VERBOSE": "yes"}, "VERBOSE=yes: give 1 or 0"),
        ({"GAP_LIMIT": "high"}, "GAP_LIMIT must be a number such as 0.05, it is 'high'"),
        ({"SKIP_PREFLIGHT": "2"}, "SKIP_PREFLIGHT=2: give 1 or 0"),
        ({"NODES_DEADLINE_S": "1h"}, "NODES_DEADLINE_S must be seconds, it is '1h'"),
    ],
)
def test_bad_settings(tmp_path, settings, sentence):
    with pytest.raises(CannotWork, match=sentence):
        plan(tmp_path, **settings)


def test_a_switch_is_off_for_0(tmp_path):
    assert [plan(tmp_path, VERBOSE=text).on("VERBOSE") for text in ("1", "0", "")] == [True, False, False]


def test_token(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    for mode in (0o640, 0o620, 0o610, 0o604, 0o602, 0o601):
        path.chmod(mode)
        with pytest.raises(CannotWork, match=f"chmod 600 {path}"):
            read_token({}, str(path))
    for mode in (0o600, 0o400):
        path.chmod(mode)
        assert read_token({}, str(path)) == TOKEN
    first, second = (read_token({}, "", needed=False) for _ in range(2))
    assert len(first) == 64 and first != second  # one node needs none
    for environ, sentence in (
        ({}, "common secret"),
        ({"CLUSTER_TOKEN": "short"}, "16 or more"),
        ({"CLUSTER_TOKEN": "a" * 16 + " b"}, "without spaces"),
    ):
        with pytest.raises(CannotWork, match=sentence):
            read_token(environ, "")
    subprocess.run(["bash", "-c", NEW_TOKEN.replace("FILE", str(tmp_path / "made"))], check=True)
    assert len(read_token({}, str(tmp_path / "made"))) == 64


# MindSpeed's operators: a package in its place records what is built.


def test_operators_are_built_together_and_failures_named(tmp_path, monkeypatch):
    package = tmp_path / "mindspeed/op_builder"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "import os, pathlib, time\n"
        "class GMMOpBuilder:\n"
        "    def load(self):\n"
        "        pathlib.Path('gmm').touch()\n"
        "        while not pathlib.Path('rope').exists(): time.sleep(0.05)\n"  # they wait for each other
        "        return True\n"
        "class RotaryPositionEmbeddingOpBuilder:\n"
        "    def load(self):\n"
        "        pathlib.Path('rope').touch()\n"
        "        while not pathlib.Path('gmm').exists(): time.sleep(0.05)\n"
        "        return True\n"
        "class MatmulAddOpBuilder:\n"
        "    def load(self): raise RuntimeError('no compiler')\n"
        "class GMMV2OpBuilder:\n"
        "    def load(self): return not pathlib.Path('slow').exists() or time.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert launch_node.build_operators(tmp_path / "logs", 60) == ["MatmulAddOpBuilder"]
    assert "no compiler" in (tmp_path / "logs/MatmulAddOpBuilder.log").read_text()
    assert (tmp_path / "logs/GMMOpBuilder.log").read_text() == "built\n"
    assert "has no FusedAdamWV2OpBuilder" in (tmp_path / "logs/FusedAdamWV2OpBuilder.log").read_text()
    (tmp_path / "slow").touch()
    assert "GMMV2OpBuilder (not done after 0.5 s)" in launch_node.build_operators(tmp_path / "logs", 0.5)


def test_preflight_comes_first(root, tmp_path):
    """A mistake in an override keeps the run from starting; SKIP_PREFLIGHT is for those who know better."""
    command = [
        "bash",
        "ray_start_npu.sh",
        "internal/train_gspo_qwen3_tiny_cpu.sh",
        "internal/cpu_env.sh",
        "actor_rollout_ref.actor.clip_ratios=0.1",
    ]
    run = subprocess.run(
        command,
        cwd=root,
        env=os.environ | {"OUTPUT_DIR": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 1, run.stderr
    assert "clip_ratio" in run.stdout and "SKIP_PREFLIGHT=1 starts anyway" in run.stderr
    assert not (tmp_path / "out").exists()


def test_a_dry_run_shows_no_secrets(root):
    """Neither that of a recipe, whose environment is printed, nor that of the launcher."""
    secrets = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MODELSCOPE_API_TOKEN", "CLUSTER_TOKEN")
    plain = {"NUM_SPECULATIVE_TOKENS": "3", "TOKENIZERS_PARALLELISM": "false", "RAY_AUTH_MODE": "token"}
    environment = os.environ | plain | dict.fromkeys(secrets, "0123456789-do-not-tell") | {"DRY_RUN": "1"}
    recipe = ["bash", "-c", ". internal/common.sh; train some.module a=1"]
    launcher = ["bash", "ray_start_npu.sh", "internal/train_gspo_qwen3_tiny_cpu.sh", "internal/cpu_env.sh"]
    shown = []
    for command in (recipe, launcher):
        run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, run.stderr
        assert "do-not-tell" not in run.stdout + run.stderr
        shown.append(run.stdout)
    printed = json.loads(shown[0])
    assert printed["module"] == "some.module" and printed["args"] == ["a=1"]
    assert {printed["env"][name] for name in secrets} == {"(set)"}
    assert {name: printed["env"][name] for name in plain} == plain


def test_training_does_not_wait_for_a_ray_that_ended(tmp_path):
    """As when `ray start` gives up on its raylet: its port is open by then. A command is in its place."""
    with socket.create_server(("127.0.0.1", 0)) as control:
        job = {"ray": ["bash", "-c", "sleep 1; exit 1"], "train": ["sleep", "600"], "nodes": [""], "logs": ""}
        job |= {"control": control.getsockname(), "deadline_s": 9}
        command = [sys.executable, "-m", "ascend_rl.launch.launch_node", json.dumps(job)]
        with (tmp_path / "stderr").open("w") as stderr:
            process = subprocess.Popen(command, stderr=stderr, start_new_session=True)
            try:
                assert process.wait(300) == 1
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # what is left is supervise's to stop
    assert "Ray on this node ended (status 1)" in (tmp_path / "stderr").read_text()


def test_starting_again_keeps_what_earlier_starts_wrote(root, tmp_path):
    """Log and metrics are set aside together, under the number of the start, before anything is started."""
    out = tmp_path / "out"
    (tmp_path / "train_it.sh").write_text("")
    (tmp_path / "env.sh").write_text("echo started; exit 3")
    command = ["bash", "ray_start_npu.sh", str(tmp_path / "train_it.sh"), str(tmp_path / "env.sh")]
    variables = {"OUTPUT_DIR": str(out), "LOG_DIR": str(tmp_path / "logs"), "SKIP_PREFLIGHT": "1"}
    out.mkdir()
    (out / "report.html").write_text("of whoever had it before")
    for i in (1, 2, 3):
        if i < 3:  # the third start finds no metrics: the second ended before its first step
            (out / "metrics.jsonl").write_text(f"metrics of {i}")
        (out / "train.log").write_text(f"log of {i}")
        run = subprocess.run(command, cwd=root, env=os.environ | variables, capture_output=True, timeout=600)
        assert run.returncode == 3, run.stderr
        assert (out / "train.log").read_text() == "started\n"
        (out / "train.log").unlink()
    kept = {path.name: path.read_text() for path in out.iterdir()}
    assert (kept.pop(MARK), kept.pop("report.1.html")) == ("run\n", "of whoever had it before")
    for name in ("run.2.json", "run.3.json", "run.json"):  # of the three starts, for report.html
        assert json.loads(kept.pop(name))["overrides"] == []
    logs, metrics = (
        {f"{name}.{i}.{end}": f"{what} of {i}" for i in (1, 2, 3)}
        for name, end, what in (("train", "log", "log"), ("metrics", "jsonl", "metrics"))
    )
    del metrics["metrics.3.jsonl"]
    assert kept == logs | metrics


def test_a_tmpdir_that_is_too_long_for_sockets_is_refused(root, tmp_path):
    """In a sentence, where Ray prints a traceback after a minute; the longest is just right for Ray."""
    from ray._private.utils import validate_socket_filepath

    longest = "/" + "x" * (LONGEST_SOCKET - len(RAY_SOCKET) - 1)
    validate_socket_filepath(longest + RAY_SOCKET)
    with pytest.raises(OSError, match="107"):
        validate_socket_filepath(f"{longest}x{RAY_SOCKET}")
    (script := tmp_path / "train_it.sh").write_text("echo TRAINED\n")
    environ = os.environ | {"TMPDIR": str(tmp_path), "SKIP_PREFLIGHT": "1", "OUTPUT_DIR": f"{tmp_path}/out"}
    command = ["bash", "ray_start_npu.sh", str(script)]
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Ray's sockets need a TMPDIR of at most 22 bytes" in done.stderr
    assert "TRAINED" not in done.stdout and "Traceback" not in done.stderr and not (tmp_path / "out").exists()


# Launches that are found in TMPDIR, where anybody may write.

OTHER = 54321  # another user


def fifo(file, directory):
    file.unlink()
    os.mkfifo(file, 0o600)


def by_link(file, directory):
    file.rename(file.with_name("entry"))
    file.symlink_to("entry")


def behind_a_link(file, directory):
    directory.rename(place := directory.with_name("elsewhere"))
    directory.symlink_to(place)


PLANTED = {
    "of another user": lambda file, directory: [os.chown(path, OTHER, OTHER) for path in (directory, file)],
    "in a directory of another user": lambda file, directory: os.chown(directory, OTHER, OTHER),
    "a file of another user": lambda file, directory: os.chown(file, OTHER, OTHER),
    "in a directory that others may write to": lambda file, directory: directory.chmod(0o777),
    "a file that others may write to": lambda file, directory: file.chmod(0o666),
    "a pipe": fifo,
    "a link": by_link,
    "behind a link": behind_a_link,
    "deep": lambda file, directory: file.write_text("[" * 60_000),
    "long": lambda file, directory: file.write_text(" " * (1 << 17) + file.read_text()),
    "no object": lambda file, directory: file.write_text("[]"),
    "no JSON": lambda file, directory: file.write_bytes(b"\xff\0"),
    "half": lambda file, directory: file.write_text('{"pid": 1, "run": "x"}'),
    "of other types": lambda file, directory: file.write_text(
        file.read_text().replace('"ports": []', '"ports": 1')
    ),
    "of an earlier process": lambda file, directory: None,
}


@pytest.mark.parametrize("how", PLANTED)
def test_what_lies_in_a_shared_tmpdir_hangs_and_ends_nothing(how, root, tmp_path):
    """It names a process of this user and is locked as if its launcher lived; --stop leaves that alone."""
    if "another user" in how and os.geteuid():
        pytest.skip("only root can give a file to another user")
    directory = tmp_path / "ascend-rl-planted"
    directory.mkdir(mode=0o700)
    file = directory / "launch.json"
    victim = subprocess.Popen(["sleep", "600"])
    entry = dict.fromkeys(("run", "role", "address", "head", "log", "started"), "x")
    file.write_text(json.dumps(entry | {"pid": victim.pid, "born": 1, "nnodes": 1, "ports": []}))
    PLANTED[how](file, directory)
    with contextlib.ExitStack() as held:
        if file.is_file():
            fcntl.flock(held.enter_context(file.open()), fcntl.LOCK_EX)
        environ = os.environ | {"TMPDIR": str(tmp_path)}
        for flag in ("--status", "--stop"):
            command = [sys.executable, "-m", "ascend_rl.launch.launch", flag]
            done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=60)
            told = done.stdout + done.stderr
            assert "Traceback" not in told and victim.poll() is None, told
            if how == "of an earlier process":
                assert "running: run 'x'" in told or (done.returncode == 1 and "in another container" in told)
            else:
                assert (done.returncode, told) == (1, "no run on this node\n")
    victim.kill()
    victim.wait()


# Input that cannot be: a sentence, no traceback, and nothing left running.


def refused(root, *words, **variables) -> str:
    """What the launcher says."""
    command = ["bash", "ray_start_npu.sh", *map(str, words)]
    environ = os.environ | {"SKIP_PREFLIGHT": "1"} | {name: str(value) for name, value in variables.items()}
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("ERROR: ") and len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_wrong_input_is_a_sentence(root, tmp_path):
    (script := tmp_path / "train_it.sh").write_text(f"touch {tmp_path}/trained\n")
    (foreign := tmp_path / "foreign").write_bytes("NODES=10.0.0.1  # \u5934\u8282\u70b9\n".encode("gb18030"))
    foreign.chmod(0o600)
    assert "is no text in UTF-8" in refused(root, "--cluster", foreign, script)
    assert "is no text" in refused(root, script, NNODES=2, MASTER_ADDR="10.0.0.1", CLUSTER_TOKEN_FILE=foreign)
    assert "is a directory" in refused(root, "--cluster", tmp_path, script).lower()
    for name in ("NNODES", "NPUS_PER_NODE", "RAY_PORT", "RESTARTS"):
        for value in (99999999999, "9" * 5000, "-1", "1e9", "\u0663"):
            assert f"{name} must be" in refused(root, script, MASTER_ADDR="10.0.0.1", **{name: value})
    for place in ("/dev/null/x", "/dev/null", "/proc/x", script):
        for variables in ({"OUTPUT_DIR": place}, {"OUTPUT_DIR": tmp_path / "new", "LOG_DIR": place}):
            said = refused(root, script, **variables)
            assert str(place) in said and "set OUTPUT_DIR" in said
    assert not (tmp_path / "trained").exists()


def test_a_checkout_that_cannot_be_written(root, tmp_path):
    """As another user's: OUTPUT_DIR and LOG_DIR have to be elsewhere."""
    (script := tmp_path / "train_it.sh").touch()
    close = f"mount --bind {root} {root}; mount -o remount,bind,ro {root}"
    command = [*unshare("mount"), "bash", "-euc", f"{close}; exec bash ray_start_npu.sh {script}"]
    environ = os.environ | {"SKIP_PREFLIGHT": "1"}
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "cannot be written: Read-only file system; set OUTPUT_DIR and LOG_DIR" in done.stderr


@pytest.mark.parametrize("after_s", [0.02, 0.1, 0.2, 0.4, 0.6, 0.9])
def test_ctrl_c_in_the_first_second(after_s, root, tmp_path, short_tmp):
    """At any moment of the start: to the process group, as a terminal does."""
    (script := tmp_path / "train_it.sh").write_text("sleep 600\n")
    environ = os.environ | {
        "SKIP_PREFLIGHT": "1",
        "OUTPUT_DIR": str(tmp_path / "out"),
        "LOG_DIR": str(tmp_path),
        "TMPDIR": str(short_tmp),
    }
    command = ["bash", "ray_start_npu.sh", str(script)]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            command, cwd=root, env=environ, stdout=said, stderr=said, start_new_session=True
        )
        time.sleep(after_s)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(120) in (130, -signal.SIGINT)
    assert "Traceback" not in (tmp_path / "said").read_text()
    assert not list(short_tmp.iterdir())
    until = time.monotonic() + 60
    with contextlib.suppress(ProcessLookupError):  # a child of bash may take a moment longer
        while True:
            os.killpg(process.pid, 0)
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_port_to_be_served_later_is_none_that_a_connection_may_get_meanwhile():
    with socket.create_server(("127.0.0.1", 0)) as any_server:
        ports = {free_port() for _ in range(20)}
        with socket.create_connection(any_server.getsockname()) as connection:
            given = connection.getsockname()[1]
    assert max(ports) < int(open("/proc/sys/net/ipv4/ip_local_port_range").read().split()[0]) <= given
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_is_found_where_connections_may_get_all_of_them():
    """As on machines that are set up for many connections."""
    wide = """ip link set lo up; echo 1024 65535 > /proc/sys/net/ipv4/ip_local_port_range; exec "$@" """
    code = """
import socket
from ascend_rl.process.ports import free_port
socket.create_server(("", free_port("")))
"""
    subprocess.run([*unshare("net"), "bash", "-euc", wide, "bash", sys.executable, "-c", code], check=True)


def test_no_port_is_given_twice_before_its_server_listens(monkeypatch):
    code = """
import random
random.SystemRandom.shuffle = lambda self, ports: ports.reverse()
from ascend_rl.process.ports import free_port
print(free_port(), flush=True)
input()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        monkeypatch.setattr("random.SystemRandom.shuffle", lambda self, ports: ports.reverse())
        given = [int(other.stdout.readline()), free_port(), free_port()]
        other.communicate(b"\n")
    assert len(set(given)) == 3
    assert free_port() == given[0], "that process has ended"


TINY = ("internal/train_gspo_qwen3_tiny_cpu.sh", "internal/cpu_env.sh")
SMALL = ("internal/train_gspo_qwen2_5_3b_8die_fsdp.sh", "internal/qwen2_5_3b_env.sh")


@pytest.mark.parametrize(
    ("given", "variables", "said"),
    [
        (["README.md"], {}, "README.md: it is not a bash script"),
        (["frameworks.lock"], {}, "starts no training of verl"),
        ([TINY[0], "README.md"], {}, "README.md: it is not a bash script"),
        ([*TINY, "trainer.nonesuch=1"], {}, "trainer.nonesuch: the patched verl has no such key"),
        ([*TINY, "++x=["], {}, "++x=[: "),
        ([*SMALL, "++x=["], {"SMOKE": "1"}, "++x=[: "),
        (["README.md"], {"SMOKE": "1"}, "README.md: it is not a bash script"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(given, variables, said, tmp_path):
    """In a sentence, with status 1; for a rehearsal too."""
    environment = os.environ | variables | {"OUTPUT_DIR": str(tmp_path / "out"), "CLUSTER_TOKEN": "0" * 64}
    command = ["bash", "ray_start_npu.sh", "--dry-run", *given]
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1 and said in run.stderr, run.stdout + run.stderr
    assert "Traceback" not in run.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", [False, True])
def test_a_dry_run_misses_the_inputs_that_the_run_would_miss(missing, tiny, tmp_path):
    """The recipe of the quickstart, with a model that is there and one that is not; nothing is started."""
    model = tmp_path / "absent" if missing else tiny / "model"
    words = [f"actor_rollout_ref.model.path={model}", "trainer.logger=console"]
    words += [
        f"data.{part}_files={tiny}/{name}.parquet" for part, name in (("train", "train"), ("val", "val"))
    ]
    recipe = ["internal/train_gspo_qwen3_tiny_cpu.sh", "internal/cpu_env.sh"]
    command = ["bash", "ray_start_npu.sh", "--dry-run", *recipe, *words]
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == int(missing), result.stdout + result.stderr
    assert (f"{model}: it does not exist" in result.stderr) is missing

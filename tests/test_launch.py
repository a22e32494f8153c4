"""The launcher's decisions and its rendezvous, without Ray: choice of addresses, settings, tokens, operators.

tests/test_launcher.py has the whole of it on several hosts.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time

import pytest

from ascend_rl import launch_node
from ascend_rl.launch_plan import (
    NEW_TOKEN,
    SETTINGS,
    PlanError,
    choose_addresses,
    gather_settings,
    make_plan,
    read_cluster_file,
    read_token,
)
from ascend_rl.rendezvous import Head, Link, RendezvousError, Worker

TOKEN = "0123456789abcdef"
HEAD = [("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("ib0", "10.9.0.1"), ("eth0", "fd00::1")]
NODE = [("lo", "127.0.0.1"), ("eth0", "10.0.0.2"), ("ib0", "10.9.0.2"), ("eth0", "fd00::2")]


def no_route(target):
    raise AssertionError("the route was asked for")


# Who is the head, and what is this node's address.


@pytest.mark.parametrize(("settings", "mine", "expected"), [
    ({"MASTER_ADDR": "10.0.0.1"}, HEAD, ("head", "10.0.0.1", "10.0.0.1", [])),
    ({"MASTER_ADDR": "fd00:0:0::1"}, HEAD, ("head", "fd00::1", "fd00::1", [])),
    ({"MASTER_ADDR": "10.0.0.1"}, NODE, ("worker", "route to 10.0.0.1", "10.0.0.1", [])),
    ({"MASTER_ADDR": "10.0.0.1", "SOCKET_IFNAME": "ib0"}, NODE, ("worker", "10.9.0.2", "10.0.0.1", [])),
    ({"MASTER_ADDR": "fd00::1", "SOCKET_IFNAME": "eth0"}, NODE, ("worker", "fd00::2", "fd00::1", [])),
    ({"MASTER_ADDR": "10.0.0.1", "SOCKET_IFNAME": "10.9.0.0/16"}, NODE,
     ("worker", "10.9.0.2", "10.0.0.1", [])),
    ({"MASTER_ADDR": "10.0.0.1", "RANK": "0"}, HEAD, ("head", "10.0.0.1", "10.0.0.1", [])),
    ({"MASTER_ADDR": "10.0.0.1", "RANK": "3"}, NODE, ("worker", "route to 10.0.0.1", "10.0.0.1", [])),
    # Some schedulers tell the head "localhost"; /etc/hosts may give a machine's own name a loopback address.
    ({"MASTER_ADDR": "localhost", "RANK": "0", "SOCKET_IFNAME": "eth0"}, HEAD,
     ("head", "10.0.0.1", "10.0.0.1", [])),
    ({"MASTER_ADDR": "127.0.0.1", "RANK": "0"}, HEAD,
     ("head", "route to 192.0.2.1", "route to 192.0.2.1", [])),
    ({"NODES": "10.9.0.1, 10.9.0.2"}, HEAD, ("head", "10.9.0.1", "10.9.0.1", ["10.9.0.1", "10.9.0.2"])),
    ({"NODES": "10.9.0.1 10.9.0.2"}, NODE, ("worker", "10.9.0.2", "10.9.0.1", ["10.9.0.1", "10.9.0.2"])),
])
def test_role_and_addresses(settings, mine, expected):
    source = (lambda target: f"route to {target}") if "route" in str(expected) else no_route
    assert choose_addresses(dict.fromkeys(SETTINGS, "") | settings, mine, source) == expected


@pytest.mark.parametrize(("settings", "mine", "sentence"), [
    ({}, HEAD, "say where the head is"),
    ({"MASTER_ADDR": "<head ip>"}, HEAD, "'<head ip>' is no address"),
    ({"MASTER_ADDR": "127.0.0.1"}, HEAD, "is another machine on each node; .*eth0 10.0.0.1"),
    ({"MASTER_ADDR": "10.0.0.1", "RANK": "0"}, NODE, "RANK=0, but MASTER_ADDR 10.0.0.1 is not an address of"),
    ({"MASTER_ADDR": "10.0.0.1", "RANK": "1"}, HEAD, "RANK=1, but MASTER_ADDR 10.0.0.1 is an address of"),
    ({"MASTER_ADDR": "10.0.0.1", "SOCKET_IFNAME": "ib0"}, HEAD, "ib0 is 10.9.0.1; make them agree"),
    ({"MASTER_ADDR": "10.0.0.1", "SOCKET_IFNAME": "eth7"}, NODE, "eth7 has no IPv4 address.*ib0 10.9.0.2"),
    ({"MASTER_ADDR": "fd00::1", "SOCKET_IFNAME": "ib0"}, NODE, "ib0 has no IPv6 address"),
    ({"MASTER_ADDR": "10.0.0.1", "SOCKET_IFNAME": "10.0.0/8"}, NODE, "give an interface"),
    ({"NODES": "10.0.0.1,10.0.0.3"}, NODE, "none of NODES, 10.0.0.1, 10.0.0.3, is an address of this node"),
    ({"NODES": "10.0.0.1,10.0.0.2", "MASTER_ADDR": "10.0.0.2"}, NODE, "not the first of NODES"),
])
def test_contradictions_are_explained(settings, mine, sentence):
    with pytest.raises(PlanError, match=sentence):
        choose_addresses(dict.fromkeys(SETTINGS, "") | settings, mine, no_route)


# Settings.


def test_cluster_file(tmp_path):
    path = tmp_path / "cluster.env"
    path.write_text("# two nodes\n\nNODES='10.0.0.1, 10.0.0.2'   # head first\nexport NPUS_PER_NODE=16\n"
                    'RAY_START_ARGS="--a=1 --b=2"\nLOG_DIR=$HOME/x\n')
    assert read_cluster_file(path) == {"NODES": "10.0.0.1, 10.0.0.2", "NPUS_PER_NODE": "16",
                                       "RAY_START_ARGS": "--a=1 --b=2", "LOG_DIR": "$HOME/x"}


@pytest.mark.parametrize(("text", "sentence"), [
    ("NNODE=2", "cluster.env:1: unknown setting NNODE; did you mean NNODES?"),
    ("\nHCCL_BUFFSIZE=300", "cluster.env:2: unknown setting HCCL_BUFFSIZE; .*ENV_SCRIPT"),
    ("NNODES: 2", "cluster.env:1: expected KEY=VALUE"),
    ("RUN_NAME=my run", "quoted if it has spaces: RUN_NAME=my run"),
    ("NODES='10.0.0.1", "cluster.env:1: No closing quotation"),
    ("NNODES=2\nNNODES=3", "cluster.env:2: NNODES is set twice"),
    (None, "cannot be read: No such file"),
])
def test_mistakes_in_a_cluster_file(tmp_path, text, sentence):
    path = tmp_path / "cluster.env"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=sentence):
        read_cluster_file(path)


def test_precedence():
    """Flag, variable, file, scheduler, default."""
    def value(flag=None, variable=None, file=None, scheduler=None):
        environ = {"NNODES": variable, "WORLD_SIZE": scheduler}
        return gather_settings({"NNODES": flag}, {k: v for k, v in environ.items() if v is not None},
                               {"NNODES": file} if file else {})["NNODES"]

    assert [value("1", "2", "3", "4"), value(None, "2", "3", "4"), value(None, None, "3", "4"),
            value(None, "", None, "4"), value()] == ["1", "2", "3", "4", ""]


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
    assert "--address=10.9.0.1:7000" in made.ray_start(tmp_path) and "--head" not in made.ray_start(tmp_path)


def test_one_node_keeps_to_itself(tmp_path):
    """Whatever a scheduler says of addresses and ranks."""
    made = plan(tmp_path, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "nowhere"}, NODE)
    assert (made.role, made.address, made.head, made.nnodes) == ("head", "127.0.0.1", "127.0.0.1", 1)
    assert made.token == TOKEN
    assert not {"HCCL_IF_IP", "GLOO_SOCKET_IFNAME", "MASTER_ADDR"} & made.environment().keys()


def test_what_the_user_set_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "bond0")
    variables = plan(tmp_path, NNODES="2", MASTER_ADDR="fd00::1").environment()
    assert variables["GLOO_SOCKET_IFNAME"] == "bond0" and variables["TP_SOCKET_IFNAME"] == "eth0"
    assert variables["HCCL_SOCKET_FAMILY"] == "AF_INET6"


def test_the_dashboard_is_asked_for(tmp_path):
    off = plan(tmp_path).ray_start(tmp_path)
    on = plan(tmp_path, DASHBOARD_PORT="8265", RAY_START_ARGS="--labels 'a=b c'").ray_start(tmp_path)
    assert "--include-dashboard=false" in off and not [word for word in off if "dashboard-host" in word]
    assert {"--include-dashboard=true", "--dashboard-host=127.0.0.1", "--dashboard-port=8265"} <= set(on)
    assert on[-2:] == ["--labels", "a=b c"]


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"NNODES": "two"}, "NNODES must be a positive number, it is 'two'"),
    ({"NPUS_PER_NODE": "0"}, "NPUS_PER_NODE must be a positive number"),
    ({"NNODES": "2", "NODES": "10.0.0.1"}, "NNODES is 2, but NODES lists 1"),
    ({"NNODES": "2", "MASTER_ADDR": "10.0.0.1", "RANK": "2"}, "RANK must be a number from 0 to 1, it is '2'"),
    ({"RAY_PORT": "65535"}, "RAY_PORT must be a number from 1 to 65534"),
    ({"NODES_DEADLINE_S": "1h"}, "NODES_DEADLINE_S must be seconds, it is '1h'"),
])
def test_bad_settings(tmp_path, settings, sentence):
    with pytest.raises(PlanError, match=sentence):
        plan(tmp_path, **settings)


def test_token(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o644)
    with pytest.raises(PlanError, match="chmod 600"):
        read_token({}, str(path))
    path.chmod(0o600)
    assert read_token({}, str(path)) == TOKEN
    first, second = (read_token({}, "", needed=False) for _ in range(2))
    assert len(first) == 64 and first != second  # one node needs none
    for environ, sentence in (({}, "common secret"), ({"CLUSTER_TOKEN": "short"}, "16 or more"),
                              ({"CLUSTER_TOKEN": "a" * 16 + " b"}, "without spaces")):
        with pytest.raises(PlanError, match=sentence):
            read_token(environ, "")
    subprocess.run(["bash", "-c", NEW_TOKEN.replace("FILE", str(tmp_path / "made"))], check=True)
    assert len(read_token({}, str(tmp_path / "made"))) == 64


# The rendezvous, over loopback.


def node(address: str, rank: str = "", **must_equal) -> dict:
    return {"name": f"host-{address}", "address": address, "rank": rank, "has": "x", "must_equal": must_equal}


class Cluster:
    """A head for some nodes, and threads in which workers join."""

    def __init__(self, nnodes: int, silence_s: float = 5, rank: str = "", version: int = 4):
        self.host, self.silence_s = "127.0.0.1" if version == 4 else "::1", silence_s
        self.head = Head(self.host, 0, TOKEN, node("a", rank, run="x"), nnodes, silence_s)
        self.port = self.head.listener.getsockname()[1]
        self.said: list[str] = []

    def worker(self, address: str, rank: str = "", token: str = TOKEN, run: str = "x") -> Worker:
        return Worker(self.host, self.port, token, node(address, rank, run=run), self.silence_s)

    def join(self, *workers: Worker) -> list[list[str]]:
        """Everybody meets; returns what each was told of the nodes."""
        told: list[list[str]] = []
        threads = [threading.Thread(target=lambda w=worker: told.append(w.join(10, self.said.append)))
                   for worker in workers]
        for thread in threads:
            thread.start()
        told.append(self.head.gather([], 10, self.said.append))
        for thread in threads:
            thread.join(10)
        return told


@pytest.fixture
def cluster():
    made: list[Cluster] = []

    def make(*args, **kwargs) -> Cluster:
        made.append(Cluster(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.head.finish(1, "", 0)


def wait_for(condition, seconds: float = 5):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


@pytest.mark.parametrize("version", [4, 6])
def test_all_learn_of_all_and_of_the_end(cluster, version):
    c = cluster(3, version=version)
    workers = [c.worker("b"), c.worker("c")]
    told = c.join(*workers)
    assert told[0] == told[1] == told[2] and told[0][0] == "a" and set(told[0]) == {"a", "b", "c"}
    assert c.head.ended() is None and all(w.ended() is None for w in workers)
    c.head.announce(7, "(why)")
    for w in workers:
        assert wait_for(w.ended) == (7, f"the head {c.host} ended with status 7 (why)")
    assert c.head.ended() is None  # they are still stopping
    workers[0].finish(7, "")
    assert c.head.finish(1, "too late to be told", 0.5) == ["c"]
    assert workers[1].ended()[0] == 7


def test_a_workers_end_is_told(cluster):
    c = cluster(2)
    w = c.worker("b")
    c.join(w)
    w.finish(3, "(its log there: x)")
    assert wait_for(c.head.ended) == (1, "node host-b (b) ended with status 3 (its log there: x)")


def test_a_closed_connection_and_a_silent_one(cluster, monkeypatch):
    """Beats keep a quiet connection; without them, as of a frozen machine, it is lost after silence_s."""
    c = cluster(2, silence_s=1)
    w = c.worker("b")
    c.join(w)
    time.sleep(1.6)
    assert c.head.ended() is None and w.ended() is None
    monkeypatch.setattr(w.link, "send", lambda **message: None)
    assert wait_for(c.head.ended) == (1, "node host-b (b) is lost: not a sign of life for 1 s")
    c.head.nodes["b"][1].close()
    assert wait_for(w.ended) == (1, f"the head {c.host} is lost: the connection was closed")


def test_missing_nodes_are_named(cluster):
    for expected, rank, sentence in ((["a", "b", "d"], "", "missing: d$"), ([], "0", "missing: RANK 1$"),
                                     ([], "", "1 missing, unnamed: set NODES")):
        c = cluster(3, rank=rank)
        c.worker("b", "2" if rank else "")._connect()
        wait_for(c.head.present)
        here = r"2 of 3 nodes are here: host-a \(a\), host-b \(b\); "
        with pytest.raises(RendezvousError, match=here + sentence):
            c.head.gather(expected, 0.3, c.said.append)


@pytest.mark.parametrize(("worker", "sentence"), [
    ({"address": "c", "token": "x" * 16}, "its cluster token is not the head's"),
    ({"address": "c", "run": "y"}, "run is y there and x on the head"),
    ({"address": "a"}, "a is the head's own address"),
    ({"address": "b"}, "a launcher of b is already here: this is the second one on that node"),
    ({"address": "c", "rank": "1"}, "there is a node with RANK=1 already"),
])
def test_who_does_not_belong_is_refused(cluster, worker, sentence):
    c = cluster(3)
    c.worker("b", "1")._connect()
    with pytest.raises(RendezvousError, match=f"refuses this node: {sentence}"):
        c.worker(**worker).join(5, c.said.append)
    wait_for(lambda: c.head.refused)
    assert f"127.0.0.1 was refused: {sentence}" in c.head._missing(c.head.present(), [])


def test_a_cluster_that_has_begun_is_closed_and_one_may_come_again_before(cluster):
    c = cluster(2)
    gone = c.worker("b")
    gone._connect().close()
    wait_for(lambda: c.head.nodes["b"][1].over())
    again = c.worker("b")
    c.join(again)
    with pytest.raises(RendezvousError, match="the run has its 2 nodes and has begun"):
        c.worker("c").join(5, c.said.append)
    assert c.head.ended() is None


def test_a_false_head_learns_nothing_and_is_not_believed():
    """It cannot answer a challenge, nor use the answer it gets: that depends on which side asks."""
    listener = socket.create_server(("127.0.0.1", 0))
    heard: list[dict] = []

    def impostor():
        link = Link(listener.accept()[0])
        link.send(challenge="00")
        heard.append(link.receive())
        link.send(proof=heard[0]["proof"])

    threading.Thread(target=impostor, daemon=True).start()
    with pytest.raises(RendezvousError, match="has another token"):
        Worker("127.0.0.1", listener.getsockname()[1], TOKEN, node("b"), 5).join(5, print)
    assert TOKEN not in json.dumps(heard)
    listener.close()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b'{"proof": 1}\n', b"[]\n", b""])
def test_noise_does_not_disturb_the_head(cluster, noise):
    c = cluster(2)
    with socket.create_connection(("127.0.0.1", c.port)) as stranger:
        stranger.sendall(noise)
    assert c.join(c.worker("b"))[0] == ["a", "b"]


def test_a_deadline_without_a_head_says_what_answered():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    sentence = f"after 0.2 s no head at 127.0.0.1 port {port}: .*refused.*this node has: x"
    with pytest.raises(RendezvousError, match=sentence):
        Worker("127.0.0.1", port, TOKEN, node("b"), 5).join(0.2, print)


# MindSpeed's operators: a package in its place records what is built.


def test_operators_are_built_at_once_and_failures_named(tmp_path, monkeypatch):
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
        "    def load(self): return not pathlib.Path('slow').exists() or time.sleep(60)\n")
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
    command = ["bash", "ray_start_npu.sh", "internal/train_gspo_qwen3_tiny_cpu.sh", "internal/cpu_env.sh",
               "actor_rollout_ref.actor.clip_ratios=0.1"]
    run = subprocess.run(command, cwd=root, env=os.environ | {"OUTPUT_DIR": str(tmp_path / "out")},
                         capture_output=True, text=True, timeout=120)
    assert run.returncode == 1, run.stderr
    assert "clip_ratio" in run.stdout and "SKIP_PREFLIGHT=1 starts anyway" in run.stderr
    assert not (tmp_path / "out").exists()

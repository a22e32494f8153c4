"""ray_start_npu.sh on several hosts, with real Ray and with faults.

The hosts are network namespaces on one bridge, each with its own addresses and TMPDIR. They share the process
table, so a launcher that stopped processes of others would be noticed. TRAIN_SCRIPT is a few lines.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

TOKEN = "0123456789abcdef0123456789abcdef"
NAME = os.uname().nodename
# Each NPU is asked where it is; every node must be among the answers, with its variables. Niceness is 0.
USE_ALL_NPUS = """
import os, ray, sys
ray.init(log_to_driver=False)
@ray.remote(num_cpus=0, resources={"NPU": 1}, scheduling_strategy="SPREAD")
class Worker:
    def where(self):
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        return ray.util.get_node_ip_address(), os.environ["OF_THE_NODE"], interface, os.nice(0)
workers = [Worker.remote() for _ in range(int(os.environ["NNODES"]) * int(os.environ["NPUS_PER_NODE"]))]
print("NPUS", sorted(ray.get([worker.where.remote() for worker in workers])), flush=True)
"""


def sh(command: str, **how) -> subprocess.CompletedProcess:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True, **how)


def netns_problem() -> str:
    """Why hosts cannot be made here; "" if they can."""
    if not shutil.which("ip"):
        return "iproute2 is not installed; build_project.sh installs it as root"
    name = f"probe-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.stderr.strip()


def need_netns() -> None:
    """Skip the test where there are no network namespaces; CI must have them."""
    if problem := netns_problem():
        assert os.environ.get("CI") != "true", problem
        pytest.skip(f"no network namespaces here: {problem}")


class Launch:
    """One launcher: its process, and what the user saw."""

    def __init__(self, process: subprocess.Popen, console: Path):
        self.process, self.console = process, console

    def text(self) -> str:
        return self.console.read_text()

    def until(self, wanted: str, seconds: float = 300) -> str:
        end = time.monotonic() + seconds
        while wanted not in self.text():
            assert self.process.poll() is None and time.monotonic() < end, f"no {wanted!r} in:\n{self.text()}"
            time.sleep(0.05)
        return self.text()

    def end(self, seconds: float = 300) -> tuple[int, str]:
        try:
            return self.process.wait(seconds), self.text()
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.text()}") from None

    def send(self, number: int) -> None:
        self.process.send_signal(number)


class Hosts:
    """A bridge with a few hosts; host i has 10.77.N.i and fdNN::i."""

    numbers = itertools.count(os.getpid() % 200)

    def __init__(self, root: Path, directory: Path, count: int):
        self.root, self.directory, self.count = root, directory, count
        number = next(self.numbers) % 250
        self.net, self.net6 = f"10.77.{number}", f"fd77:{number}:"
        self.tag = f"h{uuid.uuid4().hex[:5]}"
        self.mark = f"TEST_HOSTS={self.tag}"
        self.tmp = Path(tempfile.mkdtemp(prefix=f"{self.tag}-", dir="/tmp"))  # short, for Ray's sockets
        self.launches: list[Launch] = []
        sh(f"ip link add {self.tag}b type bridge")
        sh(f"ip link set {self.tag}b up")
        for i in range(1, count + 1):
            (self.tmp / str(i)).mkdir()
            inside = f"{self.tag}-{i}"
            sh(f"ip netns add {inside}")
            sh(f"ip link add {self.tag}v{i} type veth peer name eth0 netns {inside}")
            sh(f"ip link set {self.tag}v{i} master {self.tag}b up")
            sh(f"ip -n {inside} link set lo up")
            sh(f"ip -n {inside} addr add {self.address(i)}/24 dev eth0")
            sh(f"ip -n {inside} addr add {self.address(i, 6)}/64 dev eth0 nodad")
            sh(f"ip -n {inside} link set eth0 up")

    def address(self, host: int, version: int = 4) -> str:
        return f"{self.net}.{host}" if version == 4 else f"{self.net6}:{host}"

    def inside(self, host: int, *command: str, console: Path | None = None, **variables):
        """Start a command on a host."""
        dropped = ("GLOO_SOCKET_IFNAME", "VLLM_HOST_IP", "RAY_worker_niceness")  # tests/conftest.py sets them
        environment = {name: value for name, value in os.environ.items() if name not in dropped}
        environment |= {
            "TMPDIR": str(self.tmp / str(host)),
            "TEST_HOSTS": self.tag,
            "OF_THE_NODE": str(host),
            "OUTPUT_DIR": str(self.directory / "out"),
            "LOG_DIR": str(self.directory / "logs"),
            "CLUSTER_TOKEN": TOKEN,
            "SKIP_PREFLIGHT": "1",
            "VERBOSE": "1",
            "RAY_NUM_CPUS": "0",
            "RAY_OBJECT_STORE": "80000000",
            "LOST_DEADLINE_S": "20",  # a busy machine keeps a node silent for 8
            "NODES_DEADLINE_S": "120",
            "RAY_DEADLINE_S": "120",
        }
        environment |= {name: str(value) for name, value in variables.items()}
        with console.open("w") if console else contextlib.nullcontext(subprocess.PIPE) as out:
            return subprocess.Popen(
                ["ip", "netns", "exec", f"{self.tag}-{host}", *command],
                cwd=self.root,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def launch(self, host: int, script: str = "", *flags: str, recipe: tuple = (), **variables) -> Launch:
        """ray_start_npu.sh on a host, on a script or a recipe; MASTER_ADDR is host 1 unless given."""
        path = self.directory / f"train_{len(self.launches)}.sh"
        path.write_text(f"set -eu\n{script}\n")
        console = self.directory / f"console-{len(self.launches)}-host-{host}"
        variables = {"MASTER_ADDR": self.address(1), "NNODES": 2} | variables
        command = ("bash", "ray_start_npu.sh", *flags, *(recipe or [str(path)]))
        process = self.inside(host, *command, console=console, **variables)
        self.launches.append(Launch(process, console))
        return self.launches[-1]

    def run(self, host: int, *command: str, **variables) -> tuple[int, str]:
        process = self.inside(host, *command, **variables)
        text = process.communicate(timeout=600)[0]
        return process.returncode, text

    def processes(self, host: int | None = None) -> dict[int, str]:
        """What runs on one host or all: pid -> name."""
        hosts = range(1, self.count + 1) if host is None else [host]
        pids = [pid for i in hosts for pid in sh(f"ip netns pids {self.tag}-{i}").stdout.split()]
        found = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                found[int(pid)] = Path(f"/proc/{pid}/comm").read_text().strip()
        return found

    def close(self) -> None:
        """Everything must be gone already; what is not is ended all the same."""
        left = self.processes()
        files = [path for i in range(1, self.count + 1) for path in (self.tmp / str(i)).iterdir()]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launch in self.launches:
            launch.process.wait(10)
        for i in range(1, self.count + 1):
            sh(f"ip netns del {self.tag}-{i}")
        sh(f"ip link del {self.tag}b")
        shutil.rmtree(self.tmp, ignore_errors=True)
        assert not left, f"left running: {left}"
        assert not files, f"left in TMPDIR: {files}"


@pytest.fixture
def hosts(root, tmp_path):
    """A function that makes some hosts; they are checked and removed after the test."""
    need_netns()
    made: list[Hosts] = []

    def make(count: int) -> Hosts:
        made.append(Hosts(root, tmp_path, count))
        return made[-1]

    yield make
    for each in made:
        each.close()


# Whole runs.


def test_a_run_on_two_hosts_that_fails(hosts, tmp_path):
    """The worker starts before the head, all NPUs are used, nobody else gets in, both end with 7."""
    h = hosts(3)
    (tmp_path / "use.py").write_text(USE_ALL_NPUS)
    script = f"python {tmp_path}/use.py; while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; exit 7"
    worker = h.launch(2, NPUS_PER_NODE=2)
    worker.until(f"no head at {h.address(1)} port 6380: [Errno 111] Connection refused")
    head = h.launch(1, script, NPUS_PER_NODE=2)
    text = head.until("NPUS [")
    where = [(h.address(i), str(i), "eth0", 0) for i in (1, 1, 2, 2)]
    assert f"NPUS {where}" in text and "Ray has 4 of 4 NPUs; training starts" in text

    # A second launch on either, a node too many, and one with other settings.
    busy = (
        f"RAY_PORT 6379 of {h.address(1)} cannot be used (Address already in use): it belongs to "
        "run 'out' (head"
    )
    for i, output, sentence in (
        (1, "out", "this run is on here already: run 'out' (head"),
        (1, "new", busy),
        (2, "out", "this run is on here already: run 'out' (worker"),
        (3, "out", "refuses this node: the run has its 2 nodes and has begun"),
    ):
        code, text = h.launch(i, script, NPUS_PER_NODE=2, OUTPUT_DIR=tmp_path / output).end()
        assert code == 1 and sentence in text, text
    code, text = h.run(1, "bash", "ray_start_npu.sh", "--status")
    assert code == 0 and text.startswith("running: run 'out' (head")
    assert h.run(3, "bash", "ray_start_npu.sh", "--status") == (1, "no run on this node\n")
    assert f" {h.address(1)}:6380 " in h.run(1, "ss", "-ltn")[1]
    assert ":8265 " not in h.run(1, "ss", "-ltn")[1]  # no dashboard

    (tmp_path / "go").touch()
    code, text = head.end()
    assert code == 7 and "ERROR: bash ended with status 7. The log is" in text
    code, text = worker.end()
    assert code == 7 and f"ERROR: the head {h.address(1)} ended with status 7 (its log there: " in text
    for address in (h.address(1), h.address(2)):
        assert list((tmp_path / f"logs/{address}/ray").glob("*.log")), "Ray's logs of a failed run are kept"
    assert "Ray runtime started" in (tmp_path / f"logs/{h.address(2)}/node.log").read_text()


@pytest.mark.weekly
def test_two_clusters_side_by_side(hosts, tmp_path):
    """Same ports, same bridge. Ctrl-C ends one; the other, with IPv6 and a late worker, succeeds."""
    h = hosts(4)
    script = f"echo TRAINING; while [ ! -e {tmp_path}/$RUN_NAME ]; do sleep 0.1; done"
    cluster = tmp_path / "cluster.env"
    cluster.write_text(f"NODES={h.address(3, 6)},{h.address(4, 6)}   # as on each host\nRUN_NAME=six\n")
    six = {"NNODES": "", "MASTER_ADDR": "", "RUN_NAME": "six", "OUTPUT_DIR": tmp_path / "six_out"}
    head6 = h.launch(3, script, "--cluster", str(cluster), **six)
    head6.until(f"1 of 2 nodes are here: {NAME} ({h.address(3, 6)}); missing: {h.address(4, 6)}")
    head4, worker4 = h.launch(1, script, RUN_NAME="four"), h.launch(2, RUN_NAME="four")
    head4.until("TRAINING")
    worker6 = h.launch(4, "", "--cluster", str(cluster), **six)
    head6.until("TRAINING")
    head4.send(signal.SIGINT)
    code, text = head4.end()
    assert code == 130 and "ERROR: stopped by SIGINT" in text
    code, text = worker4.end()
    assert code == 130 and f"the head {h.address(1)} ended with status 130" in text
    assert not h.processes(1) and not h.processes(2)
    (tmp_path / "six").touch()
    assert [head6.end()[0], worker6.end()[0]] == [0, 0], head6.text() + worker6.text()
    assert "ERROR: " not in head6.text() + worker6.text()


def test_a_head_whose_launcher_is_killed(hosts):
    """Its worker ends; what it left itself is found, keeps others from starting, and is ended by --stop."""
    h = hosts(2)
    head, worker = h.launch(1, "echo TRAINING; sleep 300"), h.launch(2)
    head.until("TRAINING")
    head.send(signal.SIGKILL)
    code, text = worker.end()
    assert code == 1 and f"ERROR: the head {h.address(1)} is lost: the connection was closed" in text
    assert not h.processes(2) and "raylet" in h.processes(1).values()
    code, text = h.run(1, "bash", "ray_start_npu.sh", "--status")
    assert code == 1 and text.startswith("stale:   run 'out' (head") and " processes are left" in text
    code, text = h.launch(1).end()
    assert code == 1 and "was killed and left processes behind" in text and "--stop --run-name out" in text
    stranger = subprocess.Popen(["sleep", "300"])
    assert h.run(1, "bash", "ray_start_npu.sh", "--stop", "--run-name", "other")[0] == 1
    assert "raylet" in h.processes(1).values()
    assert h.run(1, "bash", "ray_start_npu.sh", "--stop")[0] == 0
    assert not h.processes(1) and stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_a_worker_whose_ray_is_killed(hosts):
    h = hosts(2)
    head, worker = h.launch(1, "echo TRAINING; sleep 300"), h.launch(2)
    head.until("TRAINING")
    os.kill(next(pid for pid, name in h.processes(2).items() if name == "raylet"), signal.SIGKILL)
    code, text = head.end()
    assert code == 1 and f"ERROR: node {NAME} ({h.address(2)}) ended with status 1" in text
    assert worker.end()[0] == 1


@pytest.mark.weekly
def test_a_run_is_restarted_until_the_same_step_fails_twice(hosts, tmp_path):
    """First a worker loses its Ray at step 3, then training fails at step 5, and again at step 5.

    Each start continues with all nodes, and its log stays, as do the options that verl writes to hydra/.
    """
    h = hosts(2)
    script = f"""
        echo start >>{tmp_path}/starts
        mkdir -p "$OUTPUT_DIR/hydra" && cp {tmp_path}/starts "$OUTPUT_DIR/hydra/"
        step() {{ printf 'Training Progress: 1%%|#| %s/9 [00:05<02:00]\n' $1; }}
        step 3
        if [ "$(wc -l <{tmp_path}/starts)" = 1 ]; then echo WAITING; sleep 300; fi
        step 5
        sleep 1
        exit 7
    """
    head, worker = h.launch(1, script, "--restarts", "5"), h.launch(2, "", "--restarts", "5")
    head.until("WAITING")
    os.kill(next(pid for pid, name in h.processes(2).items() if name == "raylet"), signal.SIGKILL)
    code, text = head.end()
    assert code == 7, text
    assert f"it failed after step 3 (node {NAME} ({h.address(2)}) ended with status 1" in text
    assert (
        "it failed after step 5 (status 7); start 3 of at most 6 follows and continues from the last" in text
    )
    assert "not restarted: it failed twice at step 5: a third time would be no different" in text
    code, text = worker.end()
    assert code == 7 and text.count(f"the head {h.address(1)} is here") == 3, text
    assert (tmp_path / "starts").read_text() == 3 * "start\n"
    logs = sorted(path.name for path in (tmp_path / "out").glob("train*.log"))
    assert logs == ["train.1.log", "train.2.log", "train.log"]
    assert "WAITING" in (tmp_path / "out/train.1.log").read_text()
    for start, directory in enumerate(("hydra.1", "hydra.2", "hydra"), start=1):
        assert (tmp_path / "out" / directory / "starts").read_text() == start * "start\n"


@pytest.mark.weekly
def test_a_spare_node_takes_the_place_of_a_lost_one(hosts, tmp_path):
    """Three hosts, two nodes: the cable of one is pulled, and the next start continues without it."""
    h = hosts(3)
    (tmp_path / "use.py").write_text(USE_ALL_NPUS)
    script = f"python {tmp_path}/use.py; if mkdir {tmp_path}/first; then echo WAITING; sleep 300; fi"
    nodes = ",".join(h.address(i) for i in (1, 2, 3))
    given = {"NODES": nodes, "MASTER_ADDR": "", "NPUS_PER_NODE": 1, "RESTARTS": 2, "LOST_DEADLINE_S": 5}
    head, lost = h.launch(1, script, **given), h.launch(2, **given)
    head.until("WAITING")
    spare = h.launch(3, **given)
    spare.until("waiting for the other nodes")
    sh(f"ip link set {h.tag}v2 down")
    code, text = head.end()
    assert code == 0, text
    assert f"(node {NAME} ({h.address(2)}) is lost: no sign of life for 5 s); start 2 of at most 3" in text
    for i in (2, 3):
        assert f"NPUS {[(h.address(1), '1', 'eth0', 0), (h.address(i), str(i), 'eth0', 0)]}" in text
    code, text = spare.end()
    assert code == 0 and text.count("waiting for the other nodes") == 2, text
    lost.send(signal.SIGTERM)
    assert lost.end()[0] == 143


# As on busy machines: the head's raylet starts after 70 s, and a raylet's agents after 20 s.
LATE = """
import os, pathlib, subprocess, sys, time
init = subprocess.Popen.__init__
def late(self, command, *rest, **given):
    if str(command[0]).endswith("/raylet") and os.environ["OF_THE_NODE"] == "1":
        mark = str(pathlib.Path(__file__).with_name("started"))
        command = ["bash", "-c", 'sleep 70; touch "$0"; exec "$@"', mark, *command]
    init(self, command, *rest, **given)
subprocess.Popen.__init__ = late
if any(name in " ".join(sys.orig_argv) for name in ("dashboard/agent.py", "runtime_env/agent")):
    time.sleep(20)
"""


@pytest.mark.weekly
def test_a_ray_that_starts_late_ends_no_run(hosts, tmp_path):
    """By itself `ray start` waits 30 s for its raylet, a driver 60 s for one, a worker 40 s for the head's,
    and a raylet 15 s for its agents."""
    h = hosts(2)
    (tmp_path / "use.py").write_text(USE_ALL_NPUS)
    (slow := tmp_path / "slow").mkdir()
    (slow / "sitecustomize.py").write_text(LATE)
    given = {"NPUS_PER_NODE": 1, "PYTHONPATH": slow, "RAY_DEADLINE_S": 600}
    head, worker = h.launch(1, f"python {tmp_path}/use.py", **given), h.launch(2, **given)
    codes = [head.end(600)[0], worker.end()[0]]
    assert codes == [0, 0], head.text() + worker.text()
    assert (slow / "started").is_file() and "NPUS [" in head.text()


# Before Ray starts.


def test_a_pulled_cable(hosts):
    h = hosts(2)
    head, worker = h.launch(1, NNODES=3, LOST_DEADLINE_S=3), h.launch(2, NNODES=3, LOST_DEADLINE_S=3)
    worker.until("waiting for the other nodes")
    head.until(f"2 of 3 nodes are here: {NAME} ({h.address(1)}), {NAME} ({h.address(2)}); 1 missing")
    sh(f"ip link set {h.tag}v2 down")
    code, text = worker.end()
    assert code == 1 and f"ERROR: the head {h.address(1)} is lost: no sign of life for 3 s" in text
    end = time.monotonic() + 300
    while head.text().count("1 of 3 nodes are here") < 2:
        assert time.monotonic() < end, head.text()
        time.sleep(0.1)
    head.send(signal.SIGTERM)
    assert head.end()[0] == 143


def test_missing_nodes_and_wrong_addresses(hosts):
    h = hosts(2)
    soon = {"NODES_DEADLINE_S": 3}
    alone = h.launch(1, RANK=0, WORLD_SIZE=4, NNODES="", **soon)
    ranked = h.launch(2, RANK=2, WORLD_SIZE=4, NNODES="", **soon)
    code, text = alone.end()
    assert code == 1 and f"ERROR: after 3 s 2 of 4 nodes are here: {NAME}" in text
    assert "missing: RANK 1, 3" in text
    code, text = ranked.end()
    assert code == 1 and "the head" in text and "missing: RANK 1, 3" in text  # the head's reason
    nobody, unroutable = h.launch(1, MASTER_ADDR=h.address(9), **soon), h.launch(2, MASTER_ADDR="10.99.0.1")
    code, text = nobody.end()
    assert code == 1 and f"after 3 s no head at {h.address(9)} port 6380" in text
    assert f"must have that address; this node has: lo 127.0.0.1, lo ::1, eth0 {h.address(1)}" in text
    code, text = unroutable.end()
    assert code == 1 and "there is no route to 10.99.0.1 (Network is unreachable); check MASTER_ADDR" in text


def test_a_wrong_token_a_busy_port_and_an_impatient_user(hosts):
    h = hosts(2)
    occupy = "import socket, time; s = socket.create_server(('', 6379)); print(1, flush=True); time.sleep(60)"
    occupant = h.inside(1, "python3", "-c", occupy)
    assert occupant.stdout.readline() == "1\n"
    code, text = h.launch(1).end()
    assert code == 1 and f"used by: python3 (pid {occupant.pid}). Stop it, or set RAY_PORT to" in text
    assert occupant.poll() is None
    head = h.launch(1, RAY_PORT=7000)
    head.until("1 of 2 nodes are here")
    wrong = h.launch(2, RAY_PORT=7000, CLUSTER_TOKEN="another-token-of-somebody")
    code, text = wrong.end()
    assert code == 1 and "refuses this node: its cluster token is not the head's" in text
    assert TOKEN not in text + head.text()
    worker = h.launch(2, NNODES=3, RAY_PORT=7000)
    code, text = worker.end()
    assert code == 1 and "refuses this node: NNODES is 3 there and 2 on the head" in text
    head.send(signal.SIGINT)
    code, text = head.end()
    assert code == 130 and "ERROR: stopped by SIGINT" in text
    again = h.launch(1, RAY_PORT=7000)
    again.until("1 of 2 nodes are here")
    assert h.run(1, "bash", "ray_start_npu.sh", "--stop", "--run-name", "out")[0] == 0
    assert again.end()[0] == 143
    occupant.kill()
    occupant.wait()


def test_dry_run_with_cann_and_jemalloc(hosts, tmp_path):
    """Both are in /usr/local, in a mount namespace. Nothing is started or written."""
    h = hosts(1)
    prepare = f"""
        mount -t tmpfs none {h.tmp} && mkdir {h.tmp}/upper {h.tmp}/work {h.tmp}/1
        mount -t overlay none -o lowerdir=/usr/local,upperdir={h.tmp}/upper,workdir={h.tmp}/work /usr/local
        mkdir -p /usr/local/Ascend/ascend-toolkit /usr/local/lib
        echo 'false; export ASCEND_HOME_PATH=/cann$NOT_SET' >/usr/local/Ascend/ascend-toolkit/set_env.sh
        cp "$(ls /lib/*/libm.so.6 /lib64/libm.so.6 2>/dev/null | head -n1)" /usr/local/lib/libjemalloc.so.2
        exec bash ray_start_npu.sh --dry-run --nnodes 2 "$0" "" a=1"""
    script = tmp_path / "train_it.sh"
    script.touch()
    code, text = h.run(
        1, "unshare", "-m", "bash", "-euc", prepare, str(script), MASTER_ADDR=h.address(1), SKIP_PREFLIGHT=1
    )
    assert code == 0, text
    assert "CANN        /cann\n" in text and "preloaded   /usr/local/lib/libjemalloc.so.2\n" in text
    for line in (
        f"this node   head, {h.address(1)} on eth0",
        f"variable    HCCL_IF_IP={h.address(1)}",
        f"trains      bash {script} a=1",
    ):
        assert f"{line}\n" in text
    assert TOKEN not in text
    assert sorted(tmp_path.iterdir()) == [script]


# ray_start_npu.sh --check


@pytest.mark.weekly
def test_a_check_of_two_hosts(hosts, tmp_path):
    """All is brought up, sum and links are judged, nothing is trained, earlier logs stay."""
    h = hosts(2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/train.log").write_text("of the run\n")
    script = f"touch {tmp_path}/trained"
    where = {"NPUS_PER_NODE": 2, "SKIP_PREFLIGHT": 1}
    head, worker = h.launch(1, script, "--check", **where), h.launch(2, "", "--check", **where)
    code, text = head.end()
    assert code == 0, text
    assert "gloo: 4 dies of 2 node(s); all-reduce " in text
    assert "within a node: 2 links, median " in text and "between nodes: 2 links, median " in text
    assert "check: 0 errors, " in text
    assert worker.end()[0] == 0
    assert not (tmp_path / "trained").exists() and (tmp_path / "out/train.log").read_text() == "of the run\n"
    assert "check: 0 errors" in (tmp_path / "out/check/train.log").read_text()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) >= 4 and not [path for path in written if TOKEN.encode() in path.read_bytes()]


# Who can connect, and who else can start a run.

ACTOR = """
import ray, time
ray.init(log_to_driver=False)
@ray.remote(num_cpus=0)
class Worker:
    def __init__(self):
        print("up")
worker = Worker.remote()
ray.get(worker.__ray_ready__.remote())
print("TRAINING", flush=True)
time.sleep(300)
"""


LOOPBACK = {"127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"}


def listening(text: str) -> dict[str, set[str]]:
    """Of `ss -Hltnp`: address without port -> names of the processes that listen there."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        address = line.split()[3].rpartition(":")[0]
        found.setdefault(address, set()).add(line.partition('(("')[2].partition('"')[0])
    return found


@pytest.mark.parametrize("default_route", [False, True])
def test_what_listens_where(hosts, tmp_path, default_route):
    """One node: loopback alone, so no other host connects, also where Ray finds a way to the network."""
    h = hosts(2)
    if default_route:
        sh(f"ip -n {h.tag}-1 route add default via {h.address(2)}")
    (tmp_path / "use.py").write_text(ACTOR)
    script = f"python {tmp_path}/use.py"
    single = h.launch(1, script, NNODES="", MASTER_ADDR="")
    single.until("TRAINING")
    found = listening(h.run(1, "ss", "-Hltnp")[1])
    assert set().union(*found.values()) >= {"gcs_server", "raylet"}
    assert found.keys() <= LOOPBACK, found
    single.send(signal.SIGTERM)
    assert single.end()[0] == 143


@pytest.mark.weekly
def test_what_a_training_listens_on(hosts, tmp_path, tiny):
    """Two workers with a vLLM server each, from the first process to the last, with a default route."""
    h = hosts(2)
    sh(f"ip -n {h.tag}-1 route add default via {h.address(2)}")
    places = dict.fromkeys(("NNODES", "MASTER_ADDR", "RAY_NUM_CPUS"), "")
    run = h.launch(
        1, script="", recipe=("internal/train_gspo_qwen3_tiny_cpu.sh", "internal/cpu_env.sh"),
        NPUS_PER_NODE=2, STEPS=2, SKIP_REPORT=1, **places,
    )  # fmt: skip
    found: dict[str, set[str]] = {}
    while run.process.poll() is None:
        for address, names in listening(h.run(1, "ss", "-Hltnp")[1]).items():
            found.setdefault(address, set()).update(names)
        time.sleep(0.2)
    assert run.end()[0] == 0, run.text()
    seen = " ".join(set().union(*found.values()))
    for name in ("gcs_server", "raylet", "ray::WorkerDict", "VLLM::EngineCor", "ray::vLLMHttp"):
        assert name in seen, seen
    assert found.keys() <= LOOPBACK, found


# A second user.

SECOND = 54321
# Lets others reach what is below a directory that is its owner's alone, in this mount namespace only.
OPEN = """
    mkdir {hold}/{n}; mount --bind {needed} {hold}/{n}
    mount -t tmpfs -o mode=755 none {closed}; mkdir -p {needed}; mount --bind {hold}/{n} {needed}
"""


def closed_parent(path: Path) -> Path | None:
    """The topmost directory above a path that only its owner may enter."""
    return next((place for place in reversed(path.parents) if not place.stat().st_mode & 0o001), None)


@pytest.fixture
def second_user(root):
    """A function that runs the launcher as another user, who owns nothing but a directory."""
    home = Path(tempfile.mkdtemp(prefix="second-", dir="/tmp"))
    hold = Path(tempfile.mkdtemp(prefix="hold-", dir="/tmp"))
    script = home / "train_it.sh"
    script.write_text("echo TRAINED by $(id -u)\n")
    for path in (home, script):
        os.chown(path, SECOND, SECOND)

    def run(opened: bool) -> tuple[int, str]:
        needed = [path for path in (Path(sys.base_prefix).resolve(), root) if closed_parent(path)]
        lines = [
            OPEN.format(n=n, hold=hold, needed=path, closed=closed_parent(path))
            for n, path in enumerate(needed if opened else [])
        ]
        if not opened and not needed:  # no such machine: make the interpreter its owner's alone
            lines = [f"mount -t tmpfs -o mode=700 none {sys.base_prefix}"]
        as_user = f"exec setpriv --reuid {SECOND} --regid {SECOND} --clear-groups"
        start = f"{as_user} bash ray_start_npu.sh {script} '' 2>&1"
        environ = {name: os.environ[name] for name in ("PATH",)} | {
            "HOME": str(home),
            "VERBOSE": "1",
            "OUTPUT_DIR": f"{home}/out",
            "LOG_DIR": f"{home}/logs",
            "SKIP_PREFLIGHT": "1",
        }
        command = ["unshare", "-m", "bash", "-euc", "\n".join([*lines, start])]
        done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    yield run
    shutil.rmtree(home, ignore_errors=True)
    shutil.rmtree(hold, ignore_errors=True)


def test_a_second_user_on_the_host(second_user):
    """With a Python that all may run it works, from a checkout of another; else the message says why."""
    code, text = second_user(opened=True)
    assert code == 0 and f"TRAINED by {SECOND}" in text, text
    code, text = second_user(opened=False)
    assert code == 1 and "is gone or closed to user " in text and "checkout of your own" in text, text

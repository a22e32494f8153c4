"""launch/hang.py: recorded stacks, processes that hang, and a run on two hosts with one rank elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_launcher import Hosts, need_netns

from ascend_rl.launch.hang import Process, Stacks, odd, where
from ascend_rl.process import at_start, progress

# As faulthandler wrote it of a rank that waits in FSDP's clip of the gradient (gloo, torch 2.9).
WAITS = """
Thread 0x00007f5d0bfff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/site-packages/tqdm/_monitor.py", line 60 in run

Current thread 0x00007f5ed1b3f740 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3008 in all_reduce
  File "/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/site-packages/torch/utils/_contextlib.py", line 120 in decorate_context
  File "/verl/verl/workers/actor/dp_actor.py", line 402 in _optimizer_step
  File "/verl/verl/workers/actor/dp_actor.py", line 563 in update_policy
  File "/site-packages/ray/_private/worker.py", line 1020 in main_loop
"""
LOADS = """
Current thread 0x00007f5ed1b3f740 (most recent call first):
  File "/verl/verl/utils/dataset/rl_dataset.py", line 77 in __getitem__
  File "/verl/verl/workers/actor/dp_actor.py", line 500 in update_policy
"""
SPIED = """
Process 71: ray::WorkerDict.update_actor
Python v3.11.7 (/usr/bin/python3.11)

Thread 71 (idle): "MainThread"
    all_gather_into_tensor (torch/distributed/distributed_c10d.py:3900)
    wrapper (/site/torch/distributed/c10d_logger.py:81)
    gather (/verl/fsdp.py:9)
Thread 90 (idle): "Thread-1"
    wait (threading.py:331)
"""


def test_stacks_say_where_a_process_is():
    assert where(WAITS) == ("all_reduce", "_optimizer_step (dp_actor.py:402)")
    assert where(LOADS) == ("", "__getitem__ (rl_dataset.py:77)")
    spied = SPIED.replace(" (torch/", " (/site/torch/")
    assert where(spied) == ("all_gather_into_tensor", "gather (fsdp.py:9)")
    assert where("") == ("", "unknown code: it did not answer")
    # A collective in a thread of autograd counts more than the main thread's wait for it.
    backward = WAITS.replace("Current thread", "Thread") + LOADS
    assert where(backward) == ("all_reduce", "_optimizer_step (dp_actor.py:402)")


def ranks_at(*places: tuple[str, str], kind: str = "ray::WorkerDict.update_actor") -> list[Process]:
    return [Process("n", 100 + i, kind, str(i), False, *place) for i, place in enumerate(places)]


def named(processes: list[Process]) -> list[str]:
    return [p.rank for p in odd(processes)]


def test_who_is_not_where_the_others_are():
    waits, loads = ("all_reduce", "f (a.py:3)"), ("", "g (b.py:7)")
    assert named(ranks_at(waits, waits, loads, waits)) == ["2"]
    assert named(ranks_at(loads, waits)) == ["0"]  # one of two: the one that does not wait
    assert named(ranks_at(loads, loads, loads, waits)) == ["0", "1", "2"]  # the one waits for all of them
    assert named(ranks_at(waits, ("all_reduce", "f (a.py:4)"), waits)) == []  # the same function
    assert named(ranks_at(waits, waits, ("broadcast", "f (a.py:3)"))) == ["2"]
    assert named(ranks_at(loads, loads, ("", "h (b.py:7)"))) == ["2"]
    assert named(ranks_at(loads, ("", "h (b.py:7)"))) == []  # nobody is the majority
    stopped = ranks_at(waits, waits, waits)
    stopped[1] = replace(stopped[1], stopped=True)
    assert named(stopped) == ["1"]
    # Kinds are compared among themselves, and what is alone with nobody.
    engines = ranks_at(loads, loads, kind="VLLM::Worker_TP0")
    alone = ranks_at(loads, kind="ray::TaskRunner.run") + ranks_at(loads, kind="python")
    assert named(ranks_at(waits, waits) + engines + alone) == []


# A process that says who it is and waits, in a function of its own; $1: its name, $2: the function.
WORKER = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
exec(f"def {sys.argv[2]}(): time.sleep(600)\\nos.write(1, b'ready\\\\n'); {sys.argv[2]}()")
"""
SUPERVISED = """
import sys
from pathlib import Path
from ascend_rl.launch.supervise import supervise
sys.exit(supervise(sys.argv[2:], Path(sys.argv[1], "log"), stall_s=8))
"""


@pytest.mark.parametrize("other", ["update", "load", "STOP"])
def test_a_stall_names_the_process_that_is_elsewhere(tmp_path, other):
    """Before anything is ended: three processes, of which one is in another function, or stopped."""
    script = "trap : TERM\n"
    for i, what in enumerate(("update", other if other != "STOP" else "update", "update")):
        script += f"""(exec -a ray::WorkerDict.update "$0" -c "$1" ray::WorkerDict {what}) & p{i}=$!\n"""
    script += f"""
        until [ "$(grep -c ready {tmp_path}/log)" = 3 ]; do sleep 0.2; done
        [ {other} != STOP ] || kill -STOP $p1
        for i in $p0 $p1 $p2; do echo "$i $((i == p1))" >>"$ASCEND_RL_PROGRESS.ranks"; done
        printf 'Training Progress: |#| 3/9 [00:05<02:00]\\n'
        wait
    """
    command = ["bash", "-c", script, sys.executable, WORKER]
    result = subprocess.run(
        [sys.executable, "-c", SUPERVISED, str(tmp_path), *command],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 124, result.stderr
    away = ", not where the others are: rank 1." in result.stderr
    assert away == (other != "update"), result.stderr
    count = {"update": "3 x ray::WorkerDict: update", "load": "2 x ray::WorkerDict: update"}.get(other, "")
    assert count in result.stderr
    stacks = (tmp_path / "hang/127.0.0.1.txt").read_text()
    assert stacks.count("== rank ") == 3 and stacks.count("in update\n") == {"update": 3}.get(other, 2)
    assert ("in load\n" in stacks) == (other == "load")
    assert ("is stopped; it" in stacks) == (other == "STOP")


def test_the_sitecustomize_of_others_runs_too(tmp_path, monkeypatch):
    """And every Python process of the run, forks included, can be asked."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/sitecustomize.py").write_text("import builtins\nbuiltins.theirs = __name__\n")
    (tmp_path / "ours").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "theirs"))
    stacks = Stacks(tmp_path / "hang", "n")
    monkeypatch.setenv(progress.FILE, str(tmp_path / "progress"))
    pids: dict[int, str] = {}
    variables = stacks.attach(tmp_path / "ours", str(tmp_path / "progress"), lambda: pids)
    program = "import os, time; os.write(1, f'{theirs} {os.fork()}\\n'.encode()); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | variables, stdout=subprocess.PIPE, text=True
    )
    lines = [process.stdout.readline().split() for _ in range(2)]
    forks = [int(number) for _, number in lines]
    try:
        assert [name for name, _ in lines] == ["sitecustomize"] * 2 and 0 in forks
        pids.update({process.pid: "python", max(forks): "python", os.getpid(): "python"})
        found = {p.pid: p.place for p in stacks.collect()}
        assert found == dict.fromkeys([process.pid, max(forks)], "<module> (<string>:1)")
    finally:
        os.kill(max(forks), signal.SIGKILL)
        process.kill()
        process.wait()
    assert at_start.SIGNAL in signal.valid_signals()


# Four training workers on two hosts; one does something else before the all-reduce of the others.
TRAINING = """
import os, ray, sys, time
ray.init(log_to_driver=True)
@ray.remote(num_cpus=0, resources={"NPU": 1}, scheduling_strategy="SPREAD")
class WorkerDict:
    def where(self):
        return ray.util.get_node_ip_address()
    def begin(self, rank, address):
        from ascend_rl.host.core_binding import bind_trainer
        os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR=address, MASTER_PORT="29511")
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        bind_trainer()
        import torch
        torch.distributed.init_process_group("gloo")
    def update(self, rank):
        import torch
        if rank == 2:
            self.load()
        torch.distributed.all_reduce(torch.ones(1))
    def load(self):
        time.sleep(3600)
workers = [WorkerDict.remote() for _ in range(4)]
address = ray.get(workers[0].where.remote())  # Ray begins with any node
ray.get([w.begin.remote(rank, address) for rank, w in enumerate(workers)])
print("Training Progress: |#| 3/9 [00:05<02:00]", flush=True)
ray.get([w.update.remote(rank) for rank, w in enumerate(workers)])
"""


@pytest.mark.weekly
def test_a_run_on_two_hosts_names_the_rank(root, tmp_path):
    need_netns()
    (tmp_path / "train.py").write_text(TRAINING)
    h = Hosts(root, tmp_path, 2)
    try:
        given = {"NPUS_PER_NODE": 2, "STALL_DEADLINE_S": 20}
        head, worker = h.launch(1, f"python {tmp_path}/train.py", **given), h.launch(2, **given)
        code, text = head.end(600)
        assert code == 124 and ", not where the others are: rank 2." in text, text
        assert "3 x ray::WorkerDict: waits in all_reduce, called by update (train.py)" in text
        assert "not where the others are: rank 2 (ray::WorkerDict.update, pid " in text
        assert worker.end()[0] == 124
        for address in (h.address(1), h.address(2)):
            written = (tmp_path / f"out/hang/{address}.txt").read_text()
            assert written.count("== rank ") == 2 and "in all_reduce" in written, written
        assert sum("in load\n" in p.read_text() for p in Path(tmp_path / "out/hang").iterdir()) == 1
    finally:
        h.close()

"""The stores of a trainer's and an engine's process groups listen where they are announced: on loopback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# The addresses this process listens on, once it has a process group of its own.
LISTENING = """
import psutil, socket, torch
def free_port():
    with socket.create_server(("", 0)) as server:
        return str(server.getsockname()[1])
host, port = "127.0.0.1", free_port()
def listening():
    found = psutil.Process().net_connections("tcp")
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}
"""
TRAINER = """
import os
from verl.single_controller.base.worker import Worker
os.environ |= {"WG_BACKEND": "ray", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": host, "MASTER_PORT": port}
os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "DISABLE_WORKER_INIT": "1"}
Worker()
torch.distributed.init_process_group("gloo")
"""
ENGINE = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.parallel_state import init_distributed_environment
from vllm.distributed.utils import stateless_init_torch_distributed_process_group as group
of_data_parallel = group("localhost", int(free_port()), 0, 1, "gloo")
init_distributed_environment(1, 0, f"tcp://{host}:{port}", 0, "gloo")
"""


@pytest.mark.parametrize("who", [TRAINER, ENGINE], ids=["trainer", "engine"])
def test_the_store_is_on_loopback_alone(who):
    program = f"{LISTENING}\n{who}\nprint('LISTENS', *listening())"
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    places = set(run.stdout.rpartition("LISTENS")[2].split())
    assert places and places <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, places


def test_another_address_is_as_upstream():
    """A name that others use: it may be no address of this machine."""
    program = """
import sys
from torch.distributed.rendezvous import _create_c10d_store, default_pg_timeout
from ascend_rl.host.loopback import listen_on_loopback
listen_on_loopback()
listen_on_loopback()
held = _create_c10d_store("0.0.0.0", int(port), 0, 1, default_pg_timeout)
print("LISTENS", *listening())
"""
    run = subprocess.run([sys.executable, "-c", LISTENING + program], capture_output=True, text=True)
    assert run.returncode == 0 and set(run.stdout.split()[1:]) <= {"::", "0.0.0.0"}, run.stdout + run.stderr

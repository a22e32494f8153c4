"""A port that verl or vLLM chose is free when its server listens, whatever the node opened meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys

from namespaces import unshare

# Connections and servers that name no port get one of these ten, as did all that verl and vLLM chose.
FEW_PORTS = """
    ip link set lo up
    echo 40000 40009 > /proc/sys/net/ipv4/ip_local_port_range
    exec "$@"
"""
CHOOSE_AND_LISTEN = """
import contextlib, socket
from vllm.plugins import load_general_plugins
load_general_plugins()
from verl.single_controller.ray.base import get_master_addr_port
from verl.utils.net_utils import get_free_port
from vllm.utils.network_utils import get_open_port, get_open_ports_list

held, held_socket = get_free_port("127.0.0.1", with_alive_sock=True)
held_socket.close()
chosen = {
    "MASTER_PORT": get_master_addr_port._function()[1],
    "verl's": get_free_port("127.0.0.1")[0],
    "verl's, held": held,
    "vLLM's": get_open_port(),
    "vLLM's, several": get_open_ports_list(3)[0],
}
others = []
with contextlib.suppress(OSError):
    while True:
        others.append(socket.create_server(("", 0)))
assert len(others) == 10
for name, port in chosen.items():
    try:
        others.append(socket.create_server(("", int(port))))
    except OSError:
        print("TAKEN", name)
print("LISTENS")
"""


def test_a_chosen_port_is_still_free():
    environ = {name: value for name, value in os.environ.items() if name != "VLLM_PORT"}
    command = [*unshare("net"), "bash", "-euc", FEW_PORTS, "bash", sys.executable, "-c", CHOOSE_AND_LISTEN]
    run = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert "LISTENS" in run.stdout and "TAKEN" not in run.stdout, run.stdout[-1000:] + run.stderr[-2000:]

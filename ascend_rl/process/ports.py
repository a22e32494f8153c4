"""A port for a server that is to be started, by whoever starts one."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from ascend_rl.settings.switch import CannotWork

_marks: list[socket.socket] = []  # one for each port given; they end with this process


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port of ``address`` for a server to be started, below those the system gives to connections.

    One that the system chose (bound to port 0) may be given to any connection before its server listens.
    As long as this process lives, no other call on this machine gets the same one: its abstract UNIX socket
    marks it. Where connections get all ports from 1024 on, it is one of theirs.

    Args:
        address: an IP address; "" is all of IPv4.

    Raises:
        CannotWork: none is free.
    """
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    ports = list(range(max(first - 10_000, 1024), first) or range(first, last + 1))
    random.SystemRandom().shuffle(ports)
    for port in ports:
        with contextlib.suppress(OSError), contextlib.ExitStack() as kept:
            kept.enter_context(mark := socket.socket(socket.AF_UNIX)).bind(f"\0ascend_rl.port.{port}")
            with socket.create_server((address, port), family=family):
                kept.pop_all()
                _marks.append(mark)
                return port
    raise CannotWork(f"no TCP port of {address} is free")

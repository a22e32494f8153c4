"""A torch store that is announced at a loopback address listens there alone.

torch.distributed gives its store (TCPStore) a host name and a port, tells the others to connect there, and
listens on all interfaces of the machine all the same. Whoever reaches the port can read and change what ranks
tell each other, without a password. A run on one node announces 127.0.0.1, so nobody else has to reach it.

The stores of torch.distributed.init_process_group, by env:// or tcp://, get a socket that is bound to the
loopback address they are announced at. Another host name changes nothing: others may reach this machine by a
name that is not one of its own addresses. Cost: none.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Whether a host name is this machine only.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "10.0.0.1", "0.0.0.0", "node1", "")]
    [True, True, True, False, False, False, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_on_loopback() -> None:
    """From now on, in this process; a second call changes nothing."""
    from torch.distributed import TCPStore

    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function has this name too

    def store(host_name: str, port: int, *more, is_master: bool = False, **given):
        if is_master and not more and is_loopback(host_name) and given.get("master_listen_fd") is None:
            family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
            with contextlib.suppress(OSError):  # this process listens there already: torch shares the store
                listener = socket.create_server((host_name, port), family=family, backlog=2048)
                port = listener.getsockname()[1]
                given["master_listen_fd"] = listener.detach()
        return TCPStore(host_name, port, *more, is_master=is_master, **given)

    if rendezvous.TCPStore is TCPStore:
        rendezvous.TCPStore = store

"""How the launchers of one run find each other, and learn of each other's end.

Ray cannot tell a worker node how the run ended, needs a minute to notice a dead head, and knows nothing of
a node that never came. So the launchers talk to each other first: the head listens on one port of the chosen
interface, each worker connects, and the connection stays open until the end.

- Both sides prove that they know the cluster's token (HMAC-SHA256 over a fresh number of the other side)
  before they continue; the token itself is not sent. What follows is not signed: the network must be trusted.
- A node is refused, with the reasons, if its settings differ from the head's, it is there already, the
  cluster is full, or the head's judge finds anything else.
- A closed connection, or `silence_s` without a sign of life (a pulled cable, a frozen machine), is an end.
- The end carries an exit status, in both directions, and whether it is final or the node restarts.
- A time limit (time_limit.py) goes in both directions too, as the seconds that are left: clocks may differ.
- Workers send readings of their dies (die_watch.py).

Messages are JSON objects, one a line. Costs two threads a connection. Used by launch.py, tested in
tests/test_rendezvous.py, and between hosts in tests/test_launcher.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from ascend_rl.launch.time_limit import TimeLimit

LONGEST_MESSAGE = 1 << 18
HANDSHAKE_S = 60.0  # in which a worker answers what the head asks
RETRY_S = 0.5
REMIND_S = 30.0  # between two lines that say who is waited for


class RendezvousError(Exception):
    """Why the nodes did not meet, as a sentence for the user. ``status``: the exit status."""

    status = 1


def proof(token: str, side: str, challenge: str) -> str:
    return hmac.new(token.encode(), f"{side} {challenge}".encode(), hashlib.sha256).hexdigest()


class Link:
    """One connection: JSON lines in both directions, and how the other side ended."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(HANDSHAKE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.reader, self.lock = connection, connection.makefile("rb"), threading.Lock()
        self.go: dict | None = None  # what the head said when all nodes were there
        self.ended: tuple[int, str] | None = None  # the other side's exit status, and why
        self.final = True  # of an end: whether the other side will not restart
        self.lost = ""  # why the other side cannot be heard any more
        self.limited: Callable[[float, bool], None] = lambda by, stop: None  # is told the other side's limit
        self.asked: Callable[[], list[dict]] = list  # what this side's processes do (hang.py)
        self.answer: list[dict] | None = None  # what the other side's do
        self.heard: Callable[[dict], None] = lambda row: None  # is told of the worker's dies (die_watch.py)

    def send(self, **message) -> None:
        with self.lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def limit(self, by: float, stop: bool) -> None:
        """Tell the other side a time limit; see TimeLimit.shorten."""
        with contextlib.suppress(OSError):  # then the run ends
            self.send(left_s=by - time.time(), stop=stop)

    def receive(self) -> dict:
        """The next message.

        Raises:
            ConnectionError: closed, silent for too long, or not this protocol.
        """
        try:
            line = self.reader.readline(LONGEST_MESSAGE)
            message = json.loads(line) if line.endswith(b"\n") else None
        except TimeoutError as error:
            raise ConnectionError(f"no sign of life for {self.socket.gettimeout():g} s") from error
        except OSError as error:
            raise ConnectionError(f"the connection broke: {error.strerror or error}") from error
        except (ValueError, RecursionError):  # "[[[[..." is too deep for the parser
            message = line
        if not line:
            raise ConnectionError("the connection was closed")
        if not isinstance(message, dict):
            raise ConnectionError("whatever answers there is not a launcher")
        return message

    def watch(self, silence_s: float) -> None:
        """Start to read in the background, and to send signs of life."""
        self.socket.settimeout(silence_s)
        for work in (self._read, lambda: self._beat(silence_s / 4)):
            threading.Thread(target=work, daemon=True).start()

    def _read(self) -> None:
        try:
            while self.ended is None:
                message = self.receive()
                if "go" in message:
                    self.go = message["go"]
                if "where" in message:
                    threading.Thread(target=self._tell_where, daemon=True).start()
                if "there" in message:
                    self.answer = list(message["there"])
                if "dies" in message:
                    self.heard(message["dies"])
                if "left_s" in message:
                    self.limited(time.time() + float(message["left_s"]), bool(message["stop"]))
                if "end" in message:
                    self.final = bool(message.get("final", True))
                    self.ended = (int(message["end"]), str(message.get("why", "")))
        except (ConnectionError, ValueError, TypeError, KeyError) as error:
            self.lost = str(error)

    def _tell_where(self) -> None:
        with contextlib.suppress(OSError):
            found = self.asked()
            while len(json.dumps(found)) > LONGEST_MESSAGE // 2:
                del found[len(found) // 2 :]
            self.send(there=found)

    def _beat(self, every_s: float) -> None:
        with contextlib.suppress(OSError):  # until it is closed: an ending node still lives
            while True:
                self.send(beat=1)
                time.sleep(every_s)

    def over(self) -> bool:
        return bool(self.ended or self.lost)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Head:
    """The side that all others connect to.

    Args:
        address, port: where to listen; nothing else is opened.
        token: the cluster's secret.
        me: this node, {"name", "address", "rank" (or ""), "has": its addresses as a text,
            "must_equal": {setting: value}}.
        nnodes: nodes of the run, this one included.
        silence_s: how long a node may be silent.
        ask: a text for each worker, which answers it as "answer" of its node.
        judge: what else stands against a node, given its "answer" and how far its clock is ahead (s).
    """

    def __init__(
        self,
        address: str,
        port: int,
        token: str,
        me: dict,
        nnodes: int,
        silence_s: float,
        ask: str = "",
        judge: Callable[[dict, float], list[str]] = lambda node, ahead_s: [],
    ):
        self.token, self.me, self.nnodes, self.silence_s = token, me, nnodes, silence_s
        self.ask, self.judge = ask, judge
        self.nodes: dict[str, tuple[dict, Link]] = {}  # by address
        self.running: dict[str, tuple[dict, Link]] = {}  # those that the run has begun with, this node aside
        self.spares = 0  # how many nodes more than nnodes may wait for the next start
        self.refused: dict[str, str] = {}  # why, by address
        self.complete = self.announced = False
        self.stopped = ""  # which node its user has stopped while the others were waited for
        self.lock = threading.Lock()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.listener = socket.create_server((address, port), family=family, backlog=128)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, peer = self.listener.accept()
                threading.Thread(target=self._greet, args=(connection, peer[0]), daemon=True).start()

    def _greet(self, connection: socket.socket, peer: str) -> None:
        link = Link(connection)
        try:
            challenge, asked = secrets.token_hex(16), time.time()
            link.send(challenge=challenge, ask=self.ask)
            hello = link.receive()
            heard = time.time()
            if not hmac.compare_digest(str(hello.get("proof")), proof(self.token, "worker", challenge)):
                refusal = "its cluster token is not the head's"
                link.send(refused=refusal)
            else:
                mine = proof(self.token, "head", str(hello["challenge"]))
                first, last = hello.get("clock", (asked, heard))  # there, within asked and heard
                ahead = max(last - heard, 0.0) - max(asked - first, 0.0)
                refusal = self._admit(hello["node"], link, mine, ahead)
        except (OSError, KeyError, TypeError, ValueError):  # a port scanner, or gone already
            link.close()
            return
        if refusal:
            self.refused[peer] = refusal
            link.close()

    def _admit(self, node: dict, link: Link, mine: str, ahead_s: float) -> str:
        """Admit a node; returns why not, or ""."""
        with self.lock:
            refusal = self._objection(node, ahead_s)
            link.send(proof=mine, **({"refused": refusal} if refusal else {}))
            if not refusal:
                self.nodes[node["address"]] = (node, link)
                link.watch(self.silence_s)
        return refusal

    def _objection(self, node: dict, ahead_s: float) -> str:
        for name, value in self.me["must_equal"].items():
            if node["must_equal"].get(name) != value:
                return f"{name} is {node['must_equal'].get(name)} there and {value} on the head"
        if node["address"] == self.me["address"]:
            return f"{node['address']} is the head's own address"
        if self.complete and not self.spares:
            return f"the run has its {self.nnodes} nodes and has begun"
        self._forget_lost()
        if node["address"] in self.nodes:
            return f"a launcher of {node['address']} is already here: this is the second one on that node"
        if node["rank"] and node["rank"] in [other["rank"] for other, _ in self.nodes.values()]:
            return f"there is a node with RANK={node['rank']} already"
        if len(self.nodes) + 1 >= self.nnodes + self.spares:
            return f"the {self.nnodes} nodes of NNODES are here already"
        return "".join(f"\n  {reason}" for reason in self.judge(node, ahead_s))

    def _forget_lost(self) -> None:
        for node, link in self.nodes.values():
            if link.ended and link.final and not self.complete:
                self.stopped = f"node {node['name']} ({node['address']}) was stopped {link.ended[1]}".rstrip()
        self.nodes = {address: entry for address, entry in self.nodes.items() if not entry[1].over()}

    def present(self) -> list[dict]:
        with self.lock:
            self._forget_lost()
            return [node for node, _ in self.nodes.values()]

    def gather(self, expected: list[str], deadline_s: float, say: Callable[[str], None]) -> list[str]:
        """Wait until enough nodes are here, then let the first ones continue; spare ones wait for the end.

        Args:
            expected: addresses of all nodes where they are known, else [].
            deadline_s: how long to wait.
            say: prints a line for the user.

        Returns:
            The addresses of those that continue, this node's first.

        Raises:
            RendezvousError: the deadline passed; names who is missing. Or a node was stopped by its user, and
                none is spare.
        """
        began = reminded = time.monotonic()
        known = None
        while len(here := self.present()) + 1 < self.nnodes:
            now = time.monotonic()
            text = self._missing(here, expected)
            if self.stopped and not self.spares:
                raise RendezvousError(self.stopped)
            if now - began > deadline_s:
                raise RendezvousError(f"after {deadline_s:g} s {text}")
            if (len(here), dict(self.refused)) != known or now - reminded > REMIND_S:
                known, reminded = (len(here), dict(self.refused)), now
                say(text)
            time.sleep(0.1)
        with self.lock:
            self.complete = True
            self.running = dict(list(self.nodes.items())[: self.nnodes - 1])
            addresses = [self.me["address"], *self.running]
            for _, link in self.running.values():
                with contextlib.suppress(OSError):  # then ended() says so
                    link.send(go={"addresses": addresses})
        return addresses

    def _missing(self, here: list[dict], expected: list[str]) -> str:
        names = [f"{node['name']} ({node['address']})" for node in [self.me, *here]]
        addresses, ranks = {node["address"] for node in here}, {node["rank"] for node in here}
        if expected:
            absent = [a for a in expected if a not in addresses and a != self.me["address"]]
            missing = ("missing: " if not self.spares else "missing of: ") + ", ".join(absent)
        elif "" not in ranks and self.me["rank"]:
            absent = [str(rank) for rank in range(1, self.nnodes) if str(rank) not in ranks]
            missing = "missing: RANK " + ", ".join(absent)
        else:
            missing = f"{self.nnodes - len(names)} missing, unnamed: set NODES to the addresses of all"
        turned_away = "".join(f"; {peer} was refused: {why}" for peer, why in self.refused.items())
        return f"{len(names)} of {self.nnodes} nodes are here: {', '.join(names)}; {missing}{turned_away}"

    def ended(self) -> tuple[int, str] | None:
        """For supervise(): a node that is gone ends the run."""
        for node, link in self.running.values():
            who = f"node {node['name']} ({node['address']})"
            if link.ended:
                return 1, f"{who} ended with status {link.ended[0]} {link.ended[1]}".rstrip()
            if link.lost:
                return 1, f"{who} is lost: {link.lost}"
        return None

    def share(self, limit: TimeLimit) -> None:
        """Keep the limit of the run and that of all its nodes the same."""
        for _, link in self.running.values():
            link.limited = limit.shorten
        limit.tell = self._limit

    def _limit(self, by: float, stop: bool) -> None:
        for _, link in self.running.values():
            link.limit(by, stop)

    def hear(self, take: Callable[[str, dict], None]) -> None:
        """Give each reading of the dies of another node, with its address, to ``take``."""
        for address, (_, link) in self.running.items():
            link.heard = partial(take, address)

    def where(self, patience_s: float) -> tuple[list[dict], list[str]]:
        """What the processes of all other nodes do, and the nodes that do not say."""
        links = {address: link for address, (_, link) in self.running.items()}
        for link in links.values():
            link.answer = None
            with contextlib.suppress(OSError):
                link.send(where=1)
        until = time.monotonic() + patience_s
        while any(link.answer is None and not link.over() for link in links.values()):
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        silent = [address for address, link in links.items() if link.answer is None]
        return [record for link in links.values() for record in link.answer or ()], silent

    def final(self) -> bool:
        """Whether a node was stopped by its user, and not by a failure."""
        return any(link.ended and link.final for _, link in self.running.values())

    def announce(self, status: int, why: str, final: bool = True) -> None:
        """Tell all nodes the end, once; unless it is final they may come again, to the next Head."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # close alone would let one more in
        self.listener.close()
        with self.lock:
            links = [] if self.announced else [link for _, link in self.nodes.values()]
            self.announced = True
        for link in links:
            with contextlib.suppress(OSError):
                link.send(end=status, why=why, final=final)

    def finish(self, status: int, why: str, patience_s: float = 40.0) -> list[str]:
        """Announce the end and wait for that of the others; returns the addresses of those still running."""
        self.announce(status, why)
        links = {address: link for address, (_, link) in self.nodes.items()}
        until = time.monotonic() + patience_s
        while not all(link.over() for link in links.values()) and time.monotonic() < until:
            time.sleep(0.05)
        late = [address for address, link in links.items() if not link.over()]
        for link in links.values():
            link.close()
        return late


class Worker:
    """The side that connects to the head; arguments as for Head, and ``answer``: to what the head asks."""

    def __init__(
        self,
        address: str,
        port: int,
        token: str,
        me: dict,
        silence_s: float,
        answer: Callable[[str], object] = lambda ask: None,
    ):
        self.head, self.token, self.me, self.silence_s = (address, port), token, me, silence_s
        self.answer = answer
        self.link: Link | None = None

    def join(self, deadline_s: float, say: Callable[[str], None]) -> list[str]:
        """Wait for the head, introduce this node, wait until all are there.

        Returns:
            The addresses of all nodes, the head's first.

        Raises:
            RendezvousError: no head until the deadline, refused, or the head gave up; says why.
        """
        began = reminded = time.monotonic()
        first = True
        while self.link is None:
            try:
                self.link = self._connect()
            except OSError as error:
                now = time.monotonic()
                text = f"no head at {self.head[0]} port {self.head[1]}: {error}"
                if now - began > deadline_s:
                    raise RendezvousError(
                        f"after {deadline_s:g} s {text}. The head must have that address; "
                        f"this node has: {self.me['has']}"
                    ) from error
                if first or now - reminded > REMIND_S:
                    first, reminded = False, now
                    say(text)
                time.sleep(RETRY_S)
        say(f"the head {self.head[0]} is here; waiting for the other nodes")
        while self.link.go is None:  # the head has the deadline for this, and the link ends with the head
            if self.link.over():
                raise RendezvousError(self.ended()[1])
            time.sleep(0.05)
        return list(self.link.go["addresses"])

    def _connect(self) -> Link:
        link = Link(socket.create_connection(self.head, timeout=5))
        try:
            challenge = secrets.token_hex(16)
            asked, clock = link.receive(), time.time()
            node = self.me | {"answer": self.answer(str(asked.get("ask", "")))}
            mine = proof(self.token, "worker", str(asked.get("challenge")))
            link.send(proof=mine, challenge=challenge, node=node, clock=(clock, time.time()))
            answer = link.receive()
        except OSError:
            link.close()
            raise
        if "refused" in answer:
            link.close()
            raise RendezvousError(f"the head {self.head[0]} refuses this node: {answer['refused']}")
        if not hmac.compare_digest(str(answer.get("proof")), proof(self.token, "head", challenge)):
            link.close()
            raise RendezvousError(f"whoever listens at {self.head[0]} port {self.head[1]} has another token")
        if "ask" not in asked:
            link.close()
            raise RendezvousError(f"the head {self.head[0]} has another version of the launcher")
        link.watch(self.silence_s)
        return link

    def ended(self) -> tuple[int, str] | None:
        """For supervise(): the head's end is this node's, with its status."""
        if self.link.ended:
            status, why = self.link.ended
            return status, f"the head {self.head[0]} ended with status {status} {why}".rstrip()
        if self.link.lost:
            return 1, f"the head {self.head[0]} is lost: {self.link.lost}"
        return None

    def share(self, limit: TimeLimit) -> None:
        """Take the head's limit, and ask the head for an earlier one."""
        self.link.limited, limit.tell = limit.shorten, self.link.limit

    def final(self) -> bool:
        """Whether the head has ended for good; a head that is lost may come again."""
        return bool(self.link and self.link.ended and self.link.final)

    def finish(self, status: int, why: str, final: bool = True, patience_s: float = 10.0) -> None:
        """Tell the head that this node is done; unless that is final, hear what the head makes of it."""
        if self.link is not None:
            with contextlib.suppress(OSError):
                self.link.send(end=status, why=why, final=final)
            until = time.monotonic() + patience_s
            while not final and not self.link.over() and time.monotonic() < until:
                time.sleep(0.05)
            self.link.close()

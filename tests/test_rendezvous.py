"""launch/rendezvous.py: a head, and workers in threads, over loopback.

Between hosts, with network faults: tests/test_launcher.py.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest

from ascend_rl.launch.rendezvous import Head, Link, RendezvousError, Worker

TOKEN = "0123456789abcdef"


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
        """Let all nodes meet; returns what each was told about the nodes."""
        told: list[list[str]] = []
        threads = [
            threading.Thread(target=lambda w=worker: told.append(w.join(10, self.said.append)))
            for worker in workers
        ]
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


def wait_for(condition, seconds: float = 300):
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


def test_spare_nodes_wait_for_the_end_without_a_part_in_the_run(cluster):
    """Before the run begins, and also after: a node that was repaired."""
    c = cluster(2)
    c.head.spares = 2
    first = c.worker("b")
    threading.Thread(target=lambda: first.join(10, c.said.append), daemon=True).start()
    assert c.head.gather(["a", "b", "c", "d"], 10, c.said.append) == ["a", "b"]
    spare, late, why = c.worker("c"), c.worker("d"), {}

    def wait(worker):
        with pytest.raises(RendezvousError) as error:
            worker.join(10, c.said.append)
        why[worker] = str(error.value)

    threads = [threading.Thread(target=wait, args=(worker,)) for worker in (spare, late)]
    for thread in threads:
        thread.start()
    wait_for(lambda: {"c", "d"} <= c.head.nodes.keys())
    with pytest.raises(RendezvousError, match="the 2 nodes of NNODES are here already"):
        c.worker("e")._connect()
    spare.finish(130, "")  # its user stops it: no matter
    wait_for(c.head.nodes["c"][1].over)
    assert c.head.ended() is None and not c.head.final()
    c.head.announce(7, "(why)", final=False)
    threads[1].join(10)
    assert why[late] == f"the head {c.host} ended with status 7 (why)" and not late.final()
    assert wait_for(first.ended) == (7, why[late])


def test_a_closed_connection_and_a_silent_one(cluster, monkeypatch):
    """Beats keep a quiet connection; without them, as of a frozen machine, it is lost after silence_s."""
    c = cluster(2, silence_s=1)
    w = c.worker("b")
    c.join(w)
    time.sleep(1.6)
    assert c.head.ended() is None and w.ended() is None
    monkeypatch.setattr(w.link, "send", lambda **message: None)
    assert wait_for(c.head.ended) == (1, "node host-b (b) is lost: no sign of life for 1 s")
    c.head.nodes["b"][1].close()
    assert wait_for(w.ended) == (1, f"the head {c.host} is lost: the connection was closed")


def test_missing_nodes_are_named(cluster):
    for expected, rank, sentence in (
        (["a", "b", "d"], "", "missing: d$"),
        ([], "0", "missing: RANK 1$"),
        ([], "", "1 missing, unnamed: set NODES"),
    ):
        c = cluster(3, rank=rank)
        c.worker("b", "2" if rank else "")._connect()
        wait_for(c.head.present)
        here = r"2 of 3 nodes are here: host-a \(a\), host-b \(b\); "
        with pytest.raises(RendezvousError, match=here + sentence):
            c.head.gather(expected, 0.3, c.said.append)


@pytest.mark.parametrize(
    ("worker", "sentence"),
    [
        ({"address": "c", "token": "x" * 16}, "its cluster token is not the head's"),
        ({"address": "c", "run": "y"}, "run is y there and x on the head"),
        ({"address": "a"}, "a is the head's own address"),
        ({"address": "b"}, "a launcher of b is already here: this is the second one on that node"),
        ({"address": "c", "rank": "1"}, "there is a node with RANK=1 already"),
    ],
)
def test_who_does_not_belong_is_refused(cluster, worker, sentence):
    c = cluster(3)
    c.worker("b", "1")._connect()
    with pytest.raises(RendezvousError, match=f"refuses this node: {sentence}"):
        c.worker(**worker).join(5, c.said.append)
    wait_for(lambda: c.head.refused)
    assert f"127.0.0.1 was refused: {sentence}" in c.head._missing(c.head.present(), [])


def test_one_node_too_many_is_refused_before_the_run_begins(cluster):
    c = cluster(2)
    c.worker("b")._connect()
    with pytest.raises(RendezvousError, match="the 2 nodes of NNODES are here already"):
        c.worker("c").join(5, c.said.append)


def test_a_cluster_that_has_begun_is_closed_and_one_may_come_again_before(cluster):
    c = cluster(2)
    gone = c.worker("b")
    gone._connect().close()
    wait_for(lambda: "b" in c.head.nodes and c.head.nodes["b"][1].over())
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


NOISE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "bytes": b"\xff\xfe\n",
    "no proof": b'{"proof": 1}\n',
    "no object": b"[]\n",
    "nothing": b"",
    "deep": b"[" * 200_000 + b"\n",
    "deep object": b'{"a":' * 50_000 + b"\n",
    "long": b'{"proof": "' + b"x" * 400_000 + b'"}\n',
    "long number": b'{"proof": ' + b"9" * 100_000 + b"}\n",
    "of other types": b'{"proof": {}, "challenge": [], "node": 3, "clock": "x"}\n',
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_noise_does_not_disturb_the_head(cluster, noise, capsys):
    """Before it is believed: the connection is closed, nothing is printed, and workers still join."""
    c = cluster(2)
    with socket.create_connection(("127.0.0.1", c.port), timeout=20) as stranger:
        stranger.sendall(noise)
        stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # it left the rest unread
            while stranger.recv(1 << 16):
                pass
    assert c.join(c.worker("b"))[0] == ["a", "b"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("spares", [0, 1])
def test_a_node_that_its_user_stops_ends_the_gathering(cluster, spares):
    """Unless there are spare nodes, one of which may take its place."""
    c = cluster(3)
    c.head.spares = spares
    w = c.worker("b")

    def join() -> None:
        with contextlib.suppress(RendezvousError):
            w.join(10, print)

    threading.Thread(target=join, daemon=True).start()
    wait_for(lambda: c.head.present() and w.link)
    w.finish(143, "(stopped by SIGTERM)")
    wanted = r"after 2 s 1 of 3" if spares else r"^node host-b \(b\) was stopped \(stopped by SIGTERM\)$"
    with pytest.raises(RendezvousError, match=wanted):
        c.head.gather([], 2, print)


def test_a_deadline_without_a_head_says_what_answered():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    sentence = f"after 0.2 s no head at 127.0.0.1 port {port}: .*refused.*this node has: x"
    with pytest.raises(RendezvousError, match=sentence):
        Worker("127.0.0.1", port, TOKEN, node("b"), 5).join(0.2, print)


def test_an_end_that_is_not_final_leaves_room_for_the_next_start(cluster):
    """A worker that fails hears what the head makes of it; one that its user stopped ends all for good."""
    c = cluster(2)
    w = c.worker("b")
    c.join(w)
    threading.Thread(target=lambda: w.finish(1, "", final=False), daemon=True).start()
    wait_for(c.head.ended)
    assert not c.head.final()
    c.head.announce(1, "", final=False)
    wait_for(w.ended)
    assert not w.final()
    with pytest.raises(OSError):  # not to the head that has ended
        c.worker("b")._connect()
    again = Cluster(2)
    w = again.worker("b")
    again.join(w)
    w.finish(130, "")
    wait_for(again.head.ended)
    assert again.head.final()
    again.head.finish(1, "", 0)

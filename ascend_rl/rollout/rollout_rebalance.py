"""Which requests to move between rollout servers, so that the long tail runs in small graphs.

Responses end at different times, so after a while one server holds many requests and another few. All wait
for the fullest: with experts spread over all DP ranks they step together, in the graph of the largest batch.

Idea, two phases as in the published practice. Waiting requests which their server has no room for go at once
to servers that have. When none is left waiting, running requests move if that lets *all* servers change to a
smaller graph (gear): only servers above the new gear give, each just its surplus, its smallest requests
first, since those cost least to recompute; receivers share them evenly, each from few servers.

Invariants (tests/test_rollout_rebalance.py, against brute force): no request is lost, duplicated or moved
twice; what a server receives runs there, within ``max_num_seqs`` and ``kv_capacity_tokens``; a plan of the
result is empty. Where KV is not short (any surplus request fits any free place) the new gear is the smallest
there is and no fewer moves reach it. Where it is short, the question is bin packing: the gear is then the
smallest for which one of two greedy packings succeeds, and no server moves anything if there is none.
Cost: O(n log n) for n requests; the gears are a constant.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """A request that has not ended.

    Attributes:
        tokens: prompt and what was generated so far; the KV it holds when it runs.
        waiting: in the server's queue, without KV.
    """

    id: str
    tokens: int
    waiting: bool


@dataclass(frozen=True)
class Server:
    """A vLLM server or DP rank; waiting requests in the order of its queue."""

    id: str
    requests: tuple[Request, ...]
    kv_capacity_tokens: int
    max_num_seqs: int


@dataclass(frozen=True)
class Move:
    """Take ``request`` from server ``source`` to server ``target``."""

    request: str
    source: str
    target: str


class _State:
    """A server while planning: what it runs or can admit by itself, and what is stuck in its queue."""

    def __init__(self, server: Server):
        self.id, self.limit = server.id, server.max_num_seqs
        waiting = [request for request in server.requests if request.waiting]
        self.held = [request for request in server.requests if not request.waiting]
        self.free_tokens = server.kv_capacity_tokens - sum([request.tokens for request in self.held])
        admitted = 0
        for request in waiting:  # vLLM admits in order and stops at the first that does not fit
            if len(self.held) >= self.limit or request.tokens > self.free_tokens:
                break
            self.take(request)
            admitted += 1
        self.stuck = waiting[admitted:]

    def take(self, request: Request) -> None:
        self.held.append(request)
        self.free_tokens -= request.tokens


def gear_of(count: int, gears: Iterable[int]) -> float:
    """The smallest graph for ``count`` requests; infinity if none is large enough.

    >>> gear_of(5, [1, 2, 4, 8])
    8
    """
    return min((gear for gear in gears if gear >= count), default=math.inf)


def plan(servers: Sequence[Server], gears: Sequence[int]) -> list[Move]:
    """The moves to make now; empty when nothing is gained.

    Args:
        servers: all servers that share the work, with all their unfinished requests.
        gears: captured batch sizes (``cudagraph_capture_sizes``), any order.

    >>> full = Server("a", tuple(Request(f"a{i}", 100, False) for i in range(6)), 10_000, 8)
    >>> plan([full, Server("b", (Request("b0", 100, False),), 10_000, 8)], [1, 2, 4, 8])
    [Move(request='a0', source='a', target='b'), Move(request='a1', source='a', target='b')]
    """
    states = [_State(server) for server in servers]
    origin: dict[str, str] = {}
    target: dict[str, str] = {}
    while moved := _spread_waiting(states) or _drop_gear(states, gears):
        for request, source, destination in moved:
            origin.setdefault(request.id, source.id)
            target[request.id] = destination.id
    return [Move(name, source, target[name]) for name, source in origin.items() if target[name] != source]


def _spread_waiting(states: list[_State]) -> list[tuple[Request, _State, _State]]:
    """Phase 1: stuck requests to the servers with fewest requests; none of them is stuck afterwards."""
    stuck = [
        (request.tokens, index, request) for index, state in enumerate(states) for request in state.stuck
    ]
    if not stuck:
        return []
    receivers = [
        (len(state.held), index)
        for index, state in enumerate(states)
        if not state.stuck and len(state.held) < state.limit
    ]
    heapq.heapify(receivers)
    moved = []
    # Smallest first: a receiver without room for this one has none for any later one.
    for tokens, source, request in sorted(stuck, key=lambda item: item[:2]):
        while receivers and states[receivers[0][1]].free_tokens < tokens:
            heapq.heappop(receivers)
        if not receivers:
            break
        index = receivers[0][1]
        states[index].take(request)
        moved.append((request, states[source], states[index]))
        if len(states[index].held) < states[index].limit:
            heapq.heapreplace(receivers, (len(states[index].held), index))
        else:
            heapq.heappop(receivers)
    gone = {id(request) for request, _, _ in moved}
    for state in states:
        # What is left does not fit: smaller ones went first, so it is no smaller than the head that did not.
        state.stuck = [request for request in state.stuck if id(request) not in gone]
    return moved


def _drop_gear(states: list[_State], gears: Sequence[int]) -> list[tuple[Request, _State, _State]]:
    """Phase 2: the moves after which all servers fit into the smallest gear that can be reached."""
    counts = [len(state.held) for state in states]
    if not any(counts) or any(state.stuck for state in states):
        return []
    current, total = gear_of(max(counts), gears), sum(counts)
    for gear in sorted(gear for gear in set(gears) if gear < current):
        slots = [min(gear, state.limit) - count for state, count in zip(states, counts, strict=True)]
        if sum(min(gear, state.limit) for state in states) < total:
            continue
        donors = [
            (state, heapq.nsmallest(count - gear, state.held, key=_cost))
            for state, count in zip(states, counts, strict=True)
            if count > gear
        ]
        receivers = [(state, slot) for state, slot in zip(states, slots, strict=True) if slot > 0]
        moved = _pair(donors, receivers) or _pack(donors, receivers)
        if moved:
            _apply(moved)
            return moved
    return []


def _cost(request: Request) -> tuple[bool, int]:
    """Waiting requests have no KV to give up."""
    return not request.waiting, request.tokens


def _pair(donors, receivers) -> list[tuple[Request, _State, _State]]:
    """Every receiver takes the same number, from few donors: one each, if receivers suffice.

    The fullest receiver is the one everybody waits for while it recomputes or loads. Empty if KV falls short.
    """
    donors = sorted(donors, key=lambda donor: -len(donor[1]))
    receivers = sorted(receivers, key=lambda receiver: -receiver[1])
    surplus = [(request, source) for source, requests in donors for request in requests]
    quota = 1
    while sum(min(quota, slot) for _, slot in receivers) < len(surplus):
        quota += 1
    moved, position = [], 0
    for state, slot in receivers:
        part = surplus[position : position + min(quota, slot)]
        if sum(request.tokens for request, _ in part) > state.free_tokens:
            return []
        moved += [(request, source, state) for request, source in part]
        position += len(part)
    return moved


def _pack(donors, receivers) -> list[tuple[Request, _State, _State]]:
    """Largest request to the receiver with most free KV; empty if one fits nowhere."""
    heap = [(-state.free_tokens, index, slot) for index, (state, slot) in enumerate(receivers)]
    heapq.heapify(heap)
    moved = []
    surplus = [(request, source) for source, requests in donors for request in requests]
    for request, source in sorted(surplus, key=lambda item: -item[0].tokens):
        if not heap or -heap[0][0] < request.tokens:
            return []
        used, index, slot = heapq.heappop(heap)
        moved.append((request, source, receivers[index][0]))
        if slot > 1:
            heapq.heappush(heap, (used + request.tokens, index, slot - 1))
    return moved


def _apply(moved: list[tuple[Request, _State, _State]]) -> None:
    gone = {id(request) for request, _, _ in moved}
    for source in {id(state): state for _, state, _ in moved}.values():
        source.held = [request for request in source.held if id(request) not in gone]
    for request, _, destination in moved:  # the KV that sources get back is not needed: gears only fall
        destination.take(request)

"""Move expert weights from the training layout to the rollout layout by AllToAllV, sending each byte once.

A training rank (pipeline stage, EP rank) owns a block of experts of its stage's layers; the rollout worker on
the same device holds another block (its own EP rank) of all layers. Gathering every expert on every rank, as
verl 0.7.1 does, moves experts / local experts times more than needed: 128 times at rollout EP 128.

Idea: an expert that a rank needs but does not own comes from one owner. The unit is one Hugging Face tensor
(``gate_proj``, ``up_proj``, ``down_proj``: equal sizes; inference calls the first two w13, the last w2).
Step j moves the j-th MoE layer of all stages together, so that every stage sends all the time. The transfers
of a step are the edges of a bipartite graph, senders against receivers; coloured with as many colours as the
busiest rank has edges (Konig 1916), they split into matchings, in which a rank sends at most one expert and
receives at most one. A round is ``round_slices`` matchings of slices, which bounds its buffers.

Invariants (tests/test_reshard.py, against sets): a rank ends up with exactly its worker's experts; it
receives exactly what it needs minus what it owns, each slice once; the replicas of an owner send equally
often, within one; no rank calls AllToAllV with nothing to send and nothing to receive: it then sends itself
one number; send and receive buffers together are at most one layer's local experts of a rollout rank.
TP and CP do not appear: without expert tensor parallelism (ETP 1) they do not move an expert.
Cost: O(E (V + D)) per step pattern, E edges, V ranks, D degree; patterns repeat, so few are computed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ascend_rl.process.counts import count

PARTS = ("gate_proj", "up_proj", "down_proj")
# More slices in a round would only cost memory: 32 of Qwen3-235B-A22B are 0.4 GB.
ROUND_SLICES_MAX = 32


class Slice(NamedTuple):
    """One Hugging Face tensor of one expert; [I, H] for gate_proj and up_proj, [H, I] for down_proj."""

    layer: int
    expert: int
    part: str

    @property
    def name(self) -> str:
        """
        >>> Slice(3, 17, "up_proj").name
        'model.layers.3.mlp.experts.17.up_proj.weight'
        """
        return f"model.layers.{self.layer}.mlp.experts.{self.expert}.{self.part}.weight"


@dataclass(frozen=True)
class Train:
    """Where megatron-core keeps experts with ETP 1: rank = EP rank + ep * (replica + replicas * stage).

    Attributes:
        world: number of ranks.
        ep: expert parallel size.
        stages: the MoE layers of each pipeline stage, numbered as in the whole model.
    """

    world: int
    ep: int
    stages: tuple[tuple[int, ...], ...]

    @property
    def replicas(self) -> int:
        return self.world // (self.ep * len(self.stages))

    def place(self, rank: int) -> tuple[int, int]:
        """(stage, EP rank) of a rank."""
        return rank // (self.ep * self.replicas), rank % self.ep

    def owners(self, stage: int, ep_rank: int) -> list[int]:
        """The ranks that hold the experts of ``ep_rank`` in the layers of ``stage``."""
        first = stage * self.replicas * self.ep + ep_rank
        return [first + replica * self.ep for replica in range(self.replicas)]


@dataclass(frozen=True)
class Rollout:
    """Where vLLM keeps experts: EP spans the TP x DP workers of a replica; with ep 1 each worker has all.

    Attributes:
        tp, dp, ep: sizes of one replica; worker w is DP rank w % (tp * dp) // tp, TP rank w % tp.
        workers: the worker on each training rank's device; None: worker r with rank r, as in verl 0.7.1.
    """

    tp: int
    dp: int
    ep: int
    workers: tuple[int, ...] | None = None

    def ep_rank(self, rank: int) -> int:
        """The EP rank of the worker on the device of training rank ``rank``."""
        return (rank if self.workers is None else self.workers[rank]) % self.ep


class Matching(NamedTuple):
    """Transfers of one expert each, at most one from and one to each rank.

    ``outgoing[src]`` = (dst, stage, expert), ``incoming[dst]`` = (src, stage, expert).
    """

    outgoing: dict[int, tuple[int, int, int]]
    incoming: dict[int, tuple[int, int, int]]


@dataclass(frozen=True)
class Plan:
    """Who sends what to whom, in which round; made by ``make_plan``.

    Attributes:
        experts: experts in a layer.
        round_slices: the most slices a rank sends, and the most it receives, in a round.
    """

    train: Train
    rollout: Rollout
    experts: int
    round_slices: int
    steps: tuple[tuple[tuple[int | None, ...], tuple[Matching, ...]], ...]  # (layer of each stage, matchings)

    @property
    def buffer_slices(self) -> int:
        """Slices in the send and receive buffers together."""
        return 2 * self.round_slices

    def needed(self, rank: int) -> range:
        """The experts of the worker on ``rank``'s device, in every layer."""
        return _block(self.experts, self.rollout.ep, self.rollout.ep_rank(rank))

    def local(self, rank: int) -> Iterator[Slice]:
        """The slices that ``rank`` both owns and needs."""
        stage, ep_rank = self.train.place(rank)
        owned = _block(self.experts, self.train.ep, ep_rank)
        for layer, expert in itertools.product(self.train.stages[stage], self.needed(rank)):
            if expert in owned:
                yield from (Slice(layer, expert, part) for part in PARTS)

    def rounds(self, rank: int) -> Iterator[tuple[list[tuple[int, Slice]], list[tuple[int, Slice]]]]:
        """For each round, what ``rank`` sends and what it receives, as (peer, slice), sorted by peer."""
        matchings = (
            (layers, matching, part) for layers, step in self.steps for matching in step for part in PARTS
        )
        while batch := list(itertools.islice(matchings, self.round_slices)):
            sends, receives = [], []
            for layers, matching, part in batch:
                for found, moves in ((matching.outgoing, sends), (matching.incoming, receives)):
                    if rank in found:
                        peer, stage, expert = found[rank]
                        moves.append((peer, Slice(layers[stage], expert, part)))
            yield sorted(sends), sorted(receives)


@functools.lru_cache(maxsize=2)
def make_plan(train: Train, rollout: Rollout, experts: int) -> Plan:
    """The plan for layers of ``experts`` experts; the same on every rank, without communication.

    Raises:
        ValueError: sizes do not divide each other, or the placement is not one worker per rank.
    """
    _check(train, rollout, experts)

    @functools.cache
    def matchings(active: tuple[bool, ...], turn: int) -> tuple[Matching, ...]:
        return _matchings(_transfers(train, rollout, experts, active, turn), train.world)

    steps = []
    for step, layers in enumerate(itertools.zip_longest(*train.stages)):
        active = tuple(layer is not None for layer in layers)
        steps.append((layers, matchings(active, step % train.replicas)))
    local = len(PARTS) * experts // rollout.ep
    return Plan(train, rollout, experts, min(local // 2, ROUND_SLICES_MAX), tuple(steps))


def reshard(
    plan: Plan,
    rank: int,
    read: Callable[[Slice], torch.Tensor],
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    device: torch.device | str,
    group: torch.distributed.ProcessGroup | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) of exactly the experts of the rollout worker on this rank's device.

    Every rank of ``group`` (of plan.train.world ranks) must run it to the end. A tensor is valid until the
    next one is requested: the buffer is reused.

    Args:
        read: returns the weight of a slice that this rank owns, detached, of ``dtype``; may be a view.
        hidden, intermediate: H and I of the shapes, [I, H] for gate_proj and up_proj, [H, I] for down_proj.
    """
    shapes = {part: (intermediate, hidden) for part in PARTS} | {"down_proj": (hidden, intermediate)}
    size = hidden * intermediate
    for owned in plan.local(rank):
        yield owned.name, read(owned).contiguous()
    send, receive = (torch.empty(plan.round_slices * size, dtype=dtype, device=device) for _ in range(2))
    for sends, receives in plan.rounds(rank):
        for place, (_, slice_) in zip(send.split(size), sends, strict=False):
            place.view(shapes[slice_.part]).copy_(read(slice_))
        wanted, given = (_counts(moves, plan.train.world, size) for moves in (receives, sends))
        if not sends and not receives:
            wanted[rank] = given[rank] = 1  # to itself: AllToAllV with nothing on both sides may be refused
        torch.distributed.all_to_all_single(
            receive[: sum(wanted)], send[: sum(given)], wanted, given, group=group
        )
        count("moe_alltoallv", len(sends))
        for place, (_, slice_) in zip(receive.split(size), receives, strict=False):
            yield slice_.name, place.view(shapes[slice_.part])


def _block(experts: int, size: int, index: int) -> range:
    return range(experts // size * index, experts // size * (index + 1))


def _counts(moves: list[tuple[int, Slice]], world: int, size: int) -> list[int]:
    counts = [0] * world
    for peer, _ in moves:
        counts[peer] += size
    return counts


def _check(train: Train, rollout: Rollout, experts: int) -> None:
    stages = len(train.stages)
    if train.world % (train.ep * stages):
        raise ValueError(
            f"{train.world} training ranks cannot hold {stages} stages with EP {train.ep}: "
            "make the world size a multiple of PP x EP"
        )
    if rollout.ep not in (1, rollout.tp * rollout.dp):
        raise ValueError(
            f"vLLM's EP is 1 or TP x DP ({rollout.tp} x {rollout.dp}), not {rollout.ep}: "
            "set rollout.expert_parallel_size to one of these"
        )
    if train.world % (rollout.tp * rollout.dp):
        raise ValueError(
            f"{train.world} ranks cannot be split into rollout replicas of TP {rollout.tp} x DP "
            f"{rollout.dp}: choose sizes that divide it"
        )
    if experts % train.ep or experts % rollout.ep:
        raise ValueError(
            f"{experts} experts cannot be split evenly by EP {train.ep} (training) and {rollout.ep} "
            "(rollout): choose sizes that divide them"
        )
    if rollout.workers is not None and sorted(rollout.workers) != list(range(train.world)):
        raise ValueError(f"workers must name each of {train.world} workers once, got {rollout.workers}")


def _transfers(
    train: Train, rollout: Rollout, experts: int, active: tuple[bool, ...], turn: int
) -> list[tuple[int, int, int, int]]:
    """(src, dst, stage, expert) for one layer of each active stage; replicas take turns, from ``turn`` on."""
    takers = [[] for _ in range(experts)]
    for rank in range(train.world):
        for expert in _block(experts, rollout.ep, rollout.ep_rank(rank)):
            takers[expert].append(rank)
    transfers = []
    for stage, ep_rank in itertools.product(itertools.compress(itertools.count(), active), range(train.ep)):
        owners = train.owners(stage, ep_rank)
        remote = [
            (dst, expert)
            for expert in _block(experts, train.ep, ep_rank)
            for dst in takers[expert]
            if dst not in owners
        ]
        turns = itertools.cycle(owners)
        for _ in range(turn * len(remote) % len(owners)):
            next(turns)
        transfers += [(src, dst, stage, expert) for src, (dst, expert) in zip(turns, remote, strict=False)]
    return transfers


def _matchings(transfers: list[tuple[int, int, int, int]], world: int) -> tuple[Matching, ...]:
    """Split transfers into the fewest matchings: edge colouring of a bipartite graph by alternating paths.

    A transfer takes a colour a that is free at its sender. If its receiver already has a transfer of that
    colour, the path from there that alternates between a and a colour b free at the receiver swaps the two
    colours; it cannot return to the sender, because the graph is bipartite.
    """
    sender = [{} for _ in range(world)]  # colour -> index of the transfer
    receiver = [{} for _ in range(world)]
    for index, (src, dst, *_) in enumerate(transfers):
        a = next(colour for colour in itertools.count() if colour not in sender[src])
        b = next(colour for colour in itertools.count() if colour not in receiver[dst])
        path, ends, here, colour = [], itertools.cycle((receiver, sender)), dst, a
        while (found := next(ends)[here].get(colour)) is not None:
            path.append((found, colour))
            here = transfers[found][len(path) % 2 == 0]
            colour = b if colour == a else a
        for found, colour in path:
            for side, rank in zip((sender, receiver), transfers[found][:2], strict=True):
                del side[rank][colour]
        for found, colour in (*((f, b if c == a else a) for f, c in path), (index, a)):
            for side, rank in zip((sender, receiver), transfers[found][:2], strict=True):
                side[rank][colour] = found
    colours = max((colour for taken in receiver for colour in taken), default=-1) + 1
    matchings = tuple(Matching({}, {}) for _ in range(colours))
    for taken in receiver:
        for colour, index in taken.items():
            src, dst, stage, expert = transfers[index]
            matchings[colour].outgoing[src] = (dst, stage, expert)
            matchings[colour].incoming[dst] = (src, stage, expert)
    return matchings

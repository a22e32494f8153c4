"""weights/reshard.py: every rank gets exactly its worker's experts, each once, and not a byte more.

Who owns and who needs what is computed here from the definitions of megatron-core's and vLLM's rank orders,
rank by rank, in sets of (layer, expert).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from ascend_rl.weights.reshard import PARTS, ROUND_SLICES_MAX, Rollout, Slice, Train, make_plan, reshard

HIDDEN, INTERMEDIATE = 6, 4


def owned_sets(train: Train, experts: int) -> list[set]:
    """{(layer, expert)} of each training rank: EP varies fastest, then data parallel, then stages."""
    block = experts // train.ep
    return [
        {(layer, expert) for layer in layers for expert in range(ep_rank * block, (ep_rank + 1) * block)}
        for layers in train.stages
        for _ in range(train.world // len(train.stages) // train.ep)
        for ep_rank in range(train.ep)
    ]


def needed_sets(train: Train, rollout: Rollout, experts: int) -> list[set]:
    """{(layer, expert)} of the worker beside each training rank, from vLLM's grid of ranks."""
    grid = np.arange(train.world).reshape(-1, rollout.dp, rollout.tp)  # replica, DP, TP
    groups = grid.reshape(-1, rollout.dp * rollout.tp) if rollout.ep > 1 else grid.reshape(-1, 1)
    layers = list(itertools.chain(*train.stages))
    of_worker = {}
    for group in groups:
        for worker, share in zip(group, np.split(np.arange(experts), len(group)), strict=True):
            of_worker[int(worker)] = set(itertools.product(layers, share.tolist()))
    return [of_worker[w] for w in rollout.workers or range(train.world)]


@st.composite
def layouts(draw):
    ep, pp = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 4))
    world = ep * pp * draw(st.integers(1, 4))
    size = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    tp = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    rollout_ep = draw(st.sampled_from([1, size]))
    numbers = draw(st.permutations(range(draw(st.integers(1, 7)))))  # any order: virtual stages interleave
    cuts = sorted(draw(st.lists(st.integers(0, len(numbers)), min_size=pp - 1, max_size=pp - 1)))
    stages = tuple(tuple(numbers[a:b]) for a, b in itertools.pairwise([0, *cuts, len(numbers)]))
    workers = draw(st.none() | st.permutations(range(world)).map(tuple))
    experts = math.lcm(ep, rollout_ep) * draw(st.integers(1, 2))
    return Train(world, ep, stages), Rollout(tp, size // tp, rollout_ep, workers), experts


@settings(max_examples=60)
@given(layouts())
@example((Train(4, 2, ((0, 1),)), Rollout(4, 1, 4), 4))  # one expert a layer to send, from two owners in turn
@example((Train(8, 2, ((0, 1),)), Rollout(8, 1, 8), 8))  # two from four
@example((Train(8, 2, ((0, 1, 2),)), Rollout(8, 1, 8), 8))
@example((Train(12, 2, ((0, 1, 2, 3),)), Rollout(4, 3, 12), 12))  # three from six
def test_every_layout_moves_the_minimum(layout):
    train, rollout, experts = layout
    plan = make_plan(train, rollout, experts)
    owned, needed = owned_sets(train, experts), needed_sets(train, rollout, experts)
    rounds = [list(plan.rounds(rank)) for rank in range(train.world)]

    for rank in range(train.world):
        received = Counter(slice_ for _, receives in rounds[rank] for _, slice_ in receives)
        remote = {Slice(*pair, part) for pair in needed[rank] - owned[rank] for part in PARTS}
        assert received == Counter(remote)
        local = {Slice(*pair, part) for pair in needed[rank] & owned[rank] for part in PARTS}
        assert Counter(plan.local(rank)) == Counter(local)
        for sends, receives in rounds[rank]:
            assert max(len(sends), len(receives)) <= plan.round_slices
            assert all(slice_[:2] in owned[rank] for _, slice_ in sends)
    layers = len(set(itertools.chain(*train.stages)))
    assert plan.buffer_slices * layers <= len(PARTS) * min(map(len, needed))
    local = len(PARTS) * experts // rollout.ep
    assert plan.round_slices == ROUND_SLICES_MAX or plan.buffer_slices + 2 > local  # no larger round fits

    for at_once in zip(*rounds, strict=True):  # both ends list the same slices in the same order
        sent = {(src, dst): [s for d, s in at_once[src][0] if d == dst]
                for src in range(train.world) for dst in range(train.world)}  # fmt: skip
        for (src, dst), slices in sent.items():
            assert slices == [s for peer, s in at_once[dst][1] if peer == src]

    sends = [sum(len(s) for s, _ in rounds[rank]) // len(PARTS) for rank in range(train.world)]
    replicas = {}
    for rank, pairs in enumerate(owned):
        replicas.setdefault(frozenset(pairs), []).append(sends[rank])
    assert all(max(counts) - min(counts) <= 1 for pairs, counts in replicas.items() if pairs)

    busiest = 0  # the fewest rounds: no step can take less than its busiest rank
    for step in itertools.zip_longest(*train.stages):
        degrees = Counter()
        for rank in range(train.world):
            for side, moves in itertools.product((0, 1), rounds[rank]):
                degrees[rank, side] += sum(s.layer in step and s.part == PARTS[0] for _, s in moves[side])
        busiest += max(degrees.values(), default=0)
    assert len(rounds[0]) == -(-busiest * len(PARTS) // plan.round_slices)


@pytest.mark.parametrize("tp, dp, rounds", [(4, 32, 288), (8, 4, 144), (16, 1, 192)])
def test_qwen3_235b_takes_no_more_rounds_than_its_busiest_rank(tp, dp, rounds):
    """The table of docs/weights.md. A step moves one layer of each stage, and takes as long as the rank
    that sends or receives most of it.
    """
    stages = tuple(tuple(range(first, last)) for first, last in itertools.pairwise((0, 23, 47, 71, 94)))
    train, rollout, experts = Train(128, 32, stages), Rollout(tp, dp, tp * dp), 128
    plan = make_plan(train, rollout, experts)
    owned, needed = owned_sets(train, experts), needed_sets(train, rollout, experts)
    busiest = 0
    for step in itertools.zip_longest(*stages):
        received = [[pair for pair in needed[r] - owned[r] if pair[0] in step] for r in range(train.world)]
        wanted = Counter(pair for pairs in received for pair in pairs)
        sent = [sum(wanted[pair] for pair in pairs if pair[0] in step) for pairs in owned]  # one owner each
        busiest += max(*sent, *map(len, received))
    assert sum(len(matchings) for _, matchings in plan.steps) == busiest
    assert len(list(plan.rounds(0))) == rounds == math.ceil(busiest * len(PARTS) / plan.round_slices)


QWEN3_235B = Train(128, 32, tuple(tuple(range(*ends)) for ends in itertools.pairwise((0, 23, 47, 71, 94))))


def test_no_rank_of_qwen3_235b_calls_with_nothing_on_both_sides(monkeypatch):
    """Counted at the call, for all ranks of the published layout with experts of one number each."""
    plan, calls, idle = make_plan(QWEN3_235B, Rollout(4, 32, 128), 128), Counter(), set()
    rank = 0

    def all_to_all(output, given, wanted, sent, group):
        assert (len(output), len(given)) == (sum(wanted), sum(sent)) and len(output) + len(given) > 0
        calls[rank] += 1
        if wanted[rank]:
            assert wanted == sent and sum(sent) == 1
            idle.add(rank)

    monkeypatch.setattr(torch.distributed, "all_to_all_single", all_to_all)
    for rank in range(plan.train.world):  # noqa: B007
        for _ in reshard(plan, rank, lambda slice_: torch.zeros(1, 1), 1, 1, torch.float32, "cpu"):
            pass
    assert set(calls) == set(range(128)) and len(set(calls.values())) == 1
    assert len(idle) > 1  # else nothing was tested


@pytest.mark.parametrize(
    "train,rollout,experts,message",
    [
        (Train(4, 3, ((0,),)), Rollout(1, 1, 1), 6, "multiple of PP x EP"),
        (Train(4, 2, ((0,),)), Rollout(2, 2, 2), 6, "1 or TP x DP"),
        (Train(6, 2, ((0,),)), Rollout(2, 2, 4), 8, "choose sizes that divide it"),
        (Train(4, 2, ((0,),)), Rollout(2, 2, 4), 6, "split evenly"),
        (Train(4, 2, ((0,),)), Rollout(2, 2, 4, (0, 1, 2, 2)), 8, "each of 4 workers once"),
    ],
)
def test_what_cannot_be_planned_is_refused(train, rollout, experts, message):
    with pytest.raises(ValueError, match=message):
        make_plan(train, rollout, experts)


def value(slice_: Slice, experts: int) -> torch.Tensor:
    """A tensor that occurs nowhere else, in the slice's shape."""
    number = (slice_.layer * experts + slice_.expert) * len(PARTS) + PARTS.index(slice_.part)
    shape = (HIDDEN, INTERMEDIATE) if slice_.part == "down_proj" else (INTERMEDIATE, HIDDEN)
    generator = torch.Generator().manual_seed(number)
    return torch.randn(shape, generator=generator).bfloat16()


def reshard_in(rank: int, cases: list[tuple[Train, Rollout, int]]) -> list[tuple[bool, int, int]]:
    """For each layout: are the experts that came out the right ones, bytes received, buffer bytes."""
    results, all_to_all = [], torch.distributed.all_to_all_single
    for train, rollout, experts in cases:
        owned = owned_sets(train, experts)[rank]
        traffic, buffers = [], set()

        def counted(output, *args, traffic=traffic, buffers=buffers, **kwargs):
            assert output.nbytes + args[0].nbytes > 0
            traffic.append(output.nbytes * (output.numel() > 1))  # one number keeps an idle rank in the round
            buffers.update((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
                           for t in (output, args[0]))  # fmt: skip
            return all_to_all(output, *args, **kwargs)

        def read(slice_, owned=owned, experts=experts):
            assert slice_[:2] in owned
            return value(slice_, experts)

        torch.distributed.all_to_all_single = counted
        plan = make_plan(train, rollout, experts)
        stream = reshard(plan, rank, read, HIDDEN, INTERMEDIATE, torch.bfloat16, "cpu")
        got = [(name, tensor.clone()) for name, tensor in stream]
        torch.distributed.all_to_all_single = all_to_all
        needed = needed_sets(train, rollout, experts)[rank]
        expected = {s.name: value(s, experts) for s in (Slice(*pair, p) for pair in needed for p in PARTS)}
        right = len(got) == len(expected) and all(torch.equal(t, expected[name]) for name, t in got)
        results.append((right, sum(traffic), sum(size for _, size in buffers)))
    return results


def test_experts_arrive_bit_for_bit(counts):
    cases = [
        (Train(4, 1, ((0, 1),)), Rollout(2, 2, 4), 8),  # the trap of a split that starts at 0
        (Train(4, 4, ((0, 1),)), Rollout(2, 1, 2), 8),  # training EP > rollout EP
        (Train(4, 4, ((0, 1),)), Rollout(1, 4, 1), 8),  # no EP in the rollout
        (Train(4, 2, ((0, 2, 4), (1, 3))), Rollout(1, 4, 4, (3, 1, 0, 2)), 8),
        (Train(4, 2, ((0,), (1,))), Rollout(4, 1, 4), 4),
        (Train(4, 4, ((0, 1, 2),)), Rollout(4, 1, 4), 4),  # nothing has to move
    ]
    slice_bytes, sent = 2 * HIDDEN * INTERMEDIATE, 0
    for rank, results in enumerate(run_ranks(4, reshard_in, cases)):
        for case, (right, received_bytes, buffer_bytes) in zip(cases, results, strict=True):
            train, rollout, experts = case
            needed, owned = needed_sets(*case)[rank], owned_sets(train, experts)[rank]
            assert right, f"{case}, rank {rank}: wrong experts"
            assert received_bytes == len(needed - owned) * len(PARTS) * slice_bytes, f"{case}, rank {rank}"
            sent += received_bytes // slice_bytes
            assert buffer_bytes <= experts // rollout.ep * len(PARTS) * slice_bytes, f"{case}, rank {rank}"
    assert counts() == {"moe_alltoallv": sent}

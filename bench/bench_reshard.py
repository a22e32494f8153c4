"""The expert reshard against the per-tensor all-gather of verl 0.7.1: bytes, buffers, exactness.

Usage:    python bench/bench_reshard.py [--quick] [--repeat 3]
Example:  python bench/bench_reshard.py              # about a minute on 2 idle cores, 3 GB of memory
1. Planned only: Qwen3-235B-A22B, training TP4 PP4 EP32 -> rollout TP4 DP32 EP128, 128 ranks.
2. Executed: 4 gloo processes, shapes between the tiny models and 30B-A3B, seeded. The all-gather issues the
   collectives of verl's per_tensor_generator: a broadcast over the pipeline group and a gather over the EP
   group for every tensor. Bytes are counted at the collectives; both alternate on the same weights.
What a rank owns and needs is computed with sets by tests/test_reshard.py, not by the planner.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from bars import bar, finish, parser_of
from ranks import run_ranks
from test_reshard import needed_sets, owned_sets

from ascend_rl.weights.reshard import PARTS, Plan, Rollout, Slice, Train, make_plan, reshard

BF16_BYTES = 2
HIDDEN, INTERMEDIATE, EXPERTS, LAYERS = 1024, 512, 16, 4
EXECUTED = {  # training -> rollout, 4 ranks
    "EP2 -> TP2 DP2 EP4": (Train(4, 2, (tuple(range(LAYERS)),)), Rollout(2, 2, 4)),
    "EP4 -> TP2 EP2": (Train(4, 4, (tuple(range(LAYERS)),)), Rollout(2, 1, 2)),
    "PP2 EP2 -> DP4 EP4": (Train(4, 2, ((0, 1), (2, 3))), Rollout(1, 4, 4)),
}


def qwen3_235b() -> tuple[Train, Rollout, int, int]:
    """Layouts, experts of a layer, bytes of one slice."""
    first, stages = 0, []
    for count in (23, 24, 24, 23):
        stages.append(tuple(range(first, first + count)))
        first += count
    return Train(128, 32, tuple(stages)), Rollout(4, 32, 128), 128, 4096 * 1536 * BF16_BYTES


def minimum_slices(train: Train, rollout: Rollout, experts: int) -> list[int]:
    """The slices each rank needs and does not own."""
    pairs = zip(needed_sets(train, rollout, experts), owned_sets(train, experts), strict=True)
    return [len(PARTS) * len(needed - owned) for needed, owned in pairs]


def gathered_slices(train: Train, experts: int, rank: int) -> int:
    """The slices verl 0.7.1's export sends to a rank: other stages' tensors by broadcast, other EP ranks' by
    all-gather."""
    own, layers = len(train.stages[train.place(rank)[0]]), sum(map(len, train.stages))
    block = experts // train.ep
    return len(PARTS) * block * ((layers - own) + layers * (train.ep - 1))


def planned_slices(plan: Plan) -> tuple[list[int], list[int], int]:
    """Slices received and sent by each rank, and the number of rounds."""
    received, sent, rounds = [], [], 0
    for rank in range(plan.train.world):
        all_rounds = list(plan.rounds(rank))
        rounds = len(all_rounds)
        sent.append(sum(len(sends) for sends, _ in all_rounds))
        received.append(sum(len(receives) for _, receives in all_rounds))
    return received, sent, rounds


def weight(layer: int, expert: int) -> torch.Tensor:
    """gate_proj, up_proj, down_proj of one expert, concatenated, different for each expert."""
    generator = torch.Generator().manual_seed(layer * EXPERTS + expert)
    return torch.randn(len(PARTS), HIDDEN * INTERMEDIATE, generator=generator).bfloat16()


def gather_all(train: Train, owned: dict, stage_group, ep_group, rank: int, traffic: list[int]):
    """(slice, tensor) of every expert on every rank; adds the received bytes to ``traffic``."""
    stage, ep_rank = train.place(rank)
    block = EXPERTS // train.ep
    for source, layers in enumerate(train.stages):
        root = rank + (source - stage) * train.ep * train.replicas
        for layer in layers:
            for index in range(block):
                for nth, part in enumerate(PARTS):
                    if source == stage:
                        tensor = owned[layer, ep_rank * block + index][nth]
                    else:
                        tensor = torch.empty(HIDDEN * INTERMEDIATE, dtype=torch.bfloat16)
                        traffic.append(tensor.nbytes)
                    if len(train.stages) > 1:
                        dist.broadcast(tensor, root, group=stage_group)
                    parts = [torch.empty_like(tensor) for _ in range(train.ep)]
                    dist.all_gather(parts, tensor, group=ep_group)
                    traffic.append((train.ep - 1) * tensor.nbytes)
                    for other, found in enumerate(parts):
                        yield Slice(layer, other * block + index, part), found


def execute(rank: int, repeat: int) -> dict[str, dict]:
    """In each rank: both ways for each layout; seconds, bytes, buffers, and whether every value is right."""
    results, all_to_all = {}, dist.all_to_all_single
    for name, (train, rollout) in EXECUTED.items():
        ranks = range(train.world)
        ep_groups, stage_groups = {}, {}
        for other in ranks:
            stage, ep_rank = train.place(other)
            ep_groups.setdefault(other // train.ep, []).append(other)
            stage_groups.setdefault(other % (train.ep * train.replicas), []).append(other)
        ep_group = [dist.new_group(members) for members in ep_groups.values()][rank // train.ep]
        stage_group = [dist.new_group(members) for members in stage_groups.values()][
            rank % (train.ep * train.replicas)
        ]
        owned = {pair: weight(*pair) for pair in owned_sets(train, EXPERTS)[rank]}
        needed = {pair: weight(*pair) for pair in needed_sets(train, rollout, EXPERTS)[rank]}
        plan = make_plan(train, rollout, EXPERTS)
        traffic: list[int] = []
        buffers: dict[int, int] = {}

        def counted(output, data, wanted, *args, traffic=traffic, buffers=buffers, **kwargs):
            traffic.append((sum(wanted) - wanted[rank]) * output.element_size())  # from others
            for tensor in (output, data):
                buffers[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return all_to_all(output, data, wanted, *args, **kwargs)

        def read(slice_: Slice, owned=owned) -> torch.Tensor:
            shape = (HIDDEN, INTERMEDIATE) if slice_.part == "down_proj" else (INTERMEDIATE, HIDDEN)
            return owned[slice_[:2]][PARTS.index(slice_.part)].view(shape)

        dist.all_to_all_single = counted
        times: dict[str, list[float]] = {"reshard": [], "all-gather": []}
        right, gathered, most_bytes = True, [], 0
        expected = {
            Slice(*pair, part).name: row
            for pair, rows in needed.items()
            for part, row in zip(PARTS, rows, strict=True)
        }
        for _ in range(repeat + 1):  # the first warms up
            traffic.clear()
            buffers.clear()
            dist.barrier()
            begun, waiting, count = time.monotonic(), 0.0, 0
            for tensor_name, tensor in reshard(plan, rank, read, HIDDEN, INTERMEDIATE, torch.bfloat16, "cpu"):
                checking = time.monotonic()
                right &= tensor_name in expected and torch.equal(tensor.flatten(), expected[tensor_name])
                count, waiting = count + 1, waiting + time.monotonic() - checking
            times["reshard"].append(time.monotonic() - begun - waiting)
            right &= count == len(expected)
            most_bytes = max(most_bytes, sum(buffers.values()))
            dist.barrier()
            begun, waiting = time.monotonic(), 0.0
            gathered.clear()
            for slice_, tensor in gather_all(train, owned, stage_group, ep_group, rank, gathered):
                checking = time.monotonic()
                wanted = expected.get(slice_.name)
                right &= wanted is None or torch.equal(tensor, wanted)
                waiting += time.monotonic() - checking
            times["all-gather"].append(time.monotonic() - begun - waiting)
        dist.all_to_all_single = all_to_all
        results[name] = {
            "seconds": {way: values[1:] for way, values in times.items()},
            "received_bytes": sum(traffic),
            "gathered_bytes": sum(gathered),
            "buffer_bytes": most_bytes,
            "right": right,
        }
    return results


def main() -> int:
    parser = parser_of(__doc__, "one repetition; under a minute")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    repeat = 1 if args.quick else args.repeat
    bars: list[tuple[str, float, str, str, bool]] = []
    data: dict = {}

    train, rollout, experts, slice_bytes = qwen3_235b()
    begun = time.monotonic()
    plan = make_plan(train, rollout, experts)
    plan_ms = (time.monotonic() - begun) * 1e3
    received, sent, rounds = planned_slices(plan)
    minimum = minimum_slices(train, rollout, experts)
    gathered = [gathered_slices(train, experts, rank) for rank in range(train.world)]
    local = len(PARTS) * experts // rollout.ep
    gb = slice_bytes / 1e9
    print("Qwen3-235B-A22B, TP4 PP4 EP32 -> TP4 DP32 EP128, by plan, bytes per rank")
    rows = {
        "minimum: needed, not owned": (min(minimum) * gb, max(minimum) * gb),
        "reshard, received": (min(received) * gb, max(received) * gb),
        "reshard, sent": (min(sent) * gb, max(sent) * gb),
        "all-gather, received": (min(gathered) * gb, max(gathered) * gb),
        "reshard, send and receive buffer": (plan.buffer_slices * gb,) * 2,
        "one layer's experts of a rollout rank": (local * gb,) * 2,
    }
    for name, (least, most) in rows.items():
        print(f"  {name:<40} {least:10.4f} to {most:10.4f} GB")
    ratio = sum(gathered) / sum(received)
    print(f"  {rounds} rounds; planned in {plan_ms:.0f} ms; all-gather / reshard: {ratio:.1f}x\n")
    data["qwen3_235b"] = {"gb": rows, "rounds": rounds, "plan_ms": plan_ms, "ratio": ratio}
    off = max(abs(a - b) for a, b in zip(received, minimum, strict=True))
    bars.append(bar("235B, by plan: bytes per rank off the minimum", off * slice_bytes, "B", "= 0"))
    share = plan.buffer_slices / local
    bars.append(bar("235B, by plan: buffers / one layer's local experts", share, "", "<= 1"))

    print(f"{'4 gloo ranks, executed':<24} {'reshard':>20} {'all-gather':>20} {'bytes':>8} {'time':>8}")
    slice_bytes = HIDDEN * INTERMEDIATE * BF16_BYTES
    from bench_reshard import execute as by_name  # ranks find it by the name of its module

    ranks = run_ranks(4, by_name, repeat)
    data["executed"] = {}
    for name, (train, rollout) in EXECUTED.items():
        results = [result[name] for result in ranks]
        minimum = [count * slice_bytes for count in minimum_slices(train, rollout, EXPERTS)]
        formula = [gathered_slices(train, EXPERTS, rank) * slice_bytes for rank in range(4)]
        off = max(abs(r["received_bytes"] - least) for r, least in zip(results, minimum, strict=True))
        share = max(r["buffer_bytes"] for r in results) / (EXPERTS // rollout.ep * len(PARTS) * slice_bytes)
        right = sum(r["right"] for r in results)
        seconds = {
            way: [max(r["seconds"][way][i] for r in results) for i in range(repeat)]
            for way in ("reshard", "all-gather")
        }
        middle = {way: statistics.median(values) for way, values in seconds.items()}
        sums = {way: sum(r[key] for r in results) for way, key in
                (("reshard", "received_bytes"), ("all-gather", "gathered_bytes"))}  # fmt: skip
        print(
            f"{name:<24} "
            + " ".join(f"{sums[way] / 1e6:9.1f} MB {middle[way]:6.3f} s" for way in middle)
            + f" {sums['all-gather'] / sums['reshard']:7.1f}x"
            f" {middle['all-gather'] / middle['reshard']:7.1f}x"
        )
        data["executed"][name] = {"seconds": seconds, "bytes": sums, "load_average": os.getloadavg()}
        exact = [r["gathered_bytes"] for r in results] == formula
        bars += [
            bar(f"{name}: bytes per rank off the minimum", off, "B", "= 0"),
            bar(f"{name}: buffers / one layer's local experts", share, "", "<= 1"),
            bar(f"{name}: ranks with every value bit-exact", right, "", "= 4"),
            (f"{name}: all-gather's bytes are the formula's", exact, "", "= 1", exact),
        ]

    return finish("reshard", bars, quick=args.quick, **data)


if __name__ == "__main__":
    sys.exit(main())

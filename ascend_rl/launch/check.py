"""What `ray_start_npu.sh --check` runs in place of TRAIN_SCRIPT: is this cluster fit for a run?

The launchers have met, and Ray has the NPUs of all nodes, as for a run. Then:

1. The preflight of all nodes (preflight/preflight.py --cluster): an error ends the check.
2. One actor on each die; all form one group over HCCL (gloo without NPUs). A sum over all dies must be right.
3. Speed: of a matrix product on each die, of the sum, and of every link between neighbours: dies of a node,
   and the dies of one index on neighbouring nodes. Neighbours exchange in disjoint pairs, all at a time, so
   that a slow link is a pair's own. A link with less than half of its class's median is named; so is a
   die all of whose links are slow, or whose product takes twice the median.

Exit status: 1 for an error, 0 with or without warnings of slow dies: how fast is fast enough is the user's to
say. Cost: the start of Ray and of one process per die, then seconds. The run's own model is not loaded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from ascend_rl.process.ports import free_port

SLOW = 2.0  # times the median
DEADLINE_S = 600.0  # for HCCL to connect all dies; links of many nodes take minutes
BYTES = {"npu": 64 << 20, "cpu": 1 << 20}
TIMES = 5
GAP = 0.05  # of log-probs in bfloat16, whose logits of about 10 have 8 bits
SIDE = {"npu": 4096, "cpu": 256}
CLASSES = ("within a node", "between nodes")


def links(nodes: Sequence[int]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Rounds of disjoint pairs of ranks, which together are all neighbours.

    Args:
        nodes: the node of each rank; ranks of a node follow each other, all nodes have as many.

    >>> links([0, 0, 0])
    [('within a node', [(0, 1)]), ('within a node', [(1, 2)])]
    >>> links([0, 0, 1, 1])
    [('within a node', [(0, 1), (2, 3)]), ('between nodes', [(0, 2), (1, 3)])]
    """
    each = nodes.count(nodes[0])
    rounds = []
    for name, step, places in zip(
        CLASSES, (1, each), ([r % each for r in range(len(nodes))], nodes), strict=True
    ):
        for parity in (0, 1):
            pairs = [
                (rank, rank + step)
                for rank in range(len(nodes) - step)
                if places[rank] % 2 == parity and places[rank + step] == places[rank] + 1
            ]
            if pairs:
                rounds.append((name, pairs))
    return rounds


def judge(names: Sequence[str], products: Sequence[float], speeds: dict[str, dict]) -> list[str]:
    """Who is slow.

    Args:
        names: of the ranks.
        products: seconds of a matrix product on each.
        speeds: class -> {(rank, rank): bytes/s}.

    >>> judge(["a", "b", "c"], [1.0, 1.1, 3.0], {"within a node": {(0, 1): 9e9, (1, 2): 4e9, (0, 2): 10e9}})
    ['c computes at 0.37 of the median speed', 'the link b - c has 4.0 of 9.0 GB/s, the median within a node']
    """
    middle = statistics.median(products)
    found = [
        f"{name} computes at {middle / seconds:.2f} of the median speed"
        for name, seconds in zip(names, products, strict=True)
        if seconds > SLOW * middle
    ]
    for name, of_links in speeds.items():
        middle = statistics.median(of_links.values())
        slow = {pair: speed for pair, speed in of_links.items() if speed < middle / SLOW}
        ends = {rank for pair in slow for rank in pair}
        own = {rank: {pair for pair in of_links if rank in pair} for rank in ends}
        bad = {rank for rank in ends if len(own[rank]) > 1 and own[rank] <= slow.keys()}
        found += [
            f"all links {name} of {names[rank]} are slow: the die, and not a cable" for rank in sorted(bad)
        ]
        found += [
            f"the link {names[a]} - {names[b]} has {speed / 1e9:.1f} of {middle / 1e9:.1f} GB/s, "
            f"the median {name}"
            for (a, b), speed in slow.items()
            if not bad & {a, b}
        ]
    return found


def kind() -> str:
    """npu where PyTorch has one, else cpu."""
    import torch

    return "npu" if hasattr(torch, "npu") and torch.npu.is_available() else "cpu"


class Die:
    """The actor on a die."""

    def place(self) -> tuple[str, int]:
        """An address for the group to meet at; called on the first rank."""
        import ray

        address = ray.util.get_node_ip_address()
        return address, free_port(address)

    def index(self) -> int:
        """The die's number on its node, as Ray counts."""
        import ray

        ids = ray.get_runtime_context().get_accelerator_ids().get("NPU") or ["0"]
        return int(ids[0])

    def join(self, address: str, port: int, rank: int, ranks: int) -> str:
        """Form the group; returns its backend."""
        import torch
        import torch.distributed as dist

        self.kind = kind()
        if self.kind == "npu":
            torch.npu.set_device(0 if torch.npu.device_count() == 1 else self.index())
        host = f"[{address}]" if ":" in address else address
        dist.init_process_group(
            backend := "hccl" if self.kind == "npu" else "gloo",
            init_method=f"tcp://{host}:{port}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=DEADLINE_S),
        )
        self.rank, self.ranks = rank, ranks
        return backend

    def wait(self) -> None:
        if self.kind == "npu":
            import torch

            torch.npu.synchronize()

    def seconds(self, work) -> float:
        """The median of a few calls, after one that connects."""
        times = []
        for _ in range(TIMES + 1):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def product(self) -> float:
        """Seconds of a matrix product."""
        import torch

        a = torch.ones(SIDE[self.kind], SIDE[self.kind], device=self.kind)
        return self.seconds(lambda: a @ a)

    def total(self) -> tuple[bool, float]:
        """Whether the sum over all dies is right, and its bytes/s."""
        import torch
        import torch.distributed as dist

        count = BYTES[self.kind] // 4
        x = torch.full((count,), float(self.rank), device=self.kind)
        dist.all_reduce(x)
        right = bool((x == self.ranks * (self.ranks - 1) / 2).all())
        x.zero_()
        return right, 4 * count / self.seconds(lambda: dist.all_reduce(x))

    def exchange(self, peer: int | None) -> float:
        """Bytes/s to and from a neighbour at the same time; 0 without one."""
        import torch
        import torch.distributed as dist

        if peer is None:
            return 0.0
        out = torch.full((BYTES[self.kind] // 4,), float(self.rank), device=self.kind)
        into = torch.empty_like(out)

        def both() -> None:
            sends = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]
            for work in dist.batch_isend_irecv(sends if self.rank < peer else sends[::-1]):
                work.wait()

        taken = self.seconds(both)
        if not bool((into == peer).all()):
            raise ValueError(f"rank {self.rank} received something else than rank {peer} sent")
        return BYTES[self.kind] / taken


class Engine:
    """The actor on a node that rolls out."""

    def gap(self, dies: int) -> float:
        """Of the log-probs of one token, by vLLM and by Hugging Face, the difference."""
        from ascend_rl.glue.engine_check import gap

        return gap(dies, kind())


def nodes_of_ray() -> list[dict]:
    import ray

    return sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: n["NodeManagerAddress"])


def on_node(node: dict, actor, npus: int):
    """An actor's class that starts on a node, with so many of its NPUs."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(num_cpus=0, resources={"NPU": npus}, scheduling_strategy=there)(actor)


def last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def rollout(deadline_s: float = DEADLINE_S) -> list[str]:
    """Step 4 on all nodes at a time; returns errors, prints the largest difference."""
    import ray

    nodes = [(node, int(node["Resources"].get("NPU", 0))) for node in nodes_of_ray()]
    engines = [
        (node["NodeManagerAddress"], on_node(node, Engine, npus).remote(), npus) for node, npus in nodes
    ]
    calls = [engine.gap.remote(npus) for _, engine, npus in engines]
    _, late = ray.wait(calls, num_returns=len(calls), timeout=deadline_s)
    errors, gaps = [], []
    for (name, engine, _), call in zip(engines, calls, strict=True):
        try:
            if call in late:
                raise TimeoutError(f"no answer within {deadline_s:g} s")
            gaps.append(ray.get(call))
            if not gaps[-1] < GAP:
                errors.append(f"vLLM on {name} computes other log-probs than Hugging Face: by {gaps[-1]:.3g}")
        except (TimeoutError, ray.exceptions.RayError) as error:
            errors.append(f"the rollout on {name} failed: {last_line(error)}")
        ray.kill(engine)
    if gaps:
        print(f"rollout: one token on {len(gaps)} node(s), log-prob within {max(gaps):.1g} of Hugging Face's")
    return errors


def smoke() -> tuple[list[str], list[str]]:
    """Steps 2 and 3 on all NPUs of the connected Ray cluster; returns errors and warnings, prints figures."""
    import ray

    nodes, dies, names, places = nodes_of_ray(), [], [], []

    def ask(calls: list) -> list:
        """All answers; raises with the names of those that gave none."""
        _, late = ray.wait(calls, num_returns=len(calls), timeout=DEADLINE_S)
        missing = [name for name, call in zip(names, calls, strict=True) if call in late]
        if missing:
            raise TimeoutError(f"no answer within {DEADLINE_S:g} s from: {', '.join(missing)}")
        return ray.get(calls)

    try:
        for number, node in enumerate(nodes):
            count = int(node["Resources"].get("NPU", 0))
            dies += [on_node(node, Die, 1).remote() for _ in range(count)]
            names += [node["NodeManagerAddress"]] * count
            places += [number] * count
        order = sorted(zip(places, ask([die.index.remote() for die in dies]), range(len(dies)), strict=True))
        names = [f"{names[i]} die {index}" for _, index, i in order]
        dies = [dies[i] for _, _, i in order]
        where = ray.get(dies[0].place.remote())
        backend = ask([die.join.remote(*where, rank, len(dies)) for rank, die in enumerate(dies)])[0]
        products = ask([die.product.remote() for die in dies])
        sums = ask([die.total.remote() for die in dies])
        speeds: dict[str, dict] = {}
        for name, pairs in links(places):
            peers = {a: b for a, b in pairs} | {b: a for a, b in pairs}
            rates = ask([die.exchange.remote(peers.get(rank)) for rank, die in enumerate(dies)])
            speeds.setdefault(name, {}).update({(a, b): min(rates[a], rates[b]) for a, b in pairs})
    except (TimeoutError, ray.exceptions.RayError) as error:
        return [last_line(error)], []
    finally:
        for die in dies:
            ray.kill(die)
    print(
        f"{backend}: {len(dies)} dies of {len(nodes)} node(s); "
        f"all-reduce {min(speed for _, speed in sums) / 1e9:.2f} GB/s"
    )
    for name, of_links in speeds.items():
        (a, b), least = min(of_links.items(), key=lambda item: item[1])
        middle = statistics.median(of_links.values())
        print(
            f"{name}: {len(of_links)} links, median {middle / 1e9:.2f} GB/s, least {least / 1e9:.2f} GB/s "
            f"({names[a]} - {names[b]})"
        )
    wrong = [name for name, (right, _) in zip(names, sums, strict=True) if not right]
    errors = [f"the sum over all dies is wrong on {', '.join(wrong)}"] if wrong else []
    return errors, judge(names, products, speeds)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the Ray cluster at RAY_ADDRESS.")
    parser.add_argument("--without-preflight", action="store_true", help="only the dies and their links")
    args = parser.parse_args()
    if not args.without_preflight:
        from ascend_rl.preflight import preflight

        if status := preflight.main(["--cluster"]):
            print("ERROR: the preflight of the cluster found what would fail, see above", file=sys.stderr)
            return status
    import ray

    if not ray.is_initialized():
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
    errors, warnings = smoke()
    errors = errors or rollout()
    for text in warnings:
        print(f"WARNING: {text}")
    for text in errors:
        print(f"ERROR: {text}", file=sys.stderr)
    print(f"check: {len(errors)} errors, {len(warnings)} warnings", flush=True)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())

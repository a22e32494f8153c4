"""Which CPUs each process of a run may use: those next to its device, apart from those of other devices.

    python -m ascend_rl.host.core_binding            # print the plan of this node; nothing is bound

Problem: the host launches every operator of a decode step. A thread that moves to another NUMA node, or
shares a core with the HTTP server, delays its device, and the ranks that wait for it. torch_npu binds (with
CPU_AFFINITY_CONF) by the number a device has inside its process: where Ray shows each worker one device, all
of them are number 0, mode 1 then binds to all CPUs, and mode 2 puts every main thread on CPU 0.
Idea: one plan for a node, made from what sysfs and npu-smi say, by the number a device has on the node. The
CPUs of a NUMA node are cut into a share for Ray and all other processes, and one for each device on it: a
part for vLLM's engine core, the rest for the worker, in training and in the rollout, which take turns. If
CPU_AFFINITY_CONF asks torch_npu to bind workers, it is told their share and nothing else is done to them.
Invariants: shares of devices are disjoint, on the device's NUMA node, and within the CPUs the first process
was allowed (taskset, cpuset of a container); if that is impossible, nothing is bound and one line says why.
Cost: O(CPUs + devices), and two calls of npu-smi for each process that Ray starts, unless its parent has set
CORE_BINDING_TOPOLOGY, as ascend_rl.launch.launch_node does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ascend_rl.host import npu_tools
from ascend_rl.process.progress import name_rank
from ascend_rl.settings.switch import CannotWork, switched_on

OTHERS = 4  # a NUMA node's CPUs over this are for processes without a device
ENGINE = 8  # a device's CPUs over this are for the engine core, from 4 CPUs on
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Topology:
    """NUMA node -> CPUs that may be used, ascending; device -> its NUMA node; where that is from."""

    cpus: dict[int, list[int]]
    devices: dict[int, int]  # numbered as in ASCEND_RT_VISIBLE_DEVICES
    source: str

    @classmethod
    def from_json(cls, text: str) -> Topology:
        try:
            given = json.loads(text)
            cpus = {int(node): sorted(cpus) for node, cpus in given["cpus"].items()}
            return cls(cpus, {int(die): int(node) for die, node in given["devices"].items()}, given["source"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CannotWork(f"CORE_BINDING_TOPOLOGY is not what --json prints ({error!r})") from None


@dataclass(frozen=True)
class Plan:
    """CPUs by device for workers and engine cores, and by NUMA node for all others."""

    worker: dict[int, list[int]]
    engine: dict[int, list[int]]
    others: dict[int, list[int]]


def parse_cpus(text: str) -> list[int]:
    """CPUs of a list like "0-2,5"; [] for none."""
    pairs = (part.partition("-") for part in text.split(",") if part.strip())
    return sorted(cpu for first, _, last in pairs for cpu in range(int(first), int(last or first) + 1))


def runs(cpus: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each unbroken run of ascending CPUs."""
    breaks = [i for i in range(1, len(cpus)) if cpus[i] != cpus[i - 1] + 1]
    return (
        [(cpus[i], cpus[j - 1]) for i, j in zip([0, *breaks], [*breaks, len(cpus)], strict=True)]
        if cpus
        else []
    )


def format_cpus(cpus: Sequence[int]) -> str:
    """The list as Linux and taskset write it.

    >>> format_cpus([0, 1, 2, 5])
    '0-2,5'
    """
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in runs(cpus))


def affinities(text: str) -> dict[int, list[int]]:
    """Row of `npu-smi info -t topo` -> CPUs in its last column; A3 nodes have no such column."""
    rows = re.findall(r"^\s*NPU(\d+)\s+(?!NPU|CPU)(.*)$", text, re.M)
    lists = {int(row): re.search(r"\s(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\s*$", rest) for row, rest in rows}
    return {row: parse_cpus(found[1]) if found else [] for row, found in lists.items()}


def spread(devices: Sequence[int], nodes: Sequence[int]) -> dict[int, int]:
    """Devices in order over NUMA nodes in order, evenly."""
    return {device: nodes[i * len(nodes) // len(devices)] for i, device in enumerate(devices)}


def topology(info: str, topo: str, sysfs: Path, allowed: set[int]) -> Topology:
    """What a node looks like.

    Args:
        info, topo: what `npu-smi info` and `npu-smi info -t topo` print.
        sysfs: /sys.
        allowed: CPUs that may be used.

    Raises:
        CannotWork: it has one NUMA node, or no device.
    """
    nodes = {
        int(path.parent.name.removeprefix("node")): parse_cpus(path.read_text())
        for path in sysfs.glob("devices/system/node/node[0-9]*/cpulist")
    }
    usable = {node: [cpu for cpu in nodes[node] if cpu in allowed] for node in sorted(nodes)}
    usable = {node: cpus for node, cpus in usable.items() if cpus}
    if len(usable) < 2:
        raise CannotWork("all usable CPUs are on one NUMA node, or the system does not report NUMA nodes")
    try:
        dies, _ = npu_tools.parse_npu_smi(info)
    except npu_tools.ToolError as error:
        raise CannotWork(str(error)) from None
    # Where a device is: sysfs, by the address of its PCI function; else npu-smi, by its CPUs, which may be
    # those of several NUMA nodes; else in order, as torch_npu and vllm-ascend do: A3 reports neither.
    devices: dict[int, int] = {}
    for die in dies:
        with contextlib.suppress(OSError):
            node = int((sysfs / "bus/pci/devices" / die.bus.lower() / "numa_node").read_text())
            if node in nodes:
                devices[die.index] = node
    if len(devices) == len(dies):
        return Topology(usable, devices, "the PCI bus")
    rows = affinities(topo)
    near: dict[tuple[int, ...], list[int]] = {}
    for die in dies:
        cpus = set(rows.get(die.index if len(rows) == len(dies) else die.npu, ()))
        at = [node for node in sorted(nodes) if cpus & set(nodes[node])]
        at = [node for node in at if node in usable] or at
        near.setdefault(tuple(at), []).append(die.index)
    if () not in near:
        devices = {die: node for at, group in near.items() for die, node in spread(group, at).items()}
        return Topology(usable, devices, "npu-smi")
    return Topology(
        usable,
        spread([die.index for die in dies], list(usable)),
        "their order, a guess: nothing reports them",
    )


def plan(topology: Topology) -> Plan:
    """The shares of a node.

    Raises:
        CannotWork: a device has no CPU of its own on its NUMA node.
    """
    result = Plan({}, {}, {})
    for node in sorted({*topology.cpus, *topology.devices.values()}):
        cpus = topology.cpus.get(node, [])
        devices = sorted(die for die, at in topology.devices.items() if at == node)
        each = (len(cpus) - len(cpus) // OTHERS) // max(len(devices), 1)
        if not each:
            raise CannotWork(f"NUMA node {node} has {len(devices)} devices but only {len(cpus)} usable CPUs")
        first = len(cpus) - each * len(devices)  # CPU 0 has interrupts to serve, and is for the others
        result.others[node] = cpus[:first] or cpus
        for i, device in enumerate(devices):
            share = cpus[first + i * each : first + (i + 1) * each]
            cut = max(1, each // ENGINE) if each >= 4 else 0
            result.engine[device], result.worker[device] = share[:cut] or share, share[cut:]
    return result


def table(topology: Topology) -> str:
    """The plan, for people."""
    shares = plan(topology)
    rows = [("device", "NUMA node", "worker, in training and rollout", "engine core")]
    for device, node in sorted(topology.devices.items()):
        worker, engine = format_cpus(shares.worker[device]), format_cpus(shares.engine[device])
        rows.append((str(device), str(node), worker, engine))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [f"others on NUMA node {node}: {format_cpus(cpus)}" for node, cpus in shares.others.items()]
    return "\n".join([*lines, f"NUMA nodes of devices from {topology.source}"])


def here(env: Mapping[str, str]) -> Topology:
    """This node's topology: CORE_BINDING_TOPOLOGY, else looked up.

    Raises:
        CannotWork: see `topology`.
    """
    if text := env.get("CORE_BINDING_TOPOLOGY"):
        return Topology.from_json(text)
    try:
        info = npu_tools.run(["npu-smi", "info"], env)
    except npu_tools.ToolError as error:
        raise CannotWork(str(error)) from None
    topo = ""
    with contextlib.suppress(npu_tools.ToolError):
        topo = npu_tools.run(["npu-smi", "info", "-t", "topo"], env)
    return topology(info, topo, Path("/sys"), os.sched_getaffinity(0))


def for_torch_npu(conf: str, shares: Sequence[Sequence[int]]) -> str | None:
    """CPU_AFFINITY_CONF with the shares of the devices a process sees; None if torch_npu is not to bind.

    Ranges of the user stay. torch_npu takes one range of CPUs for a device: the longest of its share.
    """
    options = conf.replace(" ", "").split(",")
    modes = [text for text in (option.removeprefix("mode:") for option in options) if text.isdigit()]
    if not modes or int(modes[-1]) == 0:
        return None
    if any(option.startswith("npu") for option in options):
        return conf
    longest = [max(runs(cpus), key=lambda run: run[1] - run[0]) for cpus in shares]
    return ",".join([*options, *(f"npu{i}:{first}-{last}" for i, (first, last) in enumerate(longest))])


def set_affinity(cpus: Sequence[int]) -> None:
    """Bind all threads of this process; those it starts later inherit it, and so do processes."""
    os.sched_setaffinity(0, cpus)
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cpus)


def bind(role: str, device: int | None = None, local_rank: int | None = None) -> None:
    """With CORE_BINDING=1, bind this process, or say in one line why not.

    Args:
        role: worker, engine, or others. Engines and others take what is visible, and the NUMA nodes of that.
        device: of a worker, as numbered on the node; or
        local_rank: as numbered among the devices this process sees.
    """
    if not switched_on("CORE_BINDING"):
        return
    name = role if device is None else f"{role} of device {device}"
    try:
        node = here(os.environ)
        # Processes started from here have fewer CPUs to see, and need not ask npu-smi again.
        os.environ["CORE_BINDING_TOPOLOGY"] = json.dumps(asdict(node))
        shares = plan(node)
        visible = [int(die) for die in os.environ.get(VISIBLE, "").split(",") if die.strip()]
        visible = visible or sorted(node.devices)
        if local_rank is not None:
            if local_rank >= len(visible):
                raise CannotWork(f"it sees the devices {visible} and has local rank {local_rank}")
            device = visible[local_rank]
            name = f"{role} of device {device}"
        if unknown := {*visible, visible[0] if device is None else device} - node.devices.keys():
            known = format_cpus(sorted(node.devices))
            raise CannotWork(f"the node has devices {known}, not {sorted(unknown)}")
        how = ""
        if role == "worker":
            cpus = shares.worker[device]
            conf = os.environ.get("CPU_AFFINITY_CONF", "")
            if told := for_torch_npu(conf, [shares.worker[die] for die in visible]):
                # torch_npu leaves a process alone that may not use all CPUs of its ranges.
                os.environ["CPU_AFFINITY_CONF"] = told
                cpus = sorted(cpu for group in node.cpus.values() for cpu in group)
                how = f", torch_npu binds it by CPU_AFFINITY_CONF={told}"
        elif role == "engine":
            at = node.devices[visible[0]]
            cpus = sorted(cpu for die in visible if node.devices[die] == at for cpu in shares.engine[die])
        else:
            cpus = sorted(cpu for at in {node.devices[die] for die in visible} for cpu in shares.others[at])
        set_affinity(cpus)
        text = f"{name} on CPUs {format_cpus(cpus)}{how}"
    except (OSError, ValueError) as reason:  # CannotWork, no permission, or what VISIBLE says
        text = f"{name} not bound: {reason}"
    print(f"core binding: {text}", file=sys.stderr, flush=True)


def bind_trainer() -> None:
    """Bind a training worker to the CPUs of the device Ray gave it, whether or not Ray hides the others.

    The launcher learns its rank here too.
    """
    name_rank()
    if switched_on("CORE_BINDING"):
        import ray

        given = ray.get_runtime_context().get_accelerator_ids().get("NPU")
        if given:
            bind("worker", int(given[0]))
        else:
            print("core binding: worker not bound: Ray gave it no NPU", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Print which CPUs processes of a run are given with CORE_BINDING=1. Nothing is bound.",
        epilog="Where the tools are wrong (virtual machines): change what --json prints and export it as "
        "CORE_BINDING_TOPOLOGY on that node.",
    )
    parser.add_argument("--json", action="store_true", help="the NUMA nodes of CPUs and devices, no plan")
    given = parser.parse_args()
    try:
        node = here(os.environ)
        print(json.dumps(asdict(node)) if given.json else table(node))
    except CannotWork as reason:
        print(f"core binding: nothing would be bound: {reason}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

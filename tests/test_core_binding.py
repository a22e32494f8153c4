"""Core binding plans on machines given as sysfs trees and npu-smi output; binding of real processes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_rl.host import core_binding
from ascend_rl.host.core_binding import Topology, format_cpus, parse_cpus, plan
from ascend_rl.settings.switch import CannotWork

TWO_NODES = Topology({0: [0], 1: [1]}, {0: 0, 1: 1}, "a test")  # as if the two cores were two NUMA nodes


def write_sysfs(root, nodes, buses=()):
    """A /sys with these CPUs by NUMA node, and these (bus address, NUMA node) of PCI devices."""
    for node, cpus in nodes.items():
        path = root / f"devices/system/node/node{node}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(format_cpus(sorted(cpus)) + "\n")
    for bus, node in buses:
        path = root / "bus/pci/devices" / bus
        path.mkdir(parents=True)
        (path / "numa_node").write_text(f"{node}\n")
    return root


def npu_smi(dies):
    """The table of `npu-smi info` for an A3 node of so many dies."""
    row = "| {}     Ascend910 | OK | - 36 0 / 0 |\n| {} {} | 0000:{:02X}:00.0 | 0 0 / 0 2896 / 65536 |\n"
    return "| NPU Name | Health | Power |\n" + "".join(
        row.format(i // 2, i % 2, i, 0x81 + i) for i in range(dies)
    )


def npu_smi_topo(affinity):
    """The matrix of `npu-smi info -t topo`."""
    head = "       " + " ".join(f"NPU{i}" for i in range(len(affinity))) + "   CPU Affinity\n"
    rows = (
        f"NPU{i}   " + "HCCS " * len(affinity) + f"  {format_cpus(cpus)}\n" for i, cpus in enumerate(affinity)
    )
    return head + "".join(rows) + "\nLegend:\n  X = Self\n  SYS = Path traversing PCIe and NUMA nodes. 0-3\n"


@st.composite
def machines(draw):
    """NUMA nodes of unequal size and interleaved numbers, devices anywhere, and CPUs that may be used."""
    count = draw(st.integers(1, 4))
    owner = draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=64))
    nodes = {node: [cpu for cpu, at in enumerate(owner) if at == node] for node in range(count)}
    devices = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=8))
    allowed = draw(st.one_of(st.just(set(range(64))), st.sets(st.integers(0, 63), min_size=1)))
    return nodes, devices, allowed


@settings(max_examples=150)
@given(machines(), st.sampled_from(["pci", "topo"]))
def test_shares_are_disjoint_near_and_allowed(tmp_path_factory, machine, told_by):
    nodes, devices, allowed = machine
    buses = [
        (f"0000:{0x81 + i:02x}:00.0", node if told_by == "pci" else -1) for i, node in enumerate(devices)
    ]
    topo = npu_smi_topo([nodes[node] for node in devices]) if told_by == "topo" else ""
    sysfs = write_sysfs(tmp_path_factory.mktemp("sys"), nodes, buses)
    try:
        found = core_binding.topology(npu_smi(len(devices)), topo, sysfs, allowed)
        shares = plan(found)
    except CannotWork:
        usable = {node: allowed & set(cpus) for node, cpus in nodes.items()}
        crowded = any(
            devices.count(node) > len(cpus) - len(cpus) // core_binding.OTHERS
            for node, cpus in usable.items()
        )
        empty = told_by == "topo" and any(not nodes[node] for node in devices)  # nobody says where it is
        assert sum(map(bool, usable.values())) < 2 or crowded or empty
        return
    if all(nodes[node] for node in devices):
        assert found.devices == dict(enumerate(devices))
    mine = {die: set(shares.worker[die]) | set(shares.engine[die]) for die in range(len(devices))}
    for die, cpus in mine.items():
        assert cpus and cpus <= allowed & set(nodes[found.devices[die]])
        assert not any(cpus & mine[other] for other in mine if other != die)
        assert len(cpus) < 4 or not set(shares.worker[die]) & set(shares.engine[die])
    for node, cpus in shares.others.items():
        near = [mine[die] for die in mine if found.devices[die] == node]
        assert set(cpus) <= allowed & set(nodes[node])
        left = (allowed & set(nodes[node])).difference(*near)
        assert set(cpus) == left or not left
        sizes = sorted(map(len, near))
        assert not sizes or sizes[0] == sizes[-1]


def test_an_a2_node_by_its_pci_bus(root, tmp_path):
    info = (root / "tests/samples/a2_busy/npu_smi_info.txt").read_text()
    nodes = {node: range(48 * node, 48 * node + 48) for node in range(4)}
    bus = {0xC1: 3, 0x01: 0, 0xC2: 3, 0x02: 0, 0x81: 2, 0x41: 1, 0x82: 2, 0x42: 1}
    sysfs = write_sysfs(
        tmp_path, nodes, [(f"0000:{address:02x}:00.0", node) for address, node in bus.items()]
    )
    shares = plan(core_binding.topology(info, "", sysfs, set(range(192))))
    assert [format_cpus(shares.others[node]) for node in nodes] == ["0-11", "48-59", "96-107", "144-155"]
    assert (shares.engine[1], format_cpus(shares.worker[1])) == ([12, 13], "14-29")  # 0000:01, beside 0000:02
    assert (shares.engine[3], format_cpus(shares.worker[3])) == ([30, 31], "32-47")
    assert format_cpus(shares.worker[0]) == "158-173"


def test_affinity_over_several_numa_nodes_is_spread(tmp_path):
    nodes = {node: range(8 * node, 8 * node + 8) for node in range(4)}
    topo = npu_smi_topo([range(16)] * 2 + [range(16, 32)] * 2)
    found = core_binding.topology(npu_smi(4), topo, write_sysfs(tmp_path, nodes), set(range(32)))
    assert (found.devices, found.source) == ({0: 0, 1: 1, 2: 2, 3: 3}, "npu-smi")


def test_of_several_numa_nodes_those_that_may_be_used(tmp_path):
    nodes = {node: range(8 * node, 8 * node + 8) for node in range(4)}
    topo = npu_smi_topo([range(16)] * 2 + [range(16, 32)] * 2)
    found = core_binding.topology(npu_smi(4), topo, write_sysfs(tmp_path, nodes), set(range(8, 24)))
    assert found.devices == {0: 1, 1: 1, 2: 2, 3: 2}
    assert core_binding.plan(found).others == {1: [8, 9], 2: [16, 17]}


def test_an_a3_node_tells_nothing_and_goes_by_order(root, tmp_path):
    info = (root / "tests/samples/a3_healthy/npu_smi_info.txt").read_text()
    nodes = {node: range(80 * node, 80 * node + 80) for node in range(8)}
    topo = "\tPhy-ID0\tPhy-ID1\nPhy-ID0\tX\tSIO\n"
    found = core_binding.topology(info, topo, write_sysfs(tmp_path, nodes), set(range(640)))
    assert found.devices == {die: die // 2 for die in range(16)} and "a guess" in found.source


@pytest.mark.parametrize(
    "nodes, info, reason",
    [
        ({0: range(8)}, npu_smi(2), "one NUMA node"),
        ({0: range(4), 1: range(4, 8)}, "no driver", "no table of dies"),
        ({0: [0, 1], 1: [2, 3]}, npu_smi(8), "NUMA node 0 has 4 devices but only 2 usable CPUs"),
    ],
)
def test_it_says_why_it_cannot(tmp_path, nodes, info, reason):
    with pytest.raises(CannotWork, match=reason):
        plan(core_binding.topology(info, "", write_sysfs(tmp_path, nodes), set(range(8))))


def test_lists_of_cpus():
    for text, cpus in (("0-2,5", [0, 1, 2, 5]), ("7", [7]), ("", [])):
        assert parse_cpus(text + "\n") == cpus and format_cpus(cpus) == text


# What torch_npu is told.


def ranges_of_torch_npu(conf, cpus, visible):
    """(mode, range of each device a process sees), as its documentation defines CPU_AFFINITY_CONF."""
    mode, ranges = 0, [(i * cpus // visible, (i + 1) * cpus // visible - 1) for i in range(visible)]
    for option in conf.split(","):
        key, _, value = option.rpartition(":")
        if key in ("", "mode"):
            mode = int(value or 0)
        elif key.startswith("npu") and key[3:].isdigit() and int(key[3:]) < visible:
            first, _, last = value.partition("-")
            ranges[int(key[3:])] = (int(first), int(last))
    return mode, ranges


@pytest.mark.parametrize("conf, mode", [("1", 1), ("2", 2), ("mode:2", 2), ("2,force:1", 2)])
def test_torch_npu_binds_within_the_share(conf, mode):
    shares = [[4, 5, 6, 7, 20, 21], [8, 9, 10]]
    told = core_binding.for_torch_npu(conf, shares)
    assert ranges_of_torch_npu(told, 32, 2) == (mode, [(4, 7), (8, 10)])
    assert core_binding.for_torch_npu(told, [[0]]) == told  # once


@pytest.mark.parametrize("conf", ["", "0", "mode:0", "0,npu0:1-2"])
def test_torch_npu_is_not_asked(conf):
    assert core_binding.for_torch_npu(conf, [[0]]) is None


def test_ranges_of_the_user_stay():
    assert core_binding.for_torch_npu("1,npu0:3-4", [[0]]) == "1,npu0:3-4"
    assert core_binding.for_torch_npu("1,npu_affine:1", [[0]]) == "1,npu_affine:1"


def test_without_it_every_hidden_device_is_number_0():
    """Why ranges are handed over: Ray shows a worker one device, and torch_npu divides by what it sees."""
    assert ranges_of_torch_npu("2", 640, 1) == (2, [(0, 639)])


# Real processes, on the two cores of the machine.

REPORT = """
import json, os, subprocess, sys, threading
from ascend_rl.host import core_binding
wait = threading.Event()
threading.Thread(target=wait.wait, daemon=True).start()
{call}
threads = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
child = subprocess.run([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"],
                       capture_output=True, text=True).stdout
print(json.dumps([threads, json.loads(child), os.environ.get("CPU_AFFINITY_CONF")]))
"""


def process(call, **variables):
    """(CPUs of all threads, CPUs of a child, CPU_AFFINITY_CONF, its line) of a process calling ``call``."""
    env = {
        **os.environ,
        "CORE_BINDING": "1",
        "CPU_AFFINITY_CONF": "0",
        "ASCEND_RT_VISIBLE_DEVICES": "",
        "CORE_BINDING_TOPOLOGY": json.dumps(vars(TWO_NODES)),
        **variables,
    }
    run = subprocess.run(
        [sys.executable, "-c", REPORT.format(call=call)], env=env, check=True, capture_output=True, text=True
    )
    return *json.loads(run.stdout), run.stderr


@pytest.fixture
def cores():
    found = sorted(os.sched_getaffinity(0))
    if found[:2] != [0, 1]:
        pytest.skip("needs CPUs 0 and 1")
    return found


def test_a_process_is_bound_with_its_threads_and_children(cores):
    threads, child, _, line = process('core_binding.bind("worker", 1)')
    assert len(threads) >= 2 and threads == [[1]] * len(threads) and child == [1]
    assert line == "core binding: worker of device 1 on CPUs 1\n"


@pytest.mark.parametrize(
    "visible, call, cpus",
    [
        (
            "1",
            'bind("worker", local_rank=0)',
            [1],
        ),  # the device is number 0 in the process, and 1 on the node
        ("1,0", 'bind("worker", local_rank=1)', [0]),
        ("", 'bind("worker", local_rank=1)', [1]),
        ("1", 'bind("engine")', [1]),
        ("0,1", 'bind("engine")', [0]),  # devices at two NUMA nodes: one process, one NUMA node
        ("1,0", 'bind("engine")', [1]),
        ("0", 'bind("others")', [0]),
        ("", 'bind("others")', [0, 1]),
    ],
)
def test_devices_that_are_hidden(cores, visible, call, cpus):
    threads, *_ = process(f"core_binding.{call}", ASCEND_RT_VISIBLE_DEVICES=visible)
    assert threads == [cpus] * len(threads)


def test_a_child_leaves_the_cpus_of_its_parent(cores):
    """vLLM's workers are started by the engine core, which is bound before."""
    threads, *_ = process('core_binding.bind("worker", 0); core_binding.bind("worker", 1)')
    assert threads == [[1]] * len(threads)


def test_torch_npu_is_left_to_bind(cores):
    threads, _, conf, line = process(
        'core_binding.bind("worker", 0); core_binding.bind("worker", 1)',
        CPU_AFFINITY_CONF="2",
        ASCEND_RT_VISIBLE_DEVICES="1",
    )
    assert conf == "2,npu0:1-1" and threads == [[0, 1]] * len(threads) and "torch_npu binds it" in line


@pytest.mark.parametrize(
    "variables, reason",
    [
        (
            {"CORE_BINDING_TOPOLOGY": json.dumps(vars(Topology({0: [0], 1: [4000]}, {0: 0, 1: 1}, "")))},
            "Invalid arg",
        ),
        ({"CORE_BINDING_TOPOLOGY": "{}"}, "not what --json prints"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "NPU-1"}, "invalid literal"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "7"}, r"the node has devices 0-1, not \[7\]"),
        ({"CORE_BINDING_TOPOLOGY": "", "PATH": "/nowhere"}, "npu-smi is not on PATH"),
    ],
)
def test_it_continues_unbound_with_one_line(cores, variables, reason):
    threads, _, _, line = process('core_binding.bind("worker", 1)', **variables)
    assert threads == [cores] * len(threads)
    assert line.startswith("core binding: worker of device 1 not bound: ") and line.count("\n") == 1
    assert re.search(reason, line)


def test_ray_of_a_node_inherits_the_share_of_the_others(cores):
    """The launcher on a node, with a command in the place of `ray start`."""
    ray = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    env = {**os.environ, "CORE_BINDING": "1", "CORE_BINDING_TOPOLOGY": json.dumps(vars(TWO_NODES))}
    with socket.create_server(("127.0.0.1", 0)) as control:
        job = {"ray": ray, "control": control.getsockname(), "logs": "", "train": None, "deadline_s": 9}
        run = subprocess.run(
            [sys.executable, "-m", "ascend_rl.launch.launch_node", json.dumps(job)],
            env=env | {"ASCEND_RT_VISIBLE_DEVICES": "1"},
            check=True,
            capture_output=True,
            text=True,
        )
    assert run.stdout == "[1]\n"


def test_a_value_that_is_not_a_switch_is_refused(monkeypatch):
    monkeypatch.setenv("CORE_BINDING", "2")
    for bind in (core_binding.bind_trainer, lambda: core_binding.bind("worker", 1)):
        with pytest.raises(CannotWork, match="CORE_BINDING=2: give 1 or 0"):
            bind()


def test_off_nothing_happens(cores):
    assert process('core_binding.bind("worker", 1)', CORE_BINDING="0") == ([cores] * 2, cores, "0", "")


def test_the_command_prints_the_plan(root):
    env = {**os.environ, "CORE_BINDING_TOPOLOGY": json.dumps(vars(TWO_NODES))}
    command = [sys.executable, "-m", "ascend_rl.host.core_binding"]
    run = subprocess.run(command, env=env, cwd=root, check=True, capture_output=True, text=True)
    rows = [" ".join(line.split()) for line in run.stdout.splitlines()]
    assert rows == [
        "device NUMA node worker, in training and rollout engine core",
        "0 0 0 0",
        "1 1 1 1",
        "others on NUMA node 0: 0",
        "others on NUMA node 1: 1",
        "NUMA nodes of devices from a test",
    ]
    run = subprocess.run([*command, "--json"], env=env, cwd=root, check=True, capture_output=True, text=True)
    assert Topology.from_json(run.stdout) == TWO_NODES

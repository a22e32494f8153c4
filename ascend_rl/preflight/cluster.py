"""Judge all nodes before a run: what must be the same on each, and whether they reach each other."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ascend_rl.lint.findings import Finding
from ascend_rl.preflight.doctor import dies, judge_node

CLOCK_SKEW_S = 1.0


def differing(values: Mapping[str, object]) -> tuple[object, dict[str, object]]:
    """The value most nodes have, and the nodes that have another; on a tie the first value counts."""
    usual = Counter(values.values()).most_common(1)[0][0] if values else None
    return usual, {host: value for host, value in values.items() if value != usual}


def of_dies(facts: dict, read: Callable[[dict], object]) -> str | None:
    """The values of a node's dies, a single one ("7.8.0.2.212") if all agree; None if unknown."""
    values = {read(die) for die in facts["dies"]} - {None}
    return ", ".join(sorted(map(str, values))) or None


IMAGE, HDK = "start the same image on all nodes", "install one HDK release on all hosts"
# severity, check, what it is, how to read it from the facts (None: unknown), what to do on the odd nodes
SAME: tuple[tuple[str, str, str, Callable[[dict], object], str], ...] = (
    ("error", "cluster.kind", "the kind of node", lambda f: f["target"], "see the driver of the odd node"),
    (
        "error",
        "cluster.code",
        "this repository",
        lambda f: f["code"]["hash"][:12],
        "bring the same commit to all nodes, without local edits",
    ),
    ("error", "cluster.python", "Python", lambda f: f["python"], IMAGE),
    ("warning", "cluster.os", "the system", lambda f: f["os"], IMAGE),
    ("error", "cluster.cann", "CANN", lambda f: f["cann"], IMAGE),
    ("error", "cluster.driver", "the driver", lambda f: f["driver"], HDK),
    ("error", "cluster.firmware", "the firmware", lambda f: of_dies(f, lambda die: die.get("firmware")), HDK),
    (
        "error",
        "cluster.dies",
        "the number of dies",
        lambda f: len(f["dies"]) or None,
        "leave the node out, or set ASCEND_RT_VISIBLE_DEVICES on all nodes",
    ),
    (
        "error",
        "cluster.tls",
        "TLS between dies",
        lambda f: of_dies(f, lambda die: die["network"].get("tls")),
        "hccn_tool -i <die> -tls -s enable 0, for all dies of all nodes",
    ),
)


def check_same(nodes: Sequence[dict]) -> Iterator[Finding]:
    """All nodes have the same code, patched trees, image, driver, firmware, dies and TLS setting."""
    trees = sorted({name for facts in nodes for name in facts["trees"]})
    readers = [
        *SAME,
        *(
            (
                "error",
                "cluster.tree",
                f"frameworks/{name}",
                lambda f, name=name: f["trees"].get(name, {"hash": "missing"})["hash"][:12],
                "./apply_all_patches.sh on these nodes",
            )
            for name in trees
        ),
    ]
    commits = {facts["host"]: (facts["code"]["commit"] or "no git")[:9] for facts in nodes}
    for severity, check, what, read, fix in readers:
        values = {facts["host"]: read(facts) for facts in nodes}
        usual, others = differing({host: value for host, value in values.items() if value is not None})
        for host, value in others.items():
            commit = f" (commit {commits[host]})" if check == "cluster.code" else ""
            yield Finding(severity, check, host, f"{what} is {value}{commit}, on most nodes {usual}", fix)


def check_packages(nodes: Sequence[dict]) -> Iterator[Finding]:
    """The Python packages are the same: the part of the image that a container can see of itself."""
    packages = sorted({name for facts in nodes for name in facts["packages"]})
    wrong: dict[str, list[str]] = defaultdict(list)
    for name in packages:
        usual, others = differing({facts["host"]: facts["packages"].get(name) for facts in nodes})
        for host, version in others.items():
            wrong[host].append(f"{name} {version or 'missing'} (most: {usual or 'missing'})")
    for host, what in wrong.items():
        more = f" and {len(what) - 5} more" if len(what) > 5 else ""
        yield Finding(
            "error",
            "cluster.packages",
            host,
            f"another image: {', '.join(what[:5])}{more}",
            "start the same image on all nodes, and install nothing by hand",
        )


def check_clocks(nodes: Sequence[dict]) -> Iterator[Finding]:
    for facts in nodes:
        offset, error = facts["clock_offset_s"], facts["clock_error_s"]
        if abs(offset) - error > CLOCK_SKEW_S:
            yield Finding(
                "warning",
                "cluster.clock",
                facts["host"],
                f"the clock is {abs(offset):.1f} s "
                f"{'ahead' if offset > 0 else 'behind'} (+- {error:.1f}): logs of the nodes "
                "cannot be put in order, and file times on shared storage mislead",
                "chronyc makestep, or run ntpd",
            )


def check_addresses(nodes: Sequence[dict]) -> Iterator[Finding]:
    """No two dies have the same RoCE address."""
    owners = defaultdict(list)
    for facts in nodes:
        for die in facts["dies"]:
            if die["network"].get("ip"):
                owners[die["network"]["ip"]].append(f"{facts['host']} die {die['index']}")
    for address, places in owners.items():
        if len(places) > 1:
            yield Finding(
                "error",
                "cluster.address",
                ", ".join(places),
                f"they have the same RoCE address {address}",
                "give each die its own: hccn_tool -i <die> -ip -s address <ip> netmask <mask>",
            )


def check_reach(nodes: Sequence[dict]) -> Iterator[Finding]:
    """Every node and every die reaches the others."""
    for facts in nodes:
        for peer in facts["reach"]:
            where = f"{facts['host']} -> {peer['host']} ({peer['address']})"
            if peer["tcp"]:
                icmp = {
                    True: "it answers ping, so a firewall is likely",
                    False: "it does not answer ping either",
                    None: "ping is not installed",
                }[peer["icmp"]]
                yield Finding(
                    "error",
                    "cluster.tcp",
                    where,
                    f"a port opened there cannot be reached: {peer['tcp']}; {icmp}",
                    "allow all TCP ports between the nodes (systemctl "
                    "status firewalld), or choose the interface that joins them",
                )
            groups = defaultdict(list)  # dies of a node mostly fail for one reason, at different addresses
            for index, why in peer["dies"].items():
                groups[re.sub(r"\d+(\.\d+){3}", "<ip>", why)].append((int(index), why))
            for found in groups.values():
                yield Finding(
                    "error",
                    "cluster.npu_ping",
                    where,
                    f"{dies(index for index, _ in found)} cannot reach the same die there: {found[0][1]}",
                    "compare -ip, -vnic, "
                    "-gateway and -tls of both ends with hccn_tool; the dies' VLANs on the switch",
                )


def check_ray(nodes: Sequence[dict]) -> Iterator[Finding]:
    for facts in nodes:
        if facts["target"] == "ascend" and facts["dies"] and facts["ray_npus"] != len(facts["dies"]):
            yield Finding(
                "error",
                "cluster.ray_npus",
                facts["host"],
                f"Ray has {facts['ray_npus']:.0f} NPUs there, {len(facts['dies'])} dies are visible",
                "start Ray with ray_start_npu.sh, which gives their number as --resources",
            )


CLUSTER_CHECKS = (check_same, check_packages, check_clocks, check_addresses, check_reach, check_ray)


def judge_cluster(nodes: Sequence[dict], lock: dict[str, dict]) -> list[Finding]:
    """Findings about all nodes of `node_facts.survey`: each alone, then together; equal ones are merged."""
    count = {"NNODES": str(len(nodes))}
    alone = [
        finding for facts in nodes for finding in judge_node({**facts, "env": facts["env"] | count}, lock)
    ]
    together = [finding for check in CLUSTER_CHECKS for finding in check(nodes)]
    return merged([*together, *alone])


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings that differ only in `where`."""
    groups: dict[Finding, list[str]] = defaultdict(list)
    for finding in findings:
        groups[replace(finding, where="")].append(finding.where)
    return [replace(finding, where=", ".join(where)) for finding, where in groups.items()]

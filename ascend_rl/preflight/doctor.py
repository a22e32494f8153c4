"""Judge a node before a run: report what would stop or slow it, why, and how to fix it.

Problem: most failures of a first run on a cluster have nothing to do with the training script. A die is
unhealthy or still in use, TLS differs between dies, CANN does not match torch_npu, one node has an old
checkout, /dev/shm has docker's 64 MB. They show up as an HCCL timeout or as out of memory, an hour later.
Idea: `node_facts` collects the facts; the checks here are pure functions of the facts of one node and of
frameworks.lock; `cluster` judges all nodes together.
Invariants: an error is something a run cannot survive; a warning costs time or fails only under load; an info
says what was not checked. The same facts give the same findings.
Cost: negligible. Limits: the thresholds (NEEDS) are our choices; nothing here has run on an NPU.
"""

from __future__ import annotations

import ipaddress
import re
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ascend_rl.host import npu_tools
from ascend_rl.lint.findings import Finding
from ascend_rl.preflight.node_facts import IDLE_HBM_MB

GB = 1e9
RAY_FULL_DISK = 0.95  # local_fs_capacity_threshold: above it Ray creates no objects on disk
HCCL_BASE_PORT, HCCL_PORTS = 60000, 16  # HCCL's default first port on the host, and how many it uses
BINARY = ("python", "torch", "torch_npu", "triton_ascend")  # built for each other: a mismatch is an error
OPTIONAL = ("mooncake",)  # in the image only if asked for
FOR_ROLL = "roll"  # a second framework, which only the recipes in internal/roll need
CPU_FRAMEWORKS = ("verl", "vllm", "megatron")  # what a CPU run imports; vllm_ascend must stay out of it


@dataclass(frozen=True)
class Needs:
    """What a run needs of a node; less than this is a warning, less than a tenth of it an error."""

    open_files: int
    shm_bytes: float
    output_bytes: float
    tmp_bytes: float


NEEDS = {"ascend": Needs(65536, 64 * GB, 200 * GB, 20 * GB), "cpu": Needs(1024, 1 * GB, 2 * GB, 2 * GB)}


def spans(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def dies(indices: Iterable[int]) -> str:
    """[3] -> "die 3", [0, 1] -> "dies 0-1"."""
    indices = set(indices)
    return f"die{'s' * (len(indices) > 1)} {spans(indices)}"


def number(env: Mapping[str, str], name: str, default: int) -> int:
    """The value of a numeric variable; the default if it is not a number, which the launcher reports."""
    value = env.get(name, "")
    return int(value) if value.isdigit() else default


# Versions and code.


def check_versions(facts: dict, lock: dict) -> Iterator[Finding]:
    """Driver, CANN, Python and packages against [ascend] or [cpu] of the lock."""
    host, target = facts["host"], facts["target"]
    for name, pinned in lock[target].items():
        if name.startswith("image") or name in OPTIONAL:
            continue
        if name in ("cann", "hdk"):
            yield from check_base(host, name, pinned, facts["cann" if name == "cann" else "driver"])
            continue
        found = facts["python"] if name == "python" else facts["packages"].get(name)
        plain = (found or "").split("+")[0]  # torch 2.9.1+cpu is torch 2.9.1
        if plain == pinned or (name == "python" and plain.startswith(pinned + ".")):
            continue
        severity = "error" if name in BINARY or not found else "warning"
        what = f"{name} {found}" if found else f"{name} is not installed"
        yield Finding(
            severity,
            "versions.package",
            host,
            f"{what}; frameworks.lock pins {pinned}",
            f"bash build_project.sh --target {'npu' if target == 'ascend' else 'cpu'}, in the "
            "image this repository builds",
        )
    version = facts["packages"].get("vllm_ascend")
    pinned = lock["vllm_ascend"]["version"]
    if target == "ascend" and version and version.split("+")[0] != pinned:
        yield Finding(
            "warning",
            "versions.package",
            host,
            f"the installed vllm-ascend {version} is not the "
            f"pinned {pinned}: its compiled operators may not fit the patched sources",
            f"pip install vllm-ascend=={pinned}, then bash build_project.sh --target npu",
        )
    if target == "ascend" and {"triton", "triton_ascend"} <= facts["packages"].keys():
        yield Finding(
            "warning",
            "versions.triton",
            host,
            "triton and triton-ascend are both installed, "
            "into the same directory: what was installed last wins",
            "pip uninstall -y triton triton-ascend, then install triton-ascend again",
        )


def check_base(host: str, name: str, pinned: str, found: str | None) -> Iterator[Finding]:
    """CANN must be the pinned one; a newer driver is only worth a warning."""
    if found is None or found == pinned or (name == "hdk" and found.startswith(pinned + ".")):
        return
    if name == "cann":
        yield Finding(
            "error",
            "versions.cann",
            host,
            f"CANN {found}; torch_npu and vllm-ascend were built for {pinned}",
            f"use the image with CANN {pinned}, or source its set_env.sh",
        )
        return
    older = numbers(found)[:2] < numbers(pinned)[:2]
    yield Finding(
        "error" if older else "warning",
        "versions.driver",
        host,
        f"driver {found} is "
        f"{'older' if older else 'another'} than the Ascend HDK {pinned} of frameworks.lock",
        f"install driver and firmware of HDK {pinned} on the host",
    )


def numbers(version: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", version)]


def check_trees(facts: dict, lock: dict) -> Iterator[Finding]:
    """The patched frameworks are present, match the lock, and are the ones that Python imports."""
    host, target = facts["host"], facts["target"]
    rebuild = f"bash build_project.sh --target {'npu' if target == 'ascend' else 'cpu'}"
    for name, table in lock.items():
        if "package" not in table:
            continue
        tree = facts["trees"].get(name)
        wanted = target == "ascend" or name in CPU_FRAMEWORKS
        if tree is None:
            if wanted and name == FOR_ROLL:
                why = f"frameworks/{name} is missing; only the recipes in internal/roll need it"
                yield Finding("info", "code.tree", host, why, rebuild)
            elif wanted:
                yield Finding("error", "code.tree", host, f"frameworks/{name} is missing", rebuild)
            continue
        if table["tree"] and tree["hash"] != table["tree"]:
            yield Finding(
                "error",
                "code.tree",
                host,
                f"the sources in frameworks/{name} are not those of "
                f"the lock ({tree['hash'][:12]}, not {table['tree'][:12]}): edited, or patched "
                "with another set",
                f"./apply_all_patches.sh --only {name}; to keep an edit: python3 patches/patchset.py export",
            )
        if wanted and tree["imported"] != tree["expected"]:
            yield Finding(
                "error",
                "code.import",
                host,
                f"`import {table['package']}` finds "
                f"{tree['imported'] or 'nothing'}, not the patched sources in {tree['expected']}",
                rebuild,
            )
        elif wanted and tree["also"]:
            yield Finding(
                "error",
                "code.import",
                host,
                f"`import {table['package']}` also finds {', '.join(tree['also'])}: two versions would mix",
                "uninstall the other one (pip uninstall megatron-core), or take it off PYTHONPATH",
            )


def check_rollout(facts: dict, lock: dict) -> Iterator[Finding]:
    """vllm-ascend is compiled for this chip, vLLM finds it, torch_npu and its ATB operators load."""
    host, rollout = facts["host"], facts["rollout"]
    if rollout is None:
        return
    build = "bash build_project.sh --target npu, on this node or in the image of this repository"
    series = npu_tools.series(rollout["chip"]) if rollout["chip"] else None
    if "vllm_ascend" in facts["trees"] and not rollout["series"]:
        why = "vllm_ascend has no _build_info.py: it was never compiled, and cannot be imported"
        yield Finding("error", "rollout.build", host, why, build)
    elif series and series != rollout["series"]:
        yield Finding(
            "error",
            "rollout.build",
            host,
            f"vllm_ascend is compiled for {rollout['series']}, this chip ({rollout['chip']}) is {series}: "
            "no worker would start",
            build,
        )
    if rollout["platforms"] != ["vllm_ascend"]:
        what = ", ".join(rollout["platforms"]) or "nothing"
        yield Finding(
            "error",
            "rollout.platform",
            host,
            f"the installed packages offer vLLM the platforms of {what}, not of vllm_ascend alone",
            build if "vllm_ascend" not in rollout["platforms"] else "pip uninstall the others",
        )
    if rollout["torch_npu"]:
        atb = "atb" in rollout["torch_npu"] or "undefined symbol" in rollout["torch_npu"]
        yield Finding(
            "error",
            "rollout.torch_npu",
            host,
            f"torch_npu does not load: {rollout['torch_npu']}",
            f"install the NNAL of CANN {lock['ascend']['cann']}, and source its set_env.sh after CANN's"
            if atb
            else "source the set_env.sh of CANN; see: python -c 'import torch_npu'",
        )


# Dies and their network.


def check_dies(facts: dict, lock: dict) -> Iterator[Finding]:
    """Health of the dies, leftover processes, their number, and driver against firmware."""
    host = facts["host"]
    used = defaultdict(list)
    for process in facts["processes"]:
        used[process["index"]].append(process)
    for die in facts["dies"]:
        where = f"{host} die {die['index']} (NPU {die['npu']} chip {die['chip']})"
        if die["health"] != "OK":
            error = f": {die['error']}" if die.get("error") else ""
            yield Finding(
                "warning" if die["health"] == "Warning" else "error",
                "npu.health",
                where,
                f"health is {die['health']}{error}",
                f"npu-smi info -t health -i {die['npu']}; reset the NPU, or take the node out",
            )
        if used[die["index"]]:
            names = ", ".join(
                f"{process['name'] or '?'} (pid {process['pid']}, {process['memory_mb']} MB)"
                for process in used[die["index"]]
            )
            yield Finding(
                "error",
                "npu.process",
                where,
                f"in use by {names}: the run would run out of memory",
                "end it if it is a leftover; pids are those of the host",
            )
        elif (die["hbm_used_mb"] or 0) > IDLE_HBM_MB:
            load = f", AI cores {die['ai_core_percent']}% busy" if die.get("ai_core_percent") else ""
            yield Finding(
                "error",
                "npu.hbm",
                where,
                f"{die['hbm_used_mb']} of {die['hbm_total_mb']} MB are "
                f"in use, and no process is visible from here{load}",
                "npu-smi info on the host shows the processes of other containers",
            )
    bad = [die["index"] for die in facts["dies"] if die.get("compatibility") not in (None, "OK", "NA")]
    if bad:
        yield Finding(
            "error",
            "npu.firmware",
            f"{host} {dies(bad)}",
            "npu-smi says that firmware and driver do not belong together",
            "install driver and firmware of one HDK release, then power-cycle the node",
        )
    wanted = number(facts["env"], "NPUS_PER_NODE", 0)
    if wanted and facts["target"] == "ascend" and not facts["devices"]:
        yield Finding(
            "error",
            "npu.devices",
            host,
            f"there is no /dev/davinci*, NPUS_PER_NODE is {wanted}",
            "start the container with the devices of the host, as run_container.sh does",
        )
    elif facts["dies"] and len(facts["dies"]) < wanted:
        yield Finding(
            "error",
            "npu.count",
            host,
            f"{len(facts['dies'])} dies are visible, NPUS_PER_NODE is {wanted}",
            "map all /dev/davinci* into the container, see ASCEND_RT_VISIBLE_DEVICES; on Atlas A2 (8 NPUs): "
            "export NPU_SERIES=a2; for fewer dies: export NPUS_PER_NODE",
        )


def check_network(facts: dict, lock: dict) -> Iterator[Finding]:
    """RoCE and HCCS of the dies, and one TLS setting for all. Dies without a network of their own pass."""
    host, several = facts["host"], number(facts["env"], "NNODES", 1) > 1
    nets = {die["index"]: die["network"] for die in facts["dies"] if "failed" not in die["network"]}
    hccs = {index for index, net in nets.items() if net["vnic"] and net["vnic_link"] == "UP"}

    def about(test: Callable[[dict], bool]) -> Iterator[tuple[str, str, bool]]:
        """(where, severity, over HCCS) for the dies that `test` selects; those with HCCS separately."""
        picked = {index for index, net in nets.items() if test(net)}
        for group in (picked & hccs, picked - hccs):
            if group:
                over = bool(group & hccs)
                yield f"{host} {dies(group)}", "error" if several and not over else "warning", over

    for where, severity, over in about(lambda net: net["link"] not in (None, "UP")):
        effect = "dies of other super nodes" if over else "other nodes"
        yield Finding(
            severity,
            "npu.link",
            where,
            f"the RoCE link is down: {effect} cannot be reached",
            "check cable, optical module and switch port: hccn_tool -i <die> -optical -g; "
            "hccn_tool -i <die> -link_stat -g",
        )
    for where, severity, over in about(lambda net: net["link"] is not None and not net["ip"]):
        effect = "dies of other super nodes" if over else "other nodes"
        yield Finding(
            severity,
            "npu.address",
            where,
            f"no RoCE address: {effect} cannot be reached",
            "hccn_tool -i <die> -ip -s address <ip> netmask <mask>, and keep it in /etc/hccn.conf",
        )
    for where, _, _ in about(lambda net: net["vnic"] and net["vnic_link"] != "UP"):
        yield Finding(
            "error",
            "npu.hccs",
            where,
            "the HCCS link is down: the dies of this super node are not joined",
            "hccn_tool -i <die> -vnic -g; npu-smi info -t health -i <npu>",
        )
    unknown = (None, "Success", "Init", "Detect ip set")  # the last two: no detection address is configured
    for where, _, _ in about(lambda net: net["net_health"] not in unknown):
        yield Finding(
            "warning",
            "npu.net_health",
            where,
            "the network check of the die fails (hccn_tool "
            "-net_health); it pings the address of -netdetect only",
            "hccn_tool -i <die> -net_health -g; hccn_tool -i <die> -netdetect -g",
        )
    switches = defaultdict(list)
    for index, net in nets.items():
        if net["tls"] is not None:
            switches[net["tls"]].append(index)
    if len(switches) > 1:
        yield Finding(
            "error",
            "npu.tls",
            f"{host} {dies(min(switches.values(), key=len))}",
            f"TLS is on for {dies(switches[1])} and off for {dies(switches[0])}: connections "
            "between them fail",
            "for i in <dies>; do hccn_tool -i $i -tls -s enable 0; done, on all nodes",
        )


# The host.


def check_host(facts: dict, lock: dict) -> Iterator[Finding]:
    """Open files, shared memory, disks, huge pages."""
    host, needs = facts["host"], NEEDS[facts["target"]]
    soft, hard = facts["open_files"]
    if 0 <= soft < needs.open_files:  # -1: unlimited
        fix = f"start the container with --ulimit nofile={needs.open_files}:{needs.open_files}"
        if hard < 0 or hard >= needs.open_files:
            fix = f"ulimit -n {needs.open_files} before the start"
        yield Finding(
            "warning",
            "host.open_files",
            host,
            f"ulimit -n is {soft}: Ray and the rollout "
            "servers hold thousands of sockets, and fail with 'Too many open files'",
            fix,
        )
    disks = facts["disks"]
    shm = "Ray's object store and the weight sync to the rollout live there"
    for name, wanted, size, what, fix in (
        ("shm", needs.shm_bytes, "total", shm, "start the container with --shm-size=512g or --ipc=host"),
        ("output", needs.output_bytes, "free", "checkpoints and logs go there", "set OUTPUT_DIR elsewhere"),
        ("tmp", needs.tmp_bytes, "free", "Ray spills objects there", "set TMPDIR to a larger disk"),
    ):
        disk = disks[name]
        if disk[size] < wanted:
            yield Finding(
                "error" if disk[size] < wanted / 10 else "warning",
                f"host.{name}",
                f"{host} {disk['path']}",
                f"{disk[size] / GB:.1f} GB {size}, {wanted / GB:.0f} GB wanted: {what}",
                fix,
            )
    tmp = disks["tmp"]
    if tmp["total"] and 1 - tmp["free"] / tmp["total"] > RAY_FULL_DISK:
        yield Finding(
            "error",
            "host.tmp",
            f"{host} {tmp['path']}",
            "the disk is "
            f"{1 - tmp['free'] / tmp['total']:.0%} full: above {RAY_FULL_DISK:.0%} Ray spills no "
            "objects, and tasks fail",
            "free some of it, or set TMPDIR to another disk",
        )
    memory = facts["memory"]
    if memory["huge_free"] > 0.05 * memory["total"]:
        yield Finding(
            "warning",
            "host.huge_pages",
            host,
            f"{memory['huge_free'] / GB:.0f} GB are reserved "
            "as huge pages that nobody uses: offloaded weights and optimizer states cannot have "
            "them",
            "sysctl -w vm.nr_hugepages=0",
        )
    if facts["target"] == "ascend" and memory["transparent"] == "never":
        yield Finding(
            "info",
            "host.huge_pages",
            host,
            "transparent huge pages are off: offloaded states of "
            "hundreds of GB are then mapped in 4 KB pages",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, on the host",
        )


def check_ports(facts: dict, lock: dict) -> Iterator[Finding]:
    """The ports that the run will open on this node are free."""
    host, env = facts["host"], facts["env"]
    listening = {int(port): owner for port, owner in facts["ports"].items()}
    if facts["is_master"] and "ray_npus" not in facts:  # in a running cluster Ray itself holds them
        for name in ("MASTER_PORT", "RAY_PORT", "DASHBOARD_PORT"):
            port = number(env, name, 0)
            if port in listening:
                yield Finding(
                    "error",
                    "host.port",
                    f"{host} port {port}",
                    f"{name} is taken by {listening[port]}: often a Ray that was left running",
                    f"ray stop, or another {name}",
                )
    if facts["target"] != "ascend" or env.get("HCCL_HOST_SOCKET_PORT_RANGE"):
        return
    base = number(env, "HCCL_IF_BASE_PORT", HCCL_BASE_PORT)
    ports = range(base, base + max(HCCL_PORTS, len(facts["dies"])))
    where = f"{host} ports {ports[0]}-{ports[-1]}"
    busy = sorted(set(ports) & listening.keys())
    if busy:
        yield Finding(
            "error",
            "host.hccl_ports",
            where,
            f"HCCL binds these, and {spans(busy)} is taken by {listening[busy[0]]}",
            "end it, or set HCCL_IF_BASE_PORT to a free range on all nodes",
        )
    low, high = facts["port_range"] or (0, -1)
    if ports[0] <= high and ports[-1] >= low and not reserved(ports, facts["reserved_ports"]):
        yield Finding(
            "warning",
            "host.hccl_ports",
            where,
            "HCCL binds these, but the system hands out "
            f"ports {low}-{high} to any outgoing connection: HCCL then fails to bind, by chance",
            f"sysctl -w net.ipv4.ip_local_reserved_ports={ports[0]}-{ports[-1]}, or "
            f"HCCL_IF_BASE_PORT above {high}",
        )


def reserved(ports: range, setting: str) -> bool:
    """Whether net.ipv4.ip_local_reserved_ports ("8080,60000-60015") covers all the ports."""
    kept: set[int] = set()
    for part in filter(None, setting.split(",")):
        low, _, high = part.partition("-")
        kept.update(range(int(low), int(high or low) + 1))
    return kept.issuperset(ports)


def caught(address: str, proxies: Mapping[str, str]) -> str:
    """Why a client would send a request for `address` to a proxy; "" if none does.

    Python's rule is the strict one: names, suffixes and "*", no networks. Some clients accept 10.0.0.0/8 too.
    """
    if not proxies.keys() - {"no_proxy"}:
        return ""
    no_proxy = proxies.get("no_proxy", "")
    if urllib.request.proxy_bypass_environment(address, {"no": no_proxy}):
        return ""
    for entry in no_proxy.replace(" ", "").split(","):
        try:
            if "/" in entry and ipaddress.ip_address(address) in ipaddress.ip_network(entry, strict=False):
                return f"only {entry} in no_proxy covers it, which Python's urllib and others do not read"
        except ValueError:
            continue
    return "no_proxy does not name it"


def check_proxies(facts: dict, lock: dict) -> Iterator[Finding]:
    """Requests to the cluster's addresses do not go through a proxy."""
    peers = [peer["address"] for peer in facts.get("reach", [])]
    addresses = ["127.0.0.1", facts["address"], facts["env"].get("MASTER_ADDR"), *peers]
    why = {
        address: reason
        for address in dict.fromkeys(filter(None, addresses))
        if (reason := caught(address, facts["proxies"]))
    }
    if why:
        names = ", ".join(sorted(facts["proxies"].keys() - {"no_proxy"}))
        reasons = "; ".join(f"{address}: {reason}" for address, reason in why.items())
        yield Finding(
            "warning",
            "host.proxy",
            facts["host"],
            f"{names} would catch requests inside the "
            f"cluster ({reasons}): rollout and reward servers answer with the proxy's error page",
            f"export no_proxy=localhost,{','.join(why)}${{no_proxy:+,$no_proxy}}",
        )


# What could not be inspected: (what is then not checked, how to make it visible).
BLIND = {
    "npu-smi": (
        "health, HBM, processes and network of the dies",
        "mount npu-smi, /usr/local/dcmi and the driver into the container",
    ),
    "hccn_tool": (
        "links, addresses and TLS of the dies",
        "mount /usr/local/Ascend/driver/tools/hccn_tool and /etc/hccn.conf into the container",
    ),
    "driver": ("its version", "mount /usr/local/Ascend/driver/version.info into the container"),
    "CANN": ("its version", "source the set_env.sh of CANN"),
    "NPUs": ("dies, driver and CANN, as for a run on a CPU", "nothing, on a CPU"),
}


def check_absent(facts: dict, lock: dict) -> Iterator[Finding]:
    """One line for what could not be inspected; an npu-smi that exists but fails means a broken driver."""
    for what, why in facts["absent"]:
        if what == "npu-smi" and "not on PATH" not in why:
            yield Finding(
                "error",
                "npu.driver",
                facts["host"],
                f"{why}; a run cannot use the dies either",
                "status -8020: another container has them; if npu-smi hangs, see dmesg and restart the node",
            )
        else:
            unchecked, fix = BLIND[what]
            yield Finding("info", f"absent.{what}", facts["host"], f"{why}; not checked: {unchecked}", fix)


NODE_CHECKS = (
    check_versions,
    check_trees,
    check_rollout,
    check_dies,
    check_network,
    check_host,
    check_ports,
    check_proxies,
    check_absent,
)


def judge_node(facts: dict, lock: dict[str, dict]) -> list[Finding]:
    """Findings about one node, from the facts of `collect` or `survey` and the tables of frameworks.lock."""
    return [finding for check in NODE_CHECKS for finding in check(facts, lock)]

"""Collect the facts that the node doctor judges: one plain dict for each node, with the peers it can reach.

Problem: a run on several nodes fails after an hour because of one node: another driver, a leftover process on
a die, a stale checkout, a firewall. Every node must be inspected in the same way, including nodes that the
user is not logged in to.
Idea: inspection is separate from judgement. `collect` inspects the node it runs on and returns JSON-able
facts; `survey` makes every node of a Ray cluster collect its own, in parallel, and try to reach the others.
`doctor` judges the facts without touching a machine.
Invariants: nothing is changed on a node; every command has a deadline; what cannot be inspected is listed in
`absent` as (what, why) and never guessed. A node that does not answer costs `deadline_s`, not the survey.
Cost: reads the patched trees (about 25 MB), 5 short calls of hccn_tool for each die, and in a cluster one
ping from each die to the die of the same index on every other node.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType

from ascend_rl.host import npu_tools
from ascend_rl.host.npu_tools import ToolError

ROOT = Path(__file__).resolve().parents[2]
ASCEND = Path("/usr/local/Ascend")
OWN_CODE = ("ascend_rl", "internal", "patches", "stacks/*/*.*", "frameworks.lock", "*.sh", "*.py")
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RAY_PORT",
    "DASHBOARD_PORT",
    "NNODES",
    "NPUS_PER_NODE",
    "HCCL_IF_BASE_PORT",
    "HCCL_HOST_SOCKET_PORT_RANGE",
)
PING_DEADLINE_S = 20.0
IMPORT_DEADLINE_S = 180.0  # of torch_npu, on a node whose disk is cold
CONNECT_S = 3.0
IDLE_HBM_MB = 4096  # an idle A3 or A2 die shows 2.8 to 3.5 GB in public logs


def sources(root: Path) -> ModuleType:
    """patches/sources.py, which reads frameworks.lock, loaded by path: patches/ is not a package."""
    spec = importlib.util.spec_from_file_location("ascend_rl_sources", root / "patches/sources.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def project_of(root: Path):
    """What frameworks.lock of the stack pins, as patches/sources.py has it."""
    module = sources(root)
    return module.Project.load(module.stack_root(root))


def load_lock() -> dict[str, dict]:
    """The tables of frameworks.lock."""
    return project_of(ROOT).tables


# The node: code, software, limits, ports.


def code_facts(root: Path) -> dict:
    """{"hash": sha256 of this repository's own code, "commit": the git commit, or None without git}."""
    digest = hashlib.sha256()
    paths = [
        found
        for pattern in OWN_CODE
        for path in root.glob(pattern)
        for found in ([path] if path.is_file() else path.rglob("*"))
    ]
    for path in sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\0".encode() + content)
    with contextlib.suppress(ToolError):
        location = (f"--git-dir={root}/.git", f"--work-tree={root}", "-c", f"safe.directory={root}")
        commit = npu_tools.run(["git", *location, "rev-parse", "HEAD"]).strip()
        return {"hash": digest.hexdigest(), "commit": commit}
    return {"hash": digest.hexdigest(), "commit": None}


def working_tree_hash(tree: Path, package: str, hashed: Callable[[str], bool]) -> str:
    """Like `tree` in frameworks.lock, but over the files on disk, so an uncommitted edit changes it too."""
    lines = []
    for folder, _, names in os.walk(tree / package):
        within = os.path.relpath(folder, tree)
        for name in names:
            if hashed(relative := f"{within}/{name}") and (path := Path(folder, name)).is_file():
                content = path.read_bytes()
                blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                lines.append(f"{relative} {blob}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def tree_facts(root: Path) -> dict[str, dict]:
    """For each framework present: {"hash", "expected": its path, "imported", "also": where it is found}."""
    facts = {}
    project = project_of(root)
    for name, framework in project.frameworks.items():
        tree = project.directory / name
        if not (tree / framework.package).is_dir():
            continue
        spec = importlib.util.find_spec(framework.package)  # does not import it
        places = list(spec.submodule_search_locations or []) if spec else []
        facts[name] = {
            "hash": working_tree_hash(tree, framework.package, framework.hashed),
            "expected": str(tree / framework.package),
            "imported": places[0] if places else None,
            "also": places[1:],  # of a namespace package, as Megatron is: parts of another one
        }
    return facts


def rollout_facts(env: Mapping[str, str], dies: Sequence[dict] = ()) -> dict:
    """What decides whether the rollout starts: the chip, what vllm-ascend was compiled for, and its platform.

    {"chip": as CANN names it, "series": of _build_info.py, "platforms": packages that offer vLLM
    one, "torch_npu": the last line of the error when it is imported with its ATB operators, or ""}; None for
    what cannot be told.
    """
    facts: dict = {"chip": None, "series": None, "torch_npu": None}
    with contextlib.suppress(ToolError):
        facts["chip"] = npu_tools.chip_name(env, dies[0]["npu"] if dies else None)
    if spec := importlib.util.find_spec("vllm_ascend"):
        facts["series"] = npu_tools.built_for(Path(spec.origin).parent)
    plugins = importlib.metadata.entry_points(group="vllm.platform_plugins")
    facts["platforms"] = sorted({entry.value.partition(":")[0] for entry in plugins})
    if importlib.util.find_spec("torch_npu"):
        command = [sys.executable, "-c", "import torch_npu.op_plugin.atb._atb_ops"]
        try:
            npu_tools.run(command, env, IMPORT_DEADLINE_S)
            facts["torch_npu"] = ""
        except ToolError as error:
            facts["torch_npu"] = str(error).partition(": ")[2] or str(error)
    return facts


def installed() -> dict[str, str]:
    """Versions of all installed distributions, by name in lower case with "_"."""
    facts = (dist.metadata for dist in importlib.metadata.distributions())  # each access parses a file
    return {each["Name"].lower().replace("-", "_"): each["Version"] for each in facts if each["Name"]}


def os_name() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return platform.platform()


def first_line(path: str) -> str | None:
    with contextlib.suppress(OSError):
        return Path(path).read_text().split("\n", 1)[0].strip()
    return None


def disk_facts(env: Mapping[str, str], root: Path) -> dict[str, dict]:
    """Free and total bytes where a run writes: {"output"|"tmp"|"shm": {"path", "free", "total"}}."""
    wanted = {
        "output": Path(env.get("OUTPUT_DIR") or root / "outputs"),
        "tmp": Path(env.get("TMPDIR") or "/tmp"),
        "shm": Path("/dev/shm"),
    }
    facts = {}
    for name, path in wanted.items():
        existing = next((place for place in (path, *path.absolute().parents) if place.exists()), Path("/"))
        usage = shutil.disk_usage(existing)
        facts[name] = {"path": str(path), "free": usage.free, "total": usage.total}
    return facts


def memory_facts() -> dict:
    """Bytes of memory and of unused reserved huge pages; the setting of transparent huge pages."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    info = {words[0].rstrip(":"): int(words[1]) for words in lines}
    modes = first_line("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    return {
        "total": info["MemTotal"] * 1024,
        "huge_free": info.get("HugePages_Free", 0) * info.get("Hugepagesize", 0) * 1024,
        "transparent": modes.partition("[")[2].partition("]")[0],
    }


def listening_ports() -> dict[int, str]:
    """TCP ports in use -> name and pid of the listening process, as far as this user may see them."""
    inodes: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A":  # LISTEN
                    inodes[words[9]] = int(words[1].rpartition(":")[2], 16)
    owners = dict.fromkeys(inodes.values(), "another user's process")
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for descriptor in os.scandir(f"/proc/{entry}/fd"):
                inode = os.readlink(descriptor.path).removeprefix("socket:[").removesuffix("]")
                if inode in inodes:
                    owners[inodes[inode]] = f"{first_line(f'/proc/{entry}/comm')} (pid {entry})"
    return owners


def own_address(env: Mapping[str, str]) -> str:
    """The address this node uses towards MASTER_ADDR, or towards the default route; nothing is sent."""
    target = env.get("MASTER_ADDR") or "192.0.2.1"
    with contextlib.suppress(OSError):
        family, _, _, _, where = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return probe.getsockname()[0]
    return "127.0.0.1"


def is_local(address: str) -> bool:
    """Whether `address` or host name is one of this machine's."""
    with contextlib.suppress(OSError):
        family, kind, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
            return True
    return False


# The dies.


def version_of(files: Sequence[Path], absent: list, what: str) -> str | None:
    """`version` of the first file that exists."""
    for path in files:
        with contextlib.suppress(OSError):
            return npu_tools.parse_equals(path.read_text(errors="replace")).get("version")
    absent.append((what, f"{files[0]} is missing"))
    return None


def cann_files(env: Mapping[str, str], ascend: Path) -> list[Path]:
    homes = [
        env.get("ASCEND_TOOLKIT_HOME"),
        env.get("ASCEND_HOME_PATH"),
        ascend / "cann",
        ascend / "ascend-toolkit/latest",
    ]
    file = Path(f"{platform.machine()}-linux", "ascend_toolkit_install.info")
    return [Path(home) / file for home in homes if home]


def hccn_facts(index: int, env: Mapping[str, str]) -> dict:
    """Network state of a die; None for what the product lacks (vnic on A2). {"failed"} if all calls fail."""
    readers = {
        "link": npu_tools.parse_link,
        "ip": npu_tools.parse_address,
        "tls": npu_tools.parse_tls,
        "net_health": npu_tools.parse_net_health,
    }
    facts: dict = {"vnic": None, "vnic_link": None}
    problems = []
    for name, reader in readers.items():
        facts[name] = None
        try:
            facts[name] = reader(npu_tools.run(["hccn_tool", "-i", str(index), f"-{name}", "-g"], env))
        except ToolError as error:
            problems.append(str(error))
    with contextlib.suppress(ToolError):
        text = npu_tools.run(["hccn_tool", "-i", str(index), "-vnic", "-g"], env)
        facts |= {"vnic": npu_tools.parse_address(text), "vnic_link": npu_tools.parse_link(text)}
    return {"failed": problems[0]} if len(problems) == len(readers) else facts


def smi_details(dies: Sequence[dict], env: Mapping[str, str]) -> None:
    """Add what npu-smi's table omits: firmware, the error of an unhealthy die, the load of a busy one."""

    def ask(kind: str, npu: int, *more: str) -> list[dict]:
        with contextlib.suppress(ToolError):
            command = ["npu-smi", "info", "-t", kind, "-i", str(npu), *more]
            return npu_tools.parse_fields(npu_tools.run(command, env))
        return [{}]

    boards: dict[int, dict] = {}
    for die in dies:
        npu, chip = die["npu"], die["chip"]
        if npu not in boards:
            boards[npu] = ask("board", npu)[0]
        die["firmware"] = boards[npu].get("Firmware Version")
        die["compatibility"] = boards[npu].get("Compatibility")
        if die["health"] != "OK":
            die["error"] = npu_tools.error_in(ask("health", npu, "-c", str(chip))[0])
        if (die["hbm_used_mb"] or 0) > IDLE_HBM_MB:
            usage = next((block for block in ask("usages", npu) if block.get("Chip ID") == str(chip)), {})
            die["ai_core_percent"] = usage.get("Aicore Usage Rate(%)")


def die_facts(env: Mapping[str, str], absent: list) -> tuple[list[dict], list[dict]]:
    """The visible dies, each with its state and its network, and the processes on them."""
    try:
        dies, processes = npu_tools.parse_npu_smi(npu_tools.run(["npu-smi", "info"], env))
    except ToolError as error:
        absent.append(("npu-smi", str(error)))
        return [], []
    chosen = npu_tools.visible(env)
    dies = [asdict(die) for die in dies if chosen is None or die.index in chosen]
    smi_details(dies, env)
    with ThreadPoolExecutor(8) as pool:
        networks = list(pool.map(lambda die: hccn_facts(die["index"], env), dies))
    if dies and all("failed" in network for network in networks):
        absent.append(("hccn_tool", networks[0]["failed"]))
    for die, network in zip(dies, networks, strict=True):
        die["network"] = network
    places = {(die["npu"], die["chip"]): die["index"] for die in dies}
    there = [
        asdict(process) | {"index": places[process.npu, process.chip]}
        for process in processes
        if (process.npu, process.chip) in places
    ]
    return dies, there


def collect(env: Mapping[str, str] | None = None, root: Path = ROOT, ascend: Path = ASCEND) -> dict:
    """All facts about the node this runs on; see the module docstring. Takes about a second without NPUs."""
    env = os.environ if env is None else env
    absent: list[tuple[str, str]] = []
    packages = installed()
    on_ascend = bool(
        "torch_npu" in packages or Path("/dev/davinci_manager").exists() or npu_tools.find("npu-smi", env)
    )
    if not on_ascend:
        absent.append(("NPUs", "no /dev/davinci_manager, no torch_npu, no npu-smi"))
    dies, processes = die_facts(env, absent) if on_ascend else ([], [])
    master, sysctl = env.get("MASTER_ADDR"), "/proc/sys/net/ipv4/ip_local"
    lowered = {name.lower(): value for name, value in env.items()}
    return {
        "host": socket.gethostname(),
        "address": own_address(env),
        "is_master": not master or is_local(master),
        "target": "ascend" if on_ascend else "cpu",
        "python": platform.python_version(),
        "os": os_name(),
        "packages": packages,
        "driver": version_of([ascend / "driver/version.info"], absent, "driver") if on_ascend else None,
        "cann": version_of(cann_files(env, ascend), absent, "CANN") if on_ascend else None,
        "dies": dies,
        "processes": processes,
        "devices": len(list(Path("/dev").glob("davinci[0-9]*"))),
        "rollout": rollout_facts(env, dies) if on_ascend else None,
        "absent": absent,
        "open_files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "disks": disk_facts(env, root),
        "memory": memory_facts(),
        "ports": listening_ports(),
        "port_range": [int(word) for word in (first_line(f"{sysctl}_port_range") or "").split()],
        "reserved_ports": first_line(f"{sysctl}_reserved_ports") or "",
        "env": {name: env[name] for name in VARIABLES if env.get(name)},
        "proxies": {name: lowered[name] for name in (*PROXIES, "no_proxy") if lowered.get(name)},
        "code": code_facts(root),
        "trees": tree_facts(root),
    }


# The cluster.


def ping_die(die: dict, peer: dict, env: Mapping[str, str] | None = None) -> str:
    """What was tried if a die does not reach the peer over HCCS or RoCE, else ""."""
    tried = []
    for option, kind in (("hccs_ping", "vnic"), ("ping", "ip")):
        own, other = die["network"].get(kind), peer["network"].get(kind)
        if not own or not other or own == other:
            continue
        command = ["hccn_tool", "-i", str(die["index"]), f"-{option}", "-g", "address", other]
        try:
            lost = npu_tools.parse_ping(npu_tools.run(command, env, PING_DEADLINE_S))
            if lost and lost < 1:  # the first packet is often lost to ARP
                lost = npu_tools.parse_ping(npu_tools.run(command, env, PING_DEADLINE_S))
        except ToolError as error:
            tried.append(str(error))
            continue
        if lost == 0:
            return ""
        how = "no summary" if lost is None else f"{lost:.0%} of packets lost"
        tried.append(f"-{option} {other}: {how}")
    return "; ".join(tried) or "the two have no addresses of one network"


def connect(address: str, port: int) -> str:
    """Why no TCP connection can be made, or "" if one can."""
    try:
        socket.create_connection((address, port), CONNECT_S).close()
        return ""
    except OSError as error:
        return error.strerror or str(error)


def answers_ping(address: str) -> bool | None:
    """Whether `address` answers an ICMP ping; None without ping(8)."""
    try:
        return npu_tools.run(["ping", "-c", "1", "-W", "2", address]) is not None
    except ToolError as error:
        return None if "not on PATH" in str(error) else False


def environment_of(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty if this user may not read it."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
        return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
    return {}


def listen(address: str) -> socket.socket:
    """Open a port chosen by the system, as a worker would; connections succeed without an accept."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=128)


def reach(dies: Sequence[dict], peers: Sequence[dict]) -> list[dict]:
    """Try to reach each peer {"host", "address", "port", "dies"} from this node and from its dies.

    Returns: {"host", "address", "tcp": why not or "", "icmp": bool | None, "dies": {index: why not}} each.
    """

    def try_host(peer: dict) -> dict:
        tcp = connect(peer["address"], peer["port"])
        icmp = answers_ping(peer["address"]) if tcp else None
        return {"host": peer["host"], "address": peer["address"], "tcp": tcp, "icmp": icmp, "dies": {}}

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(try_host, peers))
        pairs = [
            (result, die, other)
            for die in dies
            for result, peer in zip(results, peers, strict=True)
            for other in peer["dies"]
            if die["index"] == other["index"]
        ]
        outcomes = pool.map(lambda pair: ping_die(pair[1], pair[2]), pairs)
        for (result, die, _), why in zip(pairs, outcomes, strict=True):
            if why:
                result["dies"][die["index"]] = why
    return results


class Probe:
    """The Ray actor that `survey` runs on every node."""

    def facts(self) -> dict:
        # Ray hides the dies from actors that request none; the raylet's own environment still names them.
        choice = environment_of(os.getppid()).get("ASCEND_RT_VISIBLE_DEVICES", "")
        return collect({**os.environ, "ASCEND_RT_VISIBLE_DEVICES": choice})

    def now(self) -> float:
        return time.time()

    def listen(self, address: str) -> int:
        """Open a port that stays open as long as this actor lives, and return it."""
        self._server = listen(address)
        return self._server.getsockname()[1]

    def reach(self, dies: Sequence[dict], peers: Sequence[dict]) -> list[dict]:
        return reach(dies, peers)


def labels(nodes: Sequence[dict]) -> list[str]:
    """Host names, followed by the start of Ray's node id where two are equal."""
    names = [node["NodeManagerHostname"] for node in nodes]
    return [
        name if names.count(name) == 1 else f"{name}-{node['NodeID'][:6]}"
        for name, node in zip(names, nodes, strict=True)
    ]


def clock_offset(ask: Callable[[], float], tries: int = 5) -> tuple[float, float]:
    """(offset of another clock, uncertainty) in seconds, taken from the fastest answer."""
    samples = []
    for _ in range(tries):
        before = time.time()
        there = ask()
        after = time.time()
        samples.append(((after - before) / 2, there - (before + after) / 2))
    uncertainty, offset = min(samples)
    return offset, uncertainty


def survey(deadline_s: float = 120.0) -> tuple[list[dict], dict[str, str]]:
    """Facts of every node of the connected Ray cluster, and the reason for each node that gave none.

    Each dict is that of `collect` plus "ray_npus", "clock_offset_s", "clock_error_s" and "reach".
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    end = time.monotonic() + deadline_s
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = dict(zip(labels(alive), alive, strict=True))
    actor = ray.remote(num_cpus=0)(Probe)
    probes = {}
    for label, node in nodes.items():
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        probes[label] = actor.options(scheduling_strategy=there).remote()
    failed: dict[str, str] = {}

    def ask(calls: dict[str, Callable[[], object]]) -> dict:
        """Call all, then wait for all, so that the nodes work in parallel."""
        pending = {label: call() for label, call in calls.items()}
        answers = {}
        for label, answer in pending.items():
            try:
                answers[label] = ray.get(answer, timeout=max(0.1, end - time.monotonic()))
            except Exception as error:  # whatever failed there, the other nodes are still judged
                late = isinstance(error, ray.exceptions.GetTimeoutError)
                lines = str(error).strip().splitlines() or [type(error).__name__]
                failed[label] = f"no answer within {deadline_s:.0f} s" if late else lines[-1]
        return answers

    def address(label: str) -> str:
        return nodes[label]["NodeManagerAddress"]

    facts = ask({label: probe.facts.remote for label, probe in probes.items()})
    ports = ask({label: partial(probes[label].listen.remote, address(label)) for label in facts})
    peers = [
        {"host": label, "address": address(label), "port": port, "dies": facts[label]["dies"]}
        for label, port in ports.items()
    ]
    others = {label: [peer for peer in peers if peer["host"] != label] for label in ports}
    reached = ask(
        {label: partial(probes[label].reach.remote, facts[label]["dies"], others[label]) for label in ports}
    )
    answered = []
    for label, results in reached.items():
        now = partial(ask, {label: probes[label].now.remote})
        offset = clock_offset(lambda now=now, label=label: now().get(label, math.nan))
        answered.append(
            facts[label]
            | {
                "host": label,
                "address": address(label),
                "reach": results,
                "ray_npus": nodes[label]["Resources"].get("NPU", 0),
                "clock_offset_s": offset[0],
                "clock_error_s": offset[1],
            }
        )
    for probe in probes.values():
        ray.kill(probe)
    return answered, failed


def join(address: str) -> str:
    """Connect to the Ray cluster at "host:port"; returns why it did not work, or ""."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and (why := connect(host.strip("[]"), int(port))):
        return f"nothing answers at {address}: {why}"
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        return f"Ray at {address} cannot be joined: {(str(error).splitlines() or ['no message'])[0]}"
    return ""

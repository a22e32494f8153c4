"""What ray_start_npu.sh is going to do on this node: settings in, plan out, nothing started.

A setting has one name everywhere: the variable NNODES, the flag --nnodes, the line NNODES=8 of the cluster
file. A flag goes before a variable, that before the file, that before what schedulers set (WORLD_SIZE nodes,
MASTER_PORT), and that before the default. The same command and file serve all nodes: a node is the head if
MASTER_ADDR, or the first of NODES, is one of its own addresses (or its RANK is 0), else a worker.

The node's own address, by which the others reach it, is the one in NODES; else that of SOCKET_IFNAME (an
interface or a subnet); else MASTER_ADDR on the head, and on a worker the source of its route to MASTER_ADDR.
A single node (NNODES=1, the default) needs none of this and stays on 127.0.0.1.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import math
import os
import secrets
import shlex
import socket
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ascend_rl.launch.time_limit import TimeLimit, moment
from ascend_rl.process.ports import free_port
from ascend_rl.settings import claim
from ascend_rl.settings.switch import CannotWork, switched_on

ROOT = Path(__file__).resolve().parents[2]


def npus_here() -> int:
    return len(list(Path("/dev").glob("davinci[0-9]*")))


# name: default, "" where it depends; the header of ray_start_npu.sh says what each means.
SETTINGS = dict.fromkeys(
    (
        "NODES",
        "NNODES",
        "MASTER_ADDR",
        "RANK",
        "SOCKET_IFNAME",
        "NPUS_PER_NODE",
        "CLUSTER_TOKEN_FILE",
        "RAY_PORT",
        "LAUNCH_PORT",
        "RUN_NAME",
        "LOG_DIR",
        "OUTPUT_DIR",
        "DASHBOARD_PORT",
        "RAY_NUM_CPUS",
        "RAY_OBJECT_STORE",
        "RAY_START_ARGS",
        "VERBOSE",
        "GAP_LIMIT",
        "SKIP_PREFLIGHT",
        "SKIP_REPORT",
        "SAVE_BY",
        "ALERT",
    ),
    "",
) | {
    "SAVE_GRACE_S": "0",
    "WATCH_DIES_S": "60",
    "DASHBOARD_HOST": "127.0.0.1",
    "NODES_DEADLINE_S": "1800",
    "RAY_DEADLINE_S": "900",
    "LOST_DEADLINE_S": "60",
    "RUN_DEADLINE_S": "0",
    "RESTARTS": "0",
    "RESTART_SERVERS": "1",
    "SERVER_DEADLINE_S": "600",
    # A step of a large model with long responses takes more than an hour, and so may loading it.
    "STALL_DEADLINE_S": "14400" if npus_here() else "600",
    "START_DEADLINE_S": "14400" if npus_here() else "900",
}
# Of Ray, where the user's variables do not say otherwise.
RAY_DEFAULTS = {
    # No idle workers for the driver: actors with variables of their own never use them.
    "RAY_prestart_worker_first_driver": "0",
    # By itself Ray gives up when the raylet takes 30 s to start, as on a busy machine, a driver when it finds
    # none within 60 s, and a worker when it does not find the head's within 40 s.
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_NUM_REDIS_GET_RETRIES": "150",  # every 2 s
    "RAY_agent_register_timeout_ms": "300000",  # for its own agents to answer
    # By itself Ray lets all other processes go first (niceness 15): beside two busy ones on two cores, its
    # workers and their vLLM engines get a thirtieth of the processor time.
    "RAY_worker_niceness": "0",
}
# What the raylet's agents listen on: a raylet that is not told waits for them to tell it.
AGENT_PORTS = ("dashboard-agent-listen", "dashboard-agent-grpc", "metrics-export", "runtime-env-agent")
SWITCHES = ("VERBOSE", "SKIP_PREFLIGHT", "SKIP_REPORT", "RESTART_SERVERS")
SCHEDULERS = {"NNODES": "WORLD_SIZE", "RAY_PORT": "MASTER_PORT"}
MOST_NODES, MOST_NPUS = 100_000, 1024
TOKEN_LENGTH = 16
ANYWHERE = "192.0.2.1"  # RFC 5737: nobody's address, so its route is the default route
NEW_TOKEN = "(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > FILE)"


@dataclass(frozen=True)
class Plan:
    """All that is decided before anything starts."""

    script: str
    env_script: str
    overrides: list[str]
    settings: dict[str, str]
    role: str  # "head" or "worker"
    address: str  # of this node
    interface: str
    head: str  # address of the head
    nnodes: int
    npus: int  # of each node
    nodes: list[str]  # addresses of all nodes where known, spare ones included
    ray_port: int
    launch_port: int
    run: str
    output_dir: Path
    log_dir: Path  # of this node
    token: str
    kind: str = claim.RUN  # of OUTPUT_DIR, see settings/claim.py
    check: bool = False  # run launch/check.py in place of the script
    save_by: float = math.inf  # seconds since 1970

    @property
    def log_file(self) -> Path:
        return (self.output_dir / "train.log") if self.role == "head" else self.log_dir / "node.log"

    def seconds(self, name: str) -> float:
        return float(self.settings[name])

    def on(self, name: str) -> bool:
        return switched_on(name, self.settings)

    def limit(self) -> TimeLimit:
        """Of one start; SAVE_BY counts from the launch, also after restarts, and is the head's."""
        head = self.role == "head"
        return TimeLimit(self.save_by if head else math.inf, self.seconds("SAVE_GRACE_S"), head)

    def environment(self) -> dict[str, str]:
        """Variables for everything that is started; those the user has set are kept."""
        fixed = {
            "NNODES": str(self.nnodes),
            "NPUS_PER_NODE": str(self.npus),
            "OUTPUT_DIR": str(self.output_dir),
            "VERL_FILE_LOGGER_PATH": str(self.output_dir / "metrics.jsonl"),
            "TENSORBOARD_DIR": str(self.output_dir / "tensorboard"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            **{name: self.settings[name] for name in ("RESTART_SERVERS", "SERVER_DEADLINE_S", "SAVE_BY")},
            **{name: os.environ.get(name, value) for name, value in RAY_DEFAULTS.items()},
            # The launcher ends Ray when the run has ended: nothing is left to wait for.
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }
        if self.nnodes == 1:
            # Ray's own switch for "no cluster": wherever there is a route to the network, it would replace
            # 127.0.0.1 by the address there.
            fixed["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        else:
            fixed["MASTER_ADDR"] = self.head
        network = {
            name: self.interface
            for name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
            if self.interface
        }
        network |= {"HCCL_IF_IP": self.address, "VLLM_HOST_IP": self.address}
        if ":" in self.address:
            network["HCCL_SOCKET_FAMILY"] = "AF_INET6"
        return fixed | {name: os.environ.get(name, value) for name, value in network.items()}

    def ray_start(self, temp_dir: Path, port: Callable[[], int | str]) -> list[str]:
        """The command that starts Ray here, with a port for each agent; it lasts as long as Ray."""
        command = [
            "ray",
            "start",
            "--block",
            "--disable-usage-stats",
            f"--node-ip-address={self.address}",
            f"--temp-dir={temp_dir}",
            f"--resources={json.dumps({'NPU': self.npus})}",
            f"--num-cpus={self.settings['RAY_NUM_CPUS'] or 8 + 8 * self.npus}",
            *(f"--{name}-port={port()}" for name in AGENT_PORTS),
        ]
        if store := self.settings["RAY_OBJECT_STORE"] or ("" if npus_here() else "200000000"):
            command.append(f"--object-store-memory={store}")
        if self.role == "worker":
            command.append(f"--address={endpoint(self.head, self.ray_port)}")
        else:
            port, host = self.settings["DASHBOARD_PORT"], self.settings["DASHBOARD_HOST"]
            command += ["--head", f"--port={self.ray_port}", f"--include-dashboard={bool(port)}".lower()]
            command += [f"--dashboard-host={host}", f"--dashboard-port={port}"] if port else []
        return command + shlex.split(self.settings["RAY_START_ARGS"])


def endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def read_cluster_file(path: Path) -> dict[str, str]:
    """KEY=VALUE lines, as a shell would read them without expanding anything; # starts a comment.

    Raises:
        CannotWork: no such file, a line of another form, an unknown or repeated key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CannotWork(f"the cluster file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CannotWork(f"the cluster file {path} is no text in UTF-8: save it as such") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise CannotWork(f"{path}:{number}: {error}") from error
        if words[:1] == ["export"]:
            words = words[1:]
        if not words:
            continue
        key, equals, value = words[0].partition("=")
        if len(words) > 1 or not equals:
            raise CannotWork(f"{path}:{number}: expected KEY=VALUE, quoted if it has spaces: {line.strip()}")
        if key not in SETTINGS:
            near = difflib.get_close_matches(key, SETTINGS, 1, 0.5)
            raise CannotWork(
                f"{path}:{number}: unknown setting {key}; "
                + (f"did you mean {near[0]}?" if near else "other variables belong in ENV_SCRIPT")
            )
        if key in found:
            raise CannotWork(f"{path}:{number}: {key} is set twice")
        found[key] = value
    return found


def gather_settings(
    flags: Mapping[str, str | None], environ: Mapping[str, str], file: Mapping[str, str]
) -> dict[str, str]:
    """Every setting's value, by the precedence above; an empty value counts as not given."""
    return {
        name: flags.get(name)
        or environ.get(name)
        or file.get(name)
        or environ.get(SCHEDULERS.get(name, ""), "")
        or default
        for name, default in SETTINGS.items()
    }


def make_plan(
    settings: dict[str, str],
    script: str,
    env_script: str,
    overrides: list[str],
    environ: Mapping[str, str],
    mine: list[tuple[str, str]] | None = None,
    check: bool = False,
) -> Plan:
    """Check everything that can be checked without another node.

    Raises:
        CannotWork: with a sentence that says which setting is wrong.
    """
    if not script:
        raise CannotWork("no training script given; see: bash ray_start_npu.sh -h")
    if not Path(script).is_file():
        scripts = " ".join(f"internal/{p.name}" for p in sorted((ROOT / "internal").glob("train_*.sh")))
        raise CannotWork(f"training script '{script}' not found; there are: {scripts}")
    if env_script and not Path(env_script).is_file():
        raise CannotWork(f"environment script '{env_script}' not found")
    for name in SETTINGS:
        seconds = name.endswith(("_DEADLINE_S", "_GRACE_S", "_DIES_S"))
        if seconds and not settings[name].replace(".", "", 1).isdigit():
            raise CannotWork(f"{name} must be seconds, it is '{settings[name]}'")
    for name in SWITCHES:
        switched_on(name, settings)
    if not settings["GAP_LIMIT"].replace(".", "", 1).replace("e-", "", 1).isdigit() and settings["GAP_LIMIT"]:
        raise CannotWork(f"GAP_LIMIT must be a number such as 0.05, it is '{settings['GAP_LIMIT']}'")
    number(settings, "RESTARTS", 0, 0, 1000)
    listed = len(settings["NODES"].replace(",", " ").split())
    nnodes = number(settings, "NNODES", listed or 1, high=MOST_NODES)
    if 0 < listed < nnodes:
        raise CannotWork(f"NNODES is {nnodes}, but NODES lists {listed} addresses")
    if listed > nnodes == 1:
        raise CannotWork(
            f"NNODES is 1, but NODES lists {listed} addresses: spare nodes are for two nodes or more"
        )
    if nnodes == 1:
        role, address, head, nodes, interface = "head", "127.0.0.1", "127.0.0.1", [], "lo"
    else:
        mine = own_addresses() if mine is None else mine
        if settings["RANK"]:
            number(settings, "RANK", 0, 0, max(nnodes, listed) - 1)
        role, address, head, nodes = choose_addresses(settings, mine)
        interface = next((name for name, own in mine if own == address), "")
    token = read_token(environ, settings["CLUSTER_TOKEN_FILE"], needed=nnodes > 1)
    ray_port = number(settings, "RAY_PORT", 6379 if nnodes > 1 else free_port(), 1, 65534)
    kind = claim.QUICKSTART if environ.get("RUN_KIND") == claim.QUICKSTART else claim.RUN
    kind = claim.REHEARSAL if switched_on("SMOKE", environ) else kind
    name = Path(script).stem.removeprefix("train_") + "_rehearsal" * (kind == claim.REHEARSAL)
    output_dir = settings["OUTPUT_DIR"] or ROOT / "outputs" / name
    run = settings["RUN_NAME"] or Path(output_dir).name
    if check:
        output_dir = Path(output_dir) / "check"
        kind = kind if kind == claim.REHEARSAL else claim.CHECK
    return Plan(
        script=script,
        env_script=env_script,
        overrides=overrides,
        settings=settings,
        role=role,
        address=address,
        interface=interface,
        head=head,
        nnodes=nnodes,
        nodes=nodes,
        npus=number(settings, "NPUS_PER_NODE", npus_here() or 1, high=MOST_NPUS),
        ray_port=ray_port,
        launch_port=number(settings, "LAUNCH_PORT", ray_port + 1, 1, 65535),
        run=run,
        output_dir=Path(output_dir).absolute(),
        log_dir=Path(settings["LOG_DIR"] or ROOT / "logs" / run).absolute() / address,
        token=token,
        kind=kind,
        check=check,
        save_by=moment(settings["SAVE_BY"], time.time()),
    )


def route_source(target: str) -> str:
    """The address this node uses to reach ``target``; nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError as error:
            raise CannotWork(
                f"there is no route to {target} ({error.strerror}); check MASTER_ADDR, or say "
                "which interface to use with SOCKET_IFNAME"
            ) from error
        return probe.getsockname()[0]


def choose_addresses(
    settings: Mapping[str, str], mine: list[tuple[str, str]], source: Callable[[str], str] = route_source
) -> tuple[str, str, str, list[str]]:
    """Role, own address, the head's address and all nodes' (where known) of a run on several nodes.

    Args:
        settings: uses NODES, MASTER_ADDR, RANK, SOCKET_IFNAME.
        mine: (interface, address) of this node.
        source: own address on the route to another.

    Raises:
        CannotWork: contradictions, or nothing to choose from; lists this node's addresses.
    """
    addresses, here = [address for _, address in mine], ", ".join(" ".join(pair) for pair in mine)
    nodes = [resolve(name) for name in settings["NODES"].replace(",", " ").split()]
    named, rank, wanted = settings["MASTER_ADDR"], settings["RANK"], settings["SOCKET_IFNAME"]
    if not named and not nodes:
        raise CannotWork(
            "NNODES (or a scheduler's WORLD_SIZE) is more than 1, so say where the head is, the "
            "same on each node: MASTER_ADDR=<its address>"
        )
    master = resolve(named) if named else nodes[0]
    if nodes and master != nodes[0]:
        raise CannotWork(f"MASTER_ADDR {named} is not the first of NODES, {nodes[0]}; give one of the two")
    if ipaddress.ip_address(master).is_loopback:
        # What some schedulers tell the head itself, and what /etc/hosts often says of a machine's own name.
        if rank != "0" and named != socket.gethostname():
            raise CannotWork(
                f"MASTER_ADDR {named} is another machine on each node; give the head's address "
                f"on the network, one of: {here}"
            )
        own = pick(wanted, False, mine, here) if wanted else source(ANYWHERE)
        return "head", own, own, []
    local = master in addresses
    if rank and (rank == "0") != local:
        raise CannotWork(
            f"RANK={rank}, but MASTER_ADDR {master} is {'' if local else 'not '}an address of "
            f"this node, and only the head has RANK=0; this node has: {here}"
        )
    if nodes:
        own = next((address for address in nodes if address in addresses), "")
        if not own:
            raise CannotWork(f"none of NODES, {', '.join(nodes)}, is an address of this node: {here}")
    elif wanted:
        own = pick(wanted, ":" in master, mine, here)
        if local and own != master:
            raise CannotWork(
                f"the others look for the head at MASTER_ADDR {master}, but SOCKET_IFNAME "
                f"{wanted} is {own}; make them agree"
            )
    else:
        own = master if local else source(master)
    return "head" if local else "worker", own, master, nodes


def pick(wanted: str, ipv6: bool, mine: list[tuple[str, str]], here: str) -> str:
    """This node's address on an interface, or in a subnet, of the head's address family."""
    if "/" in wanted:
        try:
            network = ipaddress.ip_network(wanted, strict=False)
        except ValueError as error:
            raise CannotWork(
                f"SOCKET_IFNAME: {error}; give an interface (eth0) or a subnet (10.0.0.0/24)"
            ) from error
        found = [address for _, address in mine if ipaddress.ip_address(address) in network]
    else:
        found = [address for interface, address in mine if interface == wanted and (":" in address) == ipv6]
    if not found:
        raise CannotWork(
            f"SOCKET_IFNAME {wanted} has no {'IPv6' if ipv6 else 'IPv4'} address on this node; "
            f"there are: {here}"
        )
    return found[0]


def resolve(name: str) -> str:
    """The address of a host name; an address is returned as it is, in its shortest form."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise CannotWork(
            f"'{name}' is not an address, and no host of that name is found ({error.strerror}); "
            "give the head's IP address as MASTER_ADDR"
        ) from error


def own_addresses() -> list[tuple[str, str]]:
    """(interface, address) of all interfaces that are not link-local."""
    import psutil

    found = []
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                text = address.address.partition("%")[0]
                if not ipaddress.ip_address(text).is_link_local:
                    found.append((interface, text))
    return found


def read_token(environ: Mapping[str, str], file: str, needed: bool = True) -> str:
    """The secret, from CLUSTER_TOKEN or a file that only its owner may read; else, if not needed, random."""
    token = environ.get("CLUSTER_TOKEN", "").strip()
    if not token and file:
        try:
            if stat.S_IMODE(os.stat(file).st_mode) & 0o077:
                raise CannotWork(f"others may read the token in {file}; run: chmod 600 {file}")
            token = Path(file).read_text().strip()
        except OSError as error:
            raise CannotWork(
                f"CLUSTER_TOKEN_FILE {file} cannot be read: {error.strerror}; make one with: "
                f"{NEW_TOKEN.replace('FILE', file)}"
            ) from error
        except UnicodeDecodeError as error:
            raise CannotWork(f"CLUSTER_TOKEN_FILE {file} is no text; make one with: {NEW_TOKEN}") from error
    if not token and not needed:
        return secrets.token_hex(32)
    if not token:
        raise CannotWork(
            "several nodes need a common secret, or anyone on the network could run code there. "
            "Set CLUSTER_TOKEN_FILE to a file that each node can read; make one with: " + NEW_TOKEN
        )
    if len(token) < TOKEN_LENGTH or not token.isascii() or any(c.isspace() for c in token):
        raise CannotWork(
            f"the cluster token must be {TOKEN_LENGTH} or more ASCII characters without spaces; "
            f"make one with: {NEW_TOKEN}"
        )
    return token


def number(settings: Mapping[str, str], name: str, default: int, low: int = 1, high: int = 1 << 31) -> int:
    text = settings[name] or str(default)
    if not text.isascii() or not text.isdigit() or len(text) > 12 or not low <= int(text) <= high:
        what = "a positive number" if (low, high) == (1, 1 << 31) else f"a number from {low} to {high}"
        raise CannotWork(f"{name} must be {what}, it is '{text}'")
    return int(text)

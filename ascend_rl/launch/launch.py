"""Run a training script on one node or many: the work behind ray_start_npu.sh, which has the help.

The same command runs on each node. launch_plan decides what this node is; registry knows what runs here;
rendezvous brings the launchers together and tells each of the others' end; supervise runs what is started
here and leaves nothing behind. This module puts them in order, and so do the functions of this file:

1. check: ports, leftovers of a killed launcher, preflight.
2. meet: the head waits for the other launchers, a worker for the head; who differs is refused (agreement).
3. run, supervised: source ENV_SCRIPT, then launch_node: Ray, and on the head TRAIN_SCRIPT (or check.py).
4. end: the head's status is TRAIN_SCRIPT's, a worker's is the head's. A node that is lost ends all.
5. with --restarts: after a failure, again from 1, until nothing fails or the same step failed twice.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

from ascend_rl.launch import registry
from ascend_rl.launch.agreement import Agreement
from ascend_rl.launch.alert import Alerts
from ascend_rl.launch.die_watch import Book, DieWatch
from ascend_rl.launch.first_step import gate, limit_of
from ascend_rl.launch.hang import Stacks, packed
from ascend_rl.launch.launch_plan import (
    ROOT,
    SETTINGS,
    Plan,
    gather_settings,
    make_plan,
    own_addresses,
    read_cluster_file,
)
from ascend_rl.launch.registry import describe, launches, leftovers, registered, stop_command
from ascend_rl.launch.rendezvous import Head, RendezvousError, Worker
from ascend_rl.launch.supervise import Ending, supervise
from ascend_rl.launch.time_limit import EXIT_RESUMES, TimeLimit
from ascend_rl.process import counts
from ascend_rl.process.die_metrics import FILE as DIES
from ascend_rl.process.logs import set_aside
from ascend_rl.process.ports import free_port
from ascend_rl.process.progress import rank_of_die
from ascend_rl.settings import claim, hidden
from ascend_rl.settings.switch import CannotWork, switched_on

# Of a Unix socket; and the longest one of Ray below TMPDIR (ray/_private/node.py).
LONGEST_SOCKET = 107
RAY_SOCKET = "/ascend-rl-12345678/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
# Not for what is started: frameworks give some of these a meaning of their own.
LAUNCHERS_OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "CLUSTER_TOKEN", "RAY_ADDRESS")
# What a start writes on the head, beside logs.
OF_HEAD = ("metrics.jsonl", "generations.jsonl", "ranks.jsonl", DIES, "hydra", "run.json", "hang")
# Only bash can source the environment script.
INSIDE = """
. "$1/internal/common.sh"
[ -z "$2" ] || . "$2"
exec python -m ascend_rl.launch.launch_node "$3"
"""


def main(arguments: list[str]) -> int:
    try:
        stop_by_signals()
        args = parse(arguments)
        if args.status:
            return registry.status()
        file = read_cluster_file(args.cluster) if args.cluster else {}
        settings = gather_settings(vars(args), os.environ, file)
        if args.stop:
            return registry.stop(settings["RUN_NAME"])
        plan = make_plan(settings, args.script, args.env_script, args.overrides, os.environ, check=args.check)
        if args.dry_run or switched_on("DRY_RUN"):
            show(plan)
            check_node(plan)
            check_inputs(plan)
            return 0
        return launch(plan)
    except (CannotWork, RendezvousError, Stopped) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return getattr(error, "status", 1)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ray_start_npu.sh", add_help=False, allow_abbrev=False)
    parser.add_argument("--cluster", type=Path, metavar="FILE")
    for name in ("--dry-run", "--check", "--status", "--stop"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--verbose", dest="VERBOSE", action="store_const", const="1")
    for name in SETTINGS.keys() - {"VERBOSE"}:
        parser.add_argument(f"--{name.lower().replace('_', '-')}", dest=name)
    for name in ("script", "env_script"):
        parser.add_argument(name, nargs="?", default="")
    parser.add_argument("overrides", nargs=argparse.REMAINDER)

    def error(message):
        raise CannotWork(f"{message}; see: bash ray_start_npu.sh -h")

    parser.error = error
    return parser.parse_args(arguments)


def show(plan: Plan) -> None:
    """Print the plan."""
    print(f"run         {plan.run}: {plan.nnodes} node(s) x {plan.npus} NPUs")
    print(f"this node   {plan.role}, {plan.address} on {plan.interface or 'an unknown interface'}")
    print(
        f"head        {plan.head}: Ray on port {plan.ray_port}"
        + (f", the launcher on port {plan.launch_port}" if plan.nnodes > 1 else "")
    )
    if plan.nodes:
        print(f"nodes       {', '.join(plan.nodes)}")
    print(f"log         {plan.log_file}; more in {plan.log_dir}")
    print(
        "dashboard   "
        + (
            f"{plan.settings['DASHBOARD_HOST']}:{plan.settings['DASHBOARD_PORT']} on the head"
            if plan.settings["DASHBOARD_PORT"]
            else "off"
        )
    )
    for name, value in sorted((plan.environment() | {"RAY_AUTH_TOKEN": "(set)"}).items()):
        print(f"variable    {name}={hidden.variable(name, value)}")
    print(f"CANN        {os.environ.get('ASCEND_HOME_PATH', 'none found')}")
    print(f"preloaded   {os.environ.get('LD_PRELOAD', 'nothing')}")
    print(f"then        {plan.env_script or 'no ENV_SCRIPT'}")
    print(f"starts      {shlex.join(hidden.words(plan.ray_start(Path('TMPDIR/r'), lambda: 'PORT')))}")
    if plan.role == "head":
        train = shlex.join(["bash", plan.script, *hidden.words(plan.overrides)])
        print(f"trains      {train}\n            (what that would run: DRY_RUN=1 {train})")


def check_inputs(plan: Plan) -> None:
    """Raise CannotWork if the run would be refused, for a dry run: the recipe itself is not started.

    Not with SKIP_PREFLIGHT=1. SMOKE=1 brings inputs and sizes of its own; inputs are looked for on the head.
    """
    if plan.on("SKIP_PREFLIGHT"):
        return
    from ascend_rl.lint.lint import lint  # Hydra: 0.4 s that a run does not need

    with mock.patch.dict(os.environ, plan.environment()):
        found = lint(plan.script, plan.env_script or None, plan.overrides, here=plan.role == "head")
    wrong = [f for f in found if f.severity == "error"]
    if switched_on("SMOKE"):
        wrong = [f for f in wrong if f.check.startswith(("script.", "config."))]
    if wrong:
        raise CannotWork("; ".join(f"{hidden.word(f.where)}: {hidden.text(f.why)} ({f.fix})" for f in wrong))


def launch(plan: Plan) -> int:
    """Run everything on this node, again after failures where RESTARTS allows; returns the exit status."""
    began_s = time.monotonic()
    restarts = Restarts(0 if plan.check else int(plan.settings["RESTARTS"]), alerts_of(plan))
    for name in LAUNCHERS_OWN:
        os.environ.pop(name, None)
    os.environ.update(plan.environment())
    why = ""
    try:
        code, again = start(plan, restarts)
        while again:
            stop_by_signals()  # supervise() has taken its own measures
            code, again = start(plan, restarts)
        why = restarts.why or f"status {code}"
    except (CannotWork, RendezvousError, Stopped) as error:
        why = str(error)
        raise
    finally:
        if plan.role == "head":
            restarts.alerts.send("end", restarts.alerts.step, why)
            restarts.alerts.wait()
    return code if code or plan.check else report(plan, time.monotonic() - began_s)


def start(plan: Plan, restarts: Restarts) -> tuple[int, bool]:
    """One start, from the checks to the end; returns the exit status, and whether to restart."""
    check_node(plan)
    preflight(plan)
    try:
        written = OF_HEAD if plan.role == "head" else ()
        if plan.role == "head" and not claim.claim(plan.output_dir, plan.kind):
            written += ("report.json", "report.html", "report.png")  # of whoever had the directory before
        # They may be below output_dir, which has to be claimed while it is empty.
        plan.log_dir.mkdir(parents=True, exist_ok=True)
        plan.log_file.parent.mkdir(parents=True, exist_ok=True)
        set_aside([plan.log_file, *(plan.output_dir / name for name in written)])
        if plan.role == "head":  # for report.html: what differs from the recipe
            started = {"script": plan.script, "env_script": plan.env_script, "overrides": plan.overrides}
            (plan.output_dir / "run.json").write_text(json.dumps(started))
        if switched_on("SMOKE"):  # what its processes record, see ascend_rl/recipe/rehearsal.py
            record = plan.output_dir.resolve() / "record"
            shutil.rmtree(record, ignore_errors=True)
            record.mkdir(parents=True)
            os.environ["SOFTWARE_NPU_RECORD"] = str(record)
            os.environ["SOFTWARE_NPU_MEMORY_FILE"] = str(record / "memory")
            os.environ[counts.VARIABLE] = str(record / "counts")
    except OSError as error:
        raise CannotWork(
            f"{error.filename} cannot be written: {error.strerror}; set OUTPUT_DIR and LOG_DIR"
        ) from error
    if plan.role == "head" and plan.settings["DASHBOARD_PORT"]:
        where = f"{plan.settings['DASHBOARD_HOST']}:{plan.settings['DASHBOARD_PORT']}"
        log(plan, f"Ray's dashboard: http://{where}, which asks for the cluster token")
    with registered(plan) as directory:
        code, again = 1, False
        try:
            if plan.nnodes == 1:
                code, again = alone(plan, directory, restarts)
            else:
                code, again = together(plan, directory, restarts)
        finally:
            if code not in (0, EXIT_RESUMES):
                keep_ray_logs(plan, directory)
    return code, again


def check_node(plan: Plan) -> None:
    """Refuse taken ports, a second launch of the run, leftovers of an earlier one, and a long TMPDIR.

    Raises:
        CannotWork: says whose they are and what to do.
    """
    temporary, longest = tempfile.gettempdir(), LONGEST_SOCKET - len(RAY_SOCKET)
    if len(os.fsencode(temporary)) > longest:
        raise CannotWork(
            f"Ray's sockets need a TMPDIR of at most {longest} bytes, and {temporary} is longer: "
            "set TMPDIR=/tmp, or to a short link to another disk"
        )
    for directory, entry, alive in launches():
        if not alive and leftovers(directory):
            raise CannotWork(
                f"{describe(entry)} was killed and left processes behind, which may hold NPUs "
                f"and ports. End them with: {stop_command(entry)}"
            )
        if not alive:
            registry.forget(directory)
        elif entry["log"] == str(plan.log_file):
            raise CannotWork(
                f"this run is on here already: {describe(entry)}. Stop it with: "
                f"{stop_command(entry)}, or give this one another OUTPUT_DIR"
            )
    if plan.role == "head":
        if why := claim.refusal(plan.output_dir, plan.kind):
            raise CannotWork(f"{why}; set OUTPUT_DIR to another directory, or remove it yourself")
        family = socket.AF_INET6 if ":" in plan.address else socket.AF_INET
        ports = {"RAY_PORT": plan.ray_port} | ({"LAUNCH_PORT": plan.launch_port} if plan.nnodes > 1 else {})
        for name, port in ports.items():
            try:
                socket.create_server((plan.address, port), family=family).close()
            except OSError as error:
                why = os.strerror(error.errno)
                raise CannotWork(
                    f"{name} {port} of {plan.address} cannot be used ({why}): {user_of(port)}, "
                    "or set RAY_PORT to another port on all nodes"
                ) from error


def user_of(port: int) -> str:
    """Who listens on a port, and what to do about it."""
    import psutil

    for _, entry, alive in launches():
        if alive and port in entry["ports"] and entry["role"] == "head":
            return f"it belongs to {describe(entry)}. Stop that with: {stop_command(entry)}"
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            name = psutil.Process(connection.pid).name()
            what = "a Ray cluster that this launcher did not start" if name == "gcs_server" else "used by"
            return f"{what}: {name} (pid {connection.pid}). Stop it"
    return "a process of another user or container has it. Ask them"


def preflight(plan: Plan) -> None:
    """Report now what would fail later, on this node or in the configuration (preflight/preflight.py).

    Not for SMOKE=1, which piles overrides onto those of a cluster and needs none of its nodes.
    """
    if plan.on("SKIP_PREFLIGHT") or switched_on("SMOKE"):
        return
    scripts = [plan.script, plan.env_script or "", *plan.overrides]
    command = [sys.executable, "-m", "ascend_rl.preflight", "--", *scripts]
    if subprocess.run(command, env=os.environ | plan.environment()).returncode:
        raise CannotWork("preflight found what would fail later, see above; SKIP_PREFLIGHT=1 starts anyway")


def alone(plan: Plan, directory: Path, restarts: Restarts) -> tuple[int, bool]:
    """Run on this node only."""
    endings: list[Ending] = []
    limit, stacks = plan.limit(), stacks_of(plan)
    code = supervised(plan, directory, [plan.address], limit, stacks, restarts.alerts, leaving=endings.append)
    return code, decide(plan, restarts, endings[0])


def together(plan: Plan, directory: Path, restarts: Restarts) -> tuple[int, bool]:
    """Run with the other nodes: meet, run until any of them ends, tell the others.

    The head decides whether all restart. A worker does so unless it hears that the end is final: a head
    that is lost may be there again. A spare node (NODES longer than NNODES) waits until then.
    """
    me = {
        "name": socket.gethostname(),
        "address": plan.address,
        "rank": plan.settings["RANK"],
        "has": ", ".join(" ".join(pair) for pair in own_addresses()),
        "must_equal": {
            "RUN_NAME": plan.run,
            "NNODES": plan.nnodes,
            "NPUS_PER_NODE": plan.npus,
            "RAY_PORT": plan.ray_port,
            "RESTARTS": restarts.allowed,
            "--check": plan.check,
        },
    }
    silence_s, deadline_s = plan.seconds("LOST_DEADLINE_S"), plan.seconds("NODES_DEADLINE_S")
    log(
        plan,
        f"this node, {plan.address}, is {'the head' if plan.role == 'head' else 'a worker'} "
        f"of {plan.nnodes} nodes with {plan.npus} NPUs each",
    )
    code, why, again = 1, "", False

    def leaving(ending: Ending) -> None:
        nonlocal again
        if plan.role == "head":
            meant = ending.meant or side.final()
            again = decide(plan, restarts, replace(ending, meant=meant))
            side.announce(ending.code, why, final=not again)
        else:
            again = bool(restarts.allowed and ending.code and not ending.meant)

    ours, port = Agreement(plan, os.environ), plan.launch_port
    if plan.role == "head":
        side = Head(plan.address, port, plan.token, me, plan.nnodes, silence_s, ours.ask, ours.judge)
        side.spares = max(0, len(plan.nodes) - plan.nnodes)
    else:
        side = Worker(plan.head, port, plan.token, me, silence_s, ours.answer)
    try:
        if plan.role == "head":
            addresses = side.gather(plan.nodes, deadline_s, lambda text: log(plan, text))
        else:
            addresses = side.join(deadline_s, lambda text: log(plan, text))
        limit, stacks = plan.limit(), stacks_of(plan)
        side.share(limit)
        if plan.role == "head":
            stacks.others = side.where
        else:
            side.link.asked = lambda: packed(stacks.collect())
        ours.close()
        why = f"(its log there: {plan.log_file})"
        code = supervised(plan, directory, addresses, limit, stacks, restarts.alerts, leaving, side)
    except (RendezvousError, Stopped) as error:
        code, why = error.status, f"({error})"
        link = None if plan.role == "head" or isinstance(error, Stopped) else side.link
        if not link or not (link.ended or restarts.allowed):
            raise
        code = link.ended[0] if link.ended else 1  # a spare node: the run ended without it
        again = bool(restarts.allowed and code)
        log(plan, str(error))
    finally:
        ours.close()
        if plan.role == "worker":
            side.finish(code, why, final=not again)
            again = again and not side.final()
        elif late := side.finish(code, why):
            log(plan, f"these nodes did not confirm the end: {', '.join(late)}")
    return code, again


def supervised(
    plan: Plan,
    directory: Path,
    addresses: list[str],
    limit: TimeLimit,
    stacks: Stacks,
    alerts: Alerts,
    leaving: Callable[[Ending], None],
    side: Head | Worker | None = None,
) -> int:
    """Run launch_node to its end, or to that of another node; the head tells the others at once."""
    is_head = plan.role == "head"
    ended = side.ended if side else lambda: None
    stop = watch_dies(plan, stacks, alerts, side)

    def left(ending: Ending) -> None:
        stop()
        leaving(ending)

    train = ["bash", plan.script, *plan.overrides]
    if plan.check:
        train = [sys.executable, "-m", "ascend_rl.launch.check"]
        train += ["--without-preflight"] if plan.on("SKIP_PREFLIGHT") else []
    job = {
        "ray": plan.ray_start(directory / "r", lambda: free_port(plan.address)),
        "control": [plan.head, plan.ray_port],
        "nodes": addresses,
        "npus": plan.npus,
        "deadline_s": plan.seconds("RAY_DEADLINE_S"),
        "logs": str(plan.log_dir),
        "train": train if is_head else None,
    }
    command = ["bash", "-c", INSIDE, "bash", str(ROOT), plan.env_script, json.dumps(job)]
    if not is_head:
        title = "" if plan.on("VERBOSE") else f"working for {plan.head}"
        return supervise(
            command, plan.log_file, title=title, ended=ended, leaving=left, limit=limit, stacks=stacks
        )
    return supervise(
        command,
        plan.log_file,
        plan.output_dir / "metrics.jsonl",
        "" if plan.check or plan.on("VERBOSE") else "starting Ray, trainer and vLLM",
        plan.seconds("RUN_DEADLINE_S"),
        plan.seconds("STALL_DEADLINE_S"),
        plan.seconds("START_DEADLINE_S"),
        ended,
        left,
        gate(plan.settings["GAP_LIMIT"], plan.output_dir, lambda text: log(plan, text)),
        limit,
        stacks,
        alerts,
    )


def watch_dies(plan: Plan, stacks: Stacks, alerts: Alerts, side: Head | Worker | None) -> Callable[[], None]:
    """Begin to read this node's dies, and on the head to judge those of all nodes; returns what ends it."""

    def warn(text: str) -> None:
        log(plan, f"WARNING: {text}")
        alerts.send("die", alerts.step, text)

    def take(row: dict) -> None:
        if book:
            book.take(plan.address, row)
        else:
            side.link.send(dies=row)

    book = Book(plan.output_dir / DIES, warn) if plan.role == "head" else None
    if book and side:
        side.hear(book.take)
    watch = DieWatch(plan.seconds("WATCH_DIES_S"), take, lambda: rank_of_die(stacks.signs))
    watch.start()

    def stop() -> None:
        watch.stop()
        if book:
            book.close()

    return stop


def alerts_of(plan: Plan) -> Alerts:
    """Only the head tells the user's command."""
    command = plan.settings["ALERT"] if plan.role == "head" else ""
    limit = functools.cache(lambda: limit_of(plan.settings["GAP_LIMIT"], plan.output_dir))
    return Alerts(command, plan.output_dir, lambda text: log(plan, text), limit)


def stacks_of(plan: Plan) -> Stacks:
    return Stacks(plan.output_dir / "hang", plan.address)


class Restarts:
    """Whether to start again after a failure, and why not.

    >>> restarts = Restarts(5)
    >>> [restarts.refusal(Ending(1, step)) for step in (3, 8, 8)]
    ['', '', 'it failed twice at step 8: a third time would be no different']
    >>> restarts.refusal(Ending(130, 9, "stopped by SIGINT", meant=True))
    'it was stopped'
    """

    def __init__(self, allowed: int, alerts: Alerts | None = None):
        self.allowed, self.done = allowed, 0
        self.failed_at = -1
        self.alerts, self.why = alerts or Alerts(), ""  # of the last end

    def refusal(self, ending: Ending) -> str:
        """Why not to restart after this end; "" to restart."""
        if not ending.code:
            return "it is done"
        if ending.meant:
            return "it was stopped"
        if self.done >= self.allowed:
            return f"it was restarted {self.done} times, as often as RESTARTS allows"
        if ending.step == self.failed_at:
            where = f"at step {ending.step}" if ending.step else "before its first step"
            return f"it failed twice {where}: a third time would be no different"
        self.failed_at = ending.step
        self.done += 1
        return ""


def decide(plan: Plan, restarts: Restarts, ending: Ending) -> bool:
    """Whether this node, the head or a single one, restarts; said in the log of the run that ended."""
    refusal = restarts.refusal(ending)
    why = restarts.why = ending.why or f"status {ending.code}"
    if not refusal:
        restarts.alerts.send("restart", ending.step, why)
        log(
            plan,
            f"it failed after step {ending.step} ({why}); start {restarts.done + 1} of at most "
            f"{restarts.allowed + 1} follows and continues from the last checkpoint",
        )
    elif restarts.allowed and ending.code:
        log(plan, f"not restarted: {refusal} ({why})")
    return not refusal


def keep_ray_logs(plan: Plan, directory: Path) -> None:
    """Save Ray's own logs of a failed run, which would be removed with its directory."""
    logs, kept = directory / "r/session_latest/logs", plan.log_dir / "ray"
    if logs.is_dir():
        with contextlib.suppress(OSError, shutil.Error):
            set_aside([kept])
            shutil.copytree(logs, kept)
            log(plan, f"Ray's logs of this node are in {kept}")


def report(plan: Plan, wall_s: float) -> int:
    """Print what the run did, if it left metrics. A rehearsal has its own tables, and their status."""
    if switched_on("SMOKE"):
        told = [plan.script, str(plan.output_dir), "--environment", plan.env_script or ""]
        told += ["--seconds", f"{wall_s:.0f}"]
        return subprocess.run([sys.executable, "-m", "ascend_rl.rehearsal", *told]).returncode
    wanted = plan.role == "head" and not plan.on("SKIP_REPORT")
    if wanted and (plan.output_dir / "metrics.jsonl").exists():
        command = [sys.executable, "-m", "ascend_rl.report", str(plan.output_dir), "--wall", f"{wall_s:.0f}"]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:  # as of a trainer that writes other metrics; the run itself went well
            log(plan, f"no report: {(done.stderr.strip() or 'killed').splitlines()[-1]}")
    return 0


def log(plan: Plan, text: str) -> None:
    """A line for the user, also in this node's log."""
    line = f"[{time.strftime('%H:%M:%S')}] {text}\n"
    with contextlib.suppress(OSError):  # no terminal any more
        sys.stderr.write("\r\x1b[K" * sys.stderr.isatty() + line)  # the line of progress is drawn again below
        sys.stderr.flush()
    with contextlib.suppress(OSError), plan.log_file.open("a") as file:
        file.write(line)


class Stopped(Exception):
    """A signal that came while supervise() was not running."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = 128 + number


def stop_by_signals() -> None:
    """Handle signals before and after supervise(), which handles its own."""

    def stopped(number, frame):
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # a second Ctrl-C must not stop the cleaning
        raise Stopped(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup(1) stays in force
            signal.signal(number, stopped)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # ray_start_npu.sh blocks SIGINT until here


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

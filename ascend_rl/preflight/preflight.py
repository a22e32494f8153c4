"""Say what would make a run fail, before it starts: python -m ascend_rl.preflight [TRAIN_SCRIPT] [ENV_SCRIPT]

Checks this node, or with --cluster every node of the Ray cluster at RAY_ADDRESS, and, if a training
script is given, its configuration. Exit status: 0, 1 if an error was found, 2 if the arguments are wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ascend_rl.lint.dry_run import exports
from ascend_rl.lint.findings import READABLE, Finding, as_json, corrections, render
from ascend_rl.lint.lint import lint
from ascend_rl.preflight import cluster, doctor, node_facts


def sourced(script: str | None) -> tuple[dict[str, str], list[Finding]]:
    """The environment after sourcing `script` as ray_start_npu.sh does; unchanged if that fails."""
    if not script:
        return dict(os.environ), []
    run = exports(Path(script))
    if not run.env:
        said = (run.errors.strip() or "no message").splitlines()[-1]
        return dict(os.environ), [
            Finding(
                "error" if run.confined else "warning",
                "env.script",
                script,
                f"sourcing it fails: {said}" if run.confined else run.errors,
                f"bash -euo pipefail -c '. {script}'",
            )
        ]
    return run.env, []


def examine_cluster(address: str | None, lock: dict[str, dict]) -> list[Finding]:
    """Findings about every node of the Ray cluster."""
    if not address:
        return [
            Finding(
                "error",
                "cluster.ray",
                "RAY_ADDRESS",
                "it is not set, so there is no cluster to ask",
                "start Ray, then RAY_ADDRESS=<head>:<port> python -m ascend_rl.preflight --cluster",
            )
        ]
    if why := node_facts.join(address):
        return [
            Finding(
                "error", "cluster.ray", address, why, "start Ray on the head node, or correct RAY_ADDRESS"
            )
        ]
    nodes, failed = node_facts.survey()
    lost = [
        Finding(
            "error",
            "cluster.node",
            host,
            f"the node could not be examined: {why}",
            "the same code and environment must be on every node; ray status",
        )
        for host, why in failed.items()
    ]
    return [*lost, *(cluster.judge_cluster(nodes, lock) if nodes else [])]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_rl.preflight",
        description=__doc__.split("\n\n")[1],
        epilog="""Examples:
  python -m ascend_rl.preflight                                       # this node
  python -m ascend_rl.preflight TRAIN_SCRIPT ENV_SCRIPT --fix         # and a configuration, with corrections

Writes nothing but its findings. See docs/preflight.md.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("train_script", nargs="?", metavar="TRAIN_SCRIPT", help="check its configuration too")
    parser.add_argument(
        "env_script", nargs="?", metavar="ENV_SCRIPT", help="environment of the run, sourced first"
    )
    parser.add_argument("overrides", nargs="*", metavar="HYDRA_OVERRIDE", help="as given to ray_start_npu.sh")
    parser.add_argument("--cluster", action="store_true", help="all nodes of the Ray cluster at RAY_ADDRESS")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON array of findings instead of a table"
    )
    parser.add_argument("--fix", action="store_true", help="print corrected overrides and exports to paste")
    args = parser.parse_args(argv)
    for script in filter(None, (args.train_script, args.env_script)):
        if not Path(script).is_file():
            parser.error(
                f"{script} not found; there are: "
                + " ".join(sorted(str(p) for p in node_facts.ROOT.glob("internal/*.sh")))
            )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    lock = node_facts.load_lock()
    env, findings = sourced(args.env_script)
    if args.cluster:
        findings += examine_cluster(env.get("RAY_ADDRESS"), lock)
    else:
        findings += doctor.judge_node(node_facts.collect(env), lock)
    if args.train_script:
        findings += lint(args.train_script, args.env_script, args.overrides, here=True)
    if args.json:
        print(as_json(findings))
    elif args.fix:
        print(corrections(findings))
    else:
        render(findings, Console(width=None if sys.stdout.isatty() else READABLE))
    return int(any(finding.severity == "error" for finding in findings))

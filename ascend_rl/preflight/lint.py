"""Read a training script as the cluster would, and report in a second what would fail after an hour.

The script runs in bash without the commands it would start (dry_run); its overrides are composed with the
configuration tree of the patched verl (verl_config); and the rules of lint_script, lint_sizes, lint_options
and lint_engines check the result: sizes that do not divide, token budgets below the longest sequence, options
that vLLM does not have, variables that are read before they are set. Nothing is imported from verl, vLLM or
torch. The first script takes a second, each further one in the same process a fifth of a second.

    python -m ascend_rl.preflight.lint TRAIN_SCRIPT ENV_SCRIPT trainer.nnodes=2 --json

exits 1 if there are errors. Warnings and infos do not stop a run. Checks that need a device, such as the
health of a die, belong to preflight, which runs this linter too.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from ascend_rl.preflight import (  # noqa: F401  (they fill RULES)
    lint_engines,
    lint_files,
    lint_options,
    lint_roll,
    lint_script,
    lint_sizes,
    lint_values,
)
from ascend_rl.preflight.dry_run import Run, dry_run
from ascend_rl.preflight.findings import READABLE, Finding, as_json, corrections, ordered, render
from ascend_rl.preflight.lint_setup import RULES, Setup
from ascend_rl.preflight.verl_config import Resolved, module_file, resolve


def _not_reached(run: Run) -> Finding:
    """The finding for a script that ended without starting to train."""
    said = [line for line in run.errors.splitlines() if line and not line.startswith("+")]
    return Finding(
        "error",
        "script.no_training",
        "dry run",
        "the script calls no verl module; it ended with: " + (said[-1] if said else "no message"),
        "set the variables the script asks for, or correct it",
    )


def _roll(run: Run) -> list[Finding]:
    """Check a recipe of internal/roll by the rules of lint_roll."""
    from hydra.errors import HydraException

    before = dict(os.environ)
    os.environ.update(run.env)  # its configuration refers to variables
    try:
        config = lint_roll.compose(run.args[0], run.args[1:])
    except HydraException as error:
        why = str(error).splitlines()[0]
        return [Finding("error", "config.override", "overrides", why, "see internal/roll/conf for the names")]
    finally:
        os.environ.clear()
        os.environ.update(before)
    return lint_roll.lint(config, int(run.env.get("NPUS_PER_NODE") or 0) or None, run.env)


SUPERVISED = re.compile(r"verl\.trainer\.(fsdp_)?sft_trainer(_ray)?\b")


def _supervised() -> Finding:
    """The finding for a script of supervised fine-tuning, which these rules are not about."""
    return Finding(
        "info",
        "script.supervised",
        "dry run",
        "the script starts supervised fine-tuning: its configuration is not checked",
        "read what it prints when it starts",
    )


def lint(
    train_script: str | Path,
    env_script: str | Path | None = None,
    overrides: Sequence[str] = (),
    here: bool = False,
) -> list[Finding]:
    """All findings, errors first; raises FileNotFoundError for a script that does not exist.

    Args:
        here: the run will take place on this machine, so its paths, keys and interfaces must be on it.
    """
    train, env = Path(train_script), Path(env_script) if env_script else None
    run = dry_run(train, env, overrides)
    if run.module == "ascend_rl.launch.start_roll":
        return ordered(_roll(run))
    scripts = {str(path): path.read_text(errors="replace") for path in (train, env) if path}
    resolved = Resolved({})
    findings: list[Finding] = []
    if SUPERVISED.fullmatch(run.module) or (not run.module and SUPERVISED.search("".join(scripts.values()))):
        return [_supervised()]
    if not run.module:
        findings.append(_not_reached(run))
    elif not module_file(run.module).is_file():
        findings.append(
            Finding(
                "error",
                "script.unknown_module",
                run.module,
                "the patched verl has no such module",
                "start verl.trainer.main_ppo",
            )
        )
    else:
        with mock.patch.dict(os.environ, run.env):  # for ${oc.env:...}
            resolved = resolve(run.module, run.args)
        findings += resolved.findings
    setup = Setup(run, resolved, scripts, extra=len(overrides), here=here)
    unknown = not all(
        setup.get(f"trainer.{key}") for key in ("nnodes", "n_gpus_per_node")
    )  # an empty variable
    for rule in RULES:
        if rule.id.startswith("script.") or (resolved.config and not (unknown and "parallel." in rule.id)):
            findings += rule(setup)
    return ordered(findings)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_rl.preflight.lint",
        description=__doc__.splitlines()[0],
        epilog="""Examples:
  python -m ascend_rl.preflight.lint internal/train_gspo_qwen3_tiny_cpu.sh internal/cpu_env.sh
  python -m ascend_rl.preflight.lint TRAIN_SCRIPT ENV_SCRIPT trainer.nnodes=4 --fix

Writes nothing but its findings. Exit status: 0, 1 if there is an error, 2 if the arguments are wrong.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("train", help="training script")
    parser.add_argument(
        "rest",
        nargs="*",
        metavar="ENV | OVERRIDE",
        help="environment script, sourced first; then Hydra overrides, as for ray_start_npu.sh",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array")
    parser.add_argument("--fix", action="store_true", help="print corrected overrides and exports to paste")
    given = parser.parse_intermixed_args(arguments)
    env = given.rest.pop(0) if given.rest and "=" not in given.rest[0] else None
    try:
        findings = lint(given.train, env or None, given.rest)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        parser.error(str(error))
    if given.json:
        print(as_json(findings))
    elif given.fix:
        print(corrections(findings))
    else:
        from rich.console import Console

        render(findings, Console(width=None if sys.stdout.isatty() else READABLE))
    return int(any(finding.severity == "error" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())

"""Read a training script as the cluster would, and report in a second what would fail after an hour.

The script runs in bash without the commands it would start (dry_run); its overrides are composed with the
configuration tree of the patched verl (verl_config); and the rules of the modules beside this one
check the result: sizes that do not divide, token budgets below the longest sequence, options that vLLM does
not have, variables that are read before they are set. Nothing is imported from verl, vLLM or torch. The first
script takes a second, each further one in the same process a fifth of a second.

    python -m ascend_rl.lint TRAIN_SCRIPT ENV_SCRIPT trainer.nnodes=2 --json

exits 1 if there are errors. Warnings and infos do not stop a run. Checks that need a device, such as the
health of a die, belong to preflight, which runs this linter too.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import ascend_rl.lint.algorithm  # noqa: F401  (it fills RULES)
import ascend_rl.lint.files  # noqa: F401  (it fills RULES)
import ascend_rl.lint.machine  # noqa: F401  (it fills RULES)
import ascend_rl.lint.memory  # noqa: F401  (it fills RULES)
import ascend_rl.lint.options  # noqa: F401  (it fills RULES)
import ascend_rl.lint.rollout  # noqa: F401  (it fills RULES)
import ascend_rl.lint.script  # noqa: F401  (it fills RULES)
import ascend_rl.lint.sizes  # noqa: F401  (it fills RULES)
import ascend_rl.lint.training  # noqa: F401  (it fills RULES)
import ascend_rl.lint.values  # noqa: F401  (it fills RULES)
from ascend_rl.lint import roll
from ascend_rl.lint.dry_run import OTHER_TASK, Run, dry_run
from ascend_rl.lint.findings import READABLE, Finding, as_json, corrections, ordered, render
from ascend_rl.lint.setup import RULES, Setup
from ascend_rl.lint.verl_config import Resolved, module_file, package, resolve, split_arguments, version


def _not_reached(run: Run) -> Finding:
    """The finding for a script that ended without starting to train."""
    said = [line for line in run.errors.splitlines() if line.strip() and not line.startswith("+")]
    return Finding(
        "error",
        "script.no_training",
        "dry run",
        "the script starts no training of verl; it ended with: " + (said[-1][:200] if said else "no message"),
        "set the variables the script asks for, or correct it",
    )


def _not_bash(script: Path) -> str:
    """Why a file is no bash script; empty if it is one."""
    data = script.read_bytes()
    first = data[:200].partition(b"\n")[0]
    if b"\0" in data[:8192]:
        return "it is a binary file"
    if first.startswith(b"#!") and not re.search(rb"\b(ba|da|k|z)?sh\b", first):
        return f"its first line is {first.decode(errors='replace')}"
    if script.suffix in OTHER_FILES:
        return f"{script.suffix} is not the ending of one"
    bash = [shutil.which("bash"), "--norc", "-O", "extglob", "-n", str(script)]
    try:  # it only parses
        parsed = subprocess.run(bash, capture_output=True, stdin=subprocess.DEVNULL, timeout=10, env={})
    except subprocess.TimeoutExpired:
        return "bash does not come to its end"
    lines = parsed.stderr.decode(errors="replace").splitlines()
    return lines[0].removeprefix(f"{script}: ")[:200] if parsed.returncode and lines else ""


def _roots(run: Run) -> list[Path]:
    """Where the run finds modules other than verl's."""
    places = ["", *run.env.get("PYTHONPATH", "").split(":")]
    return [Path(run.cwd, place) for place in dict.fromkeys(places)]


def _folder(module: str) -> Path:
    """The folder of a module of verl."""
    return package().parent.joinpath(*module.split(".")[:-1])


def _foreign(run: Run) -> tuple[Finding, str, bool] | None:
    """(finding, the module to check it as, whether its configuration is unknown) of a module not in verl."""
    if module_file(run.module, _roots(run)).is_file():
        return None
    verl, main = f"verl {version()}", "verl.trainer.main_ppo"
    recipe = ".".join(run.module.split(".")[:2])
    if recipe == "recipe.dapo":
        fix = f"start {main} with algorithm.filter_groups.enable=True (docs/dapo.md)"
        return (
            Finding("error", "script.unknown_module", run.module, f"{recipe} is not in {verl}", fix),
            main,
            False,
        )
    if run.module.startswith("verl.experimental.") and _folder(run.module).is_dir():
        why = f"verl's wheel leaves this module out: checked as {main}, without what its configuration sets"
        fix = "take verl from git (docs/patching.md), or check it where it is"
        return Finding("warning", "script.foreign_module", run.module, why, fix), main, True
    if run.module.startswith(("recipe.", "verl.")):
        name = recipe if recipe.startswith("recipe.") else run.module
        moved = f"verl.experimental.{run.module.partition('.')[2]}"
        fix = f"start {main}, or run it from the checkout that has it"
        fix = f"start {moved}" if _folder(moved).is_dir() else fix
        return (
            Finding("error", "script.unknown_module", run.module, f"{name} is not in {verl}", fix),
            main,
            True,
        )
    why = f"not a module of {verl}: checked as {main}, without what its own configuration sets"
    fix = f"start {main}, or check it from the directory that the run starts in"
    return Finding("warning", "script.foreign_module", run.module, why, fix), main, True


def _of_main_ppo(args: Sequence[str]) -> list[str]:
    """The arguments of recipe.dapo as verl.trainer.main_ppo takes them: with a configuration of verl."""
    options, overrides = split_arguments(args)
    megatron = any("megatron" in word for word in (*options.values(), *overrides))
    return [f"--config-name=ppo_{'megatron_' * megatron}trainer", *overrides]


class _Given(Setup):
    """A run whose configuration is elsewhere: notes which keys a rule asks for."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.asked: set[str] = set()
        super().__init__(*args, **kwargs)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def answers(self) -> bool:
        """Whether all that was asked is given, so that the configuration cannot say otherwise."""
        given = ("trainer.device", *self.given)
        known = [key for key in self.asked for name in given if f"{key}.".startswith(f"{name}.")]
        known += [key for key in self.asked for name in given if name.startswith(f"{key}.")]
        return all(key in known or key.endswith("._target_") for key in self.asked)


def _roll(run: Run) -> list[Finding]:
    """Check a recipe of internal/roll by the rules of roll."""
    from hydra.errors import HydraException

    before = dict(os.environ)
    os.environ.update(run.env)  # its configuration refers to variables
    try:
        config = roll.compose(run.args[0], run.args[1:])
    except HydraException as error:
        why = str(error).splitlines()[0]
        return [Finding("error", "config.override", "overrides", why, "see internal/roll/conf for the names")]
    finally:
        os.environ.clear()
        os.environ.update(before)
    return roll.lint(config, int(run.env.get("NPUS_PER_NODE") or 0) or None, run.env)


OTHER_FILES = (".md", ".rst", ".txt", ".py", ".ipynb", ".yaml", ".yml", ".json", ".toml", ".parquet")
ALWAYS = ("script.", "env.", "config.")  # rules about what is written
OF_ANY_TRAINER = (*ALWAYS, "options.", "paths.")  # and what no trainer but verl's own may mean otherwise
SUPERVISED = re.compile(r"verl\.trainer\.(fsdp_)?sft_trainer(_ray)?\b")


def _other_task(what: str) -> Finding:
    """The finding for a script that does something else, such as supervised fine-tuning."""
    return Finding(
        "info",
        "script.supervised",
        "dry run",
        f"the script starts {what}: its configuration is not checked",
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
    for script in filter(None, (train, env)):
        if script.is_file() and (why := _not_bash(script)):
            fix = "give a bash script that starts the training, such as internal/train_*.sh"
            return [Finding("error", "script.not_bash", str(script), f"it is not a bash script: {why}", fix)]
    run = dry_run(train, env, overrides)
    if not run.confined:
        fix = "check the script on a machine that can; the run itself does not need it"
        return [Finding("warning", "script.unconfined", str(train), run.errors, fix)]
    if run.module == "ascend_rl.launch.start_roll":
        return ordered(_roll(run))
    scripts = {str(path): path.read_text(errors="replace") for path in (train, env) if path}
    resolved = Resolved({})
    findings: list[Finding] = []
    if SUPERVISED.fullmatch(run.module) or (not run.module and SUPERVISED.search("".join(scripts.values()))):
        return [_other_task("supervised fine-tuning")]
    if OTHER_TASK.search(run.module.rpartition(".")[2]):
        return [_other_task(run.module)]
    if not run.module:
        findings.append(_not_reached(run))
    else:
        module, args, partial = run.module, run.args, False
        if foreign := _foreign(run):
            finding, module, partial = foreign
            findings.append(finding)
            args = args if partial else _of_main_ppo(args)
        with mock.patch.dict(os.environ, run.env):  # for ${oc.env:...}
            resolved = resolve(module, args, _roots(run), partial)
        findings += resolved.findings
        if resolved.config and "actor_rollout_ref" not in resolved.config:
            return [_other_task(run.module)]
    own = run.module.startswith(("verl.trainer.", "recipe.dapo."))
    kind = _Given if resolved.partial else Setup
    setup = kind(run, resolved, scripts, extra=len(overrides), here=here)
    unknown = not all(
        setup.get(f"trainer.{key}") for key in ("nnodes", "n_gpus_per_node")
    )  # an empty variable
    for rule in RULES:
        if rule.id.startswith("script.") or (resolved.config and not (unknown and "parallel." in rule.id)):
            seen = (
                kind(run, resolved, scripts, extra=len(overrides), here=here) if resolved.partial else setup
            )
            found = rule(seen) if own or rule.id.startswith(OF_ANY_TRAINER) else []
            findings += found if not resolved.partial or rule.id.startswith(ALWAYS) or seen.answers() else []
    return ordered(findings)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_rl.lint",
        description=__doc__.splitlines()[0],
        epilog="""Examples:
  python -m ascend_rl.lint internal/train_gspo_qwen3_tiny_cpu.sh internal/cpu_env.sh
  python -m ascend_rl.lint TRAIN_SCRIPT ENV_SCRIPT trainer.nnodes=4 --fix

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
    rules = "".join(f"{rule.id:34} {rule.severity:8} {rule.checks}\n" for rule in RULES)
    parser.add_argument(
        "--rules", action="version", version=rules, help="print what every rule requires, and exit"
    )
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

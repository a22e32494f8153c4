"""Find out what a training script would run: execute its bash, but none of the programs it starts.

A recipe is a program: its overrides depend on variables, arithmetic and sourced files, so only bash can say
what they are. The script therefore runs in bash where the kernel lets nothing start but shells and read-only
tools, and nothing be written or sent (confine). Each other program is recorded with its arguments and
environment, and succeeds. A shell that a wrapper would start (sudo, ssh, docker, srun, a scheduler) is
followed in the same way. The last recorded call of a training module is the run.

Bash itself finds variables that are read without having been set: the script runs again under `set -u` until
bash names no new one. What only a cluster has does not end the script here: a missing folder, a missing file
to source, a loop that waits for a node. Cost: about 0.1 s a run, and one run for each unset variable.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ascend_rl.lint import confine
from ascend_rl.lint.confine import SHELLS, Call, Outcome

TIMEOUT_S = 30
UNSET_VARIABLES = 20  # the most to look for
FOLLOWED = 3  # shells within wrappers within shells
MODULE = re.compile(r"(verl|recipe)(\.\w+)+|ascend_rl\.launch\.start_roll")
FILE = re.compile(r"(?:.*/)?((?:verl|recipe)/(?:\w+/)*\w+)\.py")  # of a module that is started by its path
PYTHON = re.compile(r"(.*/)?python[\d.]*")
ASKS_FOR_MODULE = re.compile(r"-[A-Za-z]*m|--module")
OVERRIDE = re.compile(r"[+~]*(actor_rollout_ref|algorithm|critic|data|trainer)\.[\w.]+=")
OTHER_TASK = re.compile(r"eval|generat|merge|convert|serve|data")  # of the last part of a module's name
TEXT = re.compile(r"\b(verl|recipe)(\.\w|/)|\.sh\b")  # of a shell command that may lead to the training
# File, line, name.
UNBOUND = re.compile(r"^(\S+?): line (\d+): ([A-Za-z_]\w*)(?:\[.*\])?: unbound variable", re.M)
# Scripts look for them (`command -v`), and a machine may not have them.
CLUSTER_HAS = (
    "accelerate conda deepspeed docker npu-smi nvidia-smi numactl pip python python3 ray torchrun".split()
)

# Read by every bash of the run. The trap leaves loops that wait, and spares a missing file to source.
GUARD = r"""
[[ -z ${DRY_RUN_UNSET:-} ]] || set -u
command_not_found_handle() { exec -a "$1" "$DRY_RUN_PATH/python" "${@:2}"; }
ulimit() { builtin ulimit "$@" 2>/dev/null || true; }
cd() { builtin cd "$@" 2>/dev/null || true; }
__naps=0 __leave=
sleep() { __naps=$((__naps + 1)); if [[ $__naps -gt 20 ]]; then __leave=1; fi; }
set -T
trap 'if [[ -n ${__errexit:-} ]]; then __errexit=; set -e; fi
      if [[ -n $__leave && ${FUNCNAME[0]:-} != sleep ]]; then __leave=; break 2>/dev/null; fi
      case $-$BASH_COMMAND in *e*"source "* | *e*". "*)
          case $BASH_COMMAND in "source "* | ". "*)
              __file=${BASH_COMMAND#* } __file=${__file%%[<>;&|]*}
              __file=$(eval "__words=($__file)" && printf %s "${__words[0]:-}") 2>/dev/null
              if [[ -n $__file && ! -e $__file && -z $(type -P "$__file") ]]; then __errexit=1; set +e; fi ;;
          esac ;;
      esac' DEBUG
"""


@dataclass(frozen=True)
class Run:
    """The training run a script leads to; `module` is empty if it leads to none."""

    module: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    unset: tuple[tuple[str, str], ...] = ()  # (where, variable), in the order bash met them
    errors: str = ""  # the end of what bash wrote to stderr
    makes: tuple[str, ...] = ()  # directories that commands of ours write before the training, by --out
    cwd: str = ""  # where it starts
    confined: bool = True  # False: it was not run, since this machine cannot keep it from starting programs


def _start(argv: Sequence[str]) -> tuple[int, str]:
    """The index of the module or file that trains, and the module; (0, "") if there is none.

    >>> _start(["nohup", "python3", "-um", "verl.trainer.main_ppo", "a=1"])
    (3, 'verl.trainer.main_ppo')
    >>> _start(["torchrun", "verl/recipe/dapo/main_dapo.py", "a=1"])
    (1, 'recipe.dapo.main_dapo')
    """
    for index, word in enumerate(argv[1:], 1):
        before = argv[index - 1]
        named = ASKS_FOR_MODULE.fullmatch(before) or argv[max(index - 2, 0)] == "-c"  # `train` in common.sh
        if named and MODULE.fullmatch(word):
            return index, word
        if word.startswith("-m") and MODULE.fullmatch(word[2:]):
            return index, word[2:]
        if "=" not in word and (found := FILE.fullmatch(word)) and not before.startswith("--"):
            return index, found[1].replace("/", ".")
        if any(OVERRIDE.match(later) for later in argv[index + 1 :]):
            if ASKS_FOR_MODULE.fullmatch(before) and re.fullmatch(r"\w+(\.\w+)*", word):
                return index, word
            if word.endswith(".py") and "=" not in word and not before.startswith("--"):
                return index, word
    return 0, ""


def _inner(call: Call) -> tuple[int, list[str]]:
    """The shell command within a wrapper's words, and where it begins; (0, []) if there is none."""
    for index, word in enumerate(call.argv):
        if os.path.basename(word) in SHELLS:
            return index, ["bash", *call.argv[index + 1 :]]
        if index and word.endswith(".sh") and Path(call.cwd, word).is_file():
            return index, ["bash", *call.argv[index:]]
        code = index and call.argv[index - 1] == "-c" and PYTHON.fullmatch(call.argv[0])
        if index and not code and re.search(r"\s", word) and TEXT.search(word):
            return index, ["bash", "-c", word]
    if os.path.basename(call.argv[0]) == "ssh" and call.stdin:
        return len(call.argv), ["bash"]
    return 0, []


def _assigned(words: Sequence[str]) -> dict[str, str]:
    """Variables that a wrapper sets (env A=1 ..., sudo A=1 ..., docker run -e A=1 ...)."""
    return dict(word.split("=", 1) for word in words if re.match(r"[A-Z]\w*=", word))


def _keep(argv: list[str]) -> bool:
    """Whether a call may matter: it trains, writes what the training reads, or may lead to a shell."""
    return bool(_start(argv)[0] or "--out" in argv or _inner(Call(argv, stdin="?"))[1] or ".sh" in str(argv))


def _system(name: str) -> str:
    """A program of the system."""
    return shutil.which(name, path=confine.SYSTEM) or name


def _fill(directory: Path) -> dict[str, str]:
    """Create what the dry run needs in `directory`; returns the variables for it."""
    tools = directory / "bin"
    tools.mkdir()
    for name in CLUSTER_HAS:
        (tools / name).symlink_to(_system("true"))
    (directory / "guard.bash").write_text(GUARD)
    (directory / "tmp").mkdir()
    return {
        "BASH_ENV": str(directory / "guard.bash"),
        "DRY_RUN_PATH": str(tools),
        "DRY_RUN": "1",
        "TMPDIR": str(directory / "tmp"),
    }


def _followed(outcome: Outcome, room: str, deadline: float, depth: int = FOLLOWED) -> Iterator[Call]:
    """The calls of a run, and those of the shells that wrappers would start."""
    for call in outcome.calls:
        yield call
        index, command = _inner(call)
        left = deadline - time.monotonic()
        if depth and left > 0 and command and not _start(call.argv)[0]:
            env = call.env | _assigned(call.argv[:index])
            command[0] = _system("bash")
            inner = confine.run(command, env, room, _keep, call.cwd, call.stdin, left)
            yield from _followed(inner, room, deadline, depth - 1)


@contextlib.contextmanager
def _guarded(variables: Mapping[str, str]) -> Iterator[tuple[dict[str, str], Callable[[dict], dict]]]:
    """The environment of a dry run, and what takes its own variables out of an environment again."""
    with tempfile.TemporaryDirectory(prefix="dry_run_") as temporary:
        guard = _fill(Path(temporary))
        tools = f":{guard['DRY_RUN_PATH']}"

        def cleaned(env: dict[str, str]) -> dict[str, str]:
            env = {name: value for name, value in env.items() if not name.startswith(("DRY_RUN", "BASH_"))}
            env["PATH"] = env.get("PATH", "").removesuffix(tools)
            if env.get("TMPDIR") == guard["TMPDIR"]:
                del env["TMPDIR"]
                env |= {"TMPDIR": variables["TMPDIR"]} if "TMPDIR" in variables else {}
            return env

        yield {**variables, **guard, "PATH": variables.get("PATH", os.defpath) + tools}, cleaned


def exports(script: Path) -> Run:
    """The environment that sourcing a script here leads to, as `env` of the run; empty if sourcing fails."""
    with _guarded(os.environ) as (environment, cleaned):
        del environment["BASH_ENV"]  # what is missing here will be missing in the run
        code = 'set -euo pipefail; . "$1" >&2; exec "$DRY_RUN_PATH/env_of_script"'
        (Path(environment["DRY_RUN_PATH"]) / "env_of_script").symlink_to(_system("true"))
        command = [_system("bash"), "-c", code, "bash", str(script.resolve())]
        try:
            outcome = confine.run(
                command, environment, environment["TMPDIR"], lambda words: words[0].endswith("env_of_script")
            )
        except confine.Unconfined as error:
            return Run(errors=str(error), confined=False)
        env = cleaned(outcome.calls[-1].env) if outcome.calls else {}
        return Run(env=env, errors=outcome.stopped or outcome.err)


def _execute(
    train: Path, env_script: Path | None, overrides: Sequence[str], variables: dict[str, str], unset: bool
) -> Run:
    """One run, without what is unset."""
    with _guarded(variables) as (environment, cleaned):
        source = 'env=$1 train=$2; shift 2; [ -z "$env" ] || . "$env"; exec bash "$train" "$@"'
        command = [_system("bash"), "-c", source, "bash", str(env_script or ""), str(train), *overrides]
        environment |= {"DRY_RUN_UNSET": "1"} if unset else {}
        room, deadline = environment["TMPDIR"], time.monotonic() + TIMEOUT_S
        outcome = confine.run(command, environment, room, _keep, timeout_s=TIMEOUT_S)
        calls = list(_followed(outcome, room, deadline))[::-1]
        errors = outcome.stopped or outcome.err or outcome.out
        makes = tuple(
            call.argv[call.argv.index("--out") + 1]
            for call in calls
            if "--out" in call.argv[:-1] and any(word.startswith("ascend_rl.") for word in call.argv)
        )
        starts = [(call, *_start(call.argv)) for call in calls]
        starts = [start for start in starts if start[1]]
        starts.sort(key=lambda start: bool(OTHER_TASK.search(start[2].rpartition(".")[2])))
        for call, index, module in starts[:1]:
            env = cleaned(call.env | _assigned(call.argv[1:index]))
            return Run(module, tuple(call.argv[index + 1 :]), env, (), errors, makes, call.cwd)
        return Run(errors=errors)


def dry_run(
    train: Path,
    env_script: Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Run:
    """Run the scripts as ray_start_npu.sh would, with nothing started; raises FileNotFoundError."""
    for script in (train, env_script):
        if script is not None and not script.is_file():
            raise FileNotFoundError(f"'{script}' does not exist; give the path of a bash script")
    given = dict(os.environ if environ is None else environ)
    try:
        return _dry_run(train, env_script, overrides, given)
    except confine.Unconfined as error:
        return Run(errors=str(error), confined=False)


def environment_script(recipe: Path) -> Path:
    """The environment script that a recipe of internal/ is made for."""
    kinds = {"_moe_tiny_": "cpu_megatron", "_tiny_": "cpu", "_235b_": "qwen3_235b", "_32b_": "qwen3_32b"}
    kinds |= {"_30b_": "qwen3_30b_a3b", "_3b_": "qwen2_5_3b"}
    return recipe.with_name(next(f"{kind}_env.sh" for part, kind in kinds.items() if part in recipe.stem))


def _of_scheduler(name: str, script: Path) -> str:
    """What a scheduler would set a variable to; empty if it is none of its variables.

    >>> _of_scheduler("SLURM_PROCID", Path("train.sh")), _of_scheduler("DATA", Path("train.sh"))
    ('0', '')
    """
    if not re.match(r"(SLURM|SLURMD|PBS|LSB|SGE)_", name):
        return ""
    if name.endswith("DIR"):
        return os.getcwd()
    if re.search("NODELIST|NODENAME|NODEFILE|HOSTS?$|PARTITION|JOB_NAME", name):
        return "localhost"
    if name.endswith(("PROCID", "NODEID", "LOCALID", "TASK_ID")):
        return "0"
    text = script.read_text(errors="replace") if "NODES" in name else ""
    nodes = re.search(r"^#SBATCH\s+(?:--nodes[=\s]|-N\s*)(\d+)", text, re.M)
    return nodes[1] if nodes else "1"


def _dry_run(train: Path, env_script: Path | None, overrides: Sequence[str], given: dict[str, str]) -> Run:
    """Run the scripts until no new variable is found that nothing set."""
    given.setdefault("USER", "user")
    variables = dict(given)
    found: list[tuple[str, str]] = []
    while True:
        run = _execute(train, env_script, overrides, variables, unset=True)
        match = UNBOUND.search(run.errors)
        if not match or match[3] in variables or len(found) == UNSET_VARIABLES:
            break
        if value := _of_scheduler(match[3], train):
            variables[match[3]] = given[match[3]] = value
            continue
        found.append((f"{match[1]}:{match[2]}", match[3]))
        variables[match[3]] = ""
    if found or not run.module:
        run = _execute(train, env_script, overrides, given, unset=False)
    return replace(run, unset=tuple(found), errors=run.errors[-2000:])

"""Find out what a training script would run: execute its bash, but none of the commands it starts.

A recipe is a program: its overrides depend on variables, arithmetic and sourced files, so only bash can say
what they are. The script therefore runs in bash with a PATH of its own, in which a few read-only tools (cat,
date, seq) are real and every other command, from python to rm, is a recorder that writes its arguments and
environment to a file and succeeds. A DEBUG trap, inherited by functions, subshells and child scripts,
restores that PATH before each command and removes output files from the command line, so that neither "export
PATH=..." nor "> train.log" gets through. The last recorded call of a `verl` module, or of ROLL's start, is
the training run.

Bash itself finds variables that are read without having been set: the script runs again under `set -u` until
bash names no new one. This guards against accidents, not against malice: commands given by an absolute path
do run. Cost: about 50 ms a run, and one run for each unset variable.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

TIMEOUT_S = 30
UNSET_VARIABLES = 20  # the most to look for
MODULE = re.compile(r"verl(\.\w+)+|ascend_rl\.launch\.start_roll")
# File, line, name.
UNBOUND = re.compile(r"^(\S+?): line (\d+): ([A-Za-z_]\w*)(?:\[.*\])?: unbound variable", re.M)

REAL = (
    "awk basename bash bc cat cut date dirname env expr getconf grep head hostname id ls nproc printf pwd "
    "readlink realpath seq sh sort tail test tr uname uniq wc whoami"
).split()
# Looked up by `command -v` and `exec`, which do not ask command_not_found_handle.
RECORDED = (
    "accelerate deepspeed docker kill killall mkdir nohup numactl pip pip3 pkill python python3 ray rm "
    "sed setsid sleep sudo taskset tee time timeout torchrun xargs"
).split()

# -p: without GUARD. It writes the command, "\x1e" and the environment, each word ended by NUL.
RECORDER = r"""#!/bin/bash -p
case ${0##*/} in sed) [[ " $*" == *" -i"* || " $*" == *" --in-place"* ]] || exec "$DRY_RUN_SED" "$@" ;; esac
{
    printf '%s\0' "${0##*/}" "$@"
    printf '\x1e\0'
    "$DRY_RUN_ENV" -0
} >"$DRY_RUN_RECORDS/${EPOCHREALTIME/./}.$$"
"""

# Read by every bash of the run. extdebug, with which a trap can skip a command, would start a debugger here.
# In BASH_COMMAND bash prints redirections last, so they are cut from the end.
GUARD = r"""
PATH=$DRY_RUN_PATH
[[ -z ${DRY_RUN_UNSET:-} ]] || set -u
set -C
command_not_found_handle() { "$DRY_RUN_PATH/.record" "$@"; }
kill() { "$DRY_RUN_PATH/kill" "$@"; }
ulimit() { builtin ulimit "$@" 2>/dev/null || true; }
# CANN's set_env.sh, which a machine without NPUs does not have.
__no_such_toolkit() {
    local words=()
    [[ $1 =~ ^(source|\.)[[:space:]]+([^[:space:]\;\&\|]*set_env\.sh[\"\']?)$ ]] || return 1
    eval "words=(${BASH_REMATCH[2]})" 2>/dev/null && [[ ! -e ${words[0]:-} ]]
}
__to_file='^(.*[^[:space:]]) [0-9]*(&>>|&>|>>|>\||>) ?([^[:space:]"'\''&]+|"[^"]*")( [0-9]*>&[0-9-])*$'
__without_files() {
    __plain=$1
    [[ $1 == "[["* || $1 == "(("* || $1 == *"<<"* || $1 != *">"* ]] && return 1
    while [[ $__plain =~ $__to_file && ${BASH_REMATCH[3]} != /dev/* ]]; do __plain=${BASH_REMATCH[1]}; done
    [[ $__plain != "$1" ]]
}
trap 'PATH=$DRY_RUN_PATH; set -T; shopt -s extdebug
      if [[ -n ${__errexit:-} ]]; then __errexit=; set -e; fi
      if __without_files "$BASH_COMMAND"; then eval "$__plain"; false
      elif [[ $- == *e* ]] && __no_such_toolkit "$BASH_COMMAND"; then __errexit=1; set +e; fi' DEBUG
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


def _fill(directory: Path) -> dict[str, str]:
    """Create the PATH of the dry run in `directory`; returns the variables that GUARD and RECORDER need."""
    tools, records = directory / "bin", directory / "records"
    tools.mkdir()
    records.mkdir()
    for name in (".record", *RECORDED):
        (tools / name).write_text(RECORDER)
        (tools / name).chmod(0o755)
    for name in REAL:
        if path := shutil.which(name):
            (tools / name).symlink_to(path)
    (directory / "guard.bash").write_text(GUARD)
    return {
        "BASH_ENV": str(directory / "guard.bash"),
        "DRY_RUN_PATH": str(tools),
        "DRY_RUN_RECORDS": str(records),
        "DRY_RUN_SED": shutil.which("sed"),
        "DRY_RUN_ENV": shutil.which("env"),
        "DRY_RUN": "1",
    }


def _is_module(before: list[str]) -> bool:
    """Whether the next word is what runs: python -m WORD, or python3 -c CODE WORD (`train` in common.sh)."""
    return before[-1] == "-m" or before[-2:-1] == ["-c"]


def _execute(
    train: Path, env_script: Path | None, overrides: Sequence[str], variables: dict[str, str], unset: bool
) -> Run:
    """One run, without what is unset."""
    with tempfile.TemporaryDirectory(prefix="dry_run_") as temporary:
        guard = _fill(Path(temporary))
        source = 'env=$1 train=$2; shift 2; [ -z "$env" ] || . "$env"; exec bash "$train" "$@"'
        command = ["bash", "-c", source, "bash", str(env_script or ""), str(train), *overrides]
        environment = variables | guard | ({"DRY_RUN_UNSET": "1"} if unset else {})
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            errors = process.communicate(timeout=TIMEOUT_S)[1].decode(errors="replace")
        except subprocess.TimeoutExpired:
            errors = f"no end within {TIMEOUT_S} s: the script waits for something"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own background jobs
        process.communicate()
        records = [
            record.read_bytes().decode(errors="replace").partition("\0\x1e\0")
            for record in sorted(Path(guard["DRY_RUN_RECORDS"]).iterdir(), reverse=True)
        ]
        calls = [(words.split("\0"), rest) for words, _, rest in records]
        makes = tuple(
            argv[argv.index("--out") + 1]
            for argv, _ in calls
            if "--out" in argv[:-1] and any(word.startswith("ascend_rl.") for word in argv)
        )
        for argv, rest in calls:
            start = next(
                (i for i in range(1, len(argv)) if MODULE.fullmatch(argv[i]) and _is_module(argv[:i])), 0
            )
            if start:
                env = dict(entry.split("=", 1) for entry in rest.split("\0") if "=" in entry)
                given = dict(word.split("=", 1) for word in argv[1:start] if re.match(r"[A-Z]\w*=", word))
                env = {
                    name: value
                    for name, value in (env | given).items()
                    if not name.startswith(("DRY_RUN", "BASH_"))
                }
                return Run(argv[start], tuple(argv[start + 1 :]), env, errors=errors, makes=makes)
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
    variables = dict(given)
    found: list[tuple[str, str]] = []
    while True:
        run = _execute(train, env_script, overrides, variables, unset=True)
        match = UNBOUND.search(run.errors)
        if not match or match[3] in variables or len(found) == UNSET_VARIABLES:
            break
        found.append((f"{match[1]}:{match[2]}", match[3]))
        variables[match[3]] = ""
    if found or not run.module:
        run = _execute(train, env_script, overrides, given, unset=False)
    return replace(run, unset=tuple(found), errors=run.errors[-2000:])

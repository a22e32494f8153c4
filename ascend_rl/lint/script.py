"""Rules about what is written in a script: its bash, its overrides, and the variables it exports.

Bash forgives what Hydra or HCCL will not: a variable that is set too late is empty, a blank after a backslash
ends the command, a key that is given twice counts once. Variables are judged by the table of
tuning, on NPU runs only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ascend_rl.host.core_binding import for_torch_npu
from ascend_rl.lint.pinned import mapping, sources
from ascend_rl.lint.setup import VLLM, Setup, as_mapping, rule
from ascend_rl.lint.tuning import table

# Set by ray_start_npu.sh or by schedulers.
LAUNCHER_SETS = {"NNODES", "NPUS_PER_NODE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "OUTPUT_DIR"}
INHERITED = {"PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH"}  # scripts append to what may be unset
LONG_RESPONSE_TOKENS = 16384
PLACEHOLDER = re.compile(  # <HEAD_IP>, your_model, xx/weights, /path/to/x, x.x.x.x
    r"<[^<>=]+>|\byour[_-]\w+|(^|[\['\"])[xX]{2,}(/|$)|/path/to/|(^|=)x+(\.x+){3}|\bTODO\b|\bCHANGE_?ME\b"
)


# The scripts as text.


def _lines(s: Setup) -> Iterator[tuple[str, str]]:
    """(where, line) of all scripts, without comment lines."""
    for path, text in s.scripts.items():
        for number, line in enumerate(text.splitlines(), 1):
            if not line.lstrip().startswith("#"):
                yield f"{path}:{number}", line


@rule(
    "script.kill_by_name",
    "error",
    "no process is killed by name",
    why="it kills every Python program of the machine, other users' and the launcher's included",
    fix="remove it; ray_start_npu.sh stops what it started, also after a crash (--stop)",
)
def kill_by_name(s):
    for where, line in _lines(s):
        of_a_parent = re.search(r"\bpkill\b.*\s(-P|--parent)\b", line) and " -f" not in line
        if (re.search(r"\b(pkill|killall)\b", line) and not of_a_parent) or re.search(
            r"\bps\b.*\bgrep\b.*\bkill\b", line
        ):
            yield where, line.strip()[:60]


@rule(
    "script.home",
    "warning",
    "HOME is not changed",
    why="caches, keys and Ray's files of this user move, and differ from node to node",
    fix="set HF_HOME, XDG_CACHE_HOME or OUTPUT_DIR instead",
)
def script_home(s):
    for where, line in _lines(s):
        if re.match(r"\s*(export\s+)?HOME=", line):
            yield where, line.strip()


@rule(
    "script.unquoted_arguments",
    "warning",
    'arguments are passed on as "$@"',
    why="an override with a space or a * is split into several words",
    fix='write "$@"',
)
def unquoted_arguments(s):
    for where, line in _lines(s):
        if re.search(r"""(?<!["'\\])\$[@*](?!["'])""", line):
            yield where, line.strip()[-60:]


@rule(
    "script.continuation",
    "error",
    "nothing follows a backslash that continues a line",
    why="the command ends there; the overrides below it are not passed on but run as commands of their own",
    fix="remove what follows the backslash, or the comment line below it; better: an array, ARGS=( ... )",
)
def script_continuation(s):
    for where, line in _lines(s):
        if re.search(r"\\[ \t]+(#.*)?$", line):
            yield where, f"'{line.strip()[-40:]}' ends in a backslash and a blank"
    for path, text in s.scripts.items():
        lines = text.splitlines()
        for number, (before, line) in enumerate(zip(lines, lines[1:], strict=False), 2):
            if (
                before.endswith("\\")
                and not before.lstrip().startswith("#")
                and line.lstrip().startswith("#")
            ):
                yield f"{path}:{number}", "a comment between continued lines"


@rule(
    "script.installs",
    "warning",
    "a run installs nothing",
    why="versions no longer match the lock, e.g. a transformers whose NPU attention asks for the metadata of "
    "flash_attn and stops with PackageNotFoundError; nodes may differ",
    fix="change the image, or requirements and the lock",
)
def script_installs(s):
    for where, line in _lines(s):
        if re.search(r"\bpip3?\s+install\b", line):
            yield where, line.strip()[:60]


def _tested(s: Setup, where: str, name: str) -> bool:
    """The line asks whether the variable is empty, so it may well be."""
    path, _, number = where.rpartition(":")
    try:
        line = Path(path).read_text().splitlines()[int(number) - 1]
    except (OSError, IndexError):
        return False
    return bool(re.search(rf"-[zn]\s+\"?\$\{{?{name}\b", line))


ASSIGNMENT = r"^\s*(export\s+|local\s+|readonly\s+)?(\w+=\S*\s+)*{name}\+?="


def _assigned(s: Setup, name: str) -> bool:
    return any(re.search(ASSIGNMENT.format(name=name), text, re.M) for text in s.scripts.values())


def _assigned_above(s: Setup, name: str, path: str, number: int) -> bool:
    """A line above sets it: what it was set to was empty, since the dry run starts no commands."""
    above = "\n".join(s.scripts.get(path, "").splitlines()[: number - 1])
    return bool(re.search(ASSIGNMENT.format(name=name), above, re.M))


@rule(
    "script.used_before_set",
    "error",
    "no variable is used before the line that sets it",
    why="bash reads it as empty or 0 there: a token budget divided by it is empty",
    fix="move the assignment up",
)
def used_before_set(s):
    for where, name in s.run.unset:
        path, _, number = where.rpartition(":")
        if _assigned(s, name) and name not in INHERITED and not _assigned_above(s, name, path, int(number)):
            yield where, f"{name} is used before it is set"


@rule(
    "script.never_set",
    "warning",
    "every variable that is used is set",
    why="bash reads it as empty",
    fix="set it, or give it a default: ${NAME:-...}",
)
def never_set(s):
    for where, name in s.run.unset:
        if name not in LAUNCHER_SETS and not _assigned(s, name) and not _tested(s, where, name):
            yield where, f"{name} is used but nowhere set"


@rule(
    "script.placeholder",
    "error",
    "no placeholder is left",
    fix="pass the value by a variable or an override instead of editing the script",
)
def script_placeholder(s):
    names = [name for name in s.env if re.search(r"ADDR|_IF_IP|IFNAME|_PATH$|_DIR$", name)]
    values = [(f"${name}", s.env[name]) for name in names]
    values += [(key, value) for key, given in s.given.items() for value in given]
    for where, value in values:
        if PLACEHOLDER.search(value):
            yield where, f"'{value}' is a placeholder"


# The overrides.


@rule(
    "config.duplicate",
    "warning",
    "no key is given twice",
    why="the last one wins, whatever a reader of the first believes",
    fix="keep one",
)
def config_duplicate(s):
    keys = [
        word.partition("=")[0].lstrip("+~") for word in s.own_args if "=" in word and not word.startswith("-")
    ]
    for key in dict.fromkeys(keys):
        if keys.count(key) > 1:
            yield key, "given " + " and ".join(s.given.get(key, ["?"])[: keys.count(key)])


@rule(
    "config.empty_value",
    "error",
    "no override is empty",
    why="a variable in it was empty",
    fix="set the variable; write null if nothing is meant",
)
def empty_value(s):
    for key, values in s.given.items():
        if "" in values:
            yield key, "no value"


# The environment: NPU runs only. The table says which values there are and which are needed.


def _variables(s: Setup) -> Iterator[Any]:
    if s.npu:
        yield from (entry for entry in table() if entry.variable)


@rule(
    "env.value",
    "error",
    "variables have valid values",
    why="it is ignored or refused",
    fix="see docs/tuning.md",
)
def env_value(s):
    for entry in _variables(s):
        value = s.env.get(entry.name)
        if value is not None and entry.values and value not in entry.values:
            yield f"${entry.name}", f"'{value}'", f"use one of: {', '.join(entry.values)}"


@rule("env.required", "error", "the variables that RL on NPUs requires are set", fix="see docs/tuning.md")
def env_required(s):
    file = sources("verl", "workers/rollout/vllm_rollout/utils.py")
    own = mapping("VLLM_ASCEND_REQUIRED_ENV_VARS", file) if s.vllm else {}  # verl sets what is unset
    for entry in _variables(s):
        if entry.name not in s.env and (own.get(entry.name) == entry.require or not s.vllm):
            continue
        if entry.require is not None and s.env.get(entry.name) != entry.require:
            yield (
                f"${entry.name}",
                f"'{s.env.get(entry.name, 'not set')}': {entry.why['en']}",
                f"export {entry.name}={entry.require}",
            )


@rule(
    "env.unread",
    "warning",
    "something reads every variable that is set",
    why="nothing in the pinned versions reads it",
    fix="remove it",
)
def env_unread(s):
    for entry in _variables(s):
        if entry.unread is not None and entry.name in s.env:
            yield f"${entry.name}", "set", f"use {entry.unread}" if entry.unread else "remove it"


@rule("env.advised", "info", "the variables recommended by the practice are set", fix="see docs/tuning.md")
def env_advised(s):
    for entry in _variables(s):
        if entry.advise is not None and entry.name not in s.env:
            yield f"${entry.name}", f"not set: {entry.why['en']}", f"export {entry.name}={entry.advise}"


@rule(
    "env.hccl_timeouts",
    "warning",
    "HCCL waits long enough on several nodes and for long responses",
    why="links need more than 120 s to come up on many nodes, and ranks that finish rollouts early wait "
    "longer than 1836 s for the others (verl#2629)",
    fix="export HCCL_CONNECT_TIMEOUT=7200 HCCL_EXEC_TIMEOUT=7200",
)
def hccl_timeouts(s):
    if s.npu and s.number("trainer.nnodes") > 1 and s.variable("HCCL_CONNECT_TIMEOUT", 120) < 600:
        yield "$HCCL_CONNECT_TIMEOUT", s.env.get("HCCL_CONNECT_TIMEOUT", "not set (120 s)")
    if (
        s.npu
        and s.number("data.max_response_length") >= LONG_RESPONSE_TOKENS
        and s.variable("HCCL_EXEC_TIMEOUT", 1836) < 3600
    ):
        yield "$HCCL_EXEC_TIMEOUT", s.env.get("HCCL_EXEC_TIMEOUT", "not set (1836 s)")


@rule(
    "env.aiv_domains",
    "warning",
    "one communication domain of the rollout expands its collectives on the vector cores",
    why="CANN documents AIV for one domain at a time; with several, collectives were reported to hang or to "
    "time out (vllm-ascend#14928)",
    fix="unset HCCL_OP_EXPANSION_MODE, and set additional_config.hccl_op_expansion_mode.tp=AIV",
)
def aiv_domains(s):
    if s.npu and s.env.get("HCCL_OP_EXPANSION_MODE") == "AIV":
        yield "$HCCL_OP_EXPANSION_MODE", "AIV, for all domains of training and rollout"
    where = "additional_config.hccl_op_expansion_mode"
    modes = as_mapping(as_mapping(s.engine_options.get("additional_config")).get("hccl_op_expansion_mode"))
    if len(domains := [domain for domain, mode in modes.items() if mode == "AIV"]) > 1:
        yield f"{VLLM}.{where}", f"AIV for {', '.join(domains)}"


@rule(
    "env.cpu_affinity",
    "warning",
    "CPU_AFFINITY_CONF has ranges, or CORE_BINDING=1 adds them",
    why="torch_npu divides the CPUs by the dies a process sees, and Ray shows a worker one: mode 1 then "
    "allows it all CPUs, and mode 2 puts the main threads of all workers on CPU 0",
    fix="export CPU_AFFINITY_CONF=0, or CORE_BINDING=1 as well (docs/host_bound.md)",
)
def cpu_affinity(s):
    given = s.env.get("CPU_AFFINITY_CONF", "")
    if s.npu and s.variable("CORE_BINDING") != 1 and for_torch_npu(given, [[0]]) not in (None, given):
        yield "$CPU_AFFINITY_CONF", f"'{given}', without ranges"


@rule(
    "env.device_connections",
    "error",
    "CUDA_DEVICE_MAX_CONNECTIONS is 1 with Megatron's TP or CP",
    why="Megatron overlaps communication only with it, and stops without",
    fix="export CUDA_DEVICE_MAX_CONNECTIONS=1",
)
def device_connections(s):
    value = s.env.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # verl sets it to 1 where it is not set
    if s.megatron and s.tp * s.cp > 1 and value != "1":
        yield "$CUDA_DEVICE_MAX_CONNECTIONS", value

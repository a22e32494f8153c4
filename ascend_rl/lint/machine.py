"""Rules about what is on a machine: paths, keys of loggers, devices, ports, interfaces.

They can be judged only where the run will take place. `Setup.here` says whether that is this machine;
elsewhere a missing path is an info, not an error.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ascend_rl.lint.setup import ACTOR, REF, ROLLOUT, VLLM, Hit, Setup, local_path, rule


def _paths(s: Setup) -> Iterator[tuple[str, str]]:
    """(key, path) of every input of the run."""
    for key in ("data.train_files", "data.val_files"):
        value = s.get(key)
        if key in s.given:
            yield from ((key, str(one)) for one in (value if isinstance(value, list) else [value]))
    keys = ["actor_rollout_ref.model.path", "actor_rollout_ref.model.tokenizer_path"]
    keys += ["actor_rollout_ref.model.hf_config_path", "data.custom_cls.path"]
    keys += ["custom_reward_function.path", "reward.custom_reward_function.path"]
    keys += [f"{ROLLOUT}.multi_turn.tool_config_path", f"{ROLLOUT}.agent.agent_loop_config_path"]
    keys += [f"{ROLLOUT}.multi_turn.interaction_config_path"]
    keys += ["critic.model.path"] if s.critic and "critic.model.path" in s.given else []
    if s.get("reward.reward_model.enable"):
        keys.append("reward.reward_model.model_path")
    for part in (ACTOR, REF):
        if s.get(f"{part}.megatron.use_dist_checkpointing"):
            keys.append(f"{part}.megatron.dist_checkpointing_path")
    if s.get("trainer.resume_mode") == "resume_path":
        keys.append("trainer.resume_from_path")
    yield from ((key, str(s.get(key))) for key in dict.fromkeys(keys) if s.get(key))
    if s.get(f"{VLLM}.speculative_config.model"):
        yield f"{VLLM}.speculative_config.model", str(s.get(f"{VLLM}.speculative_config.model"))


def _missing(s: Setup) -> Iterator[tuple[bool, Hit]]:
    """(whether it is known to be wrong, the hit) of inputs that are not on this machine.

    A path is known to be wrong if this machine runs the training, if other inputs are here, or if the
    directory that should hold it is. What the script itself makes is not looked for.
    """
    ours = Path(__file__).resolve().parents[2]
    paths = [(key, path) for key, text in _paths(s) if (path := local_path(text))]
    inputs = ("data.train_files", "data.val_files", "actor_rollout_ref.model.path")
    some = any(path.exists() for key, path in paths if key in inputs)
    for key, path in paths:
        if path.exists() or s.made(path):
            continue
        beside = path.parent not in (Path("/"), Path.home(), Path.cwd(), ours) and path.parent.is_dir()
        near = []
        if path.parent.is_dir():
            names = [entry.name for entry in path.parent.iterdir()]
            near = difflib.get_close_matches(path.name, names, 1, 0.6)
        found = path.with_name(near[0]) if near else None
        yield (
            s.here or some or beside,
            (
                key,
                str(path),
                f"there is {found}" if found else "correct the path; every node must see it",
                s.override(key, found) if found and not isinstance(s.get(key), list) else "",
            ),
        )


@rule(
    "paths.missing",
    "error",
    "models, data, rewards, tools and checkpoints that the run reads exist",
    why="it does not exist",
    fix="correct the path; every node must see it",
)
def paths_missing(s):
    yield from (hit for sure, hit in _missing(s) if sure)


@rule(
    "paths.elsewhere",
    "info",
    "this machine has the inputs, so that they can be checked",
    why="nothing of the run's inputs is on this machine, so it was not checked",
    fix="run it on a node: python -m ascend_rl.preflight TRAIN ENV; every node: --cluster",
)
def paths_elsewhere(s):
    hits = [hit for sure, hit in _missing(s) if not sure]
    if hits:
        yield ", ".join(dict.fromkeys(hit[0] for hit in hits)), ", ".join(dict.fromkeys(h[1] for h in hits))


@rule(
    "paths.content",
    "error",
    "a model directory has a config.json and weights, data files end in .parquet or .json",
    why="it cannot be loaded",
    fix="give what the message asks for",
)
def paths_content(s):
    model = local_path(s.get("actor_rollout_ref.model.path"))
    if model and model.is_dir() and not (model / "config.json").is_file():
        inside = [str(path.parent) for path in sorted(model.glob("*/config.json"))]
        near = s.override("actor_rollout_ref.model.path", inside[0]) if inside else ""
        yield (
            "actor_rollout_ref.model.path",
            f"no config.json in {model}",
            "give the directory of the model",
            near,
        )
    elif model and model.is_file():
        near = s.override("actor_rollout_ref.model.path", model.parent)
        yield "actor_rollout_ref.model.path", f"{model} is a file", "give its directory", near
    for key, text in _paths(s):
        path = local_path(text)
        if key.startswith("data.") and key.endswith("files") and path and path.is_dir():
            yield key, f"{path} is a directory", "name the files in it"
        elif key.endswith("files") and path and path.suffix not in (".parquet", ".json", ".jsonl", ""):
            yield key, f"{path} is neither parquet nor JSON", "convert it: python -m ascend_rl.data -h"


@rule(
    "paths.function",
    "error",
    "the reward function and classes that are named exist in their files",
    why="verl raises AttributeError when it loads the file",
    fix="correct the name",
)
def paths_function(s):
    for key in ("reward.custom_reward_function", "custom_reward_function", "data.custom_cls"):
        path, name = local_path(s.get(f"{key}.path")), s.get(f"{key}.name")
        if not path or not path.is_file() or not name:
            continue
        try:
            body = ast.walk(ast.parse(path.read_text()))
        except SyntaxError as error:
            yield f"{key}.path", f"{path}:{error.lineno}: {error.msg}", "correct the file"
            continue
        names = {getattr(node, "name", None) or getattr(node, "id", "") for node in body}
        names |= {
            alias.asname or alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        if name not in names and "*" not in names:
            defined = [
                node.name
                for node in ast.parse(path.read_text()).body
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            ]
            near = difflib.get_close_matches(str(name), defined, 1, 0) or defined[:1]
            yield (
                f"{key}.name",
                f"{path} has no '{name}'",
                f"it defines: {', '.join(defined) or 'nothing'}",
                s.override(f"{key}.name", near[0]) if near else "",
            )


LOGGER_KEYS = {"wandb": ("WANDB_API_KEY", "api.wandb.ai"), "swanlab": ("SWANLAB_API_KEY", "swanlab")}


@rule(
    "env.logger_key",
    "error",
    "a logger that needs a key has one, or works offline",
    why="wandb asks for a key on a terminal that a Ray worker does not have, and the run ends",
    fix="export the key, or WANDB_MODE=offline",
)
def logger_key(s):
    loggers = s.get("trainer.logger", [])
    for name in loggers if isinstance(loggers, list) else [loggers]:
        variable, host = LOGGER_KEYS.get(str(name), ("", ""))
        netrc = Path("~/.netrc").expanduser()
        logged_in = netrc.is_file() and host in netrc.read_text(errors="replace")
        offline = s.env.get(f"{str(name).upper()}_MODE") in (
            "offline",
            "disabled",
            "dryrun",
            "local",
            "cloud",
        )
        if variable and s.here and not (s.env.get(variable) or logged_in or offline):
            yield (
                "trainer.logger",
                f"{name} without ${variable}",
                f"export {variable}=..., or export {str(name).upper()}_MODE=offline",
                f"export {str(name).upper()}_MODE=offline",
            )


VISIBLE, NOSET = "ASCEND_RT_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
NOSET_ANY = re.compile(r"RAY_EXPERIMENTAL_NOSET_\w+")


@rule(
    "env.visible_devices",
    "error",
    "dies are chosen by ASCEND_RT_VISIBLE_DEVICES or left to the processes (NOSET), not both",
    why="verl takes the number that Ray gives a die, of the node, for one of those that the process sees: "
    "set_device fails, or two processes share a die",
    fix=f"unset {NOSET}, and Ray shows each process its die",
)
def visible_devices(s):
    if not s.npu:
        return
    dies = [die.strip() for die in s.env.get(VISIBLE, "").split(",") if die.strip()]
    left = [name for name in s.env if NOSET_ANY.fullmatch(name) and s.env[name]]
    ours = s.env.get(NOSET, "").lower() in ("1", "true")  # as Ray reads it
    others = s.dies > 1 and [name for name in left if name != NOSET or not ours]
    fix = f"unset {' '.join(left)}"
    if ours and dies and dies != [str(number) for number in range(len(dies))]:
        yield f"${VISIBLE}", f"{','.join(dies)} with {NOSET}={s.env[NOSET]}", fix, fix
    elif others and not ours:
        name = others[0]
        yield f"${name}", f"'{s.env[name]}': Ray hides the other dies, and verl counts them", fix, fix


PORTS = ("MASTER_PORT", "RAY_PORT", "DASHBOARD_PORT", "HCCL_IF_BASE_PORT", "PORT")


@rule(
    "env.port",
    "error",
    "ports are between 1024 and 65535; HCCL's base leaves room for the ports of its dies",
    why="nothing can listen there",
    fix="use a free port; HCCL takes 16 ports from HCCL_IF_BASE_PORT on, which may be 1024 to 65520",
)
def env_port(s):
    for name in PORTS:
        value, top = s.env.get(name), 65520 if name == "HCCL_IF_BASE_PORT" else 65535
        if value and not (value.isdigit() and 1024 <= int(value) <= top):
            yield (
                f"${name}",
                f"'{value}'",
                f"use 1024 to {top}",
                f"export {name}={24999 if top == 65520 else 6399}",
            )
    for name in ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"):
        value = s.env.get(name, "auto")
        parts = [part.split("-") for part in value.split(",")]
        fits = all(
            all(end.isdigit() and 1024 <= int(end) <= 65535 for end in part)
            and 1 <= len(part) <= 2
            and int(part[0]) <= int(part[-1])
            for part in parts
        )
        if value not in ("auto", "") and not fits:
            yield f"${name}", f"'{value}'", "auto, or ranges such as 60000-60050", f"export {name}=auto"


INTERFACES = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@rule(
    "env.interface",
    "error",
    "network interfaces that are named exist on this machine",
    why="HCCL and gloo find no address and time out",
    fix="use one of: ip -br link",
)
def env_interface(s):
    have = sorted(os.listdir("/sys/class/net")) if Path("/sys/class/net").is_dir() else []
    for name in INTERFACES:
        value = s.env.get(name, "")
        if not value or value.startswith("^") or not have or not s.npu and name != "GLOO_SOCKET_IFNAME":
            continue
        if not (s.here or name in os.environ):
            continue
        for one in value.lstrip("=").split(","):
            exact = value.startswith("=") or name != "HCCL_SOCKET_IFNAME"
            if not any(other == one if exact else other.startswith(one) for other in have):
                others = [other for other in have if other != "lo"] or have
                yield (
                    f"${name}",
                    f"'{one}' is not among {', '.join(have)}",
                    f"use one of: {', '.join(others)}",
                    f"export {name}={others[0]}",
                )

"""Check a ROLL configuration for Ascend before anything starts.

Problem: ROLL reads YAML into dataclasses and drops keys it does not know; what is wrong with placement,
batches, lengths or variables shows itself after the models are loaded, as an assertion in a worker, or never.
Idea: the configuration is composed as ROLL would (Hydra), and each rule is a small function over the plain
dictionary that yields findings. The rules say what ROLL v0.2.1 and vllm-ascend 0.13.0 do, and each names the
failure that it prevents.
Invariants: nothing is imported from ROLL (its classes are an argument of `unknown_keys`), and nothing is
evaluated: a device_mapping, which ROLL hands to eval(), is read as syntax. An absent key has ROLL's default.
Cost: composing takes about 0.2 s, the rules microseconds.

    python -m ascend_rl.lint.roll rlvr_qwen3_8b [--npus-per-node 16] [--json] [HYDRA_OVERRIDES...]
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import math
import os
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from ascend_rl.lint.findings import Finding, as_json, render
from ascend_rl.settings.numbers import whole
from ascend_rl.settings.switch import CannotWork

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "internal/roll/conf"
ROLL = ROOT / "frameworks/roll"
OURS = {"pipeline", "resources", "deepspeed"}  # top-level keys of our files that ROLL does not read
# Variables of published settings that nothing of the pinned stack reads.
UNREAD = {"VLLM_ASCEND_ENABLE_FLASHCOMM", "VLLM_ASCEND_ENABLE_DENSE_OPTIMIZE", "NPU_MEMORY_FRACTION"}
ROLES = ("actor_train", "actor_infer", "reference", "critic")


# Reading.


def compose(name: str, overrides: Sequence[str] = (), conf: Path = CONF, roll: Path = ROLL) -> dict:
    """The configuration `name` of `conf` as a plain dictionary, with interpolations resolved.

    ROLL's environments (`custom_envs`) are left out where ROLL's sources are absent.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf, open_dict

    present = (roll / "examples").is_dir()
    search = [f"hydra.searchpath=['file://{roll / 'examples'}']"] if present else []
    with initialize_config_dir(str(conf), version_base=None):
        config = hydra_compose(name, [*overrides, *search])
    if not present:
        with open_dict(config):
            config.pop("custom_envs", None)
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


MOST_DEVICES = 100_000  # of any cluster


def devices(mapping: str | None) -> list[int]:
    """The device numbers of a device_mapping: "list(range(0,4)) + [8]" -> [0, 1, 2, 3, 8]; None -> [].

    Raises:
        CannotWork: it is not a sum of list(range(...)) and lists of numbers.
    """

    def value(node: ast.expr) -> list[int]:
        match node:
            case ast.BinOp(left, ast.Add(), right):
                return value(left) + value(right)
            case ast.Call(ast.Name("list"), [ast.Call(ast.Name("range"), arguments, [])], []):
                numbers = range(*map(ast.literal_eval, arguments))
                if len(numbers) > MOST_DEVICES:
                    raise CannotWork(f"{ast.unparse(node)!r} has more than {MOST_DEVICES} devices")
                return list(numbers)
            case ast.List():
                return [int(number) for number in ast.literal_eval(node)]
        raise CannotWork(f"{ast.unparse(node)!r} is not a list of devices")

    if mapping is None:
        return []
    try:
        return value(ast.parse(str(mapping), mode="eval").body)
    except CannotWork:
        raise
    except (SyntaxError, TypeError, ValueError) as error:
        raise CannotWork(f"{mapping!r} is not a list of devices: {error}") from None


def get(config: Mapping, path: str, default: object = None) -> typing.Any:
    """The value at a dotted path; `default` where a part is absent or null."""
    for part in path.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return default if config is None else config


def mappings(config: Mapping) -> dict[str, list[int]]:
    """Devices by role; roles without a device_mapping are left out."""
    found = {role: devices(get(config, f"{role}.device_mapping")) for role in ROLES}
    return {role: numbers for role, numbers in found.items() if numbers}


def uses_reference(config: Mapping) -> bool:
    """Whether ROLL starts the reference model: for a KL term only."""
    return bool(
        get(config, "use_kl_loss", False)
        or get(config, "init_kl_coef", 0.2) > 0
        or get(config, "enable_reference", False)
    )


def agentic(config: Mapping) -> bool:
    return get(config, "train_env_manager") is not None


# Rules.


def check_devices(config: Mapping, npus_per_node: int | None) -> Iterator[Finding]:
    try:
        placed = mappings(config)
    except CannotWork as error:
        yield Finding(
            "error",
            "roll.device_mapping",
            "device_mapping",
            str(error),
            "write it as list(range(0,8)), or as a sum of such lists",
        )
        return
    for role in ("actor_train", "actor_infer"):
        if role not in placed:
            yield Finding(
                "error",
                "roll.device_mapping",
                f"{role}.device_mapping",
                "it names no device",
                "choose a resource strategy: resources=1x8, 1x16, 2x8",
            )
    for role, numbers in placed.items():
        if len(set(numbers)) < len(numbers) or min(numbers) < 0:
            yield Finding(
                "error",
                "roll.device_mapping",
                f"{role}.device_mapping",
                f"{numbers} has a device twice or a negative one",
                "name each device once, from 0",
            )
    train, infer, reference = (set(placed.get(role, [])) for role in ROLES[:3])
    if shared := sorted(train & infer):
        yield Finding(
            "error",
            "roll.colocated",
            "actor_infer.device_mapping",
            f"training and rollout share the NPUs {shared}; ROLL cannot share them on Ascend",
            "give the rollout NPUs of its own",
        )
    if uses_reference(config) and agentic(config) and get(config, "partial_gpu_mode", True):
        if reference != train:
            yield Finding(
                "error",
                "roll.reference",
                "reference.device_mapping",
                "the agentic pipeline asserts that the reference has the NPUs of actor_train",
                "drop the KL term (init_kl_coef=0) or set partial_gpu_mode=false",
            )
    elif uses_reference(config):
        if not reference:
            yield Finding(
                "error",
                "roll.reference",
                "reference.device_mapping",
                "there is a KL term but no NPU for the reference model",
                "set reference.device_mapping, or init_kl_coef=0 (its default is 0.2)",
            )
        if shared := sorted(train & reference):
            yield Finding(
                "error",
                "roll.colocated",
                "reference.device_mapping",
                f"training and the reference share the NPUs {shared}",
                "let the reference share the NPUs of the rollout, or give it its own",
            )
    elif reference:
        yield Finding(
            "info",
            "roll.reference",
            "reference.device_mapping",
            "no KL term: the reference model is not started",
            "remove it, or use its NPUs",
        )

    per_node = get(config, "num_gpus_per_node", 8)
    if npus_per_node is not None and npus_per_node != per_node:
        yield Finding(
            "error",
            "roll.nodes",
            "num_gpus_per_node",
            f"it says {per_node}, but a node shows {npus_per_node} NPUs. ROLL takes the latter, so "
            f"device {npus_per_node} is the first of the second node",
            "choose resources for such nodes, or limit the NPUs with ASCEND_RT_VISIBLE_DEVICES",
        )
    nodes = get(config, "resources.nodes")
    needed = 1 + max((max(numbers) for numbers in placed.values()), default=0) // per_node
    if nodes is not None and needed != nodes:
        yield Finding(
            "error",
            "roll.nodes",
            "device_mapping",
            f"the devices lie on {needed} nodes of {per_node} NPUs, resources.nodes is {nodes}",
            "use device numbers below nodes x npus_per_node, and some of every node",
        )
    options = get(config, "actor_infer.strategy_args.strategy_config", {})
    size = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    numbers = placed.get("actor_infer", [])
    if len(numbers) % size:
        yield Finding(
            "error",
            "roll.world_size",
            "actor_infer.device_mapping",
            f"{len(numbers)} NPUs cannot be cut into engines of TP x PP = {size}",
            "make the number of NPUs a multiple of it",
        )
        return
    for engine in (numbers[start : start + size] for start in range(0, len(numbers), size)):
        if len({number // per_node for number in engine}) > 1:
            yield Finding(
                "warning",
                "roll.world_size",
                "actor_infer.device_mapping",
                f"the engine on {engine} spans nodes: each token waits for the network",
                "order the mapping so that each engine lies on one node",
            )


def check_strategies(config: Mapping) -> Iterator[Finding]:
    allowed = {
        "actor_train": ("deepspeed_train",),
        "critic": ("deepspeed_train",),
        "reference": ("hf_infer", "deepspeed_infer"),
        "actor_infer": ("vllm",),
    }
    for role, names in allowed.items():
        name = get(config, f"{role}.strategy_args.strategy_name")
        if get(config, f"{role}.device_mapping") is not None and name not in names:
            yield Finding(
                "error",
                "roll.strategy",
                f"{role}.strategy_args.strategy_name",
                f"{name} does not run on Ascend in ROLL",
                f"use {' or '.join(names)}",
            )
        attention = get(config, f"{role}.model_args.attn_implementation", "auto")
        if attention not in ("fa2", "sdpa", "auto"):
            yield Finding(
                "error",
                "roll.attention",
                f"{role}.model_args.attn_implementation",
                f"{attention!r} is not a value that ROLL knows; there is no flash_attn package for NPUs",
                "use fa2: transformers has an implementation for NPUs",
            )
    for role in ("actor_train", "critic", "reference"):
        if not get(config, f"{role}.strategy_args.strategy_name", "").startswith("deepspeed"):
            continue
        stage = get(config, f"{role}.strategy_args.strategy_config.zero_optimization.stage", 0)
        if stage != 3:
            yield Finding(
                "warning" if role == "actor_train" else "error",
                "roll.strategy",
                f"{role}.strategy_args.strategy_config",
                f"ZeRO stage {stage}: every NPU holds all weights"
                + ("" if role == "actor_train" else ", and deepspeed_infer asserts stage 3"),
                "use deepspeed=zero3 or deepspeed=zero3_cpuoffload",
            )


def check_batches(config: Mapping) -> Iterator[Finding]:
    try:
        ranks = len(mappings(config).get("actor_train", []))
    except CannotWork:
        return
    prompts = get(config, "rollout_batch_size", 128)
    micro = get(config, "actor_train.training_args.per_device_train_batch_size", 8)
    steps = get(config, "actor_train.training_args.gradient_accumulation_steps", 1)
    update = micro * steps * ranks
    formula = f"{micro} x {steps} accumulation steps x {ranks} training NPUs = {update}"
    if not agentic(config):
        group = get(config, "num_return_sequences_in_group", 1)
        if update and prompts * group % update:
            yield Finding(
                "error",
                "roll.batch",
                "actor_train.training_args.gradient_accumulation_steps",
                f"{prompts} prompts x {group} responses = {prompts * group} samples are not a "
                f"multiple of {formula}; ROLL asserts it after the first rollout",
                f"use a divisor of {prompts * group / micro / ranks:g} accumulation steps",
            )
        return
    if update and prompts % math.lcm(update, ranks * get(config, "actor_train.infer_batch_size", 16)):
        yield Finding(
            "warning",
            "roll.batch",
            "rollout_batch_size",
            f"{prompts} trajectories are not a multiple of {formula} and of the log-prob batches; "
            "ROLL trains on some of them twice to fill up",
            "choose a multiple, or batch_adjust_mode=delete",
        )
    batches = {"train_env_manager": prompts, "val_env_manager": get(config, "val_batch_size", 128)}
    for name, batch in batches.items():
        groups, size = get(config, f"{name}.num_env_groups", 128), get(config, f"{name}.group_size", 1)
        parts, tags = get(config, f"{name}.num_groups_partition", [128]), get(config, f"{name}.tags", [])
        if len(parts) != len(tags) or sum(parts) != groups:
            yield Finding(
                "error",
                "roll.batch",
                f"{name}.num_groups_partition",
                f"{parts} must have a number for each of {tags} and add up to {groups} groups",
                "make them agree",
            )
        whole = size if name == "train_env_manager" else groups * size
        if batch > 0 and batch % whole:
            yield Finding(
                "error",
                "roll.batch",
                name,
                f"{batch} trajectories are not a multiple of {whole}, the "
                + ("size of a group" if name == "train_env_manager" else "number of environments"),
                "change the batch or the groups",
            )


def check_lengths(config: Mapping) -> Iterator[Finding]:
    prompt, response = get(config, "prompt_length", 1024), get(config, "response_length", 0)
    longest = get(config, "sequence_length", prompt + response)
    if not get(config, "sequence_length") and not response:
        yield Finding(
            "error",
            "roll.length",
            "response_length",
            "neither response_length nor sequence_length is set",
            "set response_length",
        )
        return
    if longest <= prompt:
        yield Finding(
            "error",
            "roll.length",
            "sequence_length",
            f"{longest} tokens leave no room for an answer after a prompt of {prompt}",
            "make it longer",
        )
    engine = get(config, "actor_infer.strategy_args.strategy_config.max_model_len")
    if engine is not None and engine < longest:
        yield Finding(
            "error",
            "roll.length",
            "actor_infer.strategy_args.strategy_config.max_model_len",
            f"vLLM holds {engine} tokens, prompt and response need {longest}: long answers are cut",
            f"set it to {longest} or more",
        )


def check_variables(config: Mapping, environ: Mapping[str, str]) -> Iterator[Finding]:
    shared = get(config, "system_envs", {})
    for where in ("system_envs", *(f"{role}.system_envs" for role in ROLES)):
        for name, value in get(config, where, {}).items():
            if not isinstance(value, str):
                yield Finding(
                    "error",
                    "roll.variable",
                    f"{where}.{name}",
                    f"{value!r} is not a string: os.environ refuses it",
                    f"quote it: '{value}'",
                )
            if name in UNREAD:
                yield Finding(
                    "info",
                    "roll.variable",
                    f"{where}.{name}",
                    "nothing in the pinned versions reads it",
                    "remove it",
                )
    rollout = dict(environ) | shared | get(config, "actor_infer.system_envs", {})
    if "expandable_segments:True" in str(rollout.get("PYTORCH_NPU_ALLOC_CONF", "")):
        yield Finding(
            "error",
            "roll.variable",
            "actor_infer.system_envs.PYTORCH_NPU_ALLOC_CONF",
            "the rollout gets expandable_segments:True, and ROLL turns on vLLM's sleep mode, whose "
            "memory pool in vllm-ascend asserts that it is off",
            "set it to '' for actor_infer",
        )
    if str(rollout.get("VLLM_ASCEND_ENABLE_NZ", "1")) != "0":
        yield Finding(
            "error",
            "roll.variable",
            "VLLM_ASCEND_ENABLE_NZ",
            "weights in the NZ format cannot be updated: the rollout keeps or garbles old ones",
            "export VLLM_ASCEND_ENABLE_NZ=0 before Ray starts (internal/roll/roll_env.sh)",
        )
    eager = get(config, "actor_infer.strategy_args.strategy_config.enforce_eager", False)
    if not eager and str(rollout.get("TASK_QUEUE_ENABLE", "1")) == "2":
        yield Finding(
            "warning",
            "roll.variable",
            "actor_infer.system_envs.TASK_QUEUE_ENABLE",
            "2 does not go with captured graphs",
            "set it to '1' for actor_infer, or enforce_eager=true",
        )


def check_rewards(config: Mapping) -> Iterator[Finding]:
    if agentic(config):
        return
    where = "actor_train.data_args.domain_interleave_probs"
    domains, rewards = get(config, where, {}), get(config, "rewards", {})
    if not domains or not math.isclose(sum(domains.values()), 1, abs_tol=1e-6):
        yield Finding(
            "error",
            "roll.reward",
            where,
            f"the shares {domains} must add up to 1",
            "name each domain with its share of the prompts",
        )
    for domain in domains.keys() - rewards.keys():
        yield Finding(
            "error",
            "roll.reward",
            where,
            f"{domain} has no reward; there are: {', '.join(rewards)}",
            f"add rewards.{domain}, or drop the domain",
        )
    for domain in rewards.keys() - domains.keys():
        yield Finding(
            "warning",
            "roll.reward",
            f"rewards.{domain}",
            "no prompt is drawn for it",
            "give it a share, or remove it",
        )
    owner: dict[str, str] = {}
    for domain, reward in rewards.items():
        for tag in reward.get("tag_included", []):
            if owner.setdefault(tag, domain) != domain:
                yield Finding(
                    "error",
                    "roll.reward",
                    f"rewards.{domain}.tag_included",
                    f"{tag} belongs to {owner[tag]} too; ROLL takes the last",
                    "name each tag once",
                )
    files = get(config, "actor_train.data_args.file_name", [])
    for name in [files] if isinstance(files, str) else files:
        if os.path.isabs(name) and not os.path.exists(name):
            yield Finding(
                "warning",
                "roll.data",
                "actor_train.data_args.file_name",
                f"{name} is not on this machine",
                "set ROLL_DATA to the directory of the data, the same on all nodes",
            )


def check_launch(config: Mapping, environ: Mapping[str, str]) -> Iterator[Finding]:
    """The rank variables, where there is no Ray to join: ROLL waits for the nodes without a deadline."""
    if environ.get("RAY_ADDRESS"):
        return
    nodes, size = get(config, "resources.nodes", 1), environ.get("WORLD_SIZE", "1")
    rank, head = environ.get("RANK", "0"), environ.get("MASTER_ADDR", "")
    if size != str(nodes):
        yield Finding(
            "error",
            "roll.launch",
            "WORLD_SIZE",
            f"it is {size}, the configuration needs {nodes} nodes: ROLL would wait for ever",
            f"export WORLD_SIZE={nodes} on every node, or start with ray_start_npu.sh",
        )
    elif not rank.isdigit() or int(rank) >= nodes:
        yield Finding(
            "error",
            "roll.launch",
            "RANK",
            f"it is {rank!r}, with {nodes} nodes",
            f"export RANK=0 on the head and 1 to {nodes - 1} elsewhere",
        )
    elif nodes > 1 and (head in ("", "localhost", "::1") or head.startswith("127.") or "<" in head):
        yield Finding(
            "error",
            "roll.launch",
            "MASTER_ADDR",
            f"{head!r} is not how other nodes reach the head",
            "export the head's address, the same on every node",
        )


def lint(
    config: Mapping, npus_per_node: int | None = None, environ: Mapping[str, str] | None = None
) -> list[Finding]:
    """All findings of a composed configuration.

    Args:
        npus_per_node: what a node really shows, if known.
        environ: the variables that Ray's processes inherit; default os.environ.
    """
    environ = os.environ if environ is None else environ  # looked up now: datasets.map replaces it
    return [
        *check_devices(config, npus_per_node),
        *check_strategies(config),
        *check_batches(config),
        *check_lengths(config),
        *check_variables(config, environ),
        *check_rewards(config),
    ]


def unknown_keys(config: Mapping, kind: type, where: str = "", known: set[str] = OURS) -> Iterator[Finding]:
    """Keys that the dataclass `kind` does not have, with the nearest that it has; ROLL drops them."""
    fields = typing.get_type_hints(kind)
    for key, value in config.items():
        path = f"{where}{key}"
        if key not in fields:
            if key not in known:
                near = difflib.get_close_matches(key, fields, 1)
                yield Finding(
                    "error",
                    "roll.unknown_key",
                    path,
                    f"{kind.__name__} of ROLL has no {key}: it is ignored",
                    f"did you mean {near[0]}?" if near else "remove it",
                )
            continue
        inner = [fields[key], *typing.get_args(fields[key])]  # a class, Optional[class] or Dict[str, class]
        for type_ in filter(dataclasses.is_dataclass, inner):
            if isinstance(value, Mapping):
                yield from unknown_keys(value, type_, f"{path}.", set())
        for dictionary in [t for t in inner if typing.get_origin(t) is dict]:
            for type_ in filter(dataclasses.is_dataclass, typing.get_args(dictionary)):
                for name, item in (value or {}).items():
                    yield from unknown_keys(item, type_, f"{path}.{name}.", set())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_rl.lint.roll",
        description=__doc__.splitlines()[0],
        epilog="""Examples:
  python -m ascend_rl.lint.roll agentic_frozen_lake_qwen2_5_0_5b
  python -m ascend_rl.lint.roll rlvr_qwen3_8b resources=2x8 --json

Writes nothing but its findings.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help=f"one of {', '.join(p.stem for p in sorted(CONF.glob('*_*.yaml')))}")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, e.g. resources=2x8")
    parser.add_argument("--npus-per-node", type=whole(), help="what a node shows (default: not checked)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OUTPUT_DIR", str(ROOT / "outputs" / args.config))
    os.environ.setdefault("ROLL_DATA", str(ROLL / "data"))
    findings = lint(compose(args.config, args.overrides), args.npus_per_node)
    print(as_json(findings)) if args.json else render(findings, Console())
    return int(any(finding.severity == "error" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())

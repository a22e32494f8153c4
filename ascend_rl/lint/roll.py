"""Check a ROLL configuration for Ascend before anything starts.

Problem: ROLL reads YAML into dataclasses and drops keys it does not know; what is wrong with placement,
batches, lengths or variables shows itself after the models are loaded, as an assertion in a worker, or never.
Idea: the configuration is composed as ROLL would (Hydra), and rules of the same shape as those for verl see
it. They say what ROLL v0.2.1 and vllm-ascend 0.13.0 do, and each names the failure that it prevents.
Invariants: nothing is imported from ROLL (its class is an argument of `lint`), and nothing is evaluated: a
device_mapping, which ROLL hands to eval(), is read as syntax. An absent key has ROLL's default.
Cost: composing takes about 0.2 s, the rules microseconds.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import math
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

from ascend_rl.lint import setup
from ascend_rl.lint.findings import Finding
from ascend_rl.lint.setup import Hit, Rule
from ascend_rl.settings.switch import CannotWork

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "internal/roll/conf"
ROLL = ROOT / "frameworks/roll"
OURS = {"pipeline", "resources", "deepspeed"}  # top-level keys of our files that ROLL does not read
# Variables of published settings that nothing of the pinned stack reads.
UNREAD = {"VLLM_ASCEND_ENABLE_FLASHCOMM", "VLLM_ASCEND_ENABLE_DENSE_OPTIMIZE", "NPU_MEMORY_FRACTION"}
ROLES = ("actor_train", "actor_infer", "reference", "critic")
STRATEGIES = {  # that run on Ascend
    "actor_train": ("deepspeed_train",),
    "critic": ("deepspeed_train",),
    "reference": ("hf_infer", "deepspeed_infer"),
    "actor_infer": ("vllm",),
}


# Reading.


def compose(name: str, overrides: Sequence[str] = ()) -> dict:
    """The configuration `name` of CONF as a plain dictionary, with interpolations resolved.

    ROLL's environments (`custom_envs`) are left out where ROLL's sources are absent.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf, open_dict

    present = (ROLL / "examples").is_dir()
    search = [f"hydra.searchpath=['file://{ROLL / 'examples'}']"] if present else []
    with initialize_config_dir(str(CONF), version_base=None):
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


class Setup:
    """What the rules see of a run.

    Args:
        npus_per_node: what a node really shows, if known.
        env: the variables that Ray's processes inherit.
        starting: ROLL's class of the configuration, if this process is about to start the run.
    """

    def __init__(
        self,
        config: Mapping,
        npus_per_node: int | None = None,
        env: Mapping[str, str] | None = None,
        starting: type | None = None,
    ):
        self.config, self.npus_per_node, self.starting = config, npus_per_node, starting
        self.env = os.environ if env is None else env  # looked up now: datasets.map replaces it

    def get(self, path: str, default: object = None) -> typing.Any:
        """The value at a dotted path; `default` where a part is absent or null."""
        value: typing.Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    @cached_property
    def placed(self) -> dict[str, list[int]]:
        """Devices by role; roles without a device_mapping are left out.

        Raises:
            CannotWork: a mapping cannot be read, which `device_mapping` reports; other rules just end.
        """
        found = {role: devices(self.get(f"{role}.device_mapping")) for role in ROLES}
        return {role: numbers for role, numbers in found.items() if numbers}

    @property
    def per_node(self) -> int:
        return self.get("num_gpus_per_node", 8)

    @property
    def agentic(self) -> bool:
        return self.get("train_env_manager") is not None

    @property
    def uses_reference(self) -> bool:
        """Whether ROLL starts the reference model: for a KL term only."""
        kl = self.get("use_kl_loss", False) or self.get("init_kl_coef", 0.2) > 0
        return bool(kl or self.get("enable_reference", False))

    @cached_property
    def engine_size(self) -> int:
        options = self.get("actor_infer.strategy_args.strategy_config", {})
        return options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)

    @cached_property
    def update(self) -> tuple[int, str]:
        """Samples of an update over all training NPUs, and how they come about."""
        micro = self.get("actor_train.training_args.per_device_train_batch_size", 8)
        steps = self.get("actor_train.training_args.gradient_accumulation_steps", 1)
        ranks = len(self.placed.get("actor_train", []))
        size = micro * steps * ranks
        return size, f"{micro} x {steps} accumulation steps x {ranks} training NPUs = {size}"

    @cached_property
    def rollout_env(self) -> dict[str, str]:
        return dict(self.env) | self.get("system_envs", {}) | self.get("actor_infer.system_envs", {})

    def variables(self) -> Iterator[tuple[str, str, typing.Any]]:
        """(key, name, value) of every variable that the configuration sets."""
        for where in ("system_envs", *(f"{role}.system_envs" for role in ROLES)):
            for name, value in self.get(where, {}).items():
                yield f"{where}.{name}", name, value


RULES: list[Rule] = []
rule = partial(setup.rule, rules=RULES)


# Placement.


@rule(
    "roll.device_mapping",
    "error",
    "training and rollout have devices, each once, written as lists",
    fix="write it as list(range(0,8)), or as a sum of such lists",
)
def device_mapping(s):
    try:
        placed = s.placed
    except CannotWork as error:
        yield "device_mapping", str(error)
        return
    for role in ("actor_train", "actor_infer"):
        if role not in placed:
            yield f"{role}.device_mapping", "it names no device", "choose resources=1x8, 1x16 or 2x8"
    for role, numbers in placed.items():
        if len(set(numbers)) < len(numbers) or min(numbers) < 0:
            yield (
                f"{role}.device_mapping",
                f"{numbers} has a device twice or a negative one",
                "name each device once, from 0",
            )


@rule(
    "roll.colocated",
    "error",
    "training shares no NPU with rollout or reference",
    why="ROLL cannot share them on Ascend",
    fix="give each NPUs of its own; the reference may share those of the rollout",
)
def colocated(s):
    train, infer, reference = (set(s.placed.get(role, [])) for role in ROLES[:3])
    if shared := sorted(train & infer):
        yield "actor_infer.device_mapping", f"training and rollout share the NPUs {shared}"
    on_train = s.agentic and s.get("partial_gpu_mode", True)  # as that pipeline asserts
    if s.uses_reference and not on_train and (shared := sorted(train & reference)):
        yield "reference.device_mapping", f"training and the reference share the NPUs {shared}"


@rule(
    "roll.reference",
    "error",
    "with a KL term the reference model has NPUs, in the agentic pipeline those of actor_train",
    why="ROLL asserts it",
    fix="set reference.device_mapping, or init_kl_coef=0 (its default is 0.2)",
)
def reference(s):
    own, train = (set(s.placed.get(role, [])) for role in ("reference", "actor_train"))
    if not s.uses_reference:
        return
    if s.agentic and s.get("partial_gpu_mode", True):
        if own != train:
            yield (
                "reference.device_mapping",
                "the agentic pipeline wants the reference on the NPUs of actor_train",
                "drop the KL term (init_kl_coef=0) or set partial_gpu_mode=false",
            )
    elif not own:
        yield "reference.device_mapping", "there is a KL term but no NPU for the reference model"


@rule(
    "roll.reference_unused",
    "info",
    "without a KL term no NPU waits for the reference model",
    fix="remove it, or use its NPUs",
)
def reference_unused(s):
    if "reference" in s.placed and not s.uses_reference:
        yield "reference.device_mapping", "no KL term: the reference model is not started"


@rule(
    "roll.nodes",
    "error",
    "devices are on the nodes that there are",
    fix="use device numbers below nodes x npus_per_node, and some of every node",
)
def nodes(s):
    if s.npus_per_node not in (None, s.per_node):
        yield (
            "num_gpus_per_node",
            f"it says {s.per_node}, but a node shows {s.npus_per_node} NPUs. ROLL takes the latter, so "
            f"device {s.npus_per_node} is the first of the second node",
            "choose resources for such nodes, or limit the NPUs with ASCEND_RT_VISIBLE_DEVICES",
        )
    given = s.get("resources.nodes")
    needed = 1 + max(map(max, s.placed.values()), default=0) // s.per_node
    if given not in (None, needed):
        yield (
            "device_mapping",
            f"the devices lie on {needed} nodes of {s.per_node} NPUs, resources.nodes is {given}",
        )


@rule(
    "roll.world_size",
    "error",
    "the rollout's NPUs are a multiple of TP x PP",
    why="they cannot be cut into engines",
    fix="make the number of NPUs a multiple of it",
)
def world_size(s):
    count = len(s.placed.get("actor_infer", []))
    if count % s.engine_size:
        yield "actor_infer.device_mapping", f"{count} NPUs, and TP x PP = {s.engine_size}"


@rule(
    "roll.engine_nodes",
    "warning",
    "an engine is on one node",
    why="each token waits for the network",
    fix="order the mapping so that each engine lies on one node",
)
def engine_nodes(s):
    numbers, size = s.placed.get("actor_infer", []), s.engine_size
    for engine in zip(*[iter(numbers)] * size, strict=False) if len(numbers) % size == 0 else ():
        if len({number // s.per_node for number in engine}) > 1:
            yield "actor_infer.device_mapping", f"the engine on {list(engine)} spans nodes"


# Engines.


def _stages(s: Setup) -> Iterator[tuple[str, int]]:
    """(role, ZeRO stage) of the roles that use DeepSpeed."""
    for role in ("actor_train", "critic", "reference"):
        args = f"{role}.strategy_args"
        if s.get(f"{args}.strategy_name", "").startswith("deepspeed"):
            yield role, s.get(f"{args}.strategy_config.zero_optimization.stage", 0)


@rule("roll.strategy", "error", "each role has a strategy that runs on Ascend in ROLL", fix="use another")
def strategy(s):
    for role, names in STRATEGIES.items():
        name = s.get(f"{role}.strategy_args.strategy_name")
        if s.get(f"{role}.device_mapping") is not None and name not in names:
            yield (
                f"{role}.strategy_args.strategy_name",
                f"{name} does not run on Ascend in ROLL",
                f"use {' or '.join(names)}",
            )
    for role, stage in _stages(s):
        if stage != 3 and role != "actor_train":
            yield (
                f"{role}.strategy_args.strategy_config",
                f"ZeRO stage {stage}: every NPU holds all weights, and deepspeed_infer asserts stage 3",
                "use deepspeed=zero3 or deepspeed=zero3_cpuoffload",
            )


@rule(
    "roll.zero_stage",
    "warning",
    "training uses ZeRO stage 3",
    why="every NPU holds all weights",
    fix="use deepspeed=zero3 or deepspeed=zero3_cpuoffload",
)
def zero_stage(s):
    for role, stage in _stages(s):
        if stage != 3 and role == "actor_train":
            yield f"{role}.strategy_args.strategy_config", f"ZeRO stage {stage}"


@rule(
    "roll.attention",
    "error",
    "attention is one that ROLL knows",
    why="there is no flash_attn package for NPUs",
    fix="use fa2: transformers has an implementation for NPUs",
)
def attention(s):
    for role in STRATEGIES:
        value = s.get(f"{role}.model_args.attn_implementation", "auto")
        if value not in ("fa2", "sdpa", "auto"):
            yield f"{role}.model_args.attn_implementation", f"{value!r} is not a value that ROLL knows"


# Batches and lengths.


@rule(
    "roll.batch",
    "error",
    "samples are cut into whole updates, environments into groups",
    fix="make them agree",
)
def batch(s):
    update, formula = s.update
    if not s.agentic:
        prompts, group = s.get("rollout_batch_size", 128), s.get("num_return_sequences_in_group", 1)
        if update and prompts * group % update:
            steps = s.get("actor_train.training_args.gradient_accumulation_steps", 1)
            yield (
                "actor_train.training_args.gradient_accumulation_steps",
                f"{prompts} prompts x {group} responses = {prompts * group} samples are not a "
                f"multiple of {formula}; ROLL asserts it after the first rollout",
                f"use a divisor of {prompts * group * steps / update:g} accumulation steps",
            )
        return
    for name, trajectories in (
        ("train_env_manager", s.get("rollout_batch_size", 128)),
        ("val_env_manager", s.get("val_batch_size", 128)),
    ):
        groups, size = s.get(f"{name}.num_env_groups", 128), s.get(f"{name}.group_size", 1)
        parts, tags = s.get(f"{name}.num_groups_partition", [128]), s.get(f"{name}.tags", [])
        if len(parts) != len(tags) or sum(parts) != groups:
            yield (
                f"{name}.num_groups_partition",
                f"{parts} must have a number for each of {tags} and add up to {groups} groups",
            )
        whole, what = size, "size of a group"
        if name == "val_env_manager":
            whole, what = groups * size, "number of environments"
        if trajectories > 0 and trajectories % whole:
            yield (
                name,
                f"{trajectories} trajectories are not a multiple of {whole}, the {what}",
                "change the batch or the groups",
            )


@rule(
    "roll.batch_adjusted",
    "warning",
    "trajectories are a multiple of an update and of the log-prob batches",
    why="ROLL trains on some of them twice to fill up",
    fix="choose a multiple, or batch_adjust_mode=delete",
)
def batch_adjusted(s):
    update, formula = s.update
    passes = len(s.placed.get("actor_train", [])) * s.get("actor_train.infer_batch_size", 16)
    trajectories = s.get("rollout_batch_size", 128)
    if s.agentic and update and trajectories % math.lcm(update, passes):
        yield (
            "rollout_batch_size",
            f"{trajectories} trajectories are not a multiple of {formula} and of the log-prob batches",
        )


@rule(
    "roll.length", "error", "a sequence holds prompt and response, in ROLL and in vLLM", fix="make it longer"
)
def length(s):
    prompt, response = s.get("prompt_length", 1024), s.get("response_length", 0)
    longest = s.get("sequence_length", prompt + response)
    if not s.get("sequence_length") and not response:
        yield ("response_length", "neither response_length nor sequence_length is set", "set response_length")
        return
    if longest <= prompt:
        yield "sequence_length", f"{longest} tokens leave no room for an answer after a prompt of {prompt}"
    key = "actor_infer.strategy_args.strategy_config.max_model_len"
    if (engine := s.get(key)) is not None and engine < longest:
        yield (
            key,
            f"vLLM holds {engine} tokens, prompt and response need {longest}: long answers are cut",
            f"set it to {longest} or more",
        )


# Variables.


@rule("roll.variable", "error", "variables are strings, and let the rollout take new weights", fix="set it")
def variable(s):
    for where, _, value in s.variables():
        if not isinstance(value, str):
            yield where, f"{value!r} is not a string: os.environ refuses it", f"quote it: '{value}'"
    if "expandable_segments:True" in str(s.rollout_env.get("PYTORCH_NPU_ALLOC_CONF", "")):
        yield (
            "actor_infer.system_envs.PYTORCH_NPU_ALLOC_CONF",
            "the rollout gets expandable_segments:True, and ROLL turns on vLLM's sleep mode, whose "
            "memory pool in vllm-ascend asserts that it is off",
            "set it to '' for actor_infer",
        )
    if str(s.rollout_env.get("VLLM_ASCEND_ENABLE_NZ", "1")) != "0":
        yield (
            "VLLM_ASCEND_ENABLE_NZ",
            "weights in the NZ format cannot be updated: the rollout keeps or garbles old ones",
            "export VLLM_ASCEND_ENABLE_NZ=0 before Ray starts (internal/roll/roll_env.sh)",
        )


@rule(
    "roll.unread",
    "info",
    "something reads every variable that is set",
    why="nothing in the pinned versions reads it",
    fix="remove it",
)
def unread(s):
    yield from ((where, "set") for where, name, _ in s.variables() if name in UNREAD)


@rule(
    "roll.task_queue",
    "warning",
    "a rollout with graphs has a task queue of level 1",
    why="2 does not go with captured graphs",
    fix="set it to '1' for actor_infer, or enforce_eager=true",
)
def task_queue(s):
    eager = s.get("actor_infer.strategy_args.strategy_config.enforce_eager", False)
    if not eager and str(s.rollout_env.get("TASK_QUEUE_ENABLE", "1")) == "2":
        yield "actor_infer.system_envs.TASK_QUEUE_ENABLE", "2"


# Rewards and data.

SHARES = "actor_train.data_args.domain_interleave_probs"


@rule(
    "roll.reward", "error", "every domain has a share of the prompts and one reward", fix="name each tag once"
)
def reward(s):
    if s.agentic:
        return
    domains, rewards = s.get(SHARES, {}), s.get("rewards", {})
    if not domains or not math.isclose(sum(domains.values()), 1, abs_tol=1e-6):
        yield (
            SHARES,
            f"the shares {domains} must add up to 1",
            "name each domain with its share of the prompts",
        )
    for domain in domains.keys() - rewards.keys():
        yield (
            SHARES,
            f"{domain} has no reward; there are: {', '.join(rewards)}",
            f"add rewards.{domain}, or drop the domain",
        )
    owner: dict[str, str] = {}
    for domain, of in rewards.items():
        for tag in of.get("tag_included", []):
            if owner.setdefault(tag, domain) != domain:
                yield (
                    f"rewards.{domain}.tag_included",
                    f"{tag} belongs to {owner[tag]} too; ROLL takes the last",
                )


@rule(
    "roll.reward_unused",
    "warning",
    "every reward has prompts",
    why="no prompt is drawn for it",
    fix="give it a share, or remove it",
)
def reward_unused(s):
    for domain in s.get("rewards", {}).keys() - s.get(SHARES, {}).keys() if not s.agentic else ():
        yield f"rewards.{domain}", f"{SHARES} does not name it"


@rule(
    "roll.data",
    "warning",
    "the data is on this machine",
    fix="set ROLL_DATA to the directory of the data, the same on all nodes",
)
def data(s):
    files = s.get("actor_train.data_args.file_name", [])
    for name in [files] if isinstance(files, str) else files:
        if not s.agentic and os.path.isabs(name) and not os.path.exists(name):
            yield "actor_train.data_args.file_name", f"{name} is not on this machine"


# Where the run is about to start.


@rule(
    "roll.launch", "error", "rank variables match the nodes where there is no Ray to join", fix="export them"
)
def launch(s):
    if not s.starting or s.env.get("RAY_ADDRESS"):
        return
    nodes, size = s.get("resources.nodes", 1), s.env.get("WORLD_SIZE", "1")
    rank, head = s.env.get("RANK", "0"), s.env.get("MASTER_ADDR", "")
    if size != str(nodes):
        yield (
            "WORLD_SIZE",
            f"it is {size}, the configuration needs {nodes} nodes: ROLL would wait forever",
            f"export WORLD_SIZE={nodes} on every node, or start with ray_start_npu.sh",
        )
    elif not rank.isdigit() or int(rank) >= nodes:
        yield (
            "RANK",
            f"it is {rank!r}, with {nodes} nodes",
            f"export RANK=0 on the head and 1 to {nodes - 1} elsewhere",
        )
    elif nodes > 1 and (head in ("", "localhost", "::1") or head.startswith("127.") or "<" in head):
        yield (
            "MASTER_ADDR",
            f"{head!r} is not how other nodes reach the head",
            "export the head's address, the same on every node",
        )


@rule("roll.unknown_key", "error", "ROLL's classes have every key", why="it is ignored", fix="remove it")
def unknown_key(s):
    if s.starting:
        from omegaconf import OmegaConf

        environments = ROLL / "examples/config/traj_envs.yaml"
        theirs = set(OmegaConf.load(environments) if "custom_envs" in s.config else ())
        yield from _unknown_keys(s.config, s.starting, "", OURS | theirs)


def _unknown_keys(config: Mapping, kind: type, where: str, known: set[str]) -> Iterator[Hit]:
    """Keys that the dataclass `kind` does not have, with the nearest that it has; ROLL drops them."""
    fields = typing.get_type_hints(kind)
    for key, value in config.items():
        path = f"{where}{key}"
        if key not in fields:
            if key not in known:
                near = difflib.get_close_matches(key, fields, 1)
                detail = f"{kind.__name__} of ROLL has no {key}"
                yield (path, detail, f"did you mean {near[0]}?") if near else (path, detail)
            continue
        inner = [fields[key], *typing.get_args(fields[key])]  # a class, Optional[class] or Dict[str, class]
        for type_ in filter(dataclasses.is_dataclass, inner):
            if isinstance(value, Mapping):
                yield from _unknown_keys(value, type_, f"{path}.", set())
        for dictionary in [t for t in inner if typing.get_origin(t) is dict]:
            for type_ in filter(dataclasses.is_dataclass, typing.get_args(dictionary)):
                for name, item in (value or {}).items():
                    yield from _unknown_keys(item, type_, f"{path}.{name}.", set())


def lint(
    config: Mapping,
    npus_per_node: int | None = None,
    env: Mapping[str, str] | None = None,
    starting: type | None = None,
) -> list[Finding]:
    """All findings of a composed configuration; the arguments are those of `Setup`."""
    found, seen = [], Setup(config, npus_per_node, env, starting)
    for each in RULES:
        with contextlib.suppress(CannotWork):  # of `placed`
            found += each(seen)
    return found

"""Rules about options that verl hands on unread: to vLLM, vllm-ascend, Megatron, MindSpeed and optimizers.

Hydra accepts any name below engine_kwargs and override_*_config. A wrong one ends the run when the engine or
the model is built, or, where MindSpeed or vllm-ascend takes it, does nothing at all. The names that exist
are read from the sources of the pinned frameworks, without importing them; where one is absent, what it
might know is said to be unchecked.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ascend_rl.experts.support_eplb import GROUP_NAMES, SAME_NAMES
from ascend_rl.lint.pinned import nodes, sources
from ascend_rl.lint.setup import ROLLOUT, VLLM, Hit, Setup, as_mapping, rule
from ascend_rl.lint.tuning import table
from ascend_rl.lint.verl_config import class_fields
from ascend_rl.rollout import npu_options
from ascend_rl.speculation import bs_threshold_for_spec_decode, sam_options

VLLM_PARSERS = ("engine/arg_utils.py", "entrypoints/openai/cli_args.py")
# Without MindSpeed's sources a name is called misspelt from this likeness on: MindSpeed has names that are as
# close as 0.92 to other ones of Megatron (gemm_gradient_accumulation_fusion).
MISSPELT = 0.93
# Keys of additional_config that plug-ins read or translate for vllm-ascend 0.23; patches read them in 0.13.0.
PLUGGED = {"hccl_op_expansion_mode", "graphs_by_rank", sam_options.NAME, bs_threshold_for_spec_decode.KEY}
PLUGGED |= {*npu_options.LATER.values(), *GROUP_NAMES, *SAME_NAMES}


# What exists.


@cache
def arguments(files: tuple[Path, ...]) -> frozenset[str]:
    """Options of command line parsers: add_argument("--some-name") as some_name."""
    calls = [
        node
        for node in nodes(files, "add_argument")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    words = [
        str(word.value)
        for call in calls
        for word in call.args
        if call.func.attr == "add_argument" and isinstance(word, ast.Constant)
    ]
    return frozenset(word[2:].replace("-", "_") for word in words if word.startswith("--"))


@cache
def vllm_classes() -> dict[str, dict[str, str]]:
    return class_fields(sources("vllm", "config/*.py", *VLLM_PARSERS))


@cache
def vllm_options() -> dict[str, str]:
    """{option of vLLM's server: its type}; empty without vLLM's sources."""
    classes = vllm_classes()
    extra = arguments(sources("vllm", *VLLM_PARSERS))
    options = dict.fromkeys(extra, "")
    for name in ("FrontendArgs", "AsyncEngineArgs"):
        options |= classes.get(name, {})
    switches = {f"no_{name}": "bool" for name, kind in options.items() if "bool" in kind}
    return {name: kind for name, kind in (options | switches).items() if not name.startswith("_")}


@cache
def megatron_classes() -> dict[str, dict[str, str]]:
    files = "model_parallel_config transformer/transformer_config optimizer/optimizer_config"
    files += " distributed/distributed_data_parallel_config"
    return class_fields(sources("megatron", *(f"core/{file}.py" for file in files.split())))


@cache
def mindspeed_options() -> frozenset[str]:
    """What MindSpeed declares, and what it reads from its arguments or the model's configuration."""
    read = set()
    for file in sources("mindspeed", "**/*.py"):
        text = file.read_text()
        read.update(re.findall(r"\b(?:args|config)\.(\w+)", text))
        read.update(re.findall(r"getattr\((?:\w+\.)?\w*(?:args|config), ['\"](\w+)", text))
    return arguments(sources("mindspeed", "arguments.py", "features_manager/**/*.py")) | read


@cache
def optimizer_arguments(module: str, name: str) -> tuple[str, ...]:
    """Arguments of an optimizer's constructor; empty where its source is not found."""
    package, _, rest = module.partition(".")
    for node in nodes(sources(package, f"{rest.replace('.', '/')}/*.py".lstrip("/")), f"class {name}"):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    return tuple(arg.arg for arg in [*item.args.args[1:], *item.args.kwonlyargs])
    return ()


# What is given.


def _wrong(where: str, names: Iterable[str], known: Iterable[str], owner: str) -> Iterator[Hit]:
    """The names that are not known, each with the nearest one."""
    known = list(known)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            fix = f"did you mean {where}.{close[0]}?" if close else "remove it"
            yield f"{where}.{name}", f"{owner} has no '{name}'", fix


def _within(where: str, value: Any, kind: str) -> Iterator[Hit]:
    """Wrong names in a value that vLLM makes into one of its configuration classes."""
    name = next((name for name in re.findall(r"\w+Config", kind) if name in vllm_classes()), "")
    if name:
        fields, given = vllm_classes()[name], as_mapping(value)
        yield from _wrong(where, given, fields, name)
        for key in given.keys() & fields.keys():
            yield from _within(f"{where}.{key}", given[key], fields[key])


@rule(
    "options.vllm",
    "error",
    "keys below engine_kwargs.vllm are options of vLLM's server, and fields of its configurations",
    why="the server ends when it reads its arguments",
    fix="remove it",
)
def options_vllm(s):
    options = vllm_options()
    if not options or s.get(f"{ROLLOUT}.name") != "vllm":
        return
    for key, value in s.mapping(VLLM).items():
        name = key.replace("-", "_")
        if name in options:
            yield from _within(
                f"{VLLM}.{key}", value, {"speculative_config": "SpeculativeConfig"}.get(name, options[name])
            )
        # verl leaves null out, and argparse completes a name that only one option begins with.
        elif value is not None and sum(option.startswith(name) for option in options) != 1:
            yield from _wrong(VLLM, [key], options, "vLLM's server")


@rule(
    "options.vllm_ascend",
    "warning",
    "keys of vLLM's additional_config are read by vllm-ascend",
    why="it is silently ignored",
    fix="remove it",
)
def options_vllm_ascend(s):
    where = f"{VLLM}.additional_config"
    given = s.mapping(where)
    text = "".join(file.read_text() for file in sources("vllm_ascend", "**/*.py")) if s.npu and given else ""
    if known := set(re.findall(r"additional_config\s*\.get\(\s*[\"'](\w+)", text)):
        yield from _wrong(where, given, known | PLUGGED, "vllm-ascend")


def _megatron(s: Setup, key: str, fields: Iterable[str]) -> dict[str, str]:
    """{name: where} of what `key` of the actor, the reference or the critic gives and is not a field."""
    found: dict[str, str] = {}
    for part in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        where, engine = f"{part}.{key}", f"{part}.megatron"
        other = s.get(f"{engine}.use_mbridge") and not s.get(f"{engine}.vanilla_mbridge", True)
        if fields and s.get(f"{part}.strategy") == "megatron" and not other:  # Megatron-Bridge has its own
            found = {name: where for name in s.mapping(where) if name not in fields} | found
    return found


def _transformer(s: Setup) -> Iterator[tuple[bool, Hit]]:
    """(whether it is known to be wrong, the hit) of names that megatron-core and the practice do not have."""
    fields = megatron_classes().get("MLATransformerConfig", {})
    practice = {entry.name.rpartition(".")[2] for entry in table() if "override_transformer" in entry.name}
    known = {*fields, *(practice | mindspeed_options() if s.npu else ())}
    for name, where in _megatron(s, "megatron.override_transformer_config", fields).items():
        owner = "TransformerConfig" if not s.npu else "neither TransformerConfig nor MindSpeed"
        for hit in _wrong(where, [name], known, owner):
            sure = not s.npu or mindspeed_options() or difflib.get_close_matches(name, known, 1, MISSPELT)
            yield bool(sure), hit


@rule(
    "options.transformer",
    "error",
    "keys below override_transformer_config are known to megatron-core or MindSpeed",
    why="megatron-core raises TypeError when it builds the model; MindSpeed silently ignores it",
    fix="remove it",
)
def options_transformer(s):
    yield from (hit for sure, hit in _transformer(s) if sure)


@rule(
    "options.unchecked",
    "info",
    "MindSpeed's sources are available to check its options",
    why="megatron-core does not have it, and MindSpeed, which may, is not here",
    fix="run this where MindSpeed is: ./download_frameworks_source_code.sh --only mindspeed",
)
def options_unchecked(s):
    yield from ((hit[0], "not checked") for sure, hit in _transformer(s) if not sure)


@rule(
    "options.ddp",
    "error",
    "keys below override_ddp_config are fields of megatron-core's DistributedDataParallelConfig",
    why="TypeError when the model is built",
    fix="remove it",
)
def options_ddp(s):
    fields = megatron_classes().get("DistributedDataParallelConfig", {})
    for name, where in _megatron(s, "megatron.override_ddp_config", fields).items():
        yield from _wrong(where, [name], fields, "DistributedDataParallelConfig")


@rule(
    "options.optimizer",
    "error",
    "keys below override_optimizer_config are arguments of the optimizer that is used",
    why="TypeError when the optimizer is built",
    fix="remove it",
)
def options_optimizer(s):
    fields = megatron_classes().get("OptimizerConfig", {})
    for name, where in _megatron(s, "optim.override_optimizer_config", fields).items():
        yield from _wrong(where, [name], fields, "OptimizerConfig")
    for part in ("actor_rollout_ref.actor", "critic"):
        if str(s.get(f"{part}.strategy")).startswith("fsdp"):
            module, name = s.get(f"{part}.optim.optimizer_impl", ""), s.get(f"{part}.optim.optimizer", "")
            if known := optimizer_arguments(str(module), str(name)) if module else ():
                where = f"{part}.optim.override_optimizer_config"
                yield from _wrong(where, s.mapping(where), known, name)

"""Resolve a list of overrides to a Hydra configuration, without importing verl.

`python -m verl.trainer.main_ppo ...` finds a wrong key after Ray has started, and Hydra stops at the first
one. Here the config tree of the patched verl is composed as Hydra would, and the overrides are applied one by
one with Hydra's own code. A refused one becomes a finding with the nearest valid name, and is still applied
if its meaning is clear, so that the other checks see what was meant. A key that Hydra accepts because of its
"+" must still be a field of the dataclass that verl makes of that node; the fields are read from verl's
sources. A configuration that is not on this machine (--config-path) is replaced by verl's own: which keys it
adds is then unknown, and of what only it may set nothing is said (`partial`).

Cost: 0.4 s to compose, once for each config name (cached), and 10 ms for the overrides.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib.metadata
import importlib.util
import json
import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ascend_rl.lint.findings import Finding
from ascend_rl.lint.pinned import nodes

PLACEHOLDER = re.compile(r"<[^<>=]+>")  # /data/<MODEL>, which is no value for Hydra


@dataclass
class Resolved:
    """The configuration, the overrides that led to it as {key: [values]}, and what is wrong with them."""

    config: dict[str, Any]
    given: dict[str, list[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)  # {key: value} without the overrides
    partial: bool = False  # what is not given may have another value: the configuration is elsewhere


def package() -> Path:
    """The directory of the importable verl; raises ModuleNotFoundError."""
    spec = importlib.util.find_spec("verl")
    if spec is None:
        raise ModuleNotFoundError("verl is not importable; run: bash build_project.sh --target cpu (or npu)")
    return Path(spec.submodule_search_locations[0])


def version() -> str:
    """verl's version; empty where it is not installed as a distribution."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("verl")
    return ""


def module_file(module: str, roots: Sequence[Path] = ()) -> Path:
    """The file `python -m module` would run, in verl or below `roots`; it need not exist."""
    if module.endswith(".py"):
        return Path(*roots[:1], module)
    parts = module.split(".")
    places = [package().parent] if parts[0] == "verl" else list(roots)
    files = [place.joinpath(*parts, *end) for place in places for end in ((), ("__main__",))]
    files = [file.with_name(f"{file.name}.py") for file in files]
    return next((file for file in files if file.is_file()), Path(*parts).with_suffix(".py"))


def split_arguments(args: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Hydra's own options, by their long names, and the overrides.

    >>> split_arguments(["-cn", "ppo_trainer", "--config-path=config", "a.b=1"])
    ({'config-name': 'ppo_trainer', 'config-path': 'config'}, ['a.b=1'])
    """
    short = {"-cn": "config-name", "-cp": "config-path", "-cd": "config-dir"}
    options, overrides, words = {}, [], iter(args)
    for word in words:
        if not word.startswith("-"):
            overrides.append(word)
            continue
        name, equals, value = word.partition("=")
        name = short.get(name, name.removeprefix("--"))
        if name in short.values():
            options[name] = value if equals else next(words, "")
    return options, overrides


def own_configs() -> Path:
    """The directory of the configurations of verl's trainers."""
    return (package() / "trainer/config").resolve()


def config_source(module: str, options: dict[str, str], roots: Sequence[Path] = ()) -> tuple[Path, str]:
    """Directory and name of the primary config: the options, else those of the module's @hydra.main."""
    file = module_file(module, roots)
    main = re.search(r"@hydra\.main\(([^)]*)\)", file.read_text()) if file.is_file() else None
    declared = dict(re.findall(r"(config_\w+)\s*=\s*[\"']([^\"']+)", main[1])) if main else {}
    path = options.get("config-path") or declared.get("config_path", "config")
    name = options.get("config-name") or declared.get("config_name", "ppo_trainer")
    directory = (file.parent / path.removeprefix("file://")).resolve()
    if directory.parts[-3:] == own_configs().parts[-3:]:  # of another checkout of verl
        directory = own_configs()
    return directory, name.removesuffix(".yaml")


@cache
def _composed(directory: Path, name: str, groups: tuple[str, ...]) -> tuple[bytes, dict[str, Any]]:
    """The config without overrides: Hydra's, pickled, and as plain dicts, which callers must not change."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    # Where a configuration builds on verl's, it names the place relative to where it is started.
    search = [] if directory == own_configs() else [f"hydra.searchpath=['file://{own_configs()}']"]
    with initialize_config_dir(str(directory), version_base=None):
        config = compose(name, overrides=[*groups, *search])
    return pickle.dumps(config), OmegaConf.to_container(config, resolve=False)


@cache
def class_fields(sources: tuple[Path, ...]) -> dict[str, dict[str, str]]:
    """{class: {field: annotation}} of the classes in these files, inherited fields included.

    Fields that the constructor does not take (ClassVar, `field(init=False)`) are left out.
    """
    own, bases = {}, {}
    for node in nodes(sources, "class "):
        if isinstance(node, ast.ClassDef):
            own[node.name] = {
                item.target.id: ast.unparse(item.annotation)
                for item in node.body
                if isinstance(item, ast.AnnAssign) and not re.search("ClassVar|init=False", ast.unparse(item))
            }
            bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]

    def fields(name: str) -> dict[str, str]:
        inherited = [fields(base) for base in bases.get(name, [])]
        return {key: kind for one in [*inherited, own.get(name, {})] for key, kind in one.items()}

    return {name: fields(name) for name in own}


@cache
def dataclass_fields() -> dict[str, dict[str, str]]:
    """The fields of verl's configuration classes."""
    directories = ("workers/config", "trainer/config", "utils/profiler")
    files = [file for directory in directories for file in package().glob(f"{directory}/*.py")]
    return class_fields((package() / "base_config.py", *files))


def keys(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Every dotted key, nodes and leaves."""
    for name, value in config.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{name}.")


def nearest(key: str, known: Sequence[str]) -> str | None:
    """The likeliest intended key: one with the same last part if there is one, else the most similar.

    >>> nearest("actor.clip_grad", ["actor.optim.clip_grad", "actor.clip_ratio"])
    'actor.optim.clip_grad'
    """
    leaf = "." + key.rpartition(".")[2]
    same_leaf = [name for name in known if name.endswith(leaf)]
    found = difflib.get_close_matches(key, same_leaf, 1, 0.7) or difflib.get_close_matches(
        key, known, 1, 0.75
    )
    return found[0] if found else None


def select(config: Any, key: str, default: Any = None) -> Any:
    """config["a"]["b"] of "a.b"; the default if it is absent or None."""
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return default
        config = config[part]
    return default if config is None else config


def _error(check: str, where: str, why: str, fix: str) -> Finding:
    return Finding("error", f"config.{check}", where, why, fix)


def _node(plain: dict[str, Any], key: str) -> tuple[str, str, dict[str, str]]:
    """For a key that does not exist: the deepest existing node above it, its dataclass and fields, if any."""
    path, node = "", plain
    for part in key.split(".")[:-1]:
        if not isinstance(node.get(part), dict):
            break
        path, node = f"{path}.{part}".lstrip("."), node[part]
    class_name = str(node.get("_target_", "")).rpartition(".")[2]
    return path, class_name, dataclass_fields().get(class_name, {})


def _added(plain: dict[str, Any], key: str) -> Finding | None:
    """The finding for an accepted "+key" if verl's dataclass has no such field, and verl asks for none."""
    path, class_name, fields = _node(plain, key)
    name = key.removeprefix(path).lstrip(".").partition(".")[0]
    asked = (path.rpartition(".")[2], name) in _asked_for()
    if not fields or name in fields or asked or select(plain, key) is not None:
        return None
    close = difflib.get_close_matches(name, sorted(fields), 1)
    why = f"{class_name} has no field '{name}': verl stops with a TypeError when it builds it"
    return _error(
        "unknown_field", key, why, f"did you mean {path}.{close[0]}?" if close else "remove the override"
    )


@cache
def _asked_for() -> frozenset[tuple[str, str]]:
    """(node, key) that verl asks for and its configuration need not have: data.get("gen_batch_size")."""
    directories = ("trainer", "workers", "utils/dataset", "experimental")
    files = [file for directory in directories for file in (package() / directory).rglob("*.py")]
    asks = re.compile(r"\b(\w+)\.get\(\s*[\"'](\w+)[\"']")
    return frozenset(pair for file in files for pair in asks.findall(file.read_text()))


# Keys of verl-recipe's DAPO, and where verl's own DAPO reward manager has them.
MOVED = {"reward_model.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg."}


def _unknown(plain: dict[str, Any], key: str, value: str) -> Finding:
    """The finding for a key that Hydra refuses: what to write instead."""
    for old, new in MOVED.items():
        if key.startswith(old):
            why = "the patched verl has it elsewhere, and asks for max_resp_len there: Hydra stops"
            return _error("unknown_key", key, why, f"it may be added: +{key.replace(old, new)}={value}")
    path, _, fields = _node(plain, key)
    name = key.removeprefix(path).lstrip(".").partition(".")[0]
    passed_on = re.search(r"engine_kwargs|override_\w*config|reward_kwargs", key)
    if name in fields or passed_on or tuple(key.split(".")[-2:]) in _asked_for():
        fix = f"it may be added: +{key}={value}"
    else:
        known = nearest(key, list(keys(plain)))
        fix = f"did you mean {known}?" if known else "remove the override"
    return _error("unknown_key", key, "the patched verl has no such key: Hydra stops", fix)


@cache
def _parsed(word: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(word)


def _with_placeholder(word: str) -> Any:
    """The override if its value is <something>, which Hydra cannot read; script.placeholder reports it."""
    from hydra.errors import HydraException

    key, _, value = word.partition("=")
    with contextlib.suppress(HydraException):
        return _parsed(f"{key}={json.dumps(value)}") if PLACEHOLDER.search(value) else None
    return None


def _parse(words: Sequence[str], directory: Path, resolved: Resolved) -> tuple[list[Any], list[str]]:
    """Parsed overrides, and those that choose a config group; fills `given` and `findings`."""
    from hydra.errors import HydraException

    overrides, groups = [], []
    for word in words:
        try:
            override = _parsed(word)
        except HydraException as error:
            override = _with_placeholder(word)
            if override is None:
                why = str(error).strip().splitlines()[0]
                fix = "write key=value in one word; quote the whole word if the value has spaces or commas"
                resolved.findings.append(_error("syntax", word[:80], why, fix))
                continue
        key = override.key_or_group
        if "@" in override.get_key_element() or (directory / key).is_dir():
            groups.append(word)
        elif not key.startswith("hydra."):
            overrides.append(override)
            resolved.given.setdefault(key, []).append(word.partition("=")[2])
    return overrides, groups


def _apply(override: Any, config: Any, plain: dict[str, Any]) -> Finding | None:
    """Apply one override to config as Hydra does; if Hydra refuses it, force it and return a finding."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key = override.key_or_group
    try:
        ConfigLoaderImpl._apply_overrides_to_config([override], config)
    except (HydraException, OmegaConfBaseException):
        if not override.is_delete():
            with contextlib.suppress(OmegaConfBaseException):
                OmegaConf.update(config, key, override.value(), force_add=True)
        if override.is_add():
            return _error(
                "existing_key", key, "'+' adds a key, but this one exists: Hydra stops", "leave the + out"
            )
        return _unknown(plain, key, override.input_line.partition("=")[2])
    return _added(plain, key) if override.is_add() else None


def _replaced(directory: Path, name: str, options: dict[str, str], why: str) -> Finding:
    """The finding for a configuration that is not verl's and is not here."""
    said = options.get("config-path", str(directory))
    if not why and directory.is_dir():
        names = ", ".join(sorted(file.stem for file in directory.glob("*.yaml"))) or "none"
        return _error("name", name, f"{said} has no such config", f"use one of: {names}")
    return Finding(
        "info",
        "config.elsewhere",
        f"{said}/{name}",
        f"{why or 'it is not on this machine'}: what it sets, and which keys it adds, was not checked",
        "run this where it is, from the directory that the run starts in",
    )


def resolve(module: str, args: Sequence[str], roots: Sequence[Path] = (), partial: bool = False) -> Resolved:
    """Compose the configuration of `python -m module args...`; a wrong override raises nothing.

    Args:
        roots: where modules other than verl's may be: the working directory, then PYTHONPATH.
        partial: the module is another project's, whose configuration is not known.
    """
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    options, words = split_arguments(args)
    directory, name = config_source(module, options, roots)
    resolved = Resolved({}, partial=partial)
    findings = resolved.findings
    own, why = own_configs(), ""
    if directory != own and (directory / f"{name}.yaml").is_file():
        try:
            _composed(directory, name, ())
        except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
            why = str(error).splitlines()[0]
    if why or not (directory / f"{name}.yaml").is_file():
        if directory == own and not partial:
            names = ", ".join(sorted(file.stem for file in own.glob("ppo*.yaml")))
            findings.append(
                _error("name", name, "the patched verl has no such config", f"use one of: {names}")
            )
            return resolved
        if not partial:
            findings.append(_replaced(directory, name, options, why))
        megatron = "megatron" in name or any(".megatron." in word for word in words)
        directory, name = own, "ppo_megatron_trainer" if megatron else "ppo_trainer"
        resolved.partial = True

    overrides, groups = _parse(words, directory, resolved)
    try:
        base, plain = _composed(directory, name, tuple(groups))
    except HydraException as error:
        fix = f"see the directories in {directory.name}/ of the patched verl"
        findings.append(_error("group", " ".join(groups), str(error).splitlines()[0], fix))
        base, plain = _composed(directory, name, ())
    resolved.defaults = {key: select(plain, key) for key in keys(plain)}
    config = pickle.loads(base)  # much faster than a deep copy
    refused = list(filter(None, [_apply(override, config, plain) for override in overrides]))
    findings += [] if resolved.partial else refused
    try:
        resolved.config = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        where = str(getattr(error, "full_key", ""))
        findings.append(
            _error("interpolation", where, str(error).splitlines()[0], "correct the ${...} in the override")
        )
        resolved.config = OmegaConf.to_container(config, resolve=False)
    return resolved

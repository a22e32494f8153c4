"""What values the pinned frameworks accept, read from their sources without importing them.

A configuration says which loss, which load format, which recomputation; the frameworks look the name up hours
later. What they would accept stands in their code in a few forms, and each is read here: registries filled by
a decorator, Enum classes, Literal types, lists that a class checks itself against when it is built, strings
that a function compares an argument with before it raises, and the choices of command line options.

Invariant (tests/test_lint_values.py): every value returned here is one that the framework's own code accepts.
An absent framework gives empty results, and what is empty is not checked. Cost: parsing, once a file.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import itertools
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from ascend_rl.settings.stack import DIRECTORY

FRAMEWORKS = DIRECTORY / "frameworks"  # of a CPU run, beside what is installed


@cache
def sources(package: str, *patterns: str) -> tuple[Path, ...]:
    """Files of a package that can be imported (it is not), else of frameworks/; empty if it is absent."""
    spec = importlib.util.find_spec(package)
    roots = map(Path, spec.submodule_search_locations or ()) if spec else [FRAMEWORKS / package / package]
    return tuple(file for root in roots for pattern in patterns for file in sorted(root.glob(pattern)))


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(_text(file))


@cache
def _walked(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(file)))


@cache
def _text(file: Path) -> str:
    return file.read_text()


def nodes(files: Iterable[Path], word: str = "") -> Iterator[ast.AST]:
    """All nodes of those files in whose text `word` occurs; each is parsed and walked once."""
    return itertools.chain.from_iterable(_walked(file) for file in files if word in _text(file))


def _constants(node: ast.AST | None) -> tuple | None:
    """The values of a list, tuple, set or dict (its keys) of constants; None for anything else."""
    with contextlib.suppress(ValueError, TypeError, SyntaxError):
        value = ast.literal_eval(node)
        if isinstance(value, set):
            return tuple(sorted(value, key=str))  # the same in each run
        return tuple(value) if isinstance(value, list | tuple | dict) else None
    return None


@cache
def enums(files: tuple[Path, ...]) -> dict[str, dict[str, object]]:
    """{Enum class: {member: value}} of these files."""
    found = {}
    for node in nodes(files, "Enum"):
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
            found[node.name] = {
                item.targets[0].id: getattr(item.value, "value", None)
                for item in node.body
                if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
            }
    return found


def _decorated(decorator: str, files: Iterable[Path]) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Each definition under `@decorator(...)`, with that call."""
    for node in nodes(files, decorator):
        for call in getattr(node, "decorator_list", ()):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == decorator:
                yield node, call


@cache
def registered(decorator: str, files: tuple[Path, ...]) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """{name: definition} of what `@decorator("name")` or `@decorator(SomeEnum.NAME)` registers."""
    found, members = {}, enums(files)
    for node, call in _decorated(decorator, files):
        for name in call.args[:1]:
            if isinstance(name, ast.Constant):
                found[name.value] = node
            elif isinstance(name, ast.Attribute):
                found[members.get(ast.unparse(name.value), {}).get(name.attr)] = node
    return {str(name): node for name, node in found.items() if name}


@cache
def registered_with(decorator: str, keyword: str, files: tuple[Path, ...]) -> tuple[str, ...]:
    """The values that `@decorator(keyword="value")`, or a list of them, registers."""
    found: dict[str, None] = {}
    for _, call in _decorated(decorator, files):
        for given in (each.value for each in call.keywords if each.arg == keyword):
            one = isinstance(given, ast.Constant)
            found |= dict.fromkeys((given.value,) if one else _constants(given) or ())
    return tuple(found)


@cache
def listed(name: str, files: tuple[Path, ...]) -> tuple:
    """The constants of the list, tuple, set or dict that `name = ...` assigns, in a module or a class."""
    for node in nodes(files, name):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                if isinstance(node.value, ast.Dict):
                    return tuple(ast.literal_eval(key) for key in node.value.keys if key)
                return _constants(node.value) or ()
    return ()


@cache
def mapping(name: str, files: tuple[Path, ...]) -> dict:
    """The dict of constants that `name = {...}` assigns; empty if there is none."""
    for node in nodes(files, name):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            with contextlib.suppress(ValueError):
                return ast.literal_eval(node.value)
    return {}


@cache
def compared(expression: str, files: tuple[Path, ...], function: str = "") -> tuple[str, ...]:
    """The strings with which `expression` is compared (==, in), except where the branch only raises.

    Of one function, or of all code in the files. `expression` is the end of the text: "kl_ctrl.type".
    """
    found: dict[str, None] = {}
    everything = tuple(nodes(files, function or expression.rpartition(".")[2]))
    functions = (each for each in everything if isinstance(each, ast.FunctionDef) and each.name == function)
    for inside in [tuple(ast.walk(each)) for each in functions] if function else [everything]:
        raising = {
            id(branch.test)
            for branch in inside
            if isinstance(branch, ast.If) and all(isinstance(item, ast.Raise) for item in branch.body)
        }
        for test in inside:
            if not isinstance(test, ast.Compare) or id(test) in raising:
                continue
            if not f".{ast.unparse(test.left)}".endswith(f".{expression}"):
                continue
            (right,) = test.comparators[:1]
            values = (right.value,) if isinstance(right, ast.Constant) else _constants(right) or ()
            found |= dict.fromkeys(value for value in values if isinstance(value, str))
    return tuple(found)


@cache
def aliases(files: tuple[Path, ...]) -> dict[str, ast.AST]:
    """{name: type} of `Name = Literal[...]` in these files."""
    found = {}
    for file in files:
        for node in tree(file).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
                if ast.unparse(node.value.value).endswith("Literal"):
                    found[ast.unparse(node.targets[0])] = node.value
    return found


@cache
def literal(annotation: str, files: tuple[Path, ...]) -> tuple:
    """The values that a type allows, None included; empty if it allows others than a fixed set.

    >>> literal("Literal['a', 'b'] | None", ())
    ('a', 'b', None)
    """
    try:
        return tuple(dict.fromkeys(_allowed(ast.parse(annotation, mode="eval").body, files)))
    except (ValueError, SyntaxError):
        return ()


def _allowed(node: ast.AST, files: tuple[Path, ...]) -> Iterator:
    if isinstance(node, ast.BinOp):
        yield from [*_allowed(node.left, files), *_allowed(node.right, files)]
    elif isinstance(node, ast.Constant) and node.value is None:
        yield None
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
        values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        yield from (ast.literal_eval(value) for value in values)
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Optional":
        yield from [*_allowed(node.slice, files), None]
    elif isinstance(node, ast.Name) and node.id in aliases(files):
        yield from _allowed(aliases(files)[node.id], files)
    elif isinstance(node, ast.Name) and node.id in enums(files):
        for name, value in enums(files)[node.id].items():
            yield from (name, value)
    else:
        raise ValueError(ast.unparse(node))


@cache
def checked(files: tuple[Path, ...]) -> dict[str, dict[str, tuple]]:
    """{class: {field: values}} that a class checks when it is built: `assert self.x in [...]`, or raises."""
    own, bases = {}, {}
    for node in nodes(files):
        if not isinstance(node, ast.ClassDef):
            continue
        bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
        own[node.name] = found = {}
        names: dict[str, tuple] = {}
        for item in ast.walk(node):
            if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                names[item.targets[0].id] = _constants(item.value) or ()
        for item in ast.walk(node):
            wanted = ast.In if isinstance(item, ast.Assert) else ast.NotIn
            if not isinstance(item, ast.Assert | ast.If) or not isinstance(item.test, ast.Compare):
                continue
            if isinstance(item, ast.If) and not isinstance(item.body[-1], ast.Raise):
                continue
            left, right = item.test.left, item.test.comparators[0]
            if not isinstance(item.test.ops[0], wanted) or not ast.unparse(left).startswith("self."):
                continue
            values = names.get(right.id) if isinstance(right, ast.Name) else _constants(right)
            if values and isinstance(left, ast.Attribute):
                found[left.attr] = values

    def inherited(name: str) -> dict[str, tuple]:
        above = [inherited(base) for base in bases.get(name, ()) if base != name]
        return {key: value for one in [*above, own.get(name, {})] for key, value in one.items()}

    return {name: inherited(name) for name in own}


@cache
def checked_argument(name: str, files: tuple[Path, ...]) -> tuple:
    """The values of `assert name in [...]` in a function."""
    for node in nodes(files, name):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            if ast.unparse(node.test.left) == name and isinstance(node.test.ops[0], ast.In):
                return _constants(node.test.comparators[0]) or ()
    return ()


@cache
def choices(files: tuple[Path, ...]) -> dict[str, tuple]:
    """{option: values} of command line parsers: add_argument("--some-name", choices=[...])."""
    found = {}
    for node in nodes(files, "add_argument"):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            values = next((_constants(word.value) for word in node.keywords if word.arg == "choices"), None)
            for word in node.args:
                if values and isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                    found[word.value[2:].replace("-", "_")] = values
    return found


@cache
def forwarded(name: str, receiver: str, files: tuple[Path, ...]) -> dict[str, str]:
    """{key: attribute} of the dict that `name = {...}` builds from `receiver.attribute` values."""
    for node in nodes(files, name):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            if isinstance(node.value, ast.Dict) and len(node.value.keys) > 5:
                return {
                    key.value: value.attr
                    for key, value in zip(node.value.keys, node.value.values, strict=True)
                    if isinstance(key, ast.Constant)
                    and isinstance(value, ast.Attribute)
                    and ast.unparse(value.value) == receiver
                }
    return {}

"""The plan of ascend_rl: which rooms exist, on which floor, and that imports only go down."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ascend_rl
from ascend_rl.__main__ import COMMANDS

HOUSE = Path(ascend_rl.__file__).parent
FLOORS = {
    int(number): rooms.split()
    for number, rooms in re.findall(r"^ +floor (\d) +(.+)$", ascend_rl.__doc__, re.M)
}
ROOMS = sorted(path.name for path in HOUSE.iterdir() if (path / "__init__.py").exists())
FRAMEWORKS = {"verl", "vllm", "vllm_ascend", "megatron", "mindspeed", "roll", "torch_npu", "mbridge"}


def imported(path: Path) -> set[str]:
    """The modules a file imports anywhere in it, also by importlib."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import; this house writes the whole name"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            found |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    return found


def rooms_used(room: str) -> dict[str, set[str]]:
    """The other rooms a room imports from, each with the files that do."""
    used: dict[str, set[str]] = {}
    for path in set((HOUSE / room).glob("*.py")) - {HOUSE / room / "__main__.py"}:
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "ascend_rl" and len(parts) > 1 and parts[1] != room:
                used.setdefault(parts[1], set()).add(path.name)
    return used


def modules() -> dict[str, Path]:
    names = {
        path: ".".join(path.relative_to(HOUSE.parent).with_suffix("").parts) for path in HOUSE.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def circles(uses: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one node."""

    def reached(start: str) -> set[str]:
        found, new = set(), [start]
        while new:
            more = uses[new.pop()] - found
            found |= more
            new += more
        return found

    reach = {name: reached(name) for name in uses}
    found = {frozenset({other for other in reach[name] if name in reach[other]}) for name in uses}
    return [set(one) for one in found if len(one) > 1]


def test_a_circle_is_found():
    uses = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}
    assert circles(uses) == [{"b", "c"}]


def test_no_modules_import_each_other():
    """Nor in a circle, nor inside functions."""
    known = modules()
    assert len(known) > 100
    assert circles({name: imported(path) & known.keys() - {name} for name, path in known.items()}) == []


def test_no_file_is_longer_than_one_would_read():
    """A long one is two subjects."""
    lengths = {path.name: len(path.read_text().splitlines()) for path in HOUSE.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length >= 700} == {}


def test_the_plan_names_every_room_once():
    assert sorted(room for rooms in FLOORS.values() for room in rooms) == ROOMS


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_down(room):
    floor = {name: number for number, rooms in FLOORS.items() for name in rooms}
    for other, files in rooms_used(room).items():
        assert floor[other] < floor[room], f"{room} may not import {other}: {sorted(files)}"


def test_the_software_npu_knows_nothing_of_this_project():
    """Nor of the frameworks: others can use it."""
    for path in (HOUSE.parent / "software_npu").rglob("*.py"):
        text = path.read_text()
        names = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.M))
        assert not names & (FRAMEWORKS - {"torch_npu"}) and "ascend_rl" not in text, path


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_says_what_it_is_for(room):
    assert ast.get_docstring(ast.parse((HOUSE / room / "__init__.py").read_text()))
    assert len(list((HOUSE / room).glob("*.py"))) > 1


def test_only_glue_imports_frameworks():
    """And each of its files does, but for those of a stack. start_roll runs ROLL, by a name of the recipe."""
    for path in HOUSE.rglob("*.py"):
        used = {name.split(".")[0] for name in imported(path)} & FRAMEWORKS
        in_glue = path.relative_to(HOUSE).parts[0] == "glue"
        assert in_glue or not used, (path, used)
        assert used or path.parent.name != "glue" or path.stem == "__init__", path


@pytest.mark.parametrize("name", ["launch.launch", "launch.launch_node", "preflight.preflight"])
def test_what_only_watches_imports_no_torch(name):
    """It takes a second, and 300 MB for as long as the run."""
    program = f"import sys, ascend_rl.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_beside_the_rooms_are_commands_only():
    """One line each, that runs a command of __main__.py."""
    names, main = set(), HOUSE / "__main__.py"
    for path in {*HOUSE.glob("*.py"), *HOUSE.glob("*/__main__.py")} - {main, HOUSE / "__init__.py"}:
        *imports, last = ast.parse(path.read_text()).body
        assert all(isinstance(node, ast.Import | ast.ImportFrom) for node in imports), path
        names |= set(re.findall(r'sys\.exit\(run\("([a-z-]+)"\)\)', ast.unparse(last).replace("'", '"')))
    assert names == set(COMMANDS)


@pytest.mark.parametrize(("short", "long"), [("tiny", "tiny"), ("lint", "lint"), ("plan", "memory_plan")])
def test_both_forms_of_a_command_are_one(short, long):
    ascend_rl, environment = Path(sys.executable).with_name("ascend-rl"), os.environ | {"COLUMNS": "80"}
    forms = [ascend_rl, short], [sys.executable, "-m", f"ascend_rl.{long}"]
    texts = [subprocess.check_output([*form, "-h"], text=True, cwd="/", env=environment) for form in forms]
    assert texts[0] == texts[1] and "usage: python -m" in texts[0]


def test_the_command_lists_its_commands():
    ascend_rl = Path(sys.executable).with_name("ascend-rl")
    listed = subprocess.check_output([ascend_rl, "-h"], text=True).partition("commands:\n")[2]
    assert [line.split()[0] for line in listed.splitlines()] == list(COMMANDS)
    wrong = subprocess.run([ascend_rl, "no-such-command"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "no-such-command" in wrong.stderr

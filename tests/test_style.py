"""House rules that a machine can check: Python and shell style, help texts, leaks, documents, pins."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

_listed = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
).stdout.split("\0")
FILES = sorted(name for name in _listed if name and (ROOT / name).is_file())
SCRIPTS = [name for name in FILES if name.endswith(".sh")]
SOURCED = [
    name
    for name in SCRIPTS
    if name == "internal/common.sh" or name.endswith(("/recipe.sh", "_env.sh", "_layout.sh"))
]
COMMANDS = [name for name in SCRIPTS if name not in SOURCED]
CODE = [name for name in FILES if name.endswith((".py", ".sh", ".toml", ".lock"))]

# With a "~" in each, so that this file does not match. "<name>" is no user's name.
DIRECTORIES = ["/ro~ot/", "/wo~rk/", "/ho~me/[a-z]", "/Us~ers/[A-Za-z]"]
REGISTRIES = [
    r"py~pi\.org",
    r"python~hosted\.",
    "/py~pi/simple",
    r"mirrors\.ali~yun",
    r"pypi\.tu~na",
    r"repo\.hua~weicloud",
    r"registry\.n~pmjs",
    "arti~factory",
    r"jf~rog\.",
    r"nex~us\.",
    "index-url[= ]ht~tps?:",
]
LEAKS = re.compile(
    "|".join([*(rf"(?<![\w.}}])(?:{path})" for path in DIRECTORIES), *REGISTRIES]).replace("~", "")
)


def text(name: str) -> str | None:
    """A file's text; None for binary files."""
    data = (ROOT / name).read_bytes()
    return None if b"\0" in data else data.decode()


def test_the_lists_are_not_empty():
    """Guards the tests below."""
    assert {"ascend_rl/loss/gspo.py", "tests/test_style.py"} <= set(FILES)
    assert {"quickstart.sh", "ray_start_npu.sh"} <= set(COMMANDS) and len(SOURCED) >= 2
    assert not [name for name in FILES if name.startswith(("frameworks/", ".venv/", "outputs/", "data/"))]


# Python.


def test_ruff():
    """The rules are in pyproject.toml."""
    result = subprocess.run(
        [BIN / "ruff", "check", "--no-cache", "--output-format", "concise", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    result = subprocess.run(
        [BIN / "ruff", "format", "--no-cache", "--diff", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    settings = subprocess.run(
        [BIN / "ruff", "check", "--show-settings", "tests/test_style.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "linter.line_length = 110" in settings
    assert tomllib.loads(text("pyproject.toml"))["tool"]["ruff"]["lint"]["select"] == "E W F I B UP".split()


def test_code_is_ascii():
    bad = [
        f"{name}:{number}: {line.strip()}"
        for name in CODE
        for number, line in enumerate(text(name).splitlines(), 1)
        if not line.isascii()
    ]
    assert not bad, "\n".join(bad)


# Shell.


def test_shellcheck():
    shells = ("#!/bin/sh", "#!/usr/bin/env bash")
    unnamed = [name for name in FILES if "." not in Path(name).name and (text(name) or "").startswith(shells)]
    command = [BIN / "shellcheck", "-x", "-P", "SCRIPTDIR", "-f", "gcc", *SCRIPTS, *unnamed]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_scripts_say_how_they_are_used(name, tmp_path):
    """Line 1 is the shebang, the comment below it is the help; -h needs nothing but bash, from anywhere."""
    lines = text(name).splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    end = next(number for number, line in enumerate(lines) if number and not line.startswith("#"))
    header = [line.removeprefix("#").removeprefix(" ") for line in lines[1:end]]
    assert header[0].endswith(".") and header[1] == ""
    writes = ["Writes:"] if name.startswith("internal/train_") else []
    for field in ["Usage:", "Example:", *writes, "Hardware:", "Duration:"]:
        assert any(line.startswith(field) for line in header), f"{name} has no line '# {field} ...'"
    for option in ("-h", "--help"):
        result = subprocess.run(
            ["/bin/bash", ROOT / name, option],
            env={"PATH": "/usr/bin:/bin"},
            timeout=600,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.splitlines() == header
    assert list(tmp_path.iterdir()) == []


# Started by other programs only, not by users.
CHILDREN = {
    "ascend_rl/launch/launch.py",  # ray_start_npu.sh, which has the help
    "ascend_rl/launch/launch_node.py",
    "ascend_rl/launch/warm_start.py",
    "ascend_rl/lint/confine.py",
    "ascend_rl/recipe/math_equal.py",
    "ascend_rl/settings/hidden.py",
    "bench/verl_converter_on_cpu.py",
}
PYTHON_COMMANDS = [
    name
    for name in FILES
    if name.endswith(".py") and not name.startswith("tests/") and '__name__ == "__main__"' in text(name)
]


@pytest.mark.parametrize("name", sorted({*PYTHON_COMMANDS} - CHILDREN))
def test_python_commands_say_how_they_are_used(name, tmp_path):
    """-h does nothing else."""
    command = [sys.executable, "-B", ROOT / name, "-h"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert said.returncode == 0 and said.stdout.startswith("usage: "), said.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", COMMANDS)
def test_scripts_stop_at_errors(name):
    """By their own `set`, or by that of internal/common.sh, which internal/recipe.sh sources."""
    ways = r'^(set -euo pipefail|\. ".*(common|recipe)\.sh"( \|\| exit 130 # .*)?)$'
    assert re.search(ways, text(name), re.MULTILINE)


@pytest.mark.parametrize("name", SOURCED)
def test_sourced_files_define_and_do_nothing_else(name):
    command = ["bash", "-euo", "pipefail", "-c", f". {ROOT / name}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


# What must not get into a repository.


def test_nothing_of_a_developers_machine_leaks():
    found = [
        f"{name}:{number}: {match.group()}"
        for name in FILES
        for number, line in enumerate((text(name) or "").splitlines(), 1)
        for match in LEAKS.finditer(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "leak",
    [
        "cd /ro~ot/x",
        '"/wo~rk/main"',
        "/ho~me/alice/x",
        "=/Us~ers/Al/x",
        "https://py~pi.org/simple",
        "https://files.python~hosted.org/x",
        "--extra-index-url ht~tps://example.com/simple",
    ],
)
def test_leaks_are_recognised(leak):
    assert LEAKS.search(leak.replace("~", ""))


@pytest.mark.parametrize(
    "fine",
    [
        "$ROOT/ro~ot/x",
        "frameworks/wo~rk/x",
        "/ho~me/<name>",
        "PyPI",
        'TORCH_INDEX_URL="https://example.com"',
        '--index-url "$URL"',
    ],
)
def test_what_is_fine_is_not_taken_for_a_leak(fine):
    assert not LEAKS.search(fine.replace("~", ""))


def test_no_large_files():
    """Logs and models get in by accident; figures are below this."""
    assert not [name for name in FILES if (ROOT / name).stat().st_size > 400_000]


# Documents.


@pytest.mark.parametrize("name", [name for name in FILES if re.fullmatch(r"(docs/)?[^/]+\.md", name)])
def test_documents_exist_in_english_and_chinese(name):
    stem = name.removesuffix(".md").removesuffix(".zh")
    assert f"{stem}.md" in FILES and f"{stem}.zh.md" in FILES
    content = text(name)
    chinese = len(re.findall(r"[\u4e00-\u9fff]", content))
    assert chinese > 100 if name.endswith(".zh.md") else chinese < 20


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".md")])
def test_links_between_documents_lead_somewhere(name):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text(name))
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    missing = [link for link in local if not ((ROOT / name).parent / link).exists()]
    assert not missing


# Pins.


@pytest.mark.parametrize("name", ["docs/modules.md", "docs/modules.zh.md"])
def test_readme_names_the_pinned_versions(name):
    lock = tomllib.loads(text("frameworks.lock"))
    tags = {table["tag"] for table in lock.values() if "package" in table}
    assert set(re.findall(r"^\| [\w-]+ \| (\S+) \|$", text(name), re.M)) >= tags
    assert lock["cpu"]["torch"] in text(name) and lock["ascend"]["torch_npu"] in text(name)


def requirements(name: str) -> list[Requirement]:
    lines = (line.split(" #")[0].strip() for line in text(name).splitlines() if not line.startswith("#"))
    return [Requirement(line) for line in lines if line]


STACKS = [name.removesuffix("frameworks.lock") for name in FILES if name.endswith("frameworks.lock")]


def versions(stack: str, name: str) -> list[str]:
    """Versions of a distribution in requirements-cpu.txt; several where markers tell platforms apart."""
    return [
        next(iter(r.specifier)).version
        for r in requirements(f"{stack}requirements-cpu.txt")
        if canonicalize_name(r.name) == canonicalize_name(name)
    ]


@pytest.mark.parametrize("stack", STACKS)
def test_every_requirement_is_pinned(stack):
    pins = requirements(f"{stack}requirements-cpu.txt")
    assert len(pins) > 100
    exact = [r for r in pins if [s.operator for s in r.specifier] == ["=="] and "*" not in str(r.specifier)]
    assert [str(r) for r in pins if r not in exact] == []


@pytest.mark.parametrize("stack", STACKS)
def test_pins_satisfy_what_they_were_compiled_from(stack):
    for requirement in requirements(f"{stack}requirements-cpu.in"):
        found = versions(stack, requirement.name)
        assert found, f"{requirement.name} is not in {stack}requirements-cpu.txt; see requirements-cpu.in"
        assert all(requirement.specifier.contains(version, prereleases=True) for version in found)


@pytest.mark.parametrize("stack", STACKS)
def test_pins_equal_the_lock(stack):
    pinned = tomllib.loads(text(f"{stack}frameworks.lock"))["cpu"]
    python = pinned.pop("python")
    assert {name: versions(stack, name) for name in pinned} == {name: [pin] for name, pin in pinned.items()}
    for name in ("requirements-cpu.in", "requirements-cpu.txt"):
        assert f"--python-version {python} " in text(stack + name)

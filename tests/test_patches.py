"""The real patch set on the real sources: in order, quick to apply, and nothing to do the second time."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sources import BASE_TAG, UNTRACKED, Project, git, tree_hash

REPO = Path(__file__).resolve().parent.parent


def run(root: Path, *args: str) -> str:
    command = [sys.executable, str(REPO / "patches/patchset.py"), "--root", str(root), *args]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The lock, the patches and every downloaded tree at its base, in a place of their own."""
    root = tmp_path_factory.mktemp("stack")
    shutil.copy(REPO / "frameworks.lock", root)
    shutil.copytree(REPO / "patches", root / "patches", ignore=shutil.ignore_patterns("__pycache__"))
    project = Project.load(REPO)
    trees = [name for name in project.frameworks if project.tree(name).exists()]
    required = [name for name, framework in project.frameworks.items() if not framework.optional]
    assert set(required) <= set(trees), "run ./download_frameworks_source_code.sh first"
    for name in trees:
        tree = root / "frameworks" / name
        skip = shutil.ignore_patterns(*(pattern.removesuffix("/") for pattern in UNTRACKED))
        shutil.copytree(project.tree(name), tree, symlinks=True, ignore=skip)
        for state in ("ascend-rl-applied", "index.lock"):
            (tree / ".git" / state).unlink(missing_ok=True)
        git(tree, "checkout", "-q", "-f", "-B", "ascend-rl", BASE_TAG)
    return Project.load(root)


def test_the_set_is_in_order() -> None:
    """Applies, one commit a file, identical export, hashes, compiles, trailers, switches, tests, index."""
    out = run(REPO, "check")
    for name, framework in Project.load(REPO).frameworks.items():
        assert f"{name} {framework.tag}: " in out
        if not framework.optional:
            assert f"{name} {framework.tag}: absent" not in out


@pytest.mark.parametrize("patch", sorted((REPO / "patches").glob("*/*.patch")), ids=lambda patch: patch.stem)
def test_any_one_can_be_left_out(patch: Path) -> None:
    """So that a user may drop it, and so that tests/patched/test_left_out.py can."""
    tree = REPO / "frameworks" / patch.parent.name
    if not tree.exists():
        pytest.skip(f"no {patch.parent.name} checkout")
    git(tree, "apply", "-R", "--check", str(patch))


def cpu_s() -> float:
    """Processor time of the processes started so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_apply_then_apply_again(copy: Project) -> None:
    clock = time.monotonic(), cpu_s()
    out = run(copy.root, "apply")
    first_s, first_cpu_s = time.monotonic() - clock[0], cpu_s() - clock[1]
    assert "already applied" not in out.replace("0 patches already applied", "")
    clock = time.monotonic(), cpu_s()
    out = run(copy.root, "apply")
    second_s, second_cpu_s = time.monotonic() - clock[0], cpu_s() - clock[1]
    trees = [name for name in copy.frameworks if copy.tree(name).exists()]
    assert out.count("already applied") == len(trees)
    print(f"\napply: {first_s:.2f} s (bar 5 s), again: {second_s:.2f} s (bar 0.5 s)")
    assert first_cpu_s < 30 and second_cpu_s < 10  # machines are noisy; the bars are printed
    for name in trees:
        assert tree_hash(copy.tree(name), copy.framework(name)) == copy.framework(name).tree, name
        assert git(copy.tree(name), "status", "--porcelain") == "", name

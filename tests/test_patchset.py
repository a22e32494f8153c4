"""patches/patchset.py on toy upstreams: nothing lost, nothing half done, the same result everywhere."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
PATCHSET = REPO / "patches/patchset.py"
SOURCES = REPO / "patches/sources.py"
MESSAGE = """{kind}({name}): do something about {name}

Why: it costs 3 ms a step, measured here
How: core.run -> ascend_rl.{name}.run

Upstream-Status: Pending
Drop-When: upstream has {name}
Switch: {switch}
Test: tests/test_{name}.py
"""
HOSTILE = """
[user]
 name = Somebody Else
 email = else@example.com
 signingkey = none
[commit]
 gpgsign = true
 template = /nonexistent
[core]
 autocrlf = true
 hooksPath = {hooks}
 abbrev = 5
 quotePath = true
 attributesFile = {attributes}
[am]
 threeWay = true
 keepcr = false
[apply]
 whitespace = fix
[diff]
 noprefix = true
 mnemonicPrefix = true
 algorithm = patience
 context = 8
 renames = copies
 external = /bin/false
[format]
 attach = xx
 numbered = true
 signature = "mine"
 useAutoBase = true
 pretty = fuller
 subjectPrefix = MINE
[mailinfo]
 scissors = true
[status]
 short = true
 branch = true
[i18n]
 commitEncoding = iso-8859-1
"""


def lines(*changes: tuple[int, str]) -> str:
    """A 60 line module; `changes` replace lines by number."""
    text = {number: f"LINE_{number} = {number}" for number in range(1, 61)} | dict(changes)
    return "".join(f"{line}\n" for line in text.values())


def sh(path: Path, *args: str, env: dict[str, str] | None = None) -> str:
    return subprocess.run(
        ["git", "-C", str(path), "-c", "user.name=Dev", "-c", "user.email=dev@example.com", *args],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
        env=env,
    ).stdout.strip()


class Toy:
    """A repository root with two patched frameworks, alpha and beta, and an absent optional one."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def tree(self, name: str = "alpha") -> Path:
        return self.root / "frameworks" / name

    def patches(self, name: str = "alpha") -> list[Path]:
        return sorted((self.root / "patches" / name).glob("*.patch"))

    def bytes(self) -> dict[str, bytes]:
        """Everything that is committed to the main repository."""
        files = [path for path in self.root.rglob("*") if path.is_file() and "frameworks" not in path.parts]
        return {str(path.relative_to(self.root)): path.read_bytes() for path in files}

    def trees(self) -> dict[str, bytes]:
        """Every file of every tree and its .git, except the index (git refreshes it when reading)."""
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in (self.root / "frameworks").rglob("*")
            if path.is_file() and path.name != "index"
        }

    def head(self, name: str = "alpha") -> str:
        return sh(self.tree(name), "rev-parse", "HEAD")

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(PATCHSET), "--root", str(self.root), *args],
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | env,
            check=False,
        )

    def ok(self, *args: str, **env: str) -> str:
        result = self.run(*args, **env)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def refused(self, *args: str) -> str:
        """Run, expect a refusal that changes no tree and no file of the repository, return the message."""
        before = (self.bytes(), self.trees())
        result = self.run(*args)
        assert result.returncode == 1, result.stdout + result.stderr
        assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
        assert (self.bytes(), self.trees()) == before
        return result.stderr

    def commit(
        self, name: str, feature: str, files: dict[str, str], switch: str = "none", **changes: str
    ) -> None:
        for path, text in files.items():
            (self.tree(name) / path).parent.mkdir(parents=True, exist_ok=True)
            (self.tree(name) / path).write_text(text)
        message = changes.get("message") or MESSAGE.format(
            kind=changes.get("kind", "feature"), name=feature, switch=switch
        )
        sh(self.tree(name), "add", "-A")
        sh(self.tree(name), "commit", "-q", "-m", message)
        (self.root / f"tests/test_{feature}.py").write_text("def test():\n    assert True\n")


def make_upstream(path: Path) -> None:
    """v1; v2 moves lines and takes the change to line 5 (absorbed); v3 also rewrites line 40 (conflict)."""
    package = path / path.name
    (package / "config").mkdir(parents=True)
    (package / "core.py").write_text(lines())
    (package / "other.py").write_text(lines())
    (package / "config/a.yaml").write_text("a: 1\n")
    (path / "README.md").write_text("outside the package\n")
    (path / ".gitattributes").write_text("*.py diff=python text eol=crlf\n")
    sh(path, "init", "-q")
    sh(path, "config", "core.autocrlf", "false")

    def release(tag: str) -> None:
        sh(path, "add", "-A")
        sh(path, "commit", "-q", "-m", tag)
        sh(path, "tag", tag)

    release("v1")
    (package / "core.py").write_text(
        "# moved\n# down\n" + lines((5, "LINE_5 = 'absorbed'"), (30, "LINE_30 = 'near'"))
    )
    release("v2")
    (package / "core.py").write_text(lines((5, "LINE_5 = 'absorbed'"), (40, "LINE_40 = 'upstream'")))
    release("v3")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two downloaded frameworks with three exported patches in alpha and one in beta, all applied."""
    base = tmp_path_factory.mktemp("template")
    root = base / "root"
    (root / "tests").mkdir(parents=True)
    (root / "ascend_rl").mkdir()
    (root / "ascend_rl/third.py").write_text("import os\nON = os.environ.get('TOY_THIRD')\n")
    (root / "patches").mkdir()
    (root / "patches/README.md").write_text(
        "# Patches\n<!-- index: begin (written by patchset.py export) -->\n<!-- index: end -->\nafter\n"
    )
    lock = "# pins\n"
    for name in ("alpha", "beta"):
        make_upstream(base / name)
        lock += (
            f'[{name}]\npackage = "{name}"\nurl = "{(base / name).as_uri()}"\nmirror = ""\ntag = "v1"\n'
            f'commit = "{sh(base / name, "rev-parse", "v1")}"\ndist = ""\nversion = ""\n'
            'unhashed = []\ntree = ""\n\n'
        )
    lock += f'[gamma]\npackage = "gamma"\nurl = "{(base / "gamma").as_uri()}"\ntag = "v1"\n'
    lock += 'commit = ""\noptional = true\n'
    (root / "frameworks.lock").write_text(lock)
    subprocess.run(
        [sys.executable, str(SOURCES), "--root", str(root), "download"], check=True, capture_output=True
    )
    toy = Toy(root)
    toy.commit("alpha", "first", {"alpha/core.py": lines((5, "LINE_5 = 'absorbed'"))})
    toy.commit(
        "alpha",
        "second",
        {
            "alpha/core.py": lines((5, "LINE_5 = 'absorbed'"), (40, "LINE_40 = toy_second")),
            "alpha/config/a.yaml": "a: 1\ntoy: {second: 0}\n",
        },
        switch="+toy.second=1",
        kind="bugfix",
    )
    toy.commit("alpha", "third", {"alpha/added.py": "from ascend_rl import third\n"}, switch="TOY_THIRD=1")
    toy.commit("beta", "first", {"beta/core.py": lines((20, "LINE_20 = 'beta'"))})
    toy.ok("export")
    return root


@pytest.fixture
def toy(template: Path, tmp_path: Path) -> Toy:
    """Patches exported and applied."""
    shutil.copytree(template, tmp_path / "root", symlinks=True)
    return Toy(tmp_path / "root")


@pytest.fixture
def fresh(toy: Toy) -> Toy:
    """Patches exported, trees at their bases as after a download."""
    for name in ("alpha", "beta"):
        sh(toy.tree(name), "reset", "-q", "--hard", "ascend-rl-base")
        (toy.tree(name) / ".git/ascend-rl-applied").unlink()
    return toy


# --- apply --------------------------------------------------------------------------------------------


def test_apply_gives_the_exported_commits_and_is_idempotent(fresh: Toy, template: Path) -> None:
    out = fresh.ok("apply")
    assert "alpha v1: 3 patches applied" in out and "beta v1: 1 patch applied" in out
    assert "gamma v1: absent" in out
    assert "toy_second" in (fresh.tree() / "alpha/core.py").read_text()
    assert [fresh.head(name) for name in ("alpha", "beta")] == [
        Toy(template).head(name) for name in ("alpha", "beta")
    ]
    before = fresh.trees()
    started = time.monotonic()
    out = fresh.ok("apply")
    assert time.monotonic() - started < 30
    assert "3 patches already applied" in out and "1 patch already applied" in out
    assert fresh.trees() == before
    assert fresh.ok("status").count("as in the lock") == 2


def test_same_hashes_for_every_user_and_in_every_place(fresh: Toy, tmp_path: Path) -> None:
    """Configuration, identity, environment, hooks and even the tree's own settings make no difference."""
    other = Toy(tmp_path / "elsewhere/deeper")
    shutil.copytree(fresh.root, other.root)
    hooks = tmp_path / "home/hooks"
    hooks.mkdir(parents=True)
    for hook in (
        "applypatch-msg",
        "pre-applypatch",
        "post-applypatch",
        "pre-commit",
        "commit-msg",
        "post-checkout",
        "post-rewrite",
        "reference-transaction",
        "post-index-change",
        "prepare-commit-msg",
    ):
        (hooks / hook).write_text("#!/bin/sh\nexit 1\n")
        (hooks / hook).chmod(0o755)
    attributes = tmp_path / "home/attributes"
    attributes.write_text("*.py -diff filter=broken\n")
    config = HOSTILE.format(hooks=hooks, attributes=attributes)
    (tmp_path / "home/.gitconfig").write_text(config)
    with (other.tree() / ".git/config").open("a") as file:
        file.write(config)
    hostile = {
        "HOME": str(tmp_path / "home"),
        "GIT_AUTHOR_NAME": "Mallory",
        "GIT_COMMITTER_DATE": "1 +0000",
        "TZ": "Asia/Tokyo",
        "GIT_DIR": "/nonexistent",
        "GIT_INDEX_FILE": "/nonexistent/i",
        "GIT_WORK_TREE": "/nonexistent",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "diff.noprefix",
        "GIT_CONFIG_VALUE_0": "true",
        "GIT_DIFF_OPTS": "--unified=9",
        "LANG": "de_DE.UTF-8",
    }
    fresh.ok("apply")
    other.ok("apply", **hostile)
    assert [other.head(name) for name in ("alpha", "beta")] == [
        fresh.head(name) for name in ("alpha", "beta")
    ]
    before = other.bytes()
    other.ok("export", **hostile)
    other.ok("check", **hostile)
    assert other.bytes() == before


def test_a_conflict_leaves_every_tree_untouched_and_says_everything(fresh: Toy) -> None:
    """The conflict is in the second framework: the first must not have moved."""
    path = fresh.patches("beta")[0]
    path.write_text(path.read_text().replace(" LINE_19 = 19", " LINE_19 = 'other'"))
    message = fresh.refused("apply")
    assert "patches/beta/0001-beta-feature-first.patch does not apply (patch 1 of 1)" in message
    assert "beta/core.py: hunk 1 (line 17) finds no place" in message
    assert "line 19 expected: LINE_19 = 'other'" in message and "line 19 found:    LINE_19 = 19" in message
    assert "git -C frameworks/beta am -3" in message
    assert "3 patches applied" in fresh.ok("apply", "--only", "alpha")


def test_the_second_hunk_of_a_later_patch_is_named(fresh: Toy) -> None:
    fresh.ok("apply")
    fresh.commit("alpha", "fourth", {"alpha/other.py": lines((10, "TEN = 10"), (50, "FIFTY = 50"))})
    fresh.ok("export")
    path = fresh.patches()[3]
    path.write_text(path.read_text().replace(" LINE_51 = 51", " LINE_51 = 15"))
    sh(fresh.tree(), "reset", "-q", "--hard", "ascend-rl-base")
    message = fresh.refused("apply")
    assert "0004-alpha-feature-fourth.patch does not apply (patch 4 of 4)" in message
    assert "hunk 2 (line 47)" in message and "hunk 1" not in message


def test_a_missing_file_and_an_absorbed_patch_are_explained(fresh: Toy) -> None:
    path = fresh.patches("beta")[0]
    original = path.read_text()
    path.write_text(original.replace("core.py", "gone.py"))
    message = fresh.refused("apply")
    assert "beta/gone.py: " in message and "No such file" in message or "does not exist" in message
    path.write_text(original)
    (fresh.root / "patches/beta/0002-beta-feature-first.patch").write_text(original)
    assert "its change is already there" in fresh.refused("apply")


def test_only_selects_and_an_absent_framework_by_name_fails(fresh: Toy) -> None:
    base = fresh.head("beta")
    out = fresh.ok("apply", "--only", "alpha")
    assert "beta" not in out and fresh.head("beta") == base
    assert "gamma v1: absent" in fresh.refused("apply", "--only", "gamma")
    assert "unknown framework 'delta'" in fresh.refused("apply", "--only", "delta")


def test_uncommitted_work_is_refused(fresh: Toy) -> None:
    (fresh.tree("beta") / "beta/other.py").write_text("mine\n")
    message = fresh.refused("apply")
    assert "uncommitted changes (beta/other.py)" in message and "restore" in message
    sh(fresh.tree("beta"), "checkout", "beta/other.py")
    (fresh.tree() / "alpha/added.py").write_text("mine, untracked, where a patch adds a file\n")
    assert "is in the way of a file that a patch adds" in fresh.refused("apply")


def test_uncommitted_work_does_not_disturb_an_applied_set(toy: Toy) -> None:
    (toy.tree() / "alpha/other.py").write_text("mine\n")
    assert "already applied" in toy.ok("apply")
    assert "uncommitted changes" in toy.ok("status")
    assert (toy.tree() / "alpha/other.py").read_text() == "mine\n"


@pytest.mark.parametrize("start", ["base", "applied"])
def test_unexported_commits_are_refused_and_named(fresh: Toy, start: str) -> None:
    if start == "applied":
        fresh.ok("apply")
    fresh.commit("alpha", "extra", {"alpha/other.py": lines((1, "MINE = 1"))})
    message = fresh.refused("apply")
    assert "work that is in no patch file" in message and "feature(extra)" in message
    assert "feature(second)" not in message and "export --only alpha" in message
    assert "not exported" in fresh.ok("status")


def test_another_branch_or_a_running_rebase_is_refused(fresh: Toy) -> None:
    sh(fresh.tree(), "switch", "-q", "-c", "mine")
    assert "is on mine" in fresh.refused("apply")
    sh(fresh.tree(), "switch", "-q", "--detach")
    assert "a detached HEAD" in fresh.refused("apply")
    sh(fresh.tree(), "switch", "-q", "ascend-rl")
    (fresh.tree() / ".git/rebase-merge").mkdir()
    assert "in progress (rebase-merge)" in fresh.refused("apply")
    (fresh.tree() / ".git/rebase-merge").rmdir()
    (fresh.tree() / ".git/index.lock").touch()
    assert "in progress (index.lock)" in fresh.refused("apply")


def test_a_changed_patch_set_is_applied_over_what_the_tool_applied(fresh: Toy, template: Path) -> None:
    """As after `git pull`: fewer patches, then the old ones again."""
    fresh.ok("apply")
    full, lock = fresh.patches()[2].read_bytes(), (fresh.root / "frameworks.lock").read_bytes()
    applied = fresh.head()
    removed = fresh.patches()[2]
    removed.unlink()
    assert "frameworks.lock says" in fresh.refused("apply")  # a pull that brought only half
    (fresh.root / "frameworks.lock").write_text(
        lock.decode().replace(lock.decode().split('tree = "')[1][:64], "")
    )
    assert "2 patches applied" in fresh.ok("apply")
    assert not (fresh.tree() / "alpha/added.py").exists()
    removed.write_bytes(full)
    (fresh.root / "frameworks.lock").write_bytes(lock)
    fresh.ok("apply")
    assert fresh.head() == applied and (fresh.tree() / "alpha/added.py").exists()


def test_a_tree_from_another_pin_is_refused(toy: Toy) -> None:
    lock = toy.root / "frameworks.lock"
    lock.write_text(lock.read_text().replace('tag = "v1"', 'tag = "v2"', 1))
    message = toy.refused("apply")
    assert (
        "holds v1, frameworks.lock pins v2" in message
        and "download_frameworks_source_code.sh --only alpha" in message
    )


def test_never_resolves_to_the_parent_repository(toy: Toy) -> None:
    sh(toy.root, "init", "-q")
    sh(toy.root, "add", "patches")
    sh(toy.root, "commit", "-q", "-m", "parent")
    head = sh(toy.root, "rev-parse", "HEAD")
    shutil.rmtree(toy.tree() / ".git")
    for action in ("apply", "export"):
        assert "is not a repository made by this tool" in toy.refused(action)
    assert "is not a repository made by this tool" in toy.ok("status")
    assert sh(toy.root, "rev-parse", "HEAD") == head


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a tree to another user")
def test_trees_of_another_user_are_usable(fresh: Toy) -> None:
    """As in a container: root works on a checkout of the host's user."""
    for path in [fresh.root, *fresh.root.rglob("*")]:
        os.chown(path, 12345, 12345)
    assert "3 patches applied" in fresh.ok("apply")


def test_a_framework_without_patches_is_fine(toy: Toy) -> None:
    shutil.rmtree(toy.root / "patches/beta")
    lock = toy.root / "frameworks.lock"
    first, second, third = lock.read_text().split('\ntree = "')
    lock.write_text(f'{first}\ntree = "{second}\ntree = "{third[64:]}')
    assert "beta v1: 0 patches applied" in toy.ok("apply")
    assert "beta v1: 0 patches already applied" in toy.ok("apply")


# --- kills --------------------------------------------------------------------------------------------


def test_a_kill_at_any_moment_is_mended_by_the_next_run(fresh: Toy, tmp_path: Path, template: Path) -> None:
    expected = [Toy(template).head(name) for name in ("alpha", "beta")]
    trial = Toy(tmp_path / "trial")

    def start() -> subprocess.Popen[bytes]:
        shutil.rmtree(trial.root, ignore_errors=True)
        shutil.copytree(fresh.root, trial.root)
        return subprocess.Popen(
            [sys.executable, str(PATCHSET), "--root", str(trial.root), "apply"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    durations = []
    for _ in range(3):
        process = start()
        began = time.monotonic()
        assert process.wait(timeout=600) == 0
        durations.append(time.monotonic() - began)
    moments, landed = random.Random(7), 0
    for attempt in range(100):
        process = start()
        time.sleep(moments.uniform(0.2, 1.0) * min(durations))
        if process.poll() is None:
            landed += 1
            # the process alone (its git goes on for a moment), or with its children
            (os.kill if attempt % 2 else os.killpg)(process.pid, signal.SIGKILL)
        process.wait()
        trial.ok("apply")
        assert [trial.head(name) for name in ("alpha", "beta")] == expected
        for name in ("alpha", "beta"):
            assert sh(trial.tree(name), "status", "--porcelain") == ""
            assert not (trial.tree(name) / ".git/ascend-rl-journal").exists()
            assert sh(trial.tree(name), "fsck", "--connectivity-only", "--no-dangling", "--no-progress") == ""
        assert not list((trial.root / "frameworks").glob(".tmp-*"))
        if landed == 20:
            return
    pytest.fail(f"only {landed} of 100 kills met a running apply")


KILLED_IN_THE_MOVE = """
import os, pathlib, signal, sys
sys.path.insert(0, {patches!r})
import patchset
real = patchset.git
def git(repo, *args, **options):
    if args[0] != "reset" or repo.name != "alpha":
        return real(repo, *args, **options)
    if real(repo, "diff-files", "--name-only"):
        sys.exit("git reset would rewrite files that do not change")
    if {stage!r} == "during":
        core = repo / "alpha/core.py"
        core.write_text(real(repo, "show", args[-1] + ":alpha/core.py")[:100])
        (repo / ".git/index.lock").touch()
    elif {stage!r} == "after":
        real(repo, *args, **options)
    os.kill(os.getpid(), signal.SIGKILL)
patchset.git = git
sys.exit(patchset.main(["--root", {root!r}, "apply"]))
"""


@pytest.mark.parametrize("direction", ["forward", "back"])
@pytest.mark.parametrize("stage", ["before", "during", "after"])
def test_a_kill_inside_the_move(fresh: Toy, template: Path, stage: str, direction: str) -> None:
    """The few milliseconds that random moments seldom meet, met on purpose, also when a patch goes away."""
    expected = Toy(template).head()
    if direction == "back":
        fresh.ok("apply")
        for path in fresh.patches():
            path.unlink()
        lock = fresh.root / "frameworks.lock"
        lock.write_text(
            "\n".join(
                'tree = ""' if line.startswith("tree") else line for line in lock.read_text().splitlines()
            )
            + "\n"
        )
        expected = sh(fresh.tree(), "rev-parse", "ascend-rl-base^{commit}")
    os.utime(fresh.tree() / "README.md", (1, 1))  # as in a copied tree: unchanged, but git must look
    script = KILLED_IN_THE_MOVE.format(patches=str(REPO / "patches"), stage=stage, root=str(fresh.root))
    killed = subprocess.run([sys.executable, "-c", script], timeout=600, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert "interrupted run" in fresh.ok("status")
    assert "finished a patch run that was interrupted" in fresh.ok("apply")
    assert fresh.head() == expected and sh(fresh.tree(), "status", "--porcelain") == ""
    assert (fresh.tree() / "alpha/added.py").exists() == (direction == "forward")


Damage = Callable[[Toy], None]


def interrupted(toy: Toy) -> tuple[Path, str, str]:
    """Put alpha where a kill right before the move leaves it: journal written, tree at the base."""
    tree, new = toy.tree(), toy.head()
    sh(tree, "reset", "-q", "--hard", "ascend-rl-base")
    old = toy.head()
    (tree / ".git/ascend-rl-applied").unlink()
    (tree / ".git/ascend-rl-journal").write_text(f'{{"from": "{old}", "to": "{new}", "digest": "d"}}')
    return tree, old, new


@pytest.mark.parametrize("stage", ["nothing", "partial", "missing", "added", "half_added", "index", "head"])
def test_every_stage_of_a_killed_move_is_finished(toy: Toy, stage: str) -> None:
    tree, _, new = interrupted(toy)
    (tree / ".git/index.lock").write_bytes(b"stale")
    core, target = tree / "alpha/core.py", sh(tree, "show", f"{new}:alpha/core.py") + "\n"
    added = sh(tree, "show", f"{new}:alpha/added.py") + "\n"
    if stage == "partial":
        core.write_text(target[: len(target) // 2])
    elif stage == "missing":
        core.unlink()
    elif stage == "added":
        core.write_text(target)
        (tree / "alpha/added.py").write_text(added)
    elif stage == "half_added":
        (tree / "alpha/added.py").write_text(added[:5])
    elif stage in ("index", "head"):
        (tree / ".git/index.lock").unlink()
        sh(tree, "reset", "-q", "--hard" if stage == "head" else "--keep", new)
        if stage == "index":
            sh(tree, "update-ref", "HEAD", "ascend-rl-base")
    out = toy.ok("apply")
    assert "finished a patch run that was interrupted" in out
    assert toy.head() == new and sh(tree, "status", "--porcelain") == ""
    assert "already applied" in toy.ok("apply")


def test_a_killed_rollback_leaves_no_added_file(toy: Toy) -> None:
    """The index was put back to the base, the file that a patch had added was still there."""
    tree, old, new = interrupted(toy)
    (tree / ".git/ascend-rl-journal").write_text(f'{{"from": "{new}", "to": "{old}", "digest": "d"}}')
    (tree / "alpha/added.py").write_text(sh(tree, "show", f"{new}:alpha/added.py") + "\n")
    toy.ok("apply", "--only", "beta")
    assert (tree / "alpha/added.py").exists()
    toy.patches()[2].unlink()
    toy.run("apply")  # refused by the lock's hash, but the move is finished first
    assert toy.head() == old and not (tree / "alpha/added.py").exists()


def test_work_done_after_a_kill_is_refused_then_kept(toy: Toy) -> None:
    tree, _, new = interrupted(toy)
    (tree / "alpha/other.py").write_text("mine\n")
    assert "edited since: alpha/other.py" in toy.refused("apply")
    sh(tree, "checkout", "alpha/other.py")
    (tree / "alpha/core.py").write_text("mine\n")
    assert "edited since: alpha/core.py" in toy.refused("apply")
    sh(tree, "checkout", "alpha/core.py")
    sh(tree, "commit", "-q", "--allow-empty", "-m", "mine")
    assert "was moved to" in toy.refused("apply")
    sh(tree, "reset", "-q", "--hard", "ascend-rl-base")
    toy.ok("apply")
    assert toy.head() == new


def test_a_failing_move_is_rolled_back_in_every_tree(fresh: Toy) -> None:
    """The last step of the last tree fails: every tree returns to where it was."""
    base = [fresh.head(name) for name in ("alpha", "beta")]
    ref = fresh.tree("beta") / ".git/refs/heads/ascend-rl.lock"
    ref.touch()  # git cannot move the branch; the working tree was already written by then
    result = fresh.run("apply")
    assert result.returncode == 1 and "refs/heads/ascend-rl" in result.stderr
    assert [fresh.head(name) for name in ("alpha", "beta")] == base
    assert sh(fresh.tree(), "status", "--porcelain") == ""
    ref.unlink(missing_ok=True)
    fresh.ok("apply")
    assert "already applied" in fresh.ok("apply")


# --- export -------------------------------------------------------------------------------------------


def test_export_of_an_applied_set_changes_nothing(toy: Toy) -> None:
    before = toy.bytes(), {path: path.stat().st_mtime_ns for path in toy.root.glob("patches/*/*")}
    head = toy.head()
    assert toy.ok("export").count("nothing changed") == 2
    assert (toy.bytes(), {path: path.stat().st_mtime_ns for path in toy.root.glob("patches/*/*")}) == before
    assert toy.head() == head


def test_export_names_lock_index_and_normalised_commits(toy: Toy) -> None:
    names = [path.name for path in toy.patches()]
    assert names == [
        "0001-alpha-feature-first.patch",
        "0002-alpha-bugfix-second.patch",
        "0003-alpha-feature-third.patch",
    ]
    text = toy.patches()[0].read_text()
    assert text.startswith(f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: Dev <dev@example.com>\n")
    assert "\n-- \n" not in text and " 1 file changed" not in text and "[PATCH] feature(first)" in text
    readme = (toy.root / "patches/README.md").read_text()
    assert "[0002-alpha-bugfix-second](alpha/0002-alpha-bugfix-second.patch)" in readme
    assert readme.endswith("<!-- index: end -->\nafter\n") and "`TOY_THIRD=1`" in readme
    people = sh(toy.tree(), "log", "--format=%cn %ae", "ascend-rl-base..HEAD").splitlines()
    assert set(people) == {"ascend-rl dev@example.com"}
    dates = sh(toy.tree(), "log", "--format=%ci %ai", "ascend-rl-base..HEAD").splitlines()
    assert all(line[:25] == line[26:] for line in dates)


def test_reordered_renamed_and_dropped_commits_give_contiguous_files(toy: Toy) -> None:
    first, _, third = sh(toy.tree(), "log", "--reverse", "--format=%H", "ascend-rl-base..HEAD").splitlines()
    sh(toy.tree(), "reset", "-q", "--hard", "ascend-rl-base")
    sh(toy.tree(), "cherry-pick", third, first)
    toy.ok("export", "--only", "alpha")
    assert [path.name for path in toy.patches()] == [
        "0001-alpha-feature-third.patch",
        "0002-alpha-feature-first.patch",
    ]
    toy.ok("check")
    assert "2 patches already applied" in toy.ok("apply")


def test_a_fixup_is_squashed_first(toy: Toy) -> None:
    (toy.tree() / "alpha/added.py").write_text("from ascend_rl import third  # better\n")
    sh(toy.tree(), "commit", "-q", "-a", "--fixup", "HEAD")
    assert "rebase -i --autosquash" in toy.refused("export")
    sh(toy.tree(), "-c", "sequence.editor=true", "rebase", "-q", "-i", "--autosquash", "ascend-rl-base")
    assert "changed: 0003-alpha-feature-third.patch" in toy.ok("export")
    assert "better" in toy.patches()[2].read_text()
    toy.ok("check")


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("do something", "the subject must read"),
        ("feature(extra): x\n\nWhy: a\nHow: b\n", "lacks Upstream-Status:, Drop-When:, Switch:, Test:"),
        (
            MESSAGE.format(kind="feature", name="extra", switch="none").replace("Pending", "Maybe"),
            "Upstream-Status is 'Maybe'",
        ),
    ],
)
def test_unready_messages_are_refused_by_name(toy: Toy, message: str, complaint: str) -> None:
    toy.commit("alpha", "extra", {"alpha/other.py": lines((1, "MINE = 1"))}, message=message)
    error = toy.refused("export")
    assert complaint in error and "commit 4" in error and "rebase -i ascend-rl-base" in error


def test_uncommitted_merged_and_empty_work_is_not_exported(toy: Toy) -> None:
    (toy.tree() / "alpha/other.py").write_text("mine\n")
    assert "uncommitted changes" in toy.refused("export")
    sh(toy.tree(), "checkout", "alpha/other.py")
    sh(
        toy.tree(),
        "commit",
        "-q",
        "--allow-empty",
        "-m",
        MESSAGE.format(kind="feature", name="empty", switch="none"),
    )
    assert "is empty" in toy.refused("export")
    sh(toy.tree(), "reset", "-q", "--hard", "HEAD~1")
    sh(toy.tree(), "switch", "-q", "-c", "side", "HEAD~1")
    toy.commit("alpha", "side", {"alpha/other.py": lines((1, "MINE = 1"))})
    sh(toy.tree(), "switch", "-q", "ascend-rl")
    sh(toy.tree(), "merge", "-q", "--no-edit", "side")
    assert "merge commits cannot be exported" in toy.refused("export")


def test_pulled_patches_are_not_overwritten_by_an_export(toy: Toy) -> None:
    path = toy.patches()[0]
    path.write_text(path.read_text().replace("do something", "pulled, and better:"))
    assert "run ./apply_all_patches.sh --only alpha" in toy.refused("export")
    path.write_bytes(path.read_bytes().replace(b"pulled, and better:", b"do something"))
    shutil.copy(toy.patches()[2], toy.root / "patches/alpha/0004-alpha-feature-fourth.patch")
    fourth = toy.patches()[3]
    fourth.write_text(fourth.read_text().replace("feature(third)", "feature(fourth)"))
    toy.commit("alpha", "mine", {"alpha/other.py": lines((1, "MINE = 1"))})
    assert "exporting would delete them: 0004-alpha-feature-fourth.patch" in toy.refused("export")


def test_export_writes_all_frameworks_or_none(toy: Toy) -> None:
    toy.commit("alpha", "good", {"alpha/other.py": lines((1, "MINE = 1"))})
    toy.commit("beta", "bad", {"beta/other.py": lines((1, "MINE = 1"))}, message="not ready")
    before, head = toy.bytes(), toy.head()
    assert "commit 2 'not ready'" in toy.run("export").stderr
    assert toy.bytes() == before and toy.head() == head
    assert "0004-alpha-feature-good.patch" in toy.ok("export", "--only", "alpha")


def test_odd_but_legal_content_survives(toy: Toy) -> None:
    """CRLF, no newline at the end, form feeds, trailing blanks, non-ASCII names, long and folded subjects."""
    message = MESSAGE.format(kind="feature", name="odd", switch="none").replace(
        "do something about odd", "a subject that is " + "very " * 20 + "long"
    )
    (toy.tree() / "alpha/odd.py").write_bytes(b"a = 1  \r\nb = 2\r\n\x0c\nc = '\xc3\xa9'")
    toy.commit("alpha", "odd", {}, message=message.replace("Why: it", "Why: J\u00f6rg saw it"))
    toy.ok("export")
    (toy.tree() / "alpha/odd.py").write_bytes(b"a = 1  \r\nb = 3\r\n\x0c\nc = '\xc3\xa9' \n")
    toy.commit("alpha", "odder", {})
    toy.ok("export")
    toy.ok("check")
    head = toy.head()
    sh(toy.tree(), "reset", "-q", "--hard", "ascend-rl-base")
    toy.ok("apply")
    assert toy.head() == head
    assert (toy.tree() / "alpha/odd.py").read_bytes() == b"a = 1  \r\nb = 3\r\n\x0c\nc = '\xc3\xa9' \n"


# --- check --------------------------------------------------------------------------------------------


def test_check_passes_and_changes_nothing(toy: Toy) -> None:
    before = toy.bytes(), toy.trees()
    out = toy.ok("check")
    assert "alpha v1: 3 patches ok" in out and "gamma v1: absent" in out
    assert (toy.bytes(), toy.trees()) == before


def rewrite(index: int, old: str, new: str) -> Damage:
    def damage(toy: Toy) -> None:
        path = toy.patches()[index]
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return damage


def commit_bad(feature: str, text: str, **options: str) -> Damage:
    def damage(toy: Toy) -> None:
        toy.commit("alpha", feature, {f"alpha/{feature}.py": text}, **options)
        toy.ok("export")

    return damage


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (rewrite(0, "Drop-When: ", "Drop-when: "), "lacks Drop-When:"),
        (
            rewrite(0, "Test: tests/test_first.py", "Test: tests/test_nowhere.py"),
            "tests/test_nowhere.py does not exist",
        ),
        (rewrite(0, "feature(first)", "feature(other)"), "does not say feature(first)"),
        (rewrite(0, " LINE_4 = 4", " LINE_4 = 5"), "finds no place"),
        (rewrite(1, "@@ -37,7 +37,7 @@", "@@ -30,7 +30,7 @@"), "differs from its export"),
        (rewrite(0, "+LINE_5 = 'absorbed'", "+LINE_5 = 'changed'"), "the patched tree hash is"),
        (rewrite(2, "Switch: TOY_THIRD=1", "Switch: TOY_UNKNOWN=1"), "Switch TOY_UNKNOWN=1 is read nowhere"),
        (
            rewrite(1, "Switch: +toy.second=1", "Switch: +toy.enable=1"),
            "Switch +toy.enable=1 is read nowhere",
        ),
        (rewrite(0, "Pending", "Submitted"), "Upstream-Status is 'Submitted'"),
        (lambda toy: toy.patches()[1].unlink(), "numbers must be contiguous"),
        (lambda toy: toy.patches()[0].rename(toy.root / "patches/alpha/first.patch"), "name it NNNN-alpha-"),
        (
            lambda toy: toy.patches("beta")[0].rename(
                toy.root / "patches/alpha/0004-beta-feature-first.patch"
            ),
            "it lies in patches/alpha/",
        ),
        (
            lambda toy: (toy.root / "patches/README.md").write_text(
                (toy.root / "patches/README.md").read_text().replace("`TOY_THIRD=1`", "`TOY_FOURTH=1`")
            ),
            "index is out of date",
        ),
        (
            lambda toy: (toy.root / "frameworks.lock").write_text(
                (toy.root / "frameworks.lock").read_text().replace('tree = "', 'tree = "0')
            ),
            "frameworks.lock says 0",
        ),
        (commit_bad("broken", "def f(:\n"), "alpha/broken.py does not compile"),
        (commit_bad("big", "A = 1\n" * 61), "adds 61 lines, more than 60"),
        (
            lambda toy: (toy.commit("alpha", "outside", {"README.md": "x\n"}), toy.ok("export")),
            "not covered by the tree hash",
        ),
        (
            lambda toy: toy.patches()[2].write_bytes(
                toy.patches()[2].read_bytes()
                + toy.patches()[2].read_bytes().replace(b"added.py", b"twice.py")
            ),
            "3 patch files gave 4 commits",
        ),
    ],
)
def test_check_finds(toy: Toy, damage: Damage, complaint: str) -> None:
    damage(toy)
    assert complaint in toy.refused("check")


def test_a_size_reason_allows_a_big_patch(toy: Toy) -> None:
    message = MESSAGE.format(kind="feature", name="big", switch="none") + "Size-Reason: a table\n"
    toy.commit("alpha", "big", {"alpha/big.py": "A = 1\n" * 61}, message=message)
    toy.ok("export")
    toy.ok("check")


# --- bump ---------------------------------------------------------------------------------------------


def test_bump_drops_what_upstream_absorbed_and_rebases_the_rest(toy: Toy) -> None:
    out = toy.ok("bump", "alpha", "v2")
    assert (
        "absorbed  0001-alpha-feature-first.patch" in out
        and "clean     0003-alpha-feature-third.patch" in out
    )
    assert [path.name for path in toy.patches()] == [
        "0001-alpha-bugfix-second.patch",
        "0002-alpha-feature-third.patch",
    ]
    assert "@@ -39,7 +39,7 @@" in toy.patches()[0].read_text()  # upstream added two lines above
    core = (toy.tree() / "alpha/core.py").read_text()
    assert core.startswith("# moved") and "toy_second" in core and "'near'" in core
    lock = (toy.root / "frameworks.lock").read_text()
    assert 'tag = "v2"' in lock and sh(toy.tree(), "rev-parse", "ascend-rl-base^{commit}") in lock
    toy.ok("check")
    assert "2 patches already applied" in toy.ok("apply")
    assert sorted(path.name for path in (toy.root / "frameworks").iterdir()) == [".lock", "alpha", "beta"]


def test_bump_with_a_conflict_changes_nothing_and_continues(toy: Toy) -> None:
    trees = {name: toy.head(name) for name in ("alpha", "beta")}
    before = toy.bytes()
    result = toy.run("bump", "alpha", "v3")
    assert result.returncode == 1
    assert "conflict  0002-alpha-bugfix-second.patch: alpha/core.py" in result.stdout
    assert "absorbed  0001" in result.stdout and "clean     0003" in result.stdout
    assert "1 of 3 patches conflict with v3" in result.stderr and "Nothing was changed" in result.stderr
    assert toy.bytes() == before and {name: toy.head(name) for name in trees} == trees
    waiting = toy.root / "frameworks/.bump-alpha"
    assert sh(waiting, "symbolic-ref", "--short", "HEAD") == "bump/v3"
    assert "a bump of alpha waits" in toy.refused("bump", "alpha", "v3")
    assert "a bump waits" in toy.ok("status")
    assert "not on the branch yet: 0002" in toy.refused("bump", "alpha", "v3", "--continue")
    assert "(one to v3 is)" in toy.refused("bump", "alpha", "v2", "--continue")
    patch = toy.patches()[1]
    command = next(line for line in result.stderr.splitlines() if " am -3 " in line)
    applied = subprocess.run(
        ["bash", "-c", command], cwd=toy.root, capture_output=True, timeout=600, check=False
    )
    assert applied.returncode != 0
    assert "finish rebase-apply first" in toy.refused("bump", "alpha", "v3", "--continue")
    core = waiting / "alpha/core.py"
    assert "<<<<<<<" in core.read_text()
    core.write_text(lines((5, "LINE_5 = 'absorbed'"), (40, "LINE_40 = 'upstream' or toy_second")))
    sh(waiting, "add", "-u")
    sh(waiting, "am", "--continue")
    out = toy.ok("bump", "alpha", "v3", "--continue")
    assert "bumped from v1 to v3" in out
    assert [path.name for path in toy.patches()] == [
        "0001-alpha-feature-third.patch",
        "0002-alpha-bugfix-second.patch",
    ]
    assert not patch.exists() or patch in toy.patches()
    assert "or toy_second" in (toy.tree() / "alpha/core.py").read_text()
    toy.ok("check")
    assert "already applied" in toy.ok("apply")


def test_bump_continue_without_the_conflicting_patch(toy: Toy) -> None:
    assert toy.run("bump", "alpha", "v3").returncode == 1
    toy.patches()[1].unlink()
    toy.ok("bump", "alpha", "v3", "--continue")
    assert [path.name for path in toy.patches()] == ["0001-alpha-feature-third.patch"]


def test_bump_refuses_unsaved_work_and_unknown_tags(toy: Toy) -> None:
    assert "has no tag v9" in toy.refused("bump", "alpha", "v9")
    (toy.tree() / "alpha/other.py").write_text("mine\n")
    assert "uncommitted changes" in toy.refused("bump", "alpha", "v2")
    sh(toy.tree(), "checkout", "alpha/other.py")
    toy.commit("alpha", "mine", {"alpha/other.py": lines((1, "MINE = 1"))})
    assert "commits that are in no patch file" in toy.refused("bump", "alpha", "v2")


def test_bump_to_a_wheel_pins_it_and_empties_what_it_cannot_know(toy: Toy, tmp_path: Path) -> None:
    from test_sources import make_wheel

    wheels = tmp_path / "wheels"
    core = lines((5, "LINE_5 = 'absorbed'"))
    make_wheel(wheels, "toy_alpha", "2.0", {"alpha/core.py": core, "alpha/config/a.yaml": "a: 1\n"})
    lock = toy.root / "frameworks.lock"
    head, rest = lock.read_text().split("[beta]")
    head = head.replace('dist = ""\nversion = ""', 'dist = "toy_alpha"\nversion = "1.0"\nsha256_any = ""')
    lock.write_text(f"{head}[beta]{rest}")
    env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": "/dev/null"}
    out = toy.ok("bump", "alpha", "v2.0", "--source", "pypi", **env)
    assert "warning: alpha: commit could not be established" in out
    text = lock.read_text()
    assert 'tag = "v2.0"\ncommit = ""' in text and 'version = "2.0"' in text and 'sha256_any = ""' not in text
    assert [path.name for path in toy.patches()] == [
        "0001-alpha-bugfix-second.patch",
        "0002-alpha-feature-third.patch",
    ]
    assert "already applied" in toy.ok("apply")
    toy.ok("check", "--only", "alpha")


# --- the command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["status", "apply", "check", "export", "bump"])
def test_every_command_has_help(command: str) -> None:
    result = subprocess.run(
        [sys.executable, str(PATCHSET), command, "-h"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert "usage: patchset.py" in result.stdout


def test_front_door(fresh: Toy) -> None:
    door, env = REPO / "apply_all_patches.sh", os.environ | {"ASCEND_RL_ROOT": str(fresh.root)}

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [door, *args], capture_output=True, text=True, timeout=600, env=env, check=False
        )

    for word in ("Usage:", "Example:", "Hardware:", "Duration:"):
        assert word in run("-h").stdout
    assert "3 patches ok" in run("--check", "--only", "alpha").stdout
    assert "patches applied" not in run("--check").stdout
    assert "3 patches applied" in run().stdout
    assert "alpha v1: 3 patches already applied" in run("--only", "alpha").stdout
    assert run("--only", "delta").returncode == 1

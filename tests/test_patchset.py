"""patches/patchset.py on toy upstreams: nothing lost, nothing half done, the same result everywhere."""

from __future__ import annotations

import itertools
import os
import random
import re
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
BASE = "ascend-rl-base"
MESSAGE = """{kind}({name}): do something about {name}

Why: it costs 3 ms per step, measured here
How: core.run -> ascend_rl.{name}.run

Upstream-Status: Pending
Drop-When: upstream has {name}
Switch: {switch}
Test: tests/test_{name}.py
"""
HOSTILE = """
user.name=Else user.email=else@example.com user.signingkey=none commit.gpgsign=true commit.template=/none
core.autocrlf=true core.abbrev=5 core.quotePath=true am.threeWay=true am.keepcr=false apply.whitespace=fix
diff.noprefix=true diff.mnemonicPrefix=true diff.algorithm=patience diff.context=8 diff.renames=copies
diff.external=/bin/false format.attach=xx format.numbered=true format.signature=mine format.useAutoBase=true
format.pretty=fuller format.subjectPrefix=MINE mailinfo.scissors=true status.short=true status.branch=true
i18n.commitEncoding=iso-8859-1
"""
HOSTILE_ENV = {
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
HOOKS = """applypatch-msg pre-applypatch post-applypatch pre-commit commit-msg post-checkout post-rewrite
reference-transaction post-index-change prepare-commit-msg""".split()


def lines(*changes: tuple[int, str]) -> str:
    """A 60 line module; `changes` replace lines by number."""
    text = {number: f"LINE_{number} = {number}" for number in range(1, 61)} | dict(changes)
    return "".join(f"{line}\n" for line in text.values())


MINE = {"alpha/other.py": lines((1, "MINE = 1"))}


def sh(path: Path, *args: str) -> str:
    identity = ("-c", "user.name=Dev", "-c", "user.email=dev@example.com")
    command = ["git", "-C", str(path), *identity, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout.strip()


def execute(*command: object, **env: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=600, env=os.environ | env, check=False
    )


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
        files = [path for path in (self.root / "frameworks").rglob("*") if path.is_file()]
        return {str(path.relative_to(self.root)): path.read_bytes() for path in files if path.name != "index"}

    def heads(self) -> list[str]:
        return [sh(self.tree(name), "rev-parse", "HEAD") for name in ("alpha", "beta")]

    def reset(self, name: str = "alpha") -> None:
        sh(self.tree(name), "reset", "-q", "--hard", BASE)

    def forget_hash(self, name: str = "alpha") -> None:
        lock = self.root / "frameworks.lock"
        lock.write_text(re.sub(rf'(\[{name}\](?:.|\n)*?\ntree = ")\w+', r"\1", lock.read_text(), count=1))

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return execute(sys.executable, PATCHSET, "--root", self.root, *args, **env)

    def ok(self, *args: str, **env: str) -> str:
        result = self.run(*args, **env)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def refused(self, *args: str) -> str:
        """Run, expect a refusal that changes no tree and no file of the repository, return the message."""
        before = self.bytes() | self.trees()
        result = self.run(*args)
        assert result.returncode == 1, result.stdout + result.stderr
        assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
        after = self.bytes() | self.trees()
        assert [path for path, content in after.items() if before.pop(path, None) != content] == []
        assert not before
        return result.stderr

    def commit(
        self,
        name: str,
        feature: str,
        files: dict[str, str],
        message: str = MESSAGE,
        switch="none",
        kind="feature",
    ) -> None:
        for path, text in files.items():
            (self.tree(name) / path).parent.mkdir(parents=True, exist_ok=True)
            (self.tree(name) / path).write_text(text)
        sh(self.tree(name), "add", "-A")
        message = message.format(kind=kind, name=feature, switch=switch)
        sh(self.tree(name), "commit", "-q", "-m", message)
        (self.root / f"tests/test_{feature}.py").write_text("def test():\n    assert True\n")


def make_upstream(path: Path) -> None:
    """v1; v2 takes the change to line 5 (absorbed) and rewrites line 40 (conflict)."""
    package = path / path.name
    (package / "config").mkdir(parents=True)
    (package / "core.py").write_text(lines())
    (package / "other.py").write_text(lines())
    (package / "config/a.yaml").write_text("a: 1\n")
    (path / "README.md").write_text("outside the package\n")
    (path / ".gitattributes").write_text("*.py diff=python text eol=crlf\n")
    sh(path, "init", "-q")
    sh(path, "config", "core.autocrlf", "false")

    for tag in ("v1", "v2"):
        sh(path, "add", "-A")
        sh(path, "commit", "-q", "-m", tag)
        sh(path, "tag", tag)
        changed = lines((5, "LINE_5 = 'absorbed'"), (40, "LINE_40 = 'upstream'"))
        (package / "core.py").write_text(f"# moved\n# down\n{changed}")


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
    assert execute(sys.executable, SOURCES, "--root", root, "download").returncode == 0
    toy = Toy(root)
    toy.commit("alpha", "first", {"alpha/core.py": lines((5, "LINE_5 = 'absorbed'"))})
    second = {"alpha/core.py": lines((5, "LINE_5 = 'absorbed'"), (40, "LINE_40 = toy_second"))}
    second["alpha/config/a.yaml"] = "a: 1\ntoy: {second: 0}\n"
    toy.commit("alpha", "second", second, switch="+toy.second=1", kind="bugfix")
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
        toy.reset(name)
        (toy.tree(name) / ".git/ascend-rl-applied").unlink()
    return toy


# --- apply --------------------------------------------------------------------------------------------


def test_apply_gives_the_exported_commits_and_is_idempotent(fresh: Toy, template: Path) -> None:
    out = fresh.ok("apply")
    assert "alpha v1: 3 patches applied" in out and "beta v1: 1 patch applied" in out
    assert "gamma v1: absent" in out
    assert "toy_second" in (fresh.tree() / "alpha/core.py").read_text()
    assert fresh.heads() == Toy(template).heads()
    before = fresh.trees()
    out = fresh.ok("apply")
    assert "3 patches already applied" in out and "1 patch already applied" in out
    assert fresh.trees() == before


def test_same_hashes_for_every_user_and_in_every_place(fresh: Toy, tmp_path: Path) -> None:
    """Configuration, identity, environment, hooks and even the tree's own settings make no difference."""
    other = Toy(tmp_path / "elsewhere/deeper")
    shutil.copytree(fresh.root, other.root)
    hooks = tmp_path / "home/hooks"
    hooks.mkdir(parents=True)
    for hook in HOOKS:
        (hooks / hook).write_text("#!/bin/sh\nexit 1\n")
        (hooks / hook).chmod(0o755)
    attributes = tmp_path / "home/attributes"
    attributes.write_text("*.py -diff filter=broken\n")
    settings = f"{HOSTILE} core.hooksPath={hooks} core.attributesFile={attributes}".split()
    config = "".join("[{}]\n{} = {}\n".format(*re.split("[.=]", one, maxsplit=2)) for one in settings)
    (tmp_path / "home/.gitconfig").write_text(config)
    with (other.tree() / ".git/config").open("a") as file:
        file.write(config)
    hostile = HOSTILE_ENV | {"HOME": str(tmp_path / "home")}
    fresh.ok("apply")
    other.ok("apply", **hostile)
    assert other.heads() == fresh.heads()
    assert config in (other.tree() / ".git/config").read_text()
    before = other.bytes()
    other.ok("export", **hostile)
    other.ok("check", **hostile)
    assert other.bytes() == before


def test_a_conflict_leaves_every_tree_untouched_and_says_where(fresh: Toy) -> None:
    """The conflict is in the second framework: the first must not have moved."""
    (path,) = fresh.patches("beta")
    original = path.read_text()
    path.write_text(original.replace(" LINE_19 = 19", " LINE_19 = 'other'"))
    message = fresh.refused("apply")
    assert "patches/beta/0001-beta-feature-first.patch does not apply (patch 1 of 1)" in message
    assert "patch failed: beta/core.py:17" in message and "git -C frameworks/beta am -3" in message
    path.write_text(original.replace("core.py", "gone.py"))
    assert "beta/gone.py: does not exist" in fresh.refused("apply")
    path.write_text(original)
    (fresh.root / "patches/beta/0002-beta-feature-first.patch").write_text(original)
    assert "its change is already there" in fresh.refused("apply")
    assert "3 patches applied" in fresh.ok("apply", "--only", "alpha")


def test_the_second_hunk_of_a_later_patch_is_named(fresh: Toy) -> None:
    fresh.ok("apply")
    fresh.commit("alpha", "fourth", {"alpha/other.py": lines((10, "TEN = 10"), (50, "FIFTY = 50"))})
    fresh.ok("export")
    path = fresh.patches()[3]
    path.write_text(path.read_text().replace(" LINE_51 = 51", " LINE_51 = 15"))
    fresh.reset()
    message = fresh.refused("apply")
    assert "0004-alpha-feature-fourth.patch does not apply (patch 4 of 4)" in message
    assert "patch failed: alpha/other.py:47" in message


def test_only_selects_and_an_absent_framework_by_name_fails(fresh: Toy) -> None:
    base = fresh.heads()[1]
    assert "beta" not in fresh.ok("apply", "--only", "alpha") and fresh.heads()[1] == base
    assert "gamma v1: absent" in fresh.refused("apply", "--only", "gamma")
    assert "unknown framework 'delta'" in fresh.refused("apply", "--only", "delta")


def test_uncommitted_work_is_refused(fresh: Toy) -> None:
    (fresh.tree("beta") / "beta/other.py").write_text("mine\n")
    message = fresh.refused("apply")
    assert "uncommitted changes (beta/other.py)" in message and "restore" in message
    sh(fresh.tree("beta"), "checkout", "beta/other.py")
    (fresh.tree() / "alpha/added.py").write_text("mine, untracked, where a patch adds a file\n")
    message = fresh.refused("apply")
    assert "'alpha/added.py' would be overwritten" in message and "Move it" in message


def test_uncommitted_work_does_not_disturb_an_applied_set(toy: Toy) -> None:
    (toy.tree() / "alpha/other.py").write_text("mine\n")
    assert "already applied" in toy.ok("apply")
    assert (toy.tree() / "alpha/other.py").read_text() == "mine\n"


@pytest.mark.parametrize("start", ["base", "applied"])
def test_unexported_commits_are_refused_and_named(fresh: Toy, start: str) -> None:
    if start == "applied":
        fresh.ok("apply")
    fresh.commit("alpha", "extra", MINE)
    if start == "applied":
        fresh.patches()[2].unlink()
        fresh.forget_hash()
    message = fresh.refused("apply")
    assert "work that is in no patch file" in message and "feature(extra)" in message
    assert "feature(second)" not in message and "export --only alpha" in message


def test_another_branch_or_a_running_operation_is_refused(fresh: Toy) -> None:
    sh(fresh.tree(), "switch", "-q", "-c", "mine")
    assert "is on mine" in fresh.refused("apply")
    sh(fresh.tree(), "switch", "-q", "--detach")
    assert "a detached HEAD" in fresh.refused("apply")
    sh(fresh.tree(), "switch", "-q", "ascend-rl")
    for state in ("rebase-merge", "index.lock"):
        (fresh.tree() / ".git" / state).mkdir()
        assert f"in progress ({state})" in fresh.refused("apply")
        (fresh.tree() / ".git" / state).rmdir()


def test_what_a_user_keeps_in_a_tree_survives(fresh: Toy, tmp_path: Path) -> None:
    """Also in a tree that is a link to another place."""
    real = tmp_path / "disk/alpha"
    shutil.copytree(fresh.tree(), real)
    shutil.rmtree(fresh.tree())
    fresh.tree().symlink_to(real)
    sh(fresh.tree(), "branch", "mine")
    sh(fresh.tree(), "config", "toy.mine", "yes")
    (fresh.tree() / "alpha/other.py").write_text("stashed\n")
    sh(fresh.tree(), "stash", "-q")
    kept = [fresh.tree() / name for name in ("notes.txt", "alpha/_C.so", "alpha/__pycache__/core.pyc")]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{path}")
        os.utime(path, (5, 5))
    fresh.ok("apply")
    assert all(path.read_text() == f"{path}" and path.stat().st_mtime == 5 for path in kept)
    assert all(path.stat().st_nlink == 1 for path in real.rglob("*") if path.is_file())
    assert sh(fresh.tree(), "rev-parse", "mine") == sh(fresh.tree(), "rev-parse", BASE + "^{}")
    assert sh(fresh.tree(), "config", "toy.mine") == "yes" and sh(fresh.tree(), "stash", "list")
    assert sh(fresh.tree(), "status", "--porcelain") == "?? notes.txt" and fresh.tree().is_symlink()
    assert [path.name for path in real.parent.iterdir()] == ["alpha"]


def test_without_hard_links_a_tree_is_copied(fresh: Toy, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin/cp"
    fake.write_text(f'#!/bin/sh\n[ "$1" != -al ] || exit 1\nexec {shutil.which("cp")} "$@"\n')
    fake.chmod(0o755)
    assert "3 patches applied" in fresh.ok("apply", PATH=f"{fake.parent}:{os.environ['PATH']}")


def test_a_changed_patch_set_is_applied_over_what_the_tool_applied(fresh: Toy) -> None:
    """As after `git pull`: fewer patches, then the old ones again."""
    fresh.ok("apply")
    removed, lock, applied = fresh.patches()[2], fresh.root / "frameworks.lock", fresh.heads()
    full, pinned = removed.read_bytes(), lock.read_bytes()
    removed.unlink()
    assert "frameworks.lock says" in fresh.refused("apply")  # a pull that brought only half
    fresh.forget_hash()
    assert "2 patches applied" in fresh.ok("apply")
    assert not (fresh.tree() / "alpha/added.py").exists()
    removed.write_bytes(full)
    lock.write_bytes(pinned)
    fresh.ok("apply")
    assert fresh.heads() == applied and (fresh.tree() / "alpha/added.py").exists()


def test_a_tree_from_another_pin_is_refused(toy: Toy) -> None:
    lock = toy.root / "frameworks.lock"
    lock.write_text(lock.read_text().replace('tag = "v1"', 'tag = "v2"', 1))
    message = toy.refused("apply")
    assert "holds v1, frameworks.lock pins v2" in message
    assert "download_frameworks_source_code.sh --only alpha" in message


def test_never_resolves_to_the_parent_repository(toy: Toy) -> None:
    sh(toy.root, "init", "-q")
    sh(toy.root, "add", "patches")
    sh(toy.root, "commit", "-q", "-m", "parent")
    head = sh(toy.root, "rev-parse", "HEAD")
    shutil.rmtree(toy.tree() / ".git")
    for action in ("apply", "export", "check"):
        assert "is not a repository made by this tool" in toy.refused(action)
    assert sh(toy.root, "rev-parse", "HEAD") == head


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a tree to another user")
def test_trees_of_another_user_are_usable(fresh: Toy) -> None:
    """As in a container: root works on a checkout of the host's user."""
    for path in [fresh.root, *fresh.root.rglob("*")]:
        os.chown(path, 12345, 12345)
    assert "3 patches applied" in fresh.ok("apply")
    assert {path.stat().st_uid for path in (fresh.tree(), fresh.tree() / "alpha")} == {12345}


def test_a_framework_without_patches_is_fine(toy: Toy) -> None:
    shutil.rmtree(toy.root / "patches/beta")
    toy.forget_hash("beta")
    assert "beta v1: 0 patches applied" in toy.ok("apply")
    assert "beta v1: 0 patches already applied" in toy.ok("apply")


# --- kills --------------------------------------------------------------------------------------------

KILLED_BEFORE_STEP = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import patchset
left, begun = int(sys.argv[2]), False
def hook(event, args):
    global left, begun
    begun = begun or event == "os.rename" or (event == "subprocess.Popen" and args[1][0] == "cp")
    if begun and event in ("os.rename", "subprocess.Popen", "shutil.rmtree"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
sys.exit(patchset.main(["--root", *sys.argv[3:]]))
"""


def restart(trial: Toy, fresh: Toy) -> None:
    shutil.rmtree(trial.root, ignore_errors=True)
    shutil.copytree(fresh.root, trial.root)


def finished(trial: Toy, expected: list[str], *command: str) -> None:
    """The next run does what the killed one should have done, and nothing is left of either."""
    trial.ok(*command)
    assert trial.heads() == expected
    for name in ("alpha", "beta"):
        assert sh(trial.tree(name), "status", "--porcelain") == "?? notes.txt"
        assert sh(trial.tree(name), "fsck", "--connectivity-only", "--no-dangling", "--no-progress") == ""
    names = sorted(path.name for path in (trial.root / "frameworks").iterdir())
    assert names == [".lock", "alpha", "beta"]


@pytest.mark.parametrize("command", [pytest.param("apply", marks=pytest.mark.weekly), "export"])
def test_a_kill_before_any_step_leaves_good_trees(
    fresh: Toy, tmp_path: Path, template: Path, command: str
) -> None:
    """Each rename, deletion or start of a program in turn, from the first copy or written file on."""
    expected, trial = Toy(template).heads(), Toy(tmp_path / "trial")
    if command == "export":  # of commits that are not yet those which applying gives
        fresh.ok("apply")
        sh(fresh.tree(), "commit", "-q", "--amend", "--no-edit", "--reset-author", "--date", "2001-01-01")
        copy = Toy(tmp_path / "exported")
        restart(copy, fresh)
        copy.ok("export")
        expected = copy.heads()
    for name in ("alpha", "beta"):
        (fresh.tree(name) / "notes.txt").write_text("mine\n")
    before = fresh.heads()
    for step in itertools.count(1):
        restart(trial, fresh)
        arguments = (REPO / "patches", step, trial.root, command)
        killed = execute(sys.executable, "-c", KILLED_BEFORE_STEP, *arguments)
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        for place, name in enumerate(("alpha", "beta")):
            tree = trial.tree(name) if trial.tree(name).exists() else trial.tree(f".old-{name}")
            assert sh(tree, "rev-parse", "HEAD") in (before[place], expected[place])
            assert sh(tree, "status", "--porcelain") == "?? notes.txt"
        finished(trial, expected, command)
    assert step > 4


def test_a_kill_at_any_moment_leaves_good_trees(fresh: Toy, tmp_path: Path, template: Path) -> None:
    """The process alone, whose git or cp continues for a moment, or with its children."""
    trial, moments = Toy(tmp_path / "trial"), random.Random(7)
    for name in ("alpha", "beta"):
        (fresh.tree(name) / "notes.txt").write_text("mine\n")
    durations = []
    for kill in (None, None, *(os.kill, os.killpg) * 3):
        restart(trial, fresh)
        began = time.monotonic()
        command = [sys.executable, str(PATCHSET), "--root", str(trial.root), "apply"]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        if kill:
            time.sleep(moments.uniform(0.2, 1.0) * min(durations))
            if process.poll() is None:
                kill(process.pid, signal.SIGKILL)
        process.wait(timeout=600)
        durations.append(time.monotonic() - began)
        finished(trial, Toy(template).heads(), "apply")


def test_a_failure_in_the_last_tree_changes_none(fresh: Toy) -> None:
    ref = fresh.tree("beta") / ".git/refs/heads/ascend-rl.lock"
    ref.touch()  # git cannot move the branch
    assert "refs/heads/ascend-rl" in fresh.refused("apply")
    ref.unlink()
    fresh.ok("apply")


# --- export -------------------------------------------------------------------------------------------


def test_export_of_an_applied_set_changes_nothing(toy: Toy) -> None:
    before = toy.bytes(), {path: path.stat().st_mtime_ns for path in toy.root.glob("patches/*/*")}
    heads = toy.heads()
    assert toy.ok("export").count("nothing changed") == 2
    assert (toy.bytes(), {path: path.stat().st_mtime_ns for path in toy.root.glob("patches/*/*")}) == before
    assert toy.heads() == heads


def names(toy: Toy) -> list[str]:
    return [path.stem for path in toy.patches()]


def test_export_names_lock_index_and_normalised_commits(toy: Toy) -> None:
    assert names(toy) == ["0001-alpha-feature-first", "0002-alpha-bugfix-second", "0003-alpha-feature-third"]
    text = toy.patches()[0].read_text()
    assert text.startswith(f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: Dev <dev@example.com>\n")
    assert "\n-- \n" not in text and " 1 file changed" not in text and "[PATCH] feature(first)" in text
    readme = (toy.root / "patches/README.md").read_text()
    assert "[0002-alpha-bugfix-second](alpha/0002-alpha-bugfix-second.patch)" in readme
    assert readme.endswith("<!-- index: end -->\nafter\n") and "`TOY_THIRD=1`" in readme
    people = sh(toy.tree(), "log", "--format=%cn %ae", f"{BASE}..HEAD").splitlines()
    assert set(people) == {"ascend-rl dev@example.com"}
    dates = sh(toy.tree(), "log", "--format=%ci %ai", f"{BASE}..HEAD").splitlines()
    assert all(line[:25] == line[26:] for line in dates)


def test_reordered_renamed_and_dropped_commits_give_contiguous_files(toy: Toy) -> None:
    first, _, third = sh(toy.tree(), "log", "--reverse", "--format=%H", f"{BASE}..HEAD").splitlines()
    toy.reset()
    sh(toy.tree(), "cherry-pick", third, first)
    toy.ok("export", "--only", "alpha")
    assert names(toy) == ["0001-alpha-feature-third", "0002-alpha-feature-first"]
    toy.ok("check")
    assert "2 patches already applied" in toy.ok("apply")


def test_a_fixup_is_squashed_first(toy: Toy) -> None:
    (toy.tree() / "alpha/added.py").write_text("from ascend_rl import third  # better\n")
    sh(toy.tree(), "commit", "-q", "-a", "--fixup", "HEAD")
    assert "rebase -i --autosquash" in toy.refused("export")
    sh(toy.tree(), "-c", "sequence.editor=true", "rebase", "-q", "-i", "--autosquash", BASE)
    assert "changed: 0003-alpha-feature-third.patch" in toy.ok("export")
    assert "better" in toy.patches()[2].read_text()
    toy.ok("check")


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("do something", "the subject must read"),
        ("feature(extra): x\n\nWhy: a\nHow: b\n", "lacks Upstream-Status:, Drop-When:, Switch:, Test:"),
        (MESSAGE.replace("Pending", "Maybe"), "Upstream-Status is 'Maybe'"),
    ],
)
def test_unready_messages_are_refused_by_name(toy: Toy, message: str, complaint: str) -> None:
    toy.commit("alpha", "extra", MINE, message=message)
    error = toy.refused("export")
    assert complaint in error and "commit 4" in error and "rebase -i ascend-rl-base" in error


def test_uncommitted_merged_and_empty_work_is_not_exported(toy: Toy) -> None:
    (toy.tree() / "alpha/other.py").write_text("mine\n")
    assert "uncommitted changes" in toy.refused("export")
    sh(toy.tree(), "checkout", "alpha/other.py")
    sh(toy.tree(), "commit", "-q", "--allow-empty", "-m", "empty")
    assert "is empty" in toy.refused("export")
    sh(toy.tree(), "reset", "-q", "--hard", "HEAD~1")
    sh(toy.tree(), "switch", "-q", "-c", "side", "HEAD~1")
    toy.commit("alpha", "side", MINE)
    sh(toy.tree(), "switch", "-q", "ascend-rl")
    sh(toy.tree(), "merge", "-q", "--no-edit", "side")
    assert "merge commits cannot be exported" in toy.refused("export")


def test_pulled_patches_are_not_overwritten_by_an_export(toy: Toy) -> None:
    path = toy.patches()[0]
    path.write_text(path.read_text().replace("do something", "pulled, and better:"))
    assert "run ./apply_all_patches.sh --only alpha" in toy.refused("export")
    path.write_bytes(path.read_bytes().replace(b"pulled, and better:", b"do something"))
    fourth = toy.root / "patches/alpha/0004-alpha-feature-fourth.patch"
    fourth.write_text(toy.patches()[2].read_text().replace("feature(third)", "feature(fourth)"))
    toy.commit("alpha", "mine", MINE)
    assert "exporting would delete them: 0004-alpha-feature-fourth.patch" in toy.refused("export")


def test_export_writes_all_frameworks_or_none(toy: Toy) -> None:
    toy.commit("alpha", "good", MINE)
    toy.commit("beta", "bad", {"beta/other.py": lines((1, "MINE = 1"))}, message="not ready")
    before, heads = toy.bytes(), toy.heads()
    assert "commit 2 'not ready'" in toy.run("export").stderr
    assert toy.bytes() == before and toy.heads() == heads
    assert "0004-alpha-feature-good.patch" in toy.ok("export", "--only", "alpha")


def test_odd_but_legal_content_survives(toy: Toy) -> None:
    """CRLF, no newline at the end, form feeds, trailing blanks, non-ASCII names, long and folded subjects."""
    message = MESSAGE.replace("something", "what is " + "very " * 20 + "long").replace(
        "it costs", "J\u00f6rg saw"
    )
    odd = toy.tree() / "alpha/odd.py"
    odd.write_bytes(b"a = 1  \r\nb = 2\r\n\x0c\nc = '\xc3\xa9'")
    toy.commit("alpha", "odd", {}, message=message)
    toy.ok("export")
    odd.write_bytes(b"a = 1  \r\nb = 3\r\n\x0c\nc = '\xc3\xa9' \n")
    toy.commit("alpha", "odder", {})
    toy.ok("export")
    toy.ok("check")
    heads = toy.heads()
    toy.reset()
    toy.ok("apply")
    assert toy.heads() == heads
    assert odd.read_bytes() == b"a = 1  \r\nb = 3\r\n\x0c\nc = '\xc3\xa9' \n"


def test_moving_to_a_new_release(toy: Toy) -> None:
    """As docs/patching.md describes it: one patch is absorbed, one conflicts, one applies."""
    lock = toy.root / "frameworks.lock"
    text = lock.read_text()
    url = re.search(r'url = "file://(.*)"', text)[1]
    old, new = (sh(Path(url), "rev-parse", tag) for tag in ("v1", "v2"))
    lock.write_text(text.replace('tag = "v1"', 'tag = "v2"', 1).replace(old, new))
    toy.forget_hash()
    before = toy.tree("alpha.before")
    toy.tree().rename(before)
    download = execute(sys.executable, SOURCES, "--root", toy.root, "download", "--only", "alpha")
    assert download.returncode == 0, download.stderr
    sh(toy.tree(), "fetch", "-q", "--update-shallow", "../alpha.before", "ascend-rl", f"{BASE}:before")
    picked = ["git", "-C", toy.tree(), "-c", "user.name=Dev", "-c", "user.email=d@e.f", "cherry-pick"]
    assert "--skip" in execute(*picked, "before..FETCH_HEAD").stderr
    assert "CONFLICT" in execute(*picked, "--skip").stdout
    core = lines((5, "LINE_5 = 'absorbed'"), (40, "LINE_40 = 'upstream' or toy_second"))
    (toy.tree() / "alpha/core.py").write_text(f"# moved\n# down\n{core}")
    sh(toy.tree(), "add", "-u")
    assert execute(*picked, "--continue", GIT_EDITOR="true").returncode == 0
    assert "exporting would delete them: 0001-alpha-feature-first.patch" in toy.refused("export")
    toy.patches()[0].unlink()
    toy.ok("export")
    assert names(toy) == ["0001-alpha-bugfix-second", "0002-alpha-feature-third"]
    assert "@@ -39,7 +39,7 @@" in toy.patches()[0].read_text()  # upstream added two lines above
    toy.ok("check")
    assert "2 patches already applied" in toy.ok("apply")


# --- check --------------------------------------------------------------------------------------------


def test_check_passes_and_changes_nothing(toy: Toy) -> None:
    before = toy.bytes(), toy.trees()
    out = toy.ok("check")
    assert "alpha v1: 3 patches ok" in out and "gamma v1: absent" in out
    assert (toy.bytes(), toy.trees()) == before


Damage = Callable[[Toy], object]


def rewrite(place: int | str, old: str, new: str) -> Damage:
    """Replace text in a patch of alpha, or in a file."""

    def damage(toy: Toy) -> None:
        path = toy.root / place if isinstance(place, str) else toy.patches()[place]
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return damage


def rename(framework: str, place: int, name: str) -> Damage:
    return lambda toy: toy.patches(framework)[place].rename(toy.root / "patches/alpha" / name)


def commit_bad(feature: str, path: str, text: str) -> Damage:
    return lambda toy: (toy.commit("alpha", feature, {path: text}), toy.ok("export"))


def double(toy: Toy) -> None:
    content = toy.patches()[2].read_bytes()
    toy.patches()[2].write_bytes(content + content.replace(b"added.py", b"twice.py"))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (rewrite(0, "Drop-When: ", "Drop-when: "), "lacks Drop-When:"),
        (rewrite(0, "tests/test_first.py", "tests/test_nowhere.py"), "tests/test_nowhere.py does not exist"),
        (rewrite(0, "feature(first)", "feature(other)"), "would name it 0001-alpha-feature-other.patch"),
        (rewrite(0, " LINE_4 = 4", " LINE_4 = 5"), "patch failed: alpha/core.py:2"),
        (rewrite(1, "@@ -37,7 +37,7 @@", "@@ -30,7 +30,7 @@"), "differs from its export"),
        (rewrite(0, "+LINE_5 = 'absorbed'", "+LINE_5 = 'changed'"), "the patched tree hash is"),
        (rewrite(2, "TOY_THIRD=1", "TOY_UNKNOWN=1"), "Switch TOY_UNKNOWN=1 is read nowhere"),
        (rewrite(1, "+toy.second=1", "+toy.enable=1"), "Switch +toy.enable=1 is read nowhere"),
        (rewrite(0, "Pending", "Submitted"), "Upstream-Status is 'Submitted'"),
        (lambda toy: toy.patches()[1].unlink(), "would name it 0002-alpha-feature-third.patch"),
        (rename("alpha", 0, "first.patch"), "would name it 0003-alpha-feature-first.patch"),
        (rename("beta", 0, "0004-beta-feature-first.patch"), "would name it 0004-alpha-feature-first.patch"),
        (rewrite("patches/README.md", "`TOY_THIRD=1`", "`TOY_FOURTH=1`"), "index is out of date"),
        (rewrite("frameworks.lock", 'tree = "', 'tree = "0'), "frameworks.lock says 0"),
        (commit_bad("broken", "alpha/broken.py", "def f(:\n"), "alpha/broken.py does not compile"),
        (commit_bad("big", "alpha/big.py", "A = 1\n" * 61), "adds 61 lines, more than 60"),
        (commit_bad("outside", "README.md", "x\n"), "not covered by the tree hash"),
        (double, "3 patch files gave 4 commits"),
    ],
)
def test_check_finds(toy: Toy, damage: Damage, complaint: str) -> None:
    damage(toy)
    assert complaint in toy.refused("check")


def test_a_size_reason_allows_a_big_patch(toy: Toy) -> None:
    toy.commit("alpha", "big", {"alpha/big.py": "A = 1\n" * 61}, message=MESSAGE + "Size-Reason: a table\n")
    toy.ok("export")
    toy.ok("check")


# --- the command line ---------------------------------------------------------------------------------


def test_front_door(fresh: Toy) -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return execute(REPO / "apply_all_patches.sh", *args, ASCEND_RL_ROOT=str(fresh.root))

    for word in ("Usage:", "Example:", "Hardware:", "Duration:"):
        assert word in run("-h").stdout
    assert "3 patches ok" in run("--check", "--only", "alpha").stdout
    assert "patches applied" not in run("--check").stdout
    assert "3 patches applied" in run().stdout
    assert "alpha v1: 3 patches already applied" in run("--only", "alpha").stdout
    assert run("--only", "delta").returncode == 1

"""patches/sources.py on toy upstreams: what is fetched is what the lock pins, whatever happens in between."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import sources

REPO = Path(__file__).resolve().parent.parent
SOURCES = REPO / "patches/sources.py"


def make_wheel(
    directory: Path, dist: str = "toy", version: str = "1.0", extra: dict[str, str] | None = None
) -> Path:
    """A small valid wheel: package `toy`, one compiled file, and stray top-level directories."""
    info = f"{dist}-{version}.dist-info"
    files = {
        "toy/__init__.py": "VALUE = 1\n",
        "toy/core.py": "def run():\n    return 1\n",
        "toy/config/a.yaml": "a: 1\n",
        "toy/tool.sh": "#!/bin/sh\n",
        "toy/_C.abi3.so": "machine code",
        "toy/_cann_ops_custom/op.py": "compiled for one chip",
        "toy/.gitignore": "core.py\n",
        "tests/test_toy.py": "assert False\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    } | (extra or {})
    record = f"{info}/RECORD"
    lines = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(text)}")
    files[record] = "\n".join([*lines, f"{record},,"]) + "\n"
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / f"{dist}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = (0o100755 if name.endswith(".sh") else 0o100644) << 16
            archive.writestr(member, text)
    return wheel


def make_upstream(path: Path, tag: str = "v1.0") -> str:
    """A git upstream whose package equals the wheel's; returns the tagged commit."""
    (path / "toy/config").mkdir(parents=True)
    (path / "toy/__init__.py").write_text("VALUE = 1\n")
    (path / "toy/core.py").write_text("def run():\n    return 1\n")
    (path / "toy/config/a.yaml").write_text("a: 1\n")
    (path / "toy/_version.py").write_text("only in git\n")
    (path / "setup.py").write_text("# build\n")
    run_git(path, "init", "-q")
    run_git(path, "add", "-A")
    run_git(path, "commit", "-q", "-m", "one")
    run_git(path, "tag", "-a", "-m", "release", tag)
    return run_git(path, "rev-parse", "HEAD")


def run_git(path: Path, *args: str) -> str:
    identity = ("-c", "user.name=Up", "-c", "user.email=up@example.com")
    return subprocess.run(
        ["git", "-C", str(path), *identity, *args], check=True, capture_output=True, text=True, timeout=600
    ).stdout.strip()


def execute(command: list, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)


class Toy:
    """A repository root with one framework, a local git upstream and a local wheel directory."""

    def __init__(self, path: Path) -> None:
        self.root = path / "root"
        self.upstream = path / "upstream"
        self.commit = make_upstream(self.upstream)
        self.wheel = make_wheel(path / "wheels")
        self.values = {
            "package": "toy",
            "url": self.upstream.as_uri(),
            "mirror": "",
            "tag": "v1.0",
            "commit": self.commit,
            "dist": "toy",
            "version": "1.0",
            "sha256_any": hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            "tree": "",
        }
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "GIT_"))}
        self.env |= {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheel.parent),
            "PIP_CONFIG_FILE": "/dev/null",
        }
        self.root.mkdir()
        self.lock()

    def lock(self, **changes: str) -> None:
        self.values |= changes
        lines = [f'{key} = "{value}"' for key, value in self.values.items()]
        (self.root / "frameworks.lock").write_text(
            "# pins\n[toy]\n"
            + "\n".join(lines)
            + '\nunhashed = ["toy/_version.py", "toy/_cann_ops_custom/"]\n'
            + '\n[cpu]\npython = "3.11"\n'
        )

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(SOURCES), "--root", str(self.root), "download", "--deadline", "60"]

    def download(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return execute([*self.command, *args], self.env | env)

    @property
    def tree(self) -> Path:
        return self.root / "frameworks/toy"

    def head(self) -> str:
        return run_git(self.tree, "rev-parse", "HEAD")

    def hash(self) -> str:
        return sources.tree_hash(self.tree, sources.Project.load(self.root).framework("toy"))


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


def test_git_source_is_the_pinned_commit_marked_and_fetched_once(toy: Toy) -> None:
    result = toy.download()
    assert result.returncode == 0, result.stderr
    assert "ready from git file://" in result.stdout
    assert toy.head() == toy.commit == run_git(toy.tree, "rev-parse", "ascend-rl-base^{commit}")
    assert run_git(toy.tree, "symbolic-ref", "--short", "HEAD") == "ascend-rl"
    assert run_git(toy.tree, "status", "--porcelain") == ""
    before = {path: path.stat().st_mtime_ns for path in toy.tree.rglob("*")}
    assert "already there (git)" in toy.download().stdout
    assert {path: path.stat().st_mtime_ns for path in toy.tree.rglob("*")} == before


def test_wheel_base_is_the_same_everywhere_and_leaves_binaries_out(toy: Toy, tmp_path: Path) -> None:
    assert toy.download("--source", "pypi").returncode == 0
    files = run_git(toy.tree, "ls-files").splitlines()
    assert files == [
        "toy-1.0.dist-info/METADATA",
        "toy/.gitignore",
        "toy/__init__.py",
        "toy/config/a.yaml",
        "toy/core.py",
        "toy/tool.sh",
    ]
    assert (toy.tree / "toy/_C.abi3.so").exists() and not (toy.tree / "tests").exists()
    assert run_git(toy.tree, "status", "--porcelain") == ""
    assert run_git(toy.tree, "ls-tree", "HEAD", "toy/tool.sh").startswith("100755")
    (tmp_path / "other").mkdir()
    other = Toy(tmp_path / "other")
    # another architecture's wheel: other binaries, another digest, the same base
    other.wheel = make_wheel(other.wheel.parent, extra={"toy/_C.abi3.so": "other machine code"})
    other.lock(sha256_any=hashlib.sha256(other.wheel.read_bytes()).hexdigest())
    assert (
        other.download("--source", "pypi", GIT_AUTHOR_NAME="x", GIT_COMMITTER_DATE="1 +0000").returncode == 0
    )
    assert other.head() == toy.head()


def test_tree_hash_is_equal_for_both_sources_and_sees_every_source_file(toy: Toy) -> None:
    toy.download("--source", "git")
    from_git = toy.hash()
    assert toy.download("--source", "pypi").returncode == 0
    assert toy.hash() == from_git
    (toy.tree / "toy/config/a.yaml").write_text("a: 2\n")
    run_git(toy.tree, "commit", "-q", "-a", "-m", "edit")
    assert toy.hash() != from_git


def test_unreachable_git_falls_to_the_mirror_then_to_pypi(toy: Toy, tmp_path: Path) -> None:
    nowhere = (tmp_path / "nowhere").as_uri()
    toy.lock(url=nowhere, mirror=toy.upstream.as_uri())
    result = toy.download()
    assert result.returncode == 0 and f"passed over git {nowhere}" in result.stdout
    assert toy.head() == toy.commit
    shutil.rmtree(toy.tree)
    toy.lock(mirror=nowhere + "2")
    result = toy.download()
    assert result.returncode == 0 and "ready from pypi toy==1.0" in result.stdout, result.stderr
    assert "nowhere2" in result.stdout


def test_users_git_settings_are_used_for_the_network_only(toy: Toy, tmp_path: Path) -> None:
    home = tmp_path / "home"
    hooks = home / "hooks"
    hooks.mkdir(parents=True)
    for hook in ("reference-transaction", "post-checkout"):
        (hooks / hook).write_text("#!/bin/sh\nexit 1\n")
        (hooks / hook).chmod(0o755)
    (home / ".gitconfig").write_text(
        f'[url "{toy.upstream.as_uri()}"]\n insteadOf = https://example.invalid/toy\n'
        f"[core]\n hooksPath = {hooks}\n"
        " autocrlf = true\n[init]\n defaultBranch = odd\n[fetch]\n prune = true\n"
    )
    toy.lock(url="https://example.invalid/toy")
    result = toy.download(
        "--source", "git", HOME=str(home), GIT_DIR="/nonexistent", GIT_INDEX_FILE="/nonexistent/i"
    )
    assert result.returncode == 0, result.stderr
    assert toy.head() == toy.commit
    assert b"\r" not in (toy.tree / "toy/core.py").read_bytes()


@pytest.mark.parametrize(
    ("source", "key", "value", "told"),
    [
        ("git", "commit", "0" * 40, f"but frameworks.lock pins {'0' * 40}: refused"),
        ("git", "commit", "", "frameworks.lock pins no commit"),
        ("pypi", "sha256_any", "0" * 64, "sha256 is not the one in frameworks.lock: refused"),
        ("pypi", "sha256_any", "", "frameworks.lock pins no wheel"),
    ],
)
def test_only_what_is_pinned_is_installed(toy: Toy, source: str, key: str, value: str, told: str) -> None:
    toy.lock(**{key: value})
    result = toy.download("--source", source)
    assert result.returncode == 1 and told in result.stderr and not toy.tree.exists()
    # auto still has the other source, which is verified by itself
    assert f"ready from {'git' if source == 'pypi' else 'pypi'}" in toy.download().stdout


def test_unsafe_wheel_paths_are_refused(toy: Toy) -> None:
    toy.wheel = make_wheel(toy.wheel.parent, extra={"toy/../../escape.py": "x"})
    toy.lock(sha256_any=hashlib.sha256(toy.wheel.read_bytes()).hexdigest())
    result = toy.download("--source", "pypi")
    assert result.returncode == 1 and "unsafe path" in result.stderr
    assert not list(toy.root.rglob("escape.py"))


def test_a_framework_that_cannot_be_had_does_not_stop_the_others(toy: Toy, tmp_path: Path) -> None:
    """An optional one is a line and no failure, unless it is asked for by name."""
    text = (toy.root / "frameworks.lock").read_text()
    table = f'[npu]\npackage = "npu"\nurl = "{(tmp_path / "nowhere").as_uri()}"\ntag = "v9"\n'
    table += f'commit = "{"1" * 40}"\n'
    (toy.root / "frameworks.lock").write_text(f"{table}optional = true\n\n{text}")
    result = toy.download()
    assert result.returncode == 0 and toy.head() == toy.commit
    lines = [line for line in (result.stdout + result.stderr).splitlines() if "npu" in line]
    assert len(lines) == 1 and "npu v9: not reachable, continuing without it" in lines[0]
    assert toy.download("--only", "npu").returncode == 1
    shutil.rmtree(toy.tree)
    (toy.root / "frameworks.lock").write_text(f"{table}\n{text}")
    result = toy.download()
    assert result.returncode == 1 and "not downloaded: npu" in result.stderr
    assert toy.head() == toy.commit


def test_an_archive_serves_without_a_network(toy: Toy, tmp_path: Path) -> None:
    """The same files as the tag's; it stays until another source is asked for by name."""
    archive = tmp_path / "toy-v1.0.tar.gz"
    run_git(toy.upstream, "archive", "--prefix=toy-1.0/", f"--output={archive}", "v1.0")
    url, framework = toy.values["url"], sources.Project.load(toy.root).framework("toy")
    toy.lock(url="file:///nonexistent")
    assert toy.download("--only", "toy", "--archive", str(archive)).returncode == 0
    toy.lock(url=url)
    assert sources.tree_hash(toy.tree, framework) == sources.tree_hash(toy.upstream, framework, "v1.0")
    assert run_git(toy.tree, "status", "--porcelain") == ""
    assert (toy.tree / "setup.py").read_text() == "# build\n"
    assert "already there (archive)" in toy.download().stdout
    assert toy.download("--source", "git").returncode == 0 and toy.head() == toy.commit


def test_a_wrong_archive_is_refused(toy: Toy, tmp_path: Path) -> None:
    broken, empty = tmp_path / "broken.tar.gz", tmp_path / "empty.tar.gz"
    broken.write_bytes(b"no archive")
    run_git(toy.upstream, "archive", "--prefix=toy-1.0/", f"--output={empty}", "v1.0", "setup.py")
    for archive, told in (
        (broken, "is not an archive of one directory"),
        (tmp_path / "absent.tar.gz", "is not an archive of one directory"),
        (empty, "it has no toy-1.0/toy"),
    ):
        result = toy.download("--only", "toy", "--archive", str(archive))
        assert result.returncode == 1 and told in result.stderr
        assert [path.name for path in (toy.root / "frameworks").iterdir()] == [".lock"]
    result = toy.download("--archive", str(empty))
    assert result.returncode == 1 and "--archive needs --only NAME" in result.stderr


def test_hung_remote_meets_the_deadline(toy: Toy, tmp_path: Path) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "git-remote-hang").write_text("#!/bin/sh\nsleep 600\n")
    (fake / "git-remote-hang").chmod(0o755)
    toy.lock(url="hang://somewhere")
    started = time.monotonic()
    result = toy.download("--deadline", "1", "--source", "git", PATH=f"{fake}:{os.environ['PATH']}")
    assert result.returncode == 1 and "no answer within 1 s" in result.stderr
    assert time.monotonic() - started < 300


def test_never_resolves_to_the_parent_repository(toy: Toy) -> None:
    run_git(toy.root, "init", "-q")
    (toy.root / "file").write_text("x")
    run_git(toy.root, "add", "file")
    run_git(toy.root, "commit", "-q", "-m", "parent")
    head = run_git(toy.root, "rev-parse", "HEAD")
    (toy.tree / "toy").mkdir(parents=True)
    (toy.tree / "toy/mine.py").write_text("mine\n")
    result = toy.download()
    assert result.returncode == 1 and "is not a repository made by this tool" in result.stderr
    assert (toy.tree / "toy/mine.py").read_text() == "mine\n"
    assert run_git(toy.root, "rev-parse", "HEAD") == head
    assert run_git(toy.root, "for-each-ref", "--format=%(refname)", "refs/tags") == ""
    with pytest.raises(sources.ToolError):
        sources.git(toy.tree, "rev-parse", "HEAD")


def test_a_new_pin_replaces_the_tree_unless_it_holds_work(toy: Toy) -> None:
    toy.download("--source", "git")
    (toy.upstream / "toy/core.py").write_text("def run():\n    return 2\n")
    run_git(toy.upstream, "commit", "-q", "-a", "-m", "two")
    run_git(toy.upstream, "tag", "v2.0")
    toy.lock(tag="v2.0", commit=run_git(toy.upstream, "rev-parse", "HEAD"))
    (toy.tree / "toy/core.py").write_text("mine\n")
    result = toy.download("--source", "git")
    assert result.returncode == 1 and "uncommitted changes (toy/core.py" in result.stderr
    run_git(toy.tree, "commit", "-q", "-a", "-m", "mine")
    result = toy.download("--source", "git")
    assert result.returncode == 1 and "commits that are in no patch file" in result.stderr
    run_git(toy.tree, "reset", "-q", "--hard", "ascend-rl-base")
    assert toy.download("--source", "git").returncode == 0
    assert toy.head() == toy.values["commit"]


def test_the_next_run_recovers_from_a_kill_at_any_moment(toy: Toy) -> None:
    started = time.monotonic()
    assert toy.download("--source", "pypi").returncode == 0
    duration, expected = time.monotonic() - started, toy.head()
    moments = random.Random(1)
    for trial in range(6):
        shutil.rmtree(toy.root / "frameworks")
        source = ("pypi", "git")[trial % 2]
        process = subprocess.Popen(
            [*toy.command, "--source", source],
            env=toy.env,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(moments.uniform(0.05, duration if source == "pypi" else 0.3))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        result = toy.download("--source", source)
        assert result.returncode == 0, result.stderr
        assert toy.head() == (expected if source == "pypi" else toy.commit)
        assert run_git(toy.tree, "status", "--porcelain") == ""
        assert sorted(path.name for path in (toy.root / "frameworks").iterdir()) == [".lock", "toy"]


def test_runs_wait_for_each_other(toy: Toy) -> None:
    processes = [
        subprocess.Popen(
            [*toy.command, "--source", "git"],
            env=toy.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert sorted("already there" in out for out, _ in outputs) == [False, True, True]


def test_lock_values_from_the_shell(toy: Toy) -> None:
    def get(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SOURCES), *args]
        return execute(command, toy.env | {"ASCEND_RL_ROOT": str(toy.root)})

    assert get("get", "toy", "version").stdout == "1.0\n"
    assert get("get", "toy", "unhashed").stdout == "toy/_version.py\ntoy/_cann_ops_custom/\n"
    assert get("get", "cpu", "python").stdout == "3.11\n"
    assert get("list").stdout == "toy\n"
    missing = get("get", "toy", "nothing")
    assert missing.returncode == 1 and "has no [toy] nothing" in missing.stderr


def test_write_tree_hash_touches_one_line(toy: Toy) -> None:
    path = toy.root / "frameworks.lock"
    path.write_text(
        '[other]\ntree = "1"\n' + path.read_text() + '[last]\npackage = "o"\n\n[more]\ntree = "2"\n'
    )
    before = path.read_text()
    sources.Project.load(toy.root).write_tree_hash("toy", "3")
    assert path.read_text() == before.replace('tree = ""', 'tree = "3"')
    with pytest.raises(sources.ToolError):
        sources.Project.load(toy.root).write_tree_hash("last", "x")


def test_front_door_prints_its_header_and_passes_the_exit_code(toy: Toy) -> None:
    door = REPO / "download_frameworks_source_code.sh"
    shown = execute([door, "-h"], toy.env).stdout
    for word in ("Usage:", "Example:", "Hardware:", "Duration:"):
        assert word in shown
    assert "set -euo" not in shown
    bad = execute([door, "--only", "nothing"], toy.env | {"ASCEND_RL_ROOT": str(toy.root)})
    assert bad.returncode == 1 and "unknown framework 'nothing'" in bad.stderr


def test_the_real_lock_is_complete() -> None:
    project = sources.Project.load(REPO)
    assert list(project.frameworks) == ["verl", "vllm", "vllm_ascend", "megatron", "mindspeed", "roll"]
    for framework in project.frameworks.values():
        assert len(framework.commit) == 40 and framework.url.endswith(".git"), framework.name
        if framework.dist:
            assert set(framework.sha256) in ({"any"}, {"x86_64", "aarch64"}), framework.name
            assert all(len(digest) == 64 for digest in framework.sha256.values())
        else:
            assert framework.optional
    assert json.dumps(project.tables)  # plain values only


@pytest.mark.parametrize(
    "command", ["patches/sources.py list", "patches/patchset.py check -h", "-m ascend_rl.tiny -h"]
)
@pytest.mark.parametrize("module", ["argparse", "shutil"])
def test_ctrl_c_while_a_command_is_imported_prints_no_traceback(tmp_path, command, module):
    """At an import, so that the moment is the same on every machine."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.modules.pop({module!r}, None)\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}"}
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=REPO, env=environment, capture_output=True, text=True
    )
    assert done.returncode in (130, -signal.SIGINT) and not done.stderr, done.stderr

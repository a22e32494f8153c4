"""Pinned framework sources: read frameworks.lock, fetch what it pins, mark the base.

Problem: five upstreams, hosts that are sometimes unreachable, and patches that need exactly one tree.
Idea: two routes to the same package, `git` (shallow fetch of the tag from the main URL, then the mirror)
and `pypi` (the released wheel committed as a base); an archive of the tag's files serves if neither is
reachable. A tree is built beside frameworks/<name>, verified and renamed into place, so a kill at any point
leaves the old state or the new one; the next run puts back a tree that was renamed away and deletes the rest.
Invariants: frameworks/<name> is always complete, a repository of its own, on branch `ascend-rl`, with the
pin at tag `ascend-rl-base`; a wheel gives the same base commit on every machine; a commit or sha256 that
differs from the lock is never installed (an archive is proved by the lock's hash of the patched tree, without
which no patch is applied); no tree with unsaved work is replaced; one tool runs at a time.
Cost: one shallow clone or one wheel per framework; an up-to-date run makes four git calls per framework.
"""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C during the imports prints no traceback
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_STACK = "cann8.5"  # of a checkout without STACK
BASE_TAG = "ascend-rl-base"
BRANCH = "ascend-rl"
SOURCE_FILE = "ascend-rl-source"  # in .git: which pin this tree holds
APPLIED_FILE = "ascend-rl-applied"  # in .git: which patch set was applied, and the resulting head
HASHED_SUFFIXES = (".py", ".yaml")
# Files compiled for one architecture, and build products: in the working tree but not in the base commit.
UNTRACKED = ("*.so", "*.so.*", "*.o", "_cann_ops_custom/", "build/", "*.egg-info/", "__pycache__/", "*.pyc")
METADATA = ("METADATA", "entry_points.txt", "top_level.txt")  # the others name the architecture
# Files are the bytes of their blobs, and diffs the same, whatever .gitattributes upstream or the user has.
ATTRIBUTES = "* -text !eol !diff !filter !ident !merge !working-tree-encoding\n"
IDENTITY = {"NAME": "ascend-rl", "EMAIL": "patches@ascend-rl.invalid"}
BASE_DATE = "2000-01-01T00:00:00+00:00"
PROBE_SECONDS = 15  # a host that does not answer a one-line query by then is skipped
GLIBC_TAGS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")


class ToolError(Exception):
    """What went wrong and what to do next, as shown to the user."""


def stack_root(root: Path) -> Path:
    """Where the stack that STACK names has its lock, patches and sources: the root for the default one.

    Raises:
        ToolError: there is no such stack.
    """
    name = os.environ.get("STACK") or DEFAULT_STACK
    if name == DEFAULT_STACK:
        return root
    if not (root / "stacks" / name / "frameworks.lock").is_file():
        names = [DEFAULT_STACK, *sorted(path.parent.name for path in root.glob("stacks/*/frameworks.lock"))]
        raise ToolError(f"STACK={name}: there is no such stack, only {', '.join(names)}")
    return root / "stacks" / name


@dataclass(frozen=True)
class Framework:
    """One framework table of frameworks.lock."""

    name: str
    package: str
    url: str
    mirror: str
    tag: str
    commit: str
    dist: str
    version: str
    sha256: dict[str, str]  # machine (or "any") -> wheel digest
    optional: bool
    branch: bool  # `tag` is the name of a branch
    unhashed: tuple[str, ...]
    tree: str  # hash of the patched package; "" before the first export

    def hashed(self, path: str) -> bool:
        """Whether `path` counts in the tree hash: a source that both the tag and the wheel contain."""
        return path.endswith(HASHED_SUFFIXES) and not any(
            path.startswith(entry) if entry.endswith("/") else path == entry for entry in self.unhashed
        )


@dataclass(frozen=True)
class Project:
    """A checkout of this repository: its root, and what frameworks.lock pins."""

    root: Path
    tables: dict[str, dict]

    @classmethod
    def load(cls, root: Path) -> Project:
        lock = root / "frameworks.lock"
        try:
            return cls(root, tomllib.loads(lock.read_text()))
        except FileNotFoundError:
            raise ToolError(
                f"{lock} is missing: run from a checkout of the repository, or give --root"
            ) from None
        except tomllib.TOMLDecodeError as error:
            raise ToolError(f"{lock} is not valid TOML: {error}") from None

    @property
    def frameworks(self) -> dict[str, Framework]:
        return {name: self.framework(name) for name, table in self.tables.items() if "package" in table}

    def framework(self, name: str) -> Framework:
        table = self.tables[name]
        sha256 = {
            key.removeprefix("sha256_"): value for key, value in table.items() if key.startswith("sha256_")
        }
        text = {
            key: table.get(key, "")
            for key in ("package", "url", "mirror", "tag", "commit", "dist", "version", "tree")
        }
        return Framework(
            name=name,
            sha256=sha256,
            optional=table.get("optional", False),
            branch=table.get("branch", False),
            unhashed=tuple(table.get("unhashed", ())),
            **text,
        )

    def select(self, only: str | None) -> list[Framework]:
        frameworks = self.frameworks
        if only is None:
            return list(frameworks.values())
        if only not in frameworks:
            raise ToolError(f"unknown framework {only!r}: frameworks.lock has {', '.join(frameworks)}")
        return [frameworks[only]]

    @property
    def directory(self) -> Path:
        return self.root / "frameworks"

    def tree(self, name: str) -> Path:
        """Where a framework lies; the user may have linked frameworks/<name> to another disk."""
        return (self.directory / name).resolve()

    def scratch(self, name: str) -> Path:
        """A directory that the next run removes if this one is killed."""
        return self.directory / f".tmp-{name}"

    def write_tree_hash(self, name: str, value: str) -> None:
        """Set `tree` of a table, leaving every other byte of the file alone."""
        path = self.root / "frameworks.lock"
        text = path.read_text()
        line = rf'(?m)(^\[{name}\]\n(?:[^\[\n].*\n|\n)*?tree = ")[^"]*'
        changed, count = re.subn(line, rf"\g<1>{value}", text)
        if not count:
            raise ToolError(f'{path}: [{name}] needs a line `tree = ""`')
        if changed != text:
            write_file(path, changed.encode())

    @contextlib.contextmanager
    def exclusive(self, wait_seconds: float = 600) -> Iterator[None]:
        """Hold the lock that all tools share, and remove what killed runs left behind.

        Children inherit the descriptor: after a SIGKILL of this process the lock is held until the
        git it was running has ended, so the next run never meets it half-way.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        os.set_inheritable(descriptor, True)
        deadline, told = time.monotonic() + wait_seconds, False
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise ToolError(
                            "another download or patch run still holds frameworks/.lock; "
                            f"gave up after {wait_seconds:.0f} s"
                        ) from None
                    if not told:
                        say("waiting for another download or patch run to end")
                    told = True
                    time.sleep(0.05)
            leftovers = list(self.directory.glob(".tmp-*"))
            for tree in map(self.tree, self.frameworks):
                new, old = beside(tree, "new"), beside(tree, "old")
                if old.exists() and not tree.exists():  # killed within put_in_place
                    old.rename(tree)
                leftovers += [path for path in (new, old) if path.exists()]
            for leftover in leftovers:
                shutil.rmtree(leftover)
            yield
        finally:
            os.close(descriptor)


def say(message: str) -> None:
    print(message, flush=True)


def write_file(path: Path, content: bytes) -> None:
    """Replace a file in one step: readers and killed runs see the old content or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def read_json(path: Path) -> dict:
    """A state file of the tool; an absent or damaged one counts as empty."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}


def write_json(path: Path, value: dict) -> None:
    write_file(path, json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")


# --- running git and pip ------------------------------------------------------------------------------


def beside(tree: Path, which: str) -> Path:
    """Where a tree's successor ("new") is prepared and its predecessor ("old") waits to be deleted."""
    return tree.with_name(f".{which}-{tree.name}")


def copy_tree(tree: Path, copy: Path) -> None:
    """Copy a tree with all that is in it; what git never writes into, by hard links where possible."""

    def cp(*words: object) -> subprocess.CompletedProcess[bytes]:
        return run(["cp", *map(str, words)], env=isolated_env())

    if cp("-al", f"{tree}/.", copy).returncode:
        shutil.rmtree(copy, ignore_errors=True)
        result = cp("-a", f"{tree}/.", copy)
    else:
        state = [path for path in (tree / ".git").iterdir() if path.name != "objects"]
        result = cp("-a", "--remove-destination", *state, copy / ".git")
    if result.returncode:
        shutil.rmtree(copy, ignore_errors=True)
        raise ToolError(f"{tree} cannot be copied: {last_line(result.stderr)}")


def put_in_place(tree: Path, new: Path) -> None:
    """Replace a tree, or add it; `Project.exclusive` repairs what a kill between the renames leaves."""
    old = beside(tree, "old")
    if tree.exists():
        tree.rename(old)
    new.rename(tree)
    shutil.rmtree(old, ignore_errors=True)


def run(
    command: Sequence[str], *, env: dict[str, str], stdin: bytes | None = None, seconds: float | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run to the end or to the deadline, and leave no process behind in either case."""
    if not shutil.which(command[0], path=env.get("PATH")):
        raise ToolError(f"{command[0]} is not installed or not on PATH")
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        close_fds=False,  # see Project.exclusive
        start_new_session=seconds is not None,
    )
    try:
        out, err = process.communicate(stdin, timeout=seconds)
    except BaseException:
        if seconds is not None:  # its helpers (git-remote-https) also hold the pipes
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def isolated_env() -> dict[str, str]:
    """An environment in which git behaves the same for every user."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",  # a killed `git status` must not leave an index.lock in a tree
        "HOME": "/nonexistent",  # for a git older than 2.32, which does not know GIT_CONFIG_GLOBAL
        "XDG_CONFIG_HOME": "/nonexistent",
        "LC_ALL": "C",
        "TZ": "UTC",
    }
    for role in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{role}_{key}": value for key, value in IDENTITY.items()}
        env[f"GIT_{role}_DATE"] = BASE_DATE
    return env


def settings(listed: str) -> list[str]:
    return [word for setting in listed.split() for word in ("-c", setting)]


# Settings a tree's own .git/config could still carry.
OVERRIDES = settings(
    "core.hooksPath=/dev/null core.fsmonitor=false core.autocrlf=false core.eol=lf "
    "core.attributesFile=/dev/null core.excludesFile=/dev/null core.quotePath=false core.fileMode=true "
    "commit.gpgSign=false gc.auto=0 maintenance.auto=false advice.detachedHead=false"
)
NETWORK_SETTINGS = settings(
    "core.hooksPath=/dev/null gc.auto=0 maintenance.auto=false http.lowSpeedLimit=1000 http.lowSpeedTime=30"
)
REPOSITORY_VARIABLES = (
    "GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_NAMESPACE GIT_COMMON_DIR "
    "GIT_ALTERNATE_OBJECT_DIRECTORIES"
).split()


def git_result(repo: Path, *args: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run git on exactly the repository at `repo`: never on a parent, never with the user's settings.

    Naming the git directory also lets a container's root work on trees that the host's user owns.
    """
    location = ("-C", str(repo), f"--git-dir={repo / '.git'}", f"--work-tree={repo}")
    return run(["git", *location, *OVERRIDES, *args], env=isolated_env(), stdin=stdin)


def git(repo: Path, *args: str, stdin: bytes | None = None) -> str:
    """Like git_result, but returns the output; a failure raises an error with git's message."""
    result = git_result(repo, *args, stdin=stdin)
    if result.returncode:
        raise ToolError(
            f"git {' '.join(args[:2])} failed in {repo}:\n{result.stderr.decode(errors='replace').strip()}"
        )
    return result.stdout.decode(errors="surrogateescape").removesuffix("\n")


def network_git(repo: Path, *args: str, seconds: float) -> str:
    """Run git with the user's own settings (proxy, credentials, insteadOf) and a deadline."""
    env = {key: value for key, value in os.environ.items() if key not in REPOSITORY_VARIABLES}
    env |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = ["git", "-C", str(repo), f"--git-dir={repo / '.git'}", *NETWORK_SETTINGS, *args]
    try:
        result = run(command, env=env, seconds=seconds)
    except subprocess.TimeoutExpired:
        raise ToolError(f"no answer within {seconds:.0f} s") from None
    if result.returncode:
        raise ToolError(last_line(result.stderr))
    return result.stdout.decode()


def last_line(output: bytes) -> str:
    """The most telling line of a failed command: the last with "fatal" or "error", else the last."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if line.lower().startswith(("fatal:", "error:"))]
    return (telling or lines or ["it failed without a message"])[-1]


def init_repository(path: Path) -> None:
    path.mkdir(parents=True)
    git(path, "init", "-q", "--template=", f"--initial-branch={BRANCH}")
    (path / ".git/info").mkdir()
    (path / ".git/info/attributes").write_text(ATTRIBUTES)


# --- the state of a tree ------------------------------------------------------------------------------


def require_repository(tree: Path) -> None:
    if not (tree / ".git").is_dir():
        raise ToolError(
            f"{tree} exists but is not a repository made by this tool: move it away, then run "
            "./download_frameworks_source_code.sh"
        )


def holds_pin(tree: Path, framework: Framework, source: str = "auto") -> bool:
    """Whether the tree's base is the one that the lock pins (from `source`, unless that is auto)."""
    pin = read_json(tree / ".git" / SOURCE_FILE)
    if not pin or source not in ("auto", pin["source"]) or pin["tag"] != framework.tag:
        return False
    if pin["source"] == "archive":  # proved by `tree` when the patches are applied
        return True
    if pin["source"] == "git":
        return bool(framework.commit) and pin["base"].startswith(framework.commit)
    return pin["version"] == framework.version and pin["sha256"] in framework.sha256.values()


def unsaved_work(tree: Path) -> str:
    """What would be lost with this tree; "" if it holds only what the tools put there."""
    head = git(tree, "rev-parse", "HEAD")
    known = {
        read_json(tree / ".git" / name).get(key)
        for name, key in ((SOURCE_FILE, "base"), (APPLIED_FILE, "head"))
    }
    if changed := git(tree, "status", "--porcelain"):
        return f"uncommitted changes ({changed.split()[1]}, ...)"
    if head not in known:
        return "commits that are in no patch file"
    return ""


def tree_hash(tree: Path, framework: Framework, revision: str = "HEAD") -> str:
    """sha256 over the sorted "<path> <blob id>" lines of the package's hashed files."""
    listing = git(tree, "ls-tree", "-r", "-z", revision, "--", framework.package)
    lines = []
    for entry in filter(None, listing.split("\0")):
        meta, path = entry.split("\t", 1)
        if framework.hashed(path):
            lines.append(f"{path} {meta.split()[2]}\n")
    return hashlib.sha256("".join(sorted(lines)).encode(errors="surrogateescape")).hexdigest()


# --- the two sources ----------------------------------------------------------------------------------


def machine() -> str:
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())


def from_git(dest: Path, framework: Framework, url: str, seconds: float) -> dict[str, str]:
    """Shallow-fetch the tag, or the commit of a branch, into a new repository; the lock has the commit."""
    init_repository(dest)
    ref = f"refs/{'heads' if framework.branch else 'tags'}/{framework.tag}"
    if not network_git(dest, "ls-remote", url, ref, seconds=min(PROBE_SECONDS, seconds)):
        raise ToolError(f"has no {'branch' if framework.branch else 'tag'} {framework.tag}")
    ref = framework.commit if framework.branch else ref
    network_git(dest, "fetch", "-q", "--depth=1", "--no-tags", url, ref, seconds=seconds)
    commit = git(dest, "rev-parse", "FETCH_HEAD^{commit}")
    if not commit.startswith(framework.commit):
        raise ToolError(
            f"tag {framework.tag} is commit {commit}, but frameworks.lock pins {framework.commit}: refused"
        )
    (dest / ".git/info/exclude").write_text("\n".join(UNTRACKED) + "\n")
    git(dest, "reset", "-q", "--hard", commit)
    return {"source": "git", "from": url, "base": commit}


def wheel_digest(framework: Framework, arch: str) -> str:
    return framework.sha256.get(arch) or framework.sha256.get("any", "")


def pip_download(project: Project, framework: Framework, arch: str, directory: Path, seconds: float) -> Path:
    """Download one wheel for `arch` with the user's pip settings and return its path."""
    venv = project.root / ".venv/bin/python"
    python = str(venv) if venv.exists() else sys.executable
    digest = wheel_digest(framework, arch)
    directory.mkdir(parents=True)
    requirement = directory / "requirement.txt"
    requirement.write_text(f"{framework.dist}=={framework.version} --hash=sha256:{digest}")
    options = "--no-deps --only-binary=:all: --no-input --quiet --disable-pip-version-check --require-hashes"
    version = project.tables.get("cpu", {}).get("python", "{}.{}".format(*sys.version_info))
    command = [python, "-m", "pip", "download", *options.split(), f"--python-version={version}"]
    command += [f"--dest={directory}", f"--requirement={requirement}"]
    command += [f"--platform={tag}_{arch}" for tag in GLIBC_TAGS]
    try:
        result = run(command, env=dict(os.environ), seconds=seconds)
    except subprocess.TimeoutExpired:
        raise ToolError(f"pip did not finish within {seconds:.0f} s") from None
    if b"No module named pip" in result.stderr:
        raise ToolError(
            f"{python} has no pip: install python3-pip, or create .venv with `python3 -m venv .venv`"
        )
    if result.returncode:
        message = (
            "the wheel's sha256 is not the one in frameworks.lock: refused"
            if b"THESE PACKAGES DO NOT MATCH THE HASHES" in result.stderr
            else last_line(result.stderr)
        )
        raise ToolError(message)
    (wheel,) = directory.glob("*.whl")
    if sha256_of(wheel) != digest:
        raise ToolError(f"{wheel.name} has sha256 {sha256_of(wheel)}, frameworks.lock pins {digest}: refused")
    return wheel


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def from_pypi(dest: Path, project: Project, framework: Framework, seconds: float) -> dict[str, str]:
    """Unpack the wheel's package and commit what every architecture has in common."""
    init_repository(dest)
    downloads = dest / ".git/ascend-rl-wheel"
    wheel = pip_download(project, framework, machine(), downloads, seconds)
    sha256 = sha256_of(wheel)
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if not member.is_dir() and wanted(member.filename, framework.package):
                path = Path(archive.extract(member, dest))
                path.chmod(0o755 if member.external_attr >> 16 & 0o111 else 0o644)
    shutil.rmtree(downloads)
    base = commit_files(dest, f"{framework.dist} {framework.version} from PyPI\n")
    pin = {"source": "pypi", "from": framework.dist, "base": base, "arch": machine()}
    return pin | {"version": framework.version, "sha256": sha256}


def from_archive(dest: Path, framework: Framework, archive: Path) -> dict[str, str]:
    """Unpack a .tar.gz that holds the tag's files in one directory, and commit them."""
    init_repository(dest)
    unpacked = dest / ".git/ascend-rl-archive"
    try:
        with tarfile.open(archive) as files:
            files.extractall(unpacked, filter="data")
        (top,) = unpacked.iterdir()
    except (OSError, ValueError, tarfile.TarError) as error:
        raise ToolError(f"{archive} is not an archive of one directory: {error}") from None
    if not (top / framework.package).is_dir():
        raise ToolError(f"it has no {top.name}/{framework.package}")
    shutil.copytree(top, dest, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git"))
    shutil.rmtree(unpacked)
    base = commit_files(dest, f"{framework.name} {framework.tag} from an archive\n")
    return {"source": "archive", "from": archive.name, "base": base}


def commit_files(dest: Path, message: str) -> str:
    """Commit the files of a new repository, except those for one architecture; returns the commit."""
    (dest / ".git/info/exclude").write_text("\n".join(UNTRACKED) + "\n")
    # Listed by git with only our exclude file, so a .gitignore among them hides nothing.
    files = git(dest, "ls-files", "-z", "--others", f"--exclude-from={dest / '.git/info/exclude'}")
    git(dest, "update-index", "--add", "-z", "--stdin", stdin=files.encode(errors="surrogateescape"))
    base = git(dest, "commit-tree", git(dest, "write-tree"), stdin=message.encode())
    git(dest, "update-ref", "HEAD", base)
    return base


def wanted(member: str, package: str) -> bool:
    """Keep the package and the metadata that imports use; drop stray top-level tests/ and scripts/."""
    parts = member.split("/")
    if ".." in parts or parts[0] in ("", ".git"):
        raise ToolError(f"the wheel holds an unsafe path: {member!r}")
    return parts[0] == package or (parts[0].endswith(".dist-info") and parts[-1] in METADATA)


def build_tree(dest: Path, project: Project, framework: Framework, source: str | Path, seconds: float) -> str:
    """Make a complete repository at `dest`, trying each source in turn; return which worked and which failed.

    `source` is auto, git, pypi or an archive. One without a commit or sha256 in the lock is not tried at all.
    """
    attempts, reasons = [], []
    if isinstance(source, Path):
        attempts.append((f"archive {source}", lambda: from_archive(dest, framework, source)))
    elif source in ("auto", "git") and not framework.commit:
        reasons.append("git: frameworks.lock pins no commit")
    elif source in ("auto", "git"):
        urls = dict.fromkeys(filter(None, (framework.url, framework.mirror)))
        attempts += [(f"git {url}", lambda url=url: from_git(dest, framework, url, seconds)) for url in urls]
    if source in ("auto", "pypi") and not framework.dist:
        reasons.append("pypi: it is published in git only")
    elif source in ("auto", "pypi") and not wheel_digest(framework, machine()):
        reasons.append(f"pypi: frameworks.lock pins no wheel for {machine()}")
    elif source in ("auto", "pypi"):
        label = f"pypi {framework.dist}=={framework.version}"
        attempts.append((label, lambda: from_pypi(dest, project, framework, seconds)))
    for label, attempt in attempts:
        try:
            pin = attempt()
        except ToolError as error:
            reasons.append(f"{label}: {error}")
            shutil.rmtree(dest, ignore_errors=True)
            continue
        git(dest, "tag", "-f", BASE_TAG, pin["base"])
        write_json(dest / ".git" / SOURCE_FILE, {"tag": framework.tag, **pin})
        return "".join([label, *(f"\n    passed over {reason}" for reason in reasons)])
    raise ToolError("; ".join(reasons))


def download(project: Project, framework: Framework, source: str | Path, seconds: float) -> str:
    """Make frameworks/<name> hold the pinned base; return one line that says what happened."""
    tree = project.tree(framework.name)
    if tree.exists():
        require_repository(tree)
        if holds_pin(tree, framework, "archive" if isinstance(source, Path) else source):
            pin = read_json(tree / ".git" / SOURCE_FILE)
            if git(tree, "rev-parse", f"{BASE_TAG}^{{commit}}") != pin["base"]:
                raise ToolError(
                    f"tag {BASE_TAG} in {tree} was moved: `git -C {tree} tag -f {BASE_TAG} {pin['base']}`"
                )
            return f"already there ({pin['source']})"
        if work := unsaved_work(tree):
            raise ToolError(
                f"{tree} does not hold the pin {framework.tag} from {source} but has {work}: "
                "export or discard it, then run again"
            )
    origin = build_tree(beside(tree, "new"), project, framework, source, seconds)
    put_in_place(tree, beside(tree, "new"))
    return f"ready from {origin}"


def download_all(project: Project, only: str | None, source: str | Path, seconds: float) -> int:
    """Download every framework; collect failures, so that one host does not stop the others."""
    failed = []
    with project.exclusive():
        for framework in project.select(only):
            label = f"{framework.name} {framework.tag}"
            try:
                say(f"{label}: {download(project, framework, source, seconds)}")
            except ToolError as error:
                if framework.optional and only is None:
                    say(
                        f"{label}: not reachable, continuing without it: only Ascend runs need it "
                        f"(reasons: ./download_frameworks_source_code.sh --only {framework.name})"
                    )
                else:
                    failed.append(framework.name)
                    print(f"{label}: FAILED: {error}", file=sys.stderr, flush=True)
    if failed:
        print(
            f"not downloaded: {', '.join(failed)}. Check the network or proxy and run the command again: "
            "finished frameworks are kept. Git mirrors: git config --global url.<mirror>.insteadOf <url>",
            file=sys.stderr,
        )
    return 1 if failed else 0


# --- command line -------------------------------------------------------------------------------------


def add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root",
        type=Path,
        default=os.environ.get("ASCEND_RL_ROOT"),
        help="the directory of frameworks.lock (default: of STACK in this checkout)",
    )


def root_of(given: Path | None) -> Path:
    return Path(given).resolve() if given else stack_root(Path(__file__).resolve().parent.parent)


def positive(text: str) -> float:
    if (value := float(text)) <= 0:
        raise argparse.ArgumentTypeError("must be positive")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sources.py", description="Pinned framework sources.")
    add_root(parser)
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("download", help="fetch what frameworks.lock pins into frameworks/")
    fetch.add_argument(
        "--source",
        choices=("auto", "git", "pypi"),
        default="auto",
        help="auto: git, then its mirror, then the PyPI wheel",
    )
    fetch.add_argument("--only", metavar="NAME", help="one framework")
    fetch.add_argument(
        "--archive",
        type=Path,
        metavar="FILE",
        help="with --only: a .tar.gz of the tag's files instead; apply proves it by the tree hash",
    )
    fetch.add_argument(
        "--deadline", type=positive, default=300, metavar="SECONDS", help="per attempt (default 300)"
    )
    get = commands.add_parser("get", help="print one value of frameworks.lock")
    get.add_argument("table")
    get.add_argument("key")
    commands.add_parser("list", help="print the framework names, one a line")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        project = Project.load(root_of(args.root))
        if args.command == "download":
            if args.archive and not args.only:
                raise ToolError("--archive needs --only NAME: it holds one framework")
            return download_all(project, args.only, args.archive or args.source, args.deadline)
        if args.command == "list":
            print("\n".join(project.frameworks))
        elif args.key not in project.tables.get(args.table, {}):
            raise ToolError(f"frameworks.lock has no [{args.table}] {args.key}")
        else:
            value = project.tables[args.table][args.key]
            print(
                "\n".join(value)
                if isinstance(value, list)
                else str(value).lower()
                if value is True
                else value
            )
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

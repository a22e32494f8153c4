"""The patch set: apply | check | export.

Problem: numbered patches over several upstreams must give the same trees everywhere, and work in a tree
must survive mistakes, other people's pulls and kills.
Idea: the real `git am` runs in a scratch repository that borrows the tree's objects and checks out only the
touched files. Once every framework has succeeded and every tree hash matches frameworks.lock, a copy beside
each tree (hard links, with untracked files and build products) takes the new state and then the tree's name.
Invariants: a failure changes no tree; uncommitted or unexported work is never overwritten; a kill leaves a
tree as it was or as it should be; same patches and same base give the same commits for every user; an export
of an applied set changes no byte.
Cost: O(touched files + patches) per framework, and a hard link per file of a tree that changes; a second run
compares digests and makes six git calls.
"""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C during the imports prints no traceback
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import contextlib
import hashlib
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sources import (
    APPLIED_FILE,
    BASE_TAG,
    BRANCH,
    SOURCE_FILE,
    Framework,
    Project,
    ToolError,
    add_root,
    beside,
    copy_tree,
    git,
    git_result,
    holds_pin,
    init_repository,
    put_in_place,
    read_json,
    require_repository,
    root_of,
    say,
    tree_hash,
    write_file,
    write_json,
)

SUBJECT = re.compile(r"(feature|bugfix)\(([a-z0-9_]+)\): \S.*")
TRAILERS = ("Why", "How", "Upstream-Status", "Drop-When", "Switch", "Test")
UPSTREAM_STATUS = re.compile(r"Pending|Submitted \S.*|Backport \S.*|Inappropriate \[.+\]")
MAX_ADDED_LINES = 60
INDEX_BEGIN, INDEX_END = "<!-- index: begin (written by patchset.py export) -->", "<!-- index: end -->"
AM = (
    "am --quiet --no-3way --keep-cr --keep-non-patch --no-scissors --whitespace=nowarn "
    "--committer-date-is-author-date --no-gpg-sign"
).split()
FORMAT_PATCH = (
    "format-patch --zero-commit --full-index --no-signature --no-stat -N --no-renames --quiet"
).split()
IN_PROGRESS = (
    "index.lock rebase-merge rebase-apply MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD BISECT_LOG"
).split()


# --- patch files --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Patch:
    """One exported commit."""

    filename: str
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    @property
    def message(self) -> str:
        """Subject and body, as `git am` will read them."""
        headers, _, body = self.text.partition("\n\n")
        match = re.search(r"^Subject: (.*(?:\n[ \t].*)*)", headers, re.MULTILINE)
        subject = re.sub(r"\n[ \t]+", " ", match[1]) if match else ""
        text = re.split(r"(?m)^(?:---|diff --git .*)$", body, maxsplit=1)[0]
        return f"{subject.removeprefix('[PATCH] ')}\n\n{text}"

    @property
    def subject(self) -> str:
        return self.message.partition("\n")[0]

    @property
    def name(self) -> str:
        match = SUBJECT.fullmatch(self.subject)
        return match[2] if match else ""

    @property
    def files(self) -> list[str]:
        """Paths the patch touches (old and new side, without /dev/null)."""
        paths = re.findall(r"(?m)^(?:--- a|\+\+\+ b)/(.*?)\t?$", self.text)
        paths += re.findall(r"(?m)^diff --git a/(.*) b/\1$", self.text)  # mode changes and empty files
        return list(dict.fromkeys(paths))

    @property
    def added(self) -> list[str]:
        return re.findall(r"(?m)^\+(?!\+\+ b/)(.*)$", self.text)

    def trailer(self, key: str) -> str:
        match = re.search(rf"(?m)^{key}: *(\S.*)$", self.message)
        return match[1].strip() if match else ""


def patch_directory(project: Project, name: str) -> Path:
    return project.root / "patches" / name


def read_patches(project: Project, name: str) -> list[Patch]:
    paths = sorted(patch_directory(project, name).glob("*.patch"))
    return [Patch(path.name, path.read_bytes()) for path in paths]


def digest_of(patches: Sequence[Patch], base: str) -> str:
    """A digest that identifies what `apply` would produce."""
    digest = hashlib.sha256(base.encode())
    for patch in patches:
        digest.update(f"\0{patch.filename}\0{len(patch.content)}\0".encode())
        digest.update(patch.content)
    return digest.hexdigest()


def lint_message(patch: Patch) -> list[str]:
    """What a commit message still lacks to become a patch file."""
    problems = []
    if not SUBJECT.fullmatch(patch.subject):
        problems.append(
            "the subject must read `feature(<name>): <what>` or `bugfix(<name>): <what>`, "
            f"<name> in lower case, digits and _ (it is {patch.subject!r})"
        )
    if missing := [key for key in TRAILERS if not patch.trailer(key)]:
        problems.append(f"the message lacks {', '.join(f'{key}:' for key in missing)}")
    status = patch.trailer("Upstream-Status")
    if status and not UPSTREAM_STATUS.fullmatch(status):
        problems.append(
            f"Upstream-Status is {status!r}; use Pending, Submitted <ref>, Backport <ref> "
            "or Inappropriate [reason]"
        )
    return problems


def name_patches(contents: Sequence[bytes], framework: str) -> list[Patch]:
    """Give commits in the form of patch files their file names."""
    patches = []
    for number, content in enumerate(contents, 1):
        kind, name = Patch("", content).subject.partition("(")[0], Patch("", content).name
        patches.append(Patch(f"{number:04d}-{framework}-{kind}-{name}.patch", content))
    return patches


def require_ready(patches: Sequence[Patch], framework: str) -> None:
    """Refuse commits whose messages do not have the form of a patch file, by name."""
    problems = [
        f"commit {number} {patch.subject!r}: {problem}"
        for number, patch in enumerate(patches, 1)
        for problem in lint_message(patch)
    ]
    if problems:
        advice = f"amend these commits first (git -C frameworks/{framework} rebase -i {BASE_TAG})"
        raise ToolError("\n  ".join([f"{framework}: not exported; {advice}:", *problems]))


# --- scratch repositories -----------------------------------------------------------------------------


@contextlib.contextmanager
def scratch_repository(project: Project, tree: Path, base: str, patches: Sequence[Patch]) -> Iterator[Path]:
    """A repository at `base` that borrows the tree's objects and checks out only what the patches touch.

    It shares neither index, refs nor configuration with the tree, so nothing done in it can be seen there.
    """
    scratch = project.scratch(f"patch-{tree.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    init_repository(scratch)
    try:
        objects = scratch / ".git/objects/info"
        objects.mkdir(parents=True, exist_ok=True)
        (objects / "alternates").write_text(f"{tree / '.git/objects'}\n")
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(tree / ".git/shallow", scratch / ".git/shallow")
        git(scratch, "config", "core.sparseCheckout", "true")
        patterns = ["/" + re.sub(r"([*?\[\\!# ])", r"\\\1", path) for path in touched(patches)] or [
            "/nothing"
        ]
        (scratch / ".git/info/sparse-checkout").write_text("\n".join(patterns) + "\n")
        git(scratch, "update-ref", "HEAD", base)
        git(scratch, "read-tree", "-m", "-u", "HEAD")
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def run_am(scratch: Path, patches: Sequence[Patch], framework: str) -> str:
    """Apply the whole series with one `git am`; return the new head."""
    series = scratch / ".git/series"
    series.mkdir()
    for patch in patches:
        (series / patch.filename).write_bytes(patch.content)
    if patches:
        result = git_result(scratch, *AM, *(str(series / patch.filename) for patch in patches))
        if result.returncode:
            raise ToolError(
                explain_failure(scratch, framework, patches, result.stderr.decode(errors="replace"))
            )
    return git(scratch, "rev-parse", "HEAD")


def explain_failure(scratch: Path, framework: str, patches: Sequence[Patch], message: str) -> str:
    """Name the patch and the places that failed, and say what to do."""
    state = scratch / ".git/rebase-apply"
    number = int((state / "next").read_text()) if (state / "next").exists() else 1
    path = f"patches/{framework}/{patches[number - 1].filename}"
    body = state / "patch"
    if body.exists() and not git_result(scratch, "apply", "--check", "--reverse", str(body)).returncode:
        reasons = ["its change is already there: upstream or an earlier patch has it, so it can be deleted"]
    else:
        reasons = re.findall(r"(?m)^(?:error|fatal): (.*)$", message)
    return "\n".join(
        [
            f"{path} does not apply (patch {number} of {len(patches)})",
            *(f"  {reason}" for reason in reasons),
            "  No tree was changed. To repair the patch by hand, from the repository root:",
            f"    git -C frameworks/{framework} reset --hard {BASE_TAG}",
            f'    git -C frameworks/{framework} am -3 "$PWD"/patches/{framework}/*.patch',
            f"    # edit the files it names, git -C frameworks/{framework} add -u, then am --continue",
            f"    python3 patches/patchset.py export --only {framework}",
        ]
    )


def format_patches(repo: Path, base: str, head: str) -> list[bytes]:
    """Every commit of base..head as the bytes of a normalised patch file."""
    out = repo / ".git/format-patch"
    git(repo, *FORMAT_PATCH, "-o", str(out), f"{base}..{head}")
    return [path.read_bytes() for path in sorted(out.glob("*"))]


def touched(patches: Sequence[Patch]) -> list[str]:
    return list(dict.fromkeys(path for patch in patches for path in patch.files))


def fetch_commits(tree: Path, scratch: Path) -> None:
    """Add the commits of a scratch repository to a tree's objects."""
    git(tree, "fetch", "-q", "--no-tags", "--update-shallow", str(scratch), "HEAD")


# --- apply --------------------------------------------------------------------------------------------


def count(number: int) -> str:
    return f"{number} patch" if number == 1 else f"{number} patches"


def base_of(project: Project, framework: Framework) -> str:
    """The pinned base commit of an existing tree, checked against the lock."""
    tree = project.tree(framework.name)
    require_repository(tree)
    if not holds_pin(tree, framework):
        tag = read_json(tree / ".git" / SOURCE_FILE).get("tag", "something else")
        raise ToolError(
            f"{tree} holds {tag}, frameworks.lock pins {framework.tag} {framework.commit[:12]}: "
            f"run ./download_frameworks_source_code.sh --only {framework.name}"
        )
    return git(tree, "rev-parse", f"{BASE_TAG}^{{commit}}")


def require_quiet(tree: Path) -> None:
    """Require no operation in progress, the tool's branch checked out and nothing uncommitted."""
    if running := [name for name in IN_PROGRESS if (tree / ".git" / name).exists()]:
        raise ToolError(
            f"{tree}: a git operation is in progress ({running[0]}): finish or abort it, then run again"
        )
    branch = git_result(tree, "symbolic-ref", "-q", "--short", "HEAD").stdout.decode().strip()
    if branch != BRANCH:
        raise ToolError(
            f"{tree} is on {branch or 'a detached HEAD'}: `git -C {tree} switch {BRANCH}`, then run again"
        )
    if changed := git(tree, "status", "--porcelain", "--untracked-files=no"):
        files = ", ".join(line[3:] for line in changed.splitlines()[:5])
        raise ToolError(
            f"{tree} has uncommitted changes ({files}): commit them and run `python3 patches/patchset.py "
            f"export --only {tree.name}`, or discard them with `git -C {tree} restore --staged "
            "--worktree .`, then run again"
        )


def verify_hash(framework: Framework, found: str) -> None:
    if framework.tree and found != framework.tree:
        raise ToolError(
            f"{framework.name}: the patched tree hash is {found}, frameworks.lock says {framework.tree}: the "
            "patch files and the lock are not of one version. Take both from git; or, if a patch was edited, "
            f"make the change as a commit in frameworks/{framework.name} and run "
            f"`python3 patches/patchset.py export --only {framework.name}`"
        )


def apply(project: Project, only: str | None) -> None:
    """Bring every present tree to its patched state: all of them, or none."""
    copies: dict[Path, Path] = {}
    reports = []
    try:
        for framework in present(project, only):
            tree = project.tree(framework.name)
            base, patches = base_of(project, framework), read_patches(project, framework.name)
            record = {"digest": digest_of(patches, base), "head": git(tree, "rev-parse", "HEAD")}
            what = "already applied"
            if read_json(tree / ".git" / APPLIED_FILE) == record:
                verify_hash(framework, tree_hash(tree, framework))
            else:
                with scratch_repository(project, tree, base, patches) as scratch:
                    target = run_am(scratch, patches, framework.name)
                    verify_hash(framework, tree_hash(scratch, framework))
                    if record["head"] != target:
                        what = "applied"
                        require_no_work(tree, framework, base)
                        copies[tree] = check_out_beside(tree, scratch, target)
                write_json(copies.get(tree, tree) / ".git" / APPLIED_FILE, record | {"head": target})
            note = "" if framework.tree else " (no tree hash in frameworks.lock yet: run patchset.py export)"
            reports.append(f"{framework.name} {framework.tag}: {count(len(patches))} {what}{note}")
        for tree, copy in copies.items():
            put_in_place(tree, copy)
    finally:
        for copy in copies.values():
            shutil.rmtree(copy, ignore_errors=True)
    say("\n".join(reports))


def check_out_beside(tree: Path, scratch: Path, target: str) -> Path:
    """A copy of a tree, with all that is in it, at the commit `target` of a scratch repository."""
    copy = beside(tree, "new")
    copy_tree(tree, copy)
    fetch_commits(copy, scratch)
    # Without this, `reset` would rewrite files of a copied or mounted tree that do not change at all.
    git_result(copy, "update-index", "-q", "--refresh")
    result = git_result(copy, "reset", "-q", "--keep", target)  # refuses to overwrite an untracked file
    if result.returncode:
        shutil.rmtree(copy)
        raise ToolError(f"{tree}: {result.stderr.decode(errors='replace').strip()}\nMove it, then run again")
    return copy


def require_no_work(tree: Path, framework: Framework, base: str) -> None:
    """Require that the tree holds only what the tool put there, and nothing uncommitted."""
    head, applied = git(tree, "rev-parse", "HEAD"), read_json(tree / ".git" / APPLIED_FILE).get("head")
    if head in (base, applied):
        return require_quiet(tree)
    known = applied and not git_result(tree, "merge-base", "--is-ancestor", applied, "HEAD").returncode
    commits = git(tree, "log", "--format=    %h %s", f"{applied if known else base}..HEAD")
    raise ToolError(
        f"{tree} has work that is in no patch file:\n{commits or '    (commits were removed or rewritten)'}\n"
        f"  keep it:  python3 patches/patchset.py export --only {framework.name}\n"
        f"  drop it:  git -C frameworks/{framework.name} reset --hard {BASE_TAG}"
    )


def absent(framework: Framework) -> str:
    return (
        f"{framework.name} {framework.tag}: absent "
        f"(./download_frameworks_source_code.sh --only {framework.name})"
    )


def present(project: Project, only: str | None) -> list[Framework]:
    """The selected frameworks whose trees exist; report the others. One selected by name must exist."""
    found = []
    for framework in project.select(only):
        if project.tree(framework.name).exists():
            found.append(framework)
        elif only:
            raise ToolError(absent(framework))
        else:
            say(absent(framework))
    if not found:
        raise ToolError("no framework is there: run ./download_frameworks_source_code.sh first")
    return found


# --- export -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Export:
    """What exporting would write for one tree."""

    framework: Framework
    tree: Path
    patches: list[Patch]
    head: str
    target: str  # the normalised commits: what applying the files gives
    digest: str
    tree_hash: str


def export(project: Project, only: str | None) -> None:
    """Write the commits of every present tree as patch files; refresh lock and index. All, or none."""
    for plan in [prepare_export(project, framework) for framework in present(project, only)]:
        name = plan.framework.name
        written = write_patches(project, name, plan.patches)
        project.write_tree_hash(name, plan.tree_hash)
        if plan.head != plan.target:  # other commits with the same files
            git(plan.tree, "update-ref", f"refs/heads/{BRANCH}", plan.target, plan.head)
        write_json(plan.tree / ".git" / APPLIED_FILE, {"digest": plan.digest, "head": plan.target})
        what = f"changed: {', '.join(written)}" if written else "nothing changed"
        say(f"{name} {plan.framework.tag}: {count(len(plan.patches))} exported, {what}")
    write_index(project)


def prepare_export(project: Project, framework: Framework) -> Export:
    """Do everything that can be refused; moves nothing and writes no file of the repository."""
    tree = project.tree(framework.name)
    base = base_of(project, framework)
    require_quiet(tree)
    require_series(tree, base)
    head = git(tree, "rev-parse", "HEAD")
    with scratch_repository(project, tree, head, []) as scratch:
        patches = name_patches(format_patches(scratch, base, head), framework.name)
    require_ready(patches, framework.name)
    require_nothing_lost(project, tree, framework, base, head, patches)
    for _ in range(2):  # until the files are what exporting them again gives
        with scratch_repository(project, tree, base, patches) as scratch:
            target = run_am(scratch, patches, framework.name)
            again = name_patches(format_patches(scratch, base, target), framework.name)
            if again == patches:
                if git(scratch, "diff-tree", head, target):
                    raise ToolError(
                        f"{framework.name}: applying the exported patches does not give the tree again; "
                        "simplify the last commits (mode changes, renames, submodules)"
                    )
                if head != target:
                    fetch_commits(tree, scratch)
                digest = digest_of(patches, base)
                return Export(framework, tree, patches, head, target, digest, tree_hash(scratch, framework))
        patches = again
    raise ToolError(
        f"{framework.name}: the export is not stable; look for diff or `---` lines in a commit message"
    )


def require_series(tree: Path, base: str) -> None:
    """Require the work to be a straight line of finished commits on top of the base."""
    if git_result(tree, "merge-base", "--is-ancestor", base, "HEAD").returncode:
        raise ToolError(f"{tree}: HEAD does not contain the base; `git -C {tree} rebase {BASE_TAG}` first")
    if merges := git(tree, "log", "--merges", "--format=%h %s", f"{base}..HEAD"):
        raise ToolError(
            f"{tree}: merge commits cannot be exported: {merges.splitlines()[0]}; rebase them away"
        )
    subjects = git(tree, "log", "--format=%s", f"{base}..HEAD").splitlines()
    if pending := [subject for subject in subjects if re.match(r"(fixup|squash|amend)! ", subject)]:
        raise ToolError(
            f"{tree}: {pending[0]!r} still waits: `git -C {tree} rebase -i --autosquash {BASE_TAG}`"
        )
    if empty := [
        line
        for line in git(tree, "log", "--format=%x00%h %s", "--name-only", f"{base}..HEAD").split("\0")
        if line and not line.partition("\n")[2].strip()
    ]:
        raise ToolError(f"{tree}: commit {empty[0].strip()!r} is empty; drop it")


def require_nothing_lost(
    project: Project, tree: Path, framework: Framework, base: str, head: str, patches: Sequence[Patch]
) -> None:
    """Refuse to replace patch files that changed since they were applied (a git pull) with older commits."""
    existing, record = read_patches(project, framework.name), read_json(tree / ".git" / APPLIED_FILE)
    if record.get("digest") == digest_of(existing, base):
        return
    if head == record.get("head") and [patch.content for patch in existing] != [
        patch.content for patch in patches
    ]:
        raise ToolError(
            f"{framework.name}: the patch files changed since they were applied, the tree did not: "
            f"run ./apply_all_patches.sh --only {framework.name}"
        )
    exported = {patch.name for patch in patches}
    if lost := [patch.filename for patch in existing if patch.name not in exported]:
        raise ToolError(
            f"{framework.name}: these patch files are not in the tree, and exporting would delete them: "
            f"{', '.join(lost)}. Apply them with `git -C frameworks/{framework.name} am -3`, or delete them"
        )


def write_patches(project: Project, name: str, patches: Sequence[Patch]) -> list[str]:
    """Make patches/<name>/ hold exactly `patches`, writing only what differs; return the changed names."""
    directory = patch_directory(project, name)
    wanted = {patch.filename: patch.content for patch in patches}
    existing = {path.name: path.read_bytes() for path in directory.glob("*.patch")}
    changed = [filename for filename, content in wanted.items() if existing.get(filename) != content]
    for filename in changed:
        directory.mkdir(parents=True, exist_ok=True)
        write_file(directory / filename, wanted[filename])
    stale = [filename for filename in existing if filename not in wanted]
    for filename in stale:
        (directory / filename).unlink()
    return changed + [f"{filename} removed" for filename in stale]


def index_table(project: Project) -> str:
    """The table of all patches, as it stands in patches/README.md."""
    rows = ["| patch | what | switch | upstream | drop when |", "| --- | --- | --- | --- | --- |"]
    for name in project.frameworks:
        for patch in read_patches(project, name):
            cells = [
                f"[{patch.filename.removesuffix('.patch')}]({name}/{patch.filename})",
                patch.subject.partition(": ")[2],
                f"`{patch.trailer('Switch')}`",
                patch.trailer("Upstream-Status"),
                patch.trailer("Drop-When"),
            ]
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def render_readme(project: Project) -> tuple[Path, str, str]:
    """patches/README.md as it is and as it should be."""
    path = project.root / "patches/README.md"
    if not path.parent.is_dir():  # of a stack without patches
        return path, "", ""
    text = path.read_text() if path.exists() else f"{INDEX_BEGIN}\n{INDEX_END}\n"
    before, begin, rest = text.partition(INDEX_BEGIN)
    _, end, after = rest.partition(INDEX_END)
    if not begin or not end:
        raise ToolError(f"{path} needs the two index markers:\n{INDEX_BEGIN}\n{INDEX_END}")
    return path, text, f"{before}{begin}\n{index_table(project)}\n{end}{after}"


def write_index(project: Project) -> None:
    path, text, wanted = render_readme(project)
    if text != wanted:
        write_file(path, wanted.encode())


# --- check --------------------------------------------------------------------------------------------


def check(project: Project, only: str | None) -> None:
    """Prove the whole set on scratch copies; report every problem at once."""
    problems: list[str] = []
    for framework in project.select(only):
        patches = read_patches(project, framework.name)
        tree = project.tree(framework.name)
        found = check_files(project, framework, patches)
        if not tree.exists():
            if only:
                raise ToolError(absent(framework))
            say(f"{absent(framework)}; its patch files were read, not applied")
        elif not found:
            found = check_applied(project, framework, patches)
        if tree.exists() and not found:
            say(f"{framework.name} {framework.tag}: {count(len(patches))} ok")
        problems += [f"{framework.name}: {problem}" for problem in found]
    path, text, wanted = render_readme(project)
    if text != wanted:
        problems.append(
            f"{path.relative_to(project.root)}: the index is out of date: python3 patches/patchset.py export"
        )
    if problems:
        raise ToolError("\n  ".join(["the patch set is not in order:", *problems]))


def check_files(project: Project, framework: Framework, patches: Sequence[Patch]) -> list[str]:
    """Problems that the patch files alone show."""
    problems = []
    exported = name_patches([patch.content for patch in patches], framework.name)
    for patch, wanted in zip(patches, exported, strict=True):
        found = lint_message(patch)
        if not found and patch.filename != wanted.filename:
            found.append(f"export would name it {wanted.filename}")
        test = patch.trailer("Test")
        if test and not (project.root / test.split("::")[0]).is_file():
            found.append(f"Test: {test} does not exist")
        if len(patch.added) > MAX_ADDED_LINES and not patch.trailer("Size-Reason"):
            found.append(
                f"adds {len(patch.added)} lines, more than {MAX_ADDED_LINES}: move logic to ascend_rl, or "
                "say why not in a Size-Reason: trailer"
            )
        found += [
            f"{path} is not covered by the tree hash (see `unhashed` and the suffixes in sources.py)"
            for path in patch.files
            if not framework.hashed(path) or not path.startswith(framework.package + "/")
        ]
        problems += [f"{patch.filename}: {problem}" for problem in found]
    return problems


def check_applied(project: Project, framework: Framework, patches: Sequence[Patch]) -> list[str]:
    """What needs the base: applies, commit count, identical export, tree hash, compiles, switches exist."""
    tree, problems = project.tree(framework.name), []
    try:
        base = base_of(project, framework)
        with scratch_repository(project, tree, base, patches) as scratch:
            head = run_am(scratch, patches, framework.name)
            commits = int(git(scratch, "rev-list", "--count", f"{base}..{head}"))
            if commits != len(patches):
                problems.append(f"{len(patches)} patch files gave {commits} commits: one commit a file")
            for patch, content in zip(patches, format_patches(scratch, base, head), strict=False):
                if patch.content != content:
                    problems.append(
                        f"{patch.filename}: differs from its export: python3 patches/patchset.py export"
                    )
            found = tree_hash(scratch, framework)
            if found != framework.tree:
                problems.append(
                    f"the patched tree hash is {found}, frameworks.lock says {framework.tree or 'nothing'}: "
                    "python3 patches/patchset.py export"
                )
            for path in touched(patches):
                if path.endswith(".py") and (scratch / path).exists():
                    try:
                        compile((scratch / path).read_bytes(), path, "exec")
                    except (SyntaxError, ValueError) as error:
                        problems.append(f"{path} does not compile after patching: {error}")
            problems += [
                f"{patch.filename}: Switch {patch.trailer('Switch')} is read nowhere: not where the patch "
                "works, not in ascend_rl/"
                for patch in patches
                if not switch_exists(project, scratch, patch)
            ]
    except ToolError as error:
        problems.append(str(error))
    return problems


def switch_exists(project: Project, scratch: Path, patch: Patch) -> bool:
    """Whether the named switch occurs in the patched files, any same-named patch or ascend_rl/.

    The last two parts of a Hydra key must occur: `enable` alone would be found anywhere.
    """
    match = re.match(r"\+{0,2}([A-Za-z_][\w.]*)", patch.trailer("Switch"))
    if not match:
        return False
    if match[1].lower() == "none":
        return True
    texts = [
        (scratch / path).read_text(errors="replace") for path in patch.files if (scratch / path).exists()
    ]
    texts += [path.read_text(errors="replace") for path in (project.root / "ascend_rl").rglob("*.py")]
    texts += [
        "\n".join(other.added)
        for name in project.frameworks
        for other in read_patches(project, name)
        if other.name == patch.name
    ]
    words = set(re.findall(r"\w+", "\n".join(texts)))
    return all(part in words for part in match[1].split(".")[-2:])


# --- command line -------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="patchset.py", description="The numbered patches over the pinned frameworks."
    )
    add_root(parser)
    commands = parser.add_subparsers(required=True)
    for function, text in (
        (apply, "bring every tree to its patched state, all or none"),
        (check, "prove the patch files on scratch copies; changes nothing"),
        (export, "write the trees' commits as patch files; refresh lock and index"),
    ):
        command = commands.add_parser(function.__name__, help=text, description=text)
        command.add_argument("--only", metavar="NAME", help="one framework")
        command.set_defaults(function=function)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        project = Project.load(root_of(args.root))
        with project.exclusive():
            args.function(project, args.only)
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

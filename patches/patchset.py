"""The patch set: status | apply | check | export | bump.

Problem: numbered patches over several upstreams must give the same trees everywhere, and work in a tree
must survive mistakes, other people's pulls and kills.
Idea: nothing is tried out in a user's tree. The real `git am` runs in a scratch repository that borrows the
tree's objects and checks out only the touched files; once every framework has succeeded and every tree hash
matches frameworks.lock, each tree is moved from one known commit to another under a journal.
Invariants: a failure changes no tree; uncommitted or unexported work is never overwritten; a killed move
is finished by the next run; same patches and same base give the same commits for every user; an export of
an applied set changes no byte.
Cost: O(touched files + patches) per framework; a second run compares digests and makes six git calls.
"""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C during the imports prints no traceback
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import contextlib
import dataclasses
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
    build_tree,
    from_git,
    git,
    git_result,
    holds_pin,
    init_repository,
    install,
    pip_download,
    positive,
    read_json,
    require_repository,
    say,
    sha256_of,
    tree_hash,
    unsaved_work,
    write_file,
    write_json,
)

JOURNAL_FILE = "ascend-rl-journal"  # in .git: a move in progress, {"from", "to", "digest"}
BUMP_FILE = "ascend-rl-bump"  # in .git of frameworks/.bump-<name>: a bump that awaits resolutions
PATCH_NAME = re.compile(r"(\d{4})-([a-z_]+)-(feature|bugfix)-([a-z0-9_]+)\.patch")
SUBJECT = re.compile(r"(feature|bugfix)\(([a-z0-9_]+)\): \S.*")
TRAILERS = ("Why", "How", "Upstream-Status", "Drop-When", "Switch", "Test")
UPSTREAM_STATUS = re.compile(r"Pending|Submitted \S.*|Backport \S.*|Inappropriate \[.+\]")
MAX_ADDED_LINES = 60
INDEX_BEGIN, INDEX_END = "<!-- index: begin (written by patchset.py export) -->", "<!-- index: end -->"
AM = (
    "am",
    "--quiet",
    "--no-3way",
    "--keep-cr",
    "--keep-non-patch",
    "--no-scissors",
    "--whitespace=nowarn",
    "--committer-date-is-author-date",
    "--no-gpg-sign",
)
FORMAT_PATCH = (
    "format-patch",
    "--zero-commit",
    "--full-index",
    "--no-signature",
    "--no-stat",
    "-N",
    "--no-renames",
    "--quiet",
)
IN_PROGRESS = (
    "index.lock",
    "rebase-merge",
    "rebase-apply",
    "MERGE_HEAD",
    "CHERRY_PICK_HEAD",
    "REVERT_HEAD",
    "BISECT_LOG",
)


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
        return (
            subject.removeprefix("[PATCH] ")
            + "\n\n"
            + re.split(r"(?m)^(?:---|diff --git .*)$", body, maxsplit=1)[0]
        )

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
        return [
            line[1:]
            for line in self.text.split("\n")
            if line.startswith("+") and not line.startswith("+++ b/")
        ]

    def trailer(self, key: str) -> str:
        match = re.search(rf"(?m)^{key}: *(\S.*)$", self.message)
        return match[1].strip() if match else ""


def patch_directory(project: Project, name: str) -> Path:
    return project.root / "patches" / name


def read_patches(project: Project, name: str) -> list[Patch]:
    return [
        Patch(path.name, path.read_bytes()) for path in sorted(patch_directory(project, name).glob("*.patch"))
    ]


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
            "<name> in lower case, digits and _ "
            f"(it is {patch.subject!r})"
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
    """Give exported commits their file names; refuse those that are not ready, by name."""
    patches, problems = [], []
    for number, content in enumerate(contents, 1):
        patch = Patch("", content)
        problems += [f"commit {number} {patch.subject!r}: {problem}" for problem in lint_message(patch)]
        kind = patch.subject.partition("(")[0]
        patches.append(Patch(f"{number:04d}-{framework}-{kind}-{patch.name}.patch", content))
    if problems:
        advice = f"amend these commits first (git -C frameworks/{framework} rebase -i {BASE_TAG})"
        raise ToolError("\n  ".join([f"{framework}: not exported; {advice}:", *problems]))
    return patches


# --- scratch repositories -----------------------------------------------------------------------------


@contextlib.contextmanager
def scratch_repository(
    project: Project, tree: Path, revision: str, files: Sequence[str] = ()
) -> Iterator[Path]:
    """A repository at `revision` that borrows the tree's objects and checks out only `files`.

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
        patterns = ["/" + re.sub(r"([*?\[\\!# ])", r"\\\1", path) for path in files] or ["/nothing"]
        (scratch / ".git/info/sparse-checkout").write_text("\n".join(patterns) + "\n")
        git(scratch, "update-ref", "HEAD", revision)
        git(scratch, "read-tree", "-m", "-u", "HEAD")
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def run_am(scratch: Path, patches: Sequence[Patch], framework: str) -> str:
    """Apply the whole series with one `git am`; return the new head."""
    if not patches:
        return git(scratch, "rev-parse", "HEAD")
    series = scratch / ".git/series"
    series.mkdir()
    for patch in patches:
        (series / patch.filename).write_bytes(patch.content)
    result = git_result(scratch, *AM, *(str(series / patch.filename) for patch in patches))
    if result.returncode:
        try:
            number = int((scratch / ".git/rebase-apply/next").read_text())
        except (FileNotFoundError, ValueError):
            number = 1
        message = result.stderr.decode(errors="replace")
        raise ToolError(explain_failure(scratch, framework, patches, number - 1, message))
    shutil.rmtree(series)
    return git(scratch, "rev-parse", "HEAD")


def explain_failure(
    scratch: Path, framework: str, patches: Sequence[Patch], position: int, message: str
) -> str:
    """Name the patch, the file and the hunk that failed, what was expected and what to do."""
    patch = patches[position]
    path = f"patches/{framework}/{patch.filename}"
    lines = [f"{path} does not apply (patch {position + 1} of {len(patches)})"]
    body = scratch / ".git/rebase-apply/patch"
    if body.exists() and not git_result(scratch, "apply", "--check", "--reverse", str(body)).returncode:
        lines.append(
            "  its change is already there: upstream or an earlier patch has it, so it can be deleted"
        )
    elif body.exists():
        rejects = git_result(scratch, "apply", "--reject", "--verbose", "--whitespace=nowarn", str(body))
        lines += describe_rejects(scratch, patch, rejects.stderr.decode(errors="replace"))
    if len(lines) == 1:
        lines += [f"  {line}" for line in message.splitlines() if line.startswith(("error:", "fatal:"))][:4]
    lines += [
        "  No tree was changed. To repair the patch by hand, from the repository root:",
        f"    git -C frameworks/{framework} reset --hard {BASE_TAG}",
        f'    git -C frameworks/{framework} am -3 "$PWD"/patches/{framework}/*.patch',
        f"    # edit the files it names, git -C frameworks/{framework} add -u, then am --continue",
        f"    python3 patches/patchset.py export --only {framework}",
    ]
    return "\n".join(lines)


def describe_rejects(scratch: Path, patch: Patch, verbose: str) -> list[str]:
    """Turn `git apply --reject --verbose` output into one entry per rejected hunk."""
    lines, current = [], ""
    hunks = hunks_by_file(patch)
    for line in verbose.splitlines():
        if match := re.match(
            r"Checking patch (.*?)( => .*)?\.\.\.$|Applying patch (.*?) with \d+ reject", line
        ):
            current = match[1] or match[3]
        elif match := re.match(r"Rejected hunk #(\d+)", line):
            number = int(match[1])
            start, expected = hunks[current][number - 1]
            lines.append(f"  {current}: hunk {number} (line {start}) finds no place")
            lines += first_difference(scratch, current, start, expected)
        elif match := re.match(r"error: (\S+): (No such file.*|does not exist.*|already exists.*)", line):
            lines.append(f"  {match[1]}: {match[2]}")
    return lines


def hunks_by_file(patch: Patch) -> dict[str, list[tuple[int, list[str]]]]:
    """For each file, the start line and the expected old lines of every hunk."""
    hunks: dict[str, list[tuple[int, list[str]]]] = {}
    current: list[tuple[int, list[str]]] = []
    for line in patch.text.split("\n"):
        if match := re.match(r"diff --git a/(.*) b/", line):
            current = hunks.setdefault(match[1], [])
        elif match := re.match(r"@@ -(\d+)", line):
            current.append((int(match[1]), []))
        elif current and line.startswith((" ", "-")) and not line.startswith("--- a/"):
            current[-1][1].append(line[1:])
    return hunks


def first_difference(scratch: Path, path: str, start: int, expected: Sequence[str]) -> list[str]:
    """The first line where the file before this patch differs from what the hunk expects."""
    found = git(scratch, "show", f"HEAD:{path}").split("\n")[max(start - 1, 0) :]
    found += ["<end of file>"] * len(expected)
    for offset, (want, have) in enumerate(zip(expected, found, strict=False)):
        if want != have:
            return [
                f"    line {start + offset} expected: {want}",
                f"    line {start + offset} found:    {have}",
            ]
    return []


def format_patches(repo: Path, base: str, head: str) -> list[bytes]:
    """Every commit of base..head as the bytes of a normalised patch file."""
    out = repo / ".git/format-patch"
    shutil.rmtree(out, ignore_errors=True)
    git(repo, *FORMAT_PATCH, "-o", str(out), f"{base}..{head}")
    contents = [path.read_bytes() for path in sorted(out.iterdir())] if out.exists() else []
    shutil.rmtree(out, ignore_errors=True)
    return contents


def touched(patches: Sequence[Patch]) -> list[str]:
    return list(dict.fromkeys(path for patch in patches for path in patch.files))


# --- moving a tree ------------------------------------------------------------------------------------


def copy_objects(scratch: Path, tree: Path) -> None:
    """Add the scratch repository's new objects to the tree's; each appears complete or not at all."""
    for source in (scratch / ".git/objects").glob("??/*"):
        target = tree / ".git/objects" / source.parent.name / source.name
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            temporary = target.with_name(f"tmp_obj_{source.name}")  # git's gc removes such names
            shutil.copy(source, temporary)
            temporary.replace(target)


def blobs(tree: Path, revision: str, paths: Sequence[str]) -> dict[str, str]:
    """Blob id of each of `paths` that exists in `revision`."""
    if not paths:
        return {}
    listing = git(tree, "ls-tree", "-r", "-z", revision, "--", *(f":(literal){path}" for path in paths))
    return {
        entry.split("\t", 1)[1]: entry.split("\t", 1)[0].split()[2] for entry in listing.split("\0") if entry
    }


def changed_paths(tree: Path, old: str, new: str) -> list[str]:
    return [
        path
        for path in git(tree, "diff-tree", "-r", "-z", "--no-renames", "--name-only", old, new).split("\0")
        if path
    ]


def blob_bytes(tree: Path, blob: str) -> bytes:
    result = git_result(tree, "cat-file", "blob", blob)
    if result.returncode:
        raise ToolError(f"{tree}: object {blob} is missing; remove the tree and download it again")
    return result.stdout


def move(tree: Path, old: str, new: str, digest: str) -> None:
    """Take the tree from commit `old` to `new`; after a kill at any point, `recover` finishes the move."""
    write_json(tree / ".git" / JOURNAL_FILE, {"from": old, "to": new, "digest": digest})
    # Without this, `reset` would rewrite files of a copied or mounted tree that do not change at all.
    git_result(tree, "update-index", "-q", "--refresh")
    finish_move(tree, old, new, digest)


def finish_move(tree: Path, old: str, new: str, digest: str) -> None:
    changed = changed_paths(tree, old, new)
    git(tree, "reset", "-q", "--hard", new)
    present = blobs(tree, new, changed)
    for path in changed:
        if path not in present:  # `reset` leaves files that no index lists, as after a kill
            (tree / path).unlink(missing_ok=True)
    write_json(tree / ".git" / APPLIED_FILE, {"digest": digest, "head": new})
    (tree / ".git" / JOURNAL_FILE).unlink()


def recover(tree: Path) -> bool:
    """Finish a move that was killed, unless the user has worked in the tree since."""
    journal = read_json(tree / ".git" / JOURNAL_FILE)
    if not journal:
        (tree / ".git" / JOURNAL_FILE).unlink(missing_ok=True)
        return False
    old, new = journal["from"], journal["to"]
    head = git(tree, "rev-parse", "HEAD")
    if head not in (old, new):
        raise ToolError(
            f"{tree}: a patch run was interrupted, and the tree was moved to {head[:12]} since. Save that "
            f"work on a branch, then `git -C {tree} reset --hard {old}` and run again"
        )
    for lock in ("index.lock", "HEAD.lock", f"refs/heads/{BRANCH}.lock"):
        (tree / ".git" / lock).unlink(missing_ok=True)  # ours: we hold frameworks/.lock and left a journal
    changed = changed_paths(tree, old, new)
    before, after = blobs(tree, old, changed), blobs(tree, new, changed)
    git_result(tree, "update-index", "-q", "--refresh")
    foreign = [
        path
        for path in git(tree, "diff-index", "-z", "--name-only", old).split("\0")
        if path and path not in before and path not in after
    ]
    for path in changed:
        versions = [blob_bytes(tree, side[path]) for side in (before, after) if path in side]
        try:
            content = (tree / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if content not in versions and not (path in after and versions[-1].startswith(content)):
            foreign.append(path)
    if foreign:
        raise ToolError(
            f"{tree}: a patch run was interrupted, and these files were edited since: "
            f"{', '.join(foreign[:5])}. Save them elsewhere, restore them with "
            f"`git -C {tree} checkout {old[:12]} -- <file>`, and run again"
        )
    finish_move(tree, old, new, journal["digest"])
    return True


# --- apply --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What applying would do to one tree."""

    framework: Framework
    tree: Path
    patches: list[Patch]
    base: str
    head: str
    target: str
    digest: str
    scratch: Path | None  # holds the target's objects, when the tree has to move

    @property
    def summary(self) -> str:
        return f"{self.framework.name} {self.framework.tag}: {count(len(self.patches))}"


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


def make_plan(project: Project, framework: Framework, scratches: contextlib.ExitStack) -> Plan:
    """Determine where the tree must go; refuse if that would lose work. Changes nothing."""
    tree = project.tree(framework.name)
    base, patches = base_of(project, framework), read_patches(project, framework.name)
    head, digest = git(tree, "rev-parse", "HEAD"), digest_of(patches, base)
    record = read_json(tree / ".git" / APPLIED_FILE)
    if record == {"digest": digest, "head": head}:
        verify_hash(framework, tree_hash(tree, framework))
        return Plan(framework, tree, patches, base, head, head, digest, None)
    scratch = scratches.enter_context(scratch_repository(project, tree, base, touched(patches)))
    target = run_am(scratch, patches, framework.name)
    verify_hash(framework, tree_hash(scratch, framework))
    if head != target:
        if head not in (base, record.get("head")):
            raise ToolError(describe_unexported(tree, framework, base, record.get("head")))
        require_quiet(tree)
        require_no_collision(scratch, tree, head, target)
    return Plan(framework, tree, patches, base, head, target, digest, scratch)


def require_no_collision(scratch: Path, tree: Path, head: str, target: str) -> None:
    """Require that no file the patches add exists untracked with other content."""
    changed = changed_paths(scratch, head, target)
    added = {
        path: blob
        for path, blob in blobs(scratch, target, changed).items()
        if path not in blobs(scratch, head, [path])
    }
    for path, blob in added.items():
        if (tree / path).exists() and (tree / path).read_bytes() != blob_bytes(scratch, blob):
            raise ToolError(
                f"{tree / path} is in the way of a file that a patch adds: move it, then run again"
            )


def describe_unexported(tree: Path, framework: Framework, base: str, applied: str | None) -> str:
    since = base
    if applied and not git_result(tree, "merge-base", "--is-ancestor", applied, "HEAD").returncode:
        since = applied
    commits = (
        git(tree, "log", "--format=    %h %s", f"{since}..HEAD") or "    (commits were removed or rewritten)"
    )
    return (
        f"{tree} has work that is in no patch file:\n{commits}\n"
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


def apply(project: Project, only: str | None) -> None:
    """Bring every present tree to its patched state: all of them, or none."""
    frameworks = present(project, only)
    for framework in frameworks:
        tree = project.tree(framework.name)
        require_repository(tree)
        if recover(tree):
            say(f"{framework.name}: finished a patch run that was interrupted")
    with contextlib.ExitStack() as scratches:
        plans = [make_plan(project, framework, scratches) for framework in frameworks]
        begun: list[Plan] = []
        try:
            for plan in plans:
                if plan.scratch and plan.head != plan.target:
                    copy_objects(plan.scratch, plan.tree)
                    begun.append(plan)
                    move(plan.tree, plan.head, plan.target, plan.digest)
        except BaseException:
            for plan in begun:
                with contextlib.suppress(ToolError):  # the journal lets the next run finish it
                    undo(plan)
            raise
    for plan in plans:
        record = {"digest": plan.digest, "head": plan.target}
        if read_json(plan.tree / ".git" / APPLIED_FILE) != record:
            write_json(plan.tree / ".git" / APPLIED_FILE, record)
        what = "applied" if plan.head != plan.target else "already applied"
        unsure = (
            "" if plan.framework.tree else " (no tree hash in frameworks.lock yet: run patchset.py export)"
        )
        say(f"{plan.summary} {what}{unsure}")


def undo(plan: Plan) -> None:
    """Move a tree back; the old head is known to be the base or a set applied earlier."""
    digest = digest_of([], plan.base) if plan.head == plan.base else "an earlier patch set"
    move(plan.tree, plan.target, plan.head, digest)


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
        name, record = plan.framework.name, {"digest": plan.digest, "head": plan.target}
        written = write_patches(project, name, plan.patches)
        project.write_lock(name, {"tree": plan.tree_hash})
        if plan.head != plan.target or read_json(plan.tree / ".git" / APPLIED_FILE) != record:
            move(plan.tree, plan.head, plan.target, plan.digest)
        what = f"changed: {', '.join(written)}" if written else "nothing changed"
        say(f"{name} {plan.framework.tag}: {count(len(plan.patches))} exported, {what}")
    write_index(project)


def prepare_export(project: Project, framework: Framework) -> Export:
    """Do everything that can be refused; moves nothing and writes no file of the repository."""
    tree = project.tree(framework.name)
    base = base_of(project, framework)
    recover(tree)
    require_quiet(tree)
    require_series(tree, base)
    head = git(tree, "rev-parse", "HEAD")
    with scratch_repository(project, tree, head) as scratch:
        patches = name_patches(format_patches(scratch, base, head), framework.name)
    require_nothing_lost(project, tree, framework, base, head, patches)
    patches, target, found = normalise(project, tree, framework, base, patches)
    if git(tree, "rev-parse", f"{head}^{{tree}}") != git(tree, "rev-parse", f"{target}^{{tree}}"):
        raise ToolError(
            f"{framework.name}: applying the exported patches does not give the tree again; simplify "
            "the last commits (mode changes, renames, submodules)"
        )
    return Export(framework, tree, patches, head, target, digest_of(patches, base), found)


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


def normalise(
    project: Project, tree: Path, framework: Framework, base: str, patches: list[Patch]
) -> tuple[list[Patch], str, str]:
    """Apply and export once more, to make the files a fixed point; return them, the head and the hash."""
    for _ in range(2):
        with scratch_repository(project, tree, base, touched(patches)) as scratch:
            target = run_am(scratch, patches, framework.name)
            again = name_patches(format_patches(scratch, base, target), framework.name)
            found = tree_hash(scratch, framework)
            if again == patches:
                copy_objects(scratch, tree)
                return patches, target, found
        patches = again
    raise ToolError(
        f"{framework.name}: the export is not stable; look for diff or `---` lines in a commit message"
    )


def write_patches(project: Project, name: str, patches: Sequence[Patch]) -> list[str]:
    """Make patches/<name>/ hold exactly `patches`, writing only what differs; return the changed names."""
    directory = patch_directory(project, name)
    wanted = {patch.filename: patch.content for patch in patches}
    existing = {path.name: path.read_bytes() for path in directory.glob("*.patch")}
    changed = [filename for filename, content in wanted.items() if existing.get(filename) != content]
    stale = [filename for filename in existing if filename not in wanted]
    if changed:
        directory.mkdir(parents=True, exist_ok=True)
    for filename in changed:
        write_file(directory / filename, wanted[filename])
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
    for number, patch in enumerate(patches, 1):
        match = PATCH_NAME.fullmatch(patch.filename)
        if not match:
            problems.append(f"{patch.filename}: name it NNNN-{framework.name}-(feature|bugfix)-<name>.patch")
            continue
        found = lint_message(patch)
        if int(match[1]) != number:
            found.append(f"numbers must be contiguous from 0001; this one should be {number:04d}")
        if match[2] != framework.name:
            found.append(f"it lies in patches/{framework.name}/")
        if not found and not patch.subject.startswith(f"{match[3]}({match[4]}): "):
            found.append(f"the subject {patch.subject!r} does not say {match[3]}({match[4]})")
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
        with scratch_repository(project, tree, base, touched(patches)) as scratch:
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


# --- status -------------------------------------------------------------------------------------------


def status(project: Project, only: str | None) -> None:
    """One line per framework: what it holds, and what remains to be done."""
    for framework in project.select(only):
        tree = project.tree(framework.name)
        say(describe(project, framework) if tree.exists() else absent(framework))


def describe(project: Project, framework: Framework) -> str:
    tree, patches = project.tree(framework.name), read_patches(project, framework.name)
    try:
        base = base_of(project, framework)
    except ToolError as error:
        return f"{framework.name}: {error}"
    pin = read_json(tree / ".git" / SOURCE_FILE)
    head = git(tree, "rev-parse", "HEAD")
    record = read_json(tree / ".git" / APPLIED_FILE)
    notes = []
    if (tree / ".git" / JOURNAL_FILE).exists():
        notes.append("an interrupted run: ./apply_all_patches.sh finishes it")
    elif record == {"digest": digest_of(patches, base), "head": head}:
        found = tree_hash(tree, framework)
        verdict = "as in the lock" if found == framework.tree else "NOT as in the lock"
        notes.append(
            f"{count(len(patches))} applied, tree {found[:12]} {verdict if framework.tree else 'unverified'}"
        )
    elif head == record.get("head"):
        notes.append("an earlier patch set is applied: ./apply_all_patches.sh")
    elif head == base:
        notes.append(
            f"{count(len(patches))}, not applied: ./apply_all_patches.sh" if patches else "no patches"
        )
    else:
        commits = git(tree, "rev-list", "--count", f"{base}..HEAD")
        notes.append(f"{commits} commits on the base, not exported: python3 patches/patchset.py export")
    if git(tree, "status", "--porcelain", "--untracked-files=no"):
        notes.append("uncommitted changes")
    if (project.directory / f".bump-{framework.name}").exists():
        notes.append("a bump waits in " + f"frameworks/.bump-{framework.name}")
    return f"{framework.name} {framework.tag} ({pin['source']} {base[:12]}): " + "; ".join(notes)


# --- bump ---------------------------------------------------------------------------------------------


def bump(project: Project, name: str, tag: str, source: str, resume: bool, seconds: float) -> None:
    """Move a framework to a new tag: rebase its patches, or list the conflicts."""
    (framework,) = project.select(name)
    tree, waiting = project.tree(name), project.directory / f".bump-{name}"
    if not tree.exists():
        raise ToolError(absent(framework))
    if resume:
        return resume_bump(project, framework, tag, waiting)
    if waiting.exists():
        raise ToolError(
            f"a bump of {name} waits in {waiting}: finish it with `bump {name} <tag> --continue`, or give "
            f"it up with `rm -rf {waiting}`"
        )
    base_of(project, framework)
    recover(tree)
    if work := unsaved_work(tree):
        raise ToolError(f"{tree} has {work}: export or discard it first")
    target = dataclasses.replace(
        framework, tag=tag, commit="", version=re.sub(r"^\D*", "", tag), sha256={}, tree=""
    )
    built = project.scratch(f"bump-{name}")
    say(f"{name}: fetching {tag}")
    build_tree(built, project, target, source, seconds, pinned=False)
    git(built, "switch", "-q", "-c", f"bump/{tag}")
    patches = read_patches(project, name)
    lend_preimages(tree, built, patches)
    conflicts: dict[str, str] = {}
    for patch in patches:
        outcome, files = rebase_one(built, patch)
        say(f"  {outcome:<9} {patch.filename}{': ' + ', '.join(files) if files else ''}")
        if outcome == "conflict":
            conflicts[patch.filename] = patch.name
    if not conflicts:
        return finish_bump(project, framework, built, seconds)
    write_json(built / ".git" / BUMP_FILE, {"tag": tag, "conflicts": conflicts})
    built.rename(waiting)
    place = waiting.relative_to(project.root)
    commands = []
    for filename in conflicts:
        commands += [
            f'  git -C {place} am -3 "$PWD"/patches/{name}/{filename}',
            f"  # edit the files it names, git -C {place} add -u, git -C {place} am --continue",
        ]
    raise ToolError(
        f"{name}: {len(conflicts)} of {count(len(patches))} conflict with {tag}. Nothing was changed; what "
        f"applied is on branch bump/{tag} in {place}. From the repository root:\n"
        + "".join(f"{command}\n" for command in commands)
        + f"  # for a patch that is no longer needed: rm patches/{name}/<its file>\n"
        f"  python3 patches/patchset.py bump {name} {tag} --continue"
    )


def lend_preimages(tree: Path, built: Path, patches: Sequence[Patch]) -> None:
    """Give the new repository the old file versions, from which `git am -3` merges."""
    for blob in set(re.findall(r"(?m)^index ([0-9a-f]{40})\.\.", "".join(patch.text for patch in patches))):
        result = git_result(tree, "cat-file", "blob", blob)
        if not result.returncode:
            git(built, "hash-object", "-w", "--stdin", stdin=result.stdout)


def rebase_one(built: Path, patch: Patch) -> tuple[str, list[str]]:
    """Try one patch on the new base: ("clean" | "merged" | "absorbed" | "conflict", conflicting files)."""
    if not git_result(built, "apply", "--check", "--reverse", stdin=patch.content).returncode:
        return "absorbed", []
    clean = not git_result(built, "apply", "--check", stdin=patch.content).returncode
    before = git(built, "rev-parse", "HEAD")
    three_way = ["--3way" if word == "--no-3way" else word for word in AM]
    result = git_result(built, *three_way, stdin=patch.content)
    if result.returncode:
        files = git(built, "diff", "--name-only", "--diff-filter=U").splitlines()
        message = result.stderr.decode(errors="replace")
        files = files or re.findall(r"(?m)^error: (\S+): does not (?:exist|match)", message) or patch.files
        git(built, "am", "--abort")
        return "conflict", list(dict.fromkeys(files))
    if git(built, "rev-parse", "HEAD") == before:
        return "absorbed", []
    return ("clean" if clean else "merged"), []


def resume_bump(project: Project, framework: Framework, tag: str, waiting: Path) -> None:
    """Continue with the user's resolutions on the bump branch."""
    state = read_json(waiting / ".git" / BUMP_FILE)
    if state.get("tag") != tag:
        raise ToolError(
            f"no bump of {framework.name} to {tag} is waiting"
            + (f" (one to {state['tag']} is)" if state else ": start it without --continue")
        )
    if running := [name for name in IN_PROGRESS if (waiting / ".git" / name).exists()]:
        raise ToolError(f"{waiting}: finish {running[0]} first (`git -C {waiting} am --continue`)")
    if changed := git(waiting, "status", "--porcelain", "--untracked-files=no"):
        raise ToolError(f"{waiting} has uncommitted changes: {changed.split()[1]}")
    subjects = git(waiting, "log", "--format=%s", f"{BASE_TAG}..HEAD").splitlines()
    names = {match[2] for match in map(SUBJECT.fullmatch, subjects) if match}
    missing = [
        filename
        for filename, name in state["conflicts"].items()
        if name not in names and (patch_directory(project, framework.name) / filename).exists()
    ]
    if missing:
        raise ToolError(
            f"{framework.name}: not on the branch yet: {', '.join(missing)}; apply them (git am -3), or "
            "delete the patch file of one that is no longer needed"
        )
    finish_bump(project, framework, waiting, 60)


def finish_bump(project: Project, framework: Framework, built: Path, seconds: float) -> None:
    """Write the rebased patches and the new pin, then put the new tree in place and apply."""
    name, tree = framework.name, project.tree(framework.name)
    pin = read_json(built / ".git" / SOURCE_FILE)
    require_series(built, pin["base"])
    patches = name_patches(format_patches(built, pin["base"], "HEAD"), name)
    target = dataclasses.replace(framework, tag=pin["tag"], version=re.sub(r"^\D*", "", pin["tag"]))
    patches, _, found = normalise(project, built, target, pin["base"], patches)
    values = new_pins(project, target, pin, seconds)
    if work := unsaved_work(tree):
        raise ToolError(f"{tree} has {work}: export or discard it first")
    for filename in write_patches(project, name, patches):
        say(f"  patches/{name}/{filename}")
    project.write_lock(name, values | {"tree": found})
    updated = Project.load(project.root)
    write_index(updated)
    git(built, "switch", "-q", BRANCH)
    (built / ".git" / BUMP_FILE).unlink(missing_ok=True)
    git(built, "branch", "-q", "-D", f"bump/{pin['tag']}")
    install(updated, name, built)
    apply(updated, name)
    say(f"{name}: bumped from {framework.tag} to {pin['tag']}; review with `git diff`, then run the tests")


def new_pins(project: Project, target: Framework, pin: dict[str, str], seconds: float) -> dict[str, str]:
    """The lock's values for a new pin; those that cannot be determined are left empty, with a warning."""
    values = {
        "tag": target.tag,
        "commit": pin["base"] if pin["source"] == "git" else "",
        "version": target.version,
    }
    if pin["source"] == "pypi":
        with contextlib.suppress(ToolError):
            values["commit"] = probe_commit(project, target, seconds)
    anything = dataclasses.replace(target, sha256={})
    for arch in target.sha256:
        values[f"sha256_{arch}"] = ""
        if pin["source"] == "pypi" and arch in ("any", pin.get("arch")):
            values[f"sha256_{arch}"] = pin["sha256"]
            continue
        directory = project.scratch(f"wheel-{arch}")
        with contextlib.suppress(ToolError):
            from_arch = arch if arch != "any" else "x86_64"
            values[f"sha256_{arch}"] = sha256_of(
                pip_download(project, anything, from_arch, directory, seconds)
            )
        shutil.rmtree(directory, ignore_errors=True)
    for key, value in values.items():
        if not value and (key != "version" or target.dist):
            say(f"warning: {target.name}: {key} could not be established and is now empty in frameworks.lock")
    return values if target.dist else {key: values[key] for key in ("tag", "commit")}


def probe_commit(project: Project, target: Framework, seconds: float) -> str:
    """The commit behind the tag, from the first git remote that answers."""
    probe = project.scratch(f"probe-{target.name}")
    try:
        for url in filter(None, (target.url, target.mirror)):
            with contextlib.suppress(ToolError):
                return from_git(probe, dataclasses.replace(target, commit=""), url, seconds)["base"]
            shutil.rmtree(probe, ignore_errors=True)
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    raise ToolError("no git remote answered")


# --- command line -------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="patchset.py", description="The numbered patches over the pinned frameworks."
    )
    add_root(parser)
    commands = parser.add_subparsers(dest="command", required=True)
    actions = {
        "status": (status, "what every tree holds"),
        "apply": (apply, "bring every tree to its patched state, all or none"),
        "check": (check, "prove the patch files on scratch copies; changes nothing"),
        "export": (export, "write the trees' commits as patch files; refresh lock and index"),
    }
    for name, (function, text) in actions.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--only", metavar="NAME", help="one framework")
        command.set_defaults(function=function)
    text = "rebase a framework's patches onto a new upstream tag"
    command = commands.add_parser("bump", help=text, description=text)
    command.add_argument("name")
    command.add_argument("tag")
    command.add_argument("--source", choices=("auto", "git", "pypi"), default="auto")
    command.add_argument("--continue", dest="resume", action="store_true", help="after resolving conflicts")
    command.add_argument(
        "--deadline", type=positive, default=300, metavar="SECONDS", help="per download attempt"
    )
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        project = Project.load(args.root.resolve())
        with project.exclusive():
            if args.command == "bump":
                bump(project, args.name, args.tag, args.source, args.resume, args.deadline)
            else:
                args.function(project, args.only)
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

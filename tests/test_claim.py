"""Nothing is deleted or overwritten but in a directory that bears the mark of the same kind of run.

The second half lists every deletion and rename in the tree, each with the reason why it loses nothing of the
user's: a new one fails until it is looked at.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_rl.settings.claim import CHECK, KINDS, MARK, QUICKSTART, REHEARSAL, RUN, claim, kind_of, refusal
from ascend_rl.settings.switch import CannotWork

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "internal/train_grpo_qwen3_32b_32die_true_weight.sh"
# What a run of 40 steps, or a user, has in a directory.
FILES = {
    "train.log": "40 steps",
    "report.html": "my page",
    "report.json": "{}",
    "record/kept": "a record",
    "checkpoints/latest_checkpointed_iteration.txt": "40",
    "checkpoints/global_step_40/weights": "w",
    "evaluation/40/report.json": "{}",
    "model/config.json": "{}",
}


@pytest.fixture
def theirs(tmp_path) -> Path:
    directory = tmp_path / "out"
    for name, text in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def found(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file() and path.name != MARK
    }


def run(*command: str, **variables) -> tuple[int, str]:
    environ = os.environ | {"SKIP_PREFLIGHT": "1", "SKIP_REPORT": "1"} | variables
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


# The mark.


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_or_empty_directory_is_anybodys_and_then_of_one_kind(tmp_path, kind):
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "empty", tmp_path / "a/new/one"):
        assert not claim(directory, kind) and kind_of(directory) == kind and claim(directory, kind)
        for other in set(KINDS) - {kind}:
            with pytest.raises(CannotWork, match=f"is that of a {kind}, and this is a {other}"):
                claim(directory, other, adopt=True)


def test_files_without_a_mark_are_nobodys(theirs):
    for kind in (REHEARSAL, QUICKSTART):
        assert "has files that are no" in refusal(theirs, kind)
    assert not refusal(theirs, QUICKSTART, adopt=True)
    assert not claim(theirs, RUN) and claim(theirs, RUN)
    assert found(theirs) == FILES


@pytest.mark.parametrize("how", ["link", "pipe", "directory", "words", "empty"])
def test_what_is_no_mark_is_not_taken_for_one(tmp_path, how):
    (directory := tmp_path / "out").mkdir()
    mark, aside = directory / MARK, tmp_path / "aside"
    aside.write_text("quickstart")
    {
        "link": lambda: mark.symlink_to(aside),
        "pipe": lambda: os.mkfifo(mark),
        "directory": mark.mkdir,
        "words": lambda: mark.write_text("quickstart of mine"),
        "empty": mark.touch,
    }[how]()
    for kind in KINDS:
        assert kind_of(directory) == "" and "is no mark of this repository" in refusal(directory, kind, True)


# Each way in.


@pytest.mark.parametrize("mark", ["", RUN, REHEARSAL])
def test_a_quickstart_in_the_directory_of_others(theirs, mark):
    """Also one that was inherited: `export OUTPUT_DIR=...` of earlier work."""
    if mark:
        (theirs / MARK).write_text(mark)
    start = "build_project.sh() { :; }; bash() { build_project.sh; }"  # its build is another test's
    command = ("bash", "-c", f"{start}; . quickstart.sh --evaluate --steps 1")
    code, text = run(*command, OUTPUT_DIR=str(theirs))
    assert code == 1 and f"ERROR: {theirs} " in text and "set OUTPUT_DIR to another directory" in text, text
    assert found(theirs) == FILES


@pytest.mark.parametrize("mark", ["", RUN, QUICKSTART, CHECK])
def test_a_rehearsal_in_the_directory_of_others(theirs, mark):
    """By the launcher, and by the recipe alone."""
    if mark:
        (theirs / MARK).write_text(mark)
    launcher = (sys.executable, "-m", "ascend_rl.launch.launch")
    for command in ((*launcher, RECIPE), (*launcher, "--dry-run", RECIPE), ("bash", RECIPE)):
        code, text = run(*command, SMOKE="1", OUTPUT_DIR=str(theirs))
        assert code == 1 and f"ERROR: {theirs} " in text, text
        assert found(theirs) == FILES


def launch(script: Path, output: Path, *flags: str, **variables) -> tuple[int, str]:
    command = (sys.executable, "-m", "ascend_rl.launch.launch", *flags, str(script), "")
    return run(*command, OUTPUT_DIR=str(output), LOG_DIR=str(output.parent / "logs"), **variables)


def test_a_run_in_the_directory_of_a_rehearsal(theirs, tmp_path):
    """It would go on from the tiny model's checkpoint."""
    (theirs / MARK).write_text(REHEARSAL)
    (script := tmp_path / "train_it.sh").write_text(f"touch {tmp_path}/trained\n")
    for flags in ((), ("--dry-run",)):
        code, text = launch(script, theirs, *flags)
        assert code == 1 and "is that of a rehearsal, and this is a run" in text
    assert found(theirs) == FILES and not (tmp_path / "trained").exists()


def test_a_rehearsal_does_not_go_where_the_run_will():
    """Neither gives OUTPUT_DIR: so the recipe can be started after its rehearsal."""
    places = []
    for smoke in "01":
        code, text = run(sys.executable, "-m", "ascend_rl.launch.launch", "--dry-run", RECIPE, SMOKE=smoke)
        places.append(re.search(r"log         (\S+)/train.log", text)[1])
        assert code == 0, text
    assert places[0] != places[1]


def test_logs_may_be_below_the_outputs(tmp_path):
    """They are made after the directory is marked, while it is empty."""
    (script := tmp_path / "train_it.sh").write_text("exit 3\n")
    output = tmp_path / "out"
    command = (sys.executable, "-m", "ascend_rl.launch.launch", str(script), "")
    code, text = run(*command, SMOKE="1", OUTPUT_DIR=str(output), LOG_DIR=str(output / "logs"))
    assert (code, kind_of(output)) == (3, REHEARSAL), text


# Every deletion and rename.

GONE = {"rmtree", "unlink", "remove", "rmdir", "removedirs", "rename", "renames", "move", "truncate"}
# "file function: call": why it loses nothing of the user's.
REVIEWED = {
    # a directory that this process made with mkdtemp, or that launches() found to be one of ours
    "launch/launch.py registered: shutil.rmtree(directory, ignore_errors=True)",
    "launch/launch.py remove_stale: shutil.rmtree(directory, ignore_errors=True)",
    "launch/launch.py check_node: shutil.rmtree(directory, ignore_errors=True)",
    "launch/supervise.py supervise: shutil.rmtree(temporary, ignore_errors=True)",
    "launch/launch_node.py announce_agent: path.with_suffix('.early').rename(path)",
    # in a directory that is marked as a rehearsal's
    "launch/launch.py start: shutil.rmtree(record, ignore_errors=True)",
    # a file with a random name that this process made; then its directory if it is empty
    "launch/agreement.py shared: own.unlink()",
    "launch/agreement.py Agreement.close: self.file.unlink()",
    "launch/agreement.py Agreement.close: self.file.parent.rmdir()",
    # appeared during the run, was seen in use by its processes, and nobody uses it now
    "launch/supervise.py SharedMemory.remove_orphans: (SHM / name).unlink()",
    # to a number that no file has
    "settings/logs.py set_aside: path.rename(path.with_name(f'{path.stem}.{number}{path.suffix}'))",
    # the part of a line that this call wrote
    "settings/logs.py LogFile._write: self.file.truncate(before)",
    # data: a file of its own, .partial, to the name that was given; the hub's cache, whose file is damaged
    "recipe/data.py write: partial.replace(path)",
    "recipe/data.py from_hf: path.unlink()",
    "recipe/data.py from_hf: content.unlink(missing_ok=True)",
    # what a kill left of its own last line
    "recipe/evaluate.py Finished.__init__: self.file.truncate(sum((len(line) + 1 for line in lines[:-1])))",
    # the tiny model: a hidden directory of its own, to a name that does not exist
    "recipe/tiny.py make: shutil.rmtree(building, ignore_errors=True)",
    "recipe/tiny.py make: building.rename(out)",
    # KV of moved requests, in directories of the servers
    "rollout/moved_kv.py write: unfinished.rename(path)",
    "rollout/moved_kv.py Depot._drop: directory.rename(dropped)",
    "rollout/moved_kv.py _remove: shutil.rmtree(directory, ignore_errors=True)",
    "rollout/moved_kv.py _discard: (directory / file).unlink(missing_ok=True)",
    "rollout/moved_kv.py Depot.take: os.rename(given, directory)",
    # checkpoints of the run, by the number that it was told to keep
    "weights/checkpoints.py latest: shutil.rmtree(path, ignore_errors=True)",
    "weights/checkpoints.py commit: final.rename(replaced)",
    "weights/checkpoints.py commit: source.rename(final)",
    "weights/checkpoints.py commit: written.replace(tracker)",
    "weights/checkpoints.py remove_old: shutil.rmtree(path, ignore_errors=True)",
    "weights/checkpoints.py latest: path.rename(path.with_suffix(''))",
    # what is ours by its files is deleted, anything else moved aside
    "weights/checkpoints.py make_way: shutil.rmtree(path)",
    "weights/checkpoints.py make_way: path.rename(aside)",
    # an empty directory
    "weights/journal.py Output._make_room: self.path.rmdir()",
    # the converter: its own .partial and journal, to a name that does not exist
    "weights/journal.py Output.publish: os.rename(self.partial, self.path)",
    "weights/journal.py Output.__exit__: self.journal.unlink(missing_ok=True)",
    # scripts: a directory marked as a quickstart's; a cache that the user confirmed; the job's token;
    # results of the tests below data/
    'quickstart.sh: rm -rf "$OUTPUT_DIR"/{checkpoints,evaluation,model}  # of an earlier quickstart',
    'clean_cache.sh: rm -rf --one-file-system -- "$path"',
    'internal/cluster/slurm.sh: rm -f "$CLUSTER_TOKEN_FILE"',
    "internal/cluster/slurm.sh: trap 'rm -f \"$CLUSTER_TOKEN_FILE\"' EXIT",
    'run_tests.sh: rm -rf "$results"',
}


def calls(path: Path) -> set[str]:
    """ "function: call" of each call in a module that deletes, renames or cuts a file."""
    seen = set()

    def visit(node: ast.AST, where: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            where = (*where, node.name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            one = len(node.args) == 1 and not node.keywords  # Path.replace; that of a text takes two
            if node.func.attr in GONE or (node.func.attr == "replace" and one):
                seen.add(f"{'.'.join(where)}: {ast.unparse(node)}")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.replace":
            seen.add(f"{'.'.join(where)}: {ast.unparse(node)}")
        for child in ast.iter_child_nodes(node):
            visit(child, where)

    visit(ast.parse(path.read_text()), ())
    return seen


def test_every_deletion_was_looked_at():
    house = ROOT / "ascend_rl"
    seen = {f"{path.relative_to(house)} {call}" for path in house.rglob("*.py") for call in calls(path)}
    for path in (*ROOT.glob("*.sh"), *(ROOT / "internal").rglob("*.sh")):
        lines = [line.strip() for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
        deleting = re.compile(r"(^|[\s;&|('])(?<!ENGINE )(rm|rmdir|mv|shred|truncate|find .*-delete)\s+[^|]")
        seen |= {f"{path.relative_to(ROOT)}: {line}" for line in lines if deleting.search(line)}
    assert seen == REVIEWED


def test_the_list_sees_what_deletes(tmp_path):
    """Guards the test above."""
    (path := tmp_path / "module.py").write_text(
        "import os, shutil\nclass A:\n    def f(self, p):\n        os.replace(p, 'x')\n"
        "        p.replace('y')\n        'a'.replace('a', 'b')\n"
        "        shutil.rmtree(p)\n        os.unlink(p)\n"
    )
    assert calls(path) == {
        "A.f: os.replace(p, 'x')",
        "A.f: p.replace('y')",
        "A.f: shutil.rmtree(p)",
        "A.f: os.unlink(p)",
    }

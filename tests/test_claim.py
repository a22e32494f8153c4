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
from collections.abc import Callable
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
def test_what_is_not_a_mark_is_not_taken_for_one(tmp_path, how):
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
        assert kind_of(directory) == "" and "is not a mark of this repository" in refusal(
            directory, kind, True
        )


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
    """It would continue from the tiny model's checkpoint."""
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
WRITE = {"write_text", "write_bytes", "savefig", "save_pretrained", "to_parquet", "write_table", "save_file"}
WRITE |= {"copy2", "copyfile", "copytree", "symlink_to", "hardlink_to", "touch", "savez", "savez_compressed"}
# "file function: call": why it loses nothing of the user's.
REVIEWED = {
    # a directory that this process made with mkdtemp, or that launches() found to be one of ours
    "launch/registry.py forget: shutil.rmtree(directory, ignore_errors=True)",
    "launch/supervise.py supervise: shutil.rmtree(temporary, ignore_errors=True)",
    "launch/launch_node.py announce_agent: path.with_suffix('.early').rename(path)",
    "process/save_by.py write: new.rename(f'{path}{SUFFIX}')",
    # in a directory that is marked as a rehearsal's
    "launch/launch.py start: shutil.rmtree(record, ignore_errors=True)",
    # a file with a random name that this process made; then its directory if it is empty
    "launch/agreement.py shared: own.unlink()",
    "launch/agreement.py Agreement.close: self.file.unlink()",
    "launch/agreement.py Agreement.close: self.file.parent.rmdir()",
    # appeared during the run, was seen in use by its processes, and nobody uses it now
    "launch/supervise.py SharedMemory.remove_orphans: (SHM / name).unlink()",
    # to a number that no file has
    "process/logs.py set_aside: path.rename(path.with_name(f'{path.stem}.{number}{path.suffix}'))",
    # the part of a line that this call wrote
    "process/logs.py LogFile._write: self.file.truncate(before)",
    # data: a file of its own, .partial, to the name that was given; the hub's cache, whose file is damaged
    "recipe/data.py write: partial.replace(path)",
    "recipe/data.py from_hf: path.unlink()",
    "recipe/data.py from_hf: content.unlink(missing_ok=True)",
    # what a kill left of its own last line
    "recipe/evaluate.py Finished.__init__: self.file.truncate(sum((len(line) + 1 for line in lines[:-1])))",
    # the tiny model: a hidden directory of its own, to a name that does not exist
    "recipe/tiny.py make: shutil.rmtree(building, ignore_errors=True)",
    "recipe/tiny.py make: building.rename(out)",
    # a request in a list of the scheduler
    "glue/cann9_1/vllm_fixes.py start_over_without_kv._handle_invalid_blocks: self.running.remove(request)",
    # KV of moved requests, in directories of the servers
    "rollout/moved_kv.py write: unfinished.rename(path)",
    "rollout/moved_kv.py Depot._drop: directory.rename(dropped)",
    "rollout/moved_kv.py _remove: shutil.rmtree(directory, ignore_errors=True)",
    "rollout/moved_kv.py _discard: (directory / file).unlink(missing_ok=True)",
    "rollout/moved_kv.py Depot.take: os.rename(given, directory)",
    # checkpoints of the run, by the number that it was told to keep
    "weights/checkpoints.py unpack: path.rename(directory / path.name)",
    "weights/checkpoints.py unpack: written.rmdir()",
    "weights/checkpoints.py unpack: (directory / TRACKER).unlink()",
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
    # of the environment that it builds
    'build_project.sh: [ "$STACK" = cann8.5 ] || rm -rf "$VENV"/lib/python*/site-packages/tests',
}

# "file function: call": where the file is.
WRITTEN = {
    # in a directory that this process made with mkdtemp, or a child of it
    "glue/engine_check.py gap: model.save_pretrained(directory)",
    "launch/registry.py registered: (directory / 'launch.json').open('w')",
    "launch/launch_node.py announce_agent: path.with_suffix('.early').write_text(port)",
    "launch/launch_node.py build_operators: (folder / f'{name}.log').open('w')",
    "launch/supervise.py supervise: signs.touch()",
    "launch/warm_start.py write_client: program.write_text("
    "f\"{start}{inspect.getsource(client)}\\n\\nclient({str(folder / 'socket')!r})\\n\")",
    "lint/dry_run.py _fill: (directory / 'guard.bash').write_text(GUARD)",
    "lint/dry_run.py _fill: (tools / name).symlink_to(_system('true'))",
    "lint/dry_run.py exports: "
    "(Path(environment['DRY_RUN_PATH']) / 'env_of_script').symlink_to(_system('true'))",
    "process/progress.py answer_for: open(f'{path}.{processes}', 'ab')",
    "process/progress.py sign: open(path, 'ab', buffering=0)",
    "process/save_by.py write: new.write_text(f'{by!r} {int(stop)}')",
    "launch/hang.py Stacks.attach: self.file.touch()",
    "launch/hang.py Stacks.attach: shutil.copy(at_start.__file__, site / 'sitecustomize.py')",
    "process/at_start.py register: os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND)",
    "process/progress.py name_rank: open(f'{path}.ranks', 'a')",
    # of the kernel
    "launch/warm_start.py client: open('/proc/self/comm', 'w')",
    "lint/confine.py _Judge.__init__: os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)",
    "lint/confine.py _Memory.__init__: os.open(f'/proc/{pid}/mem', os.O_RDWR | os.O_CLOEXEC)",
    # where the rendezvous of a run is: a file with a random name, empty
    "launch/agreement.py offer: file.touch()",
    "launch/agreement.py shared: own.touch()",
    # the logs of a run, and what it writes into its marked directory, after set_aside
    "launch/hang.py Stacks.collect: (self.folder / f'{self.node}.txt').write_text('\\n'.join(texts))",
    "launch/launch.py keep_ray_logs: shutil.copytree(logs, kept)",
    "launch/launch.py log: plan.log_file.open('a')",
    "launch/launch.py start: (plan.output_dir / 'run.json').write_text(json.dumps(started))",
    "settings/claim.py claim: (directory / MARK).open('x')",
    "process/counts.py count: open(file, 'ab', buffering=0)",
    "process/logs.py LogFile.__init__: path.open('ab', buffering=0)",
    "process/logs.py LogFile.write: self.path.open('ab', buffering=0)",
    # where metrics.jsonl is, and the record of a rehearsal
    "recipe/rehearsal.py main: "
    "(options.output_dir / 'rehearsal.json').write_text(json.dumps(report, indent=1))",
    "recipe/report.py main: (run / 'report.html').write_text(page)",
    "recipe/report.py main: (run / 'report.json').write_text(as_json(report))",
    "recipe/report_plots.py plot: figure.savefig(file, dpi=110, format='png')",
    # files that no evaluation wrote are refused before
    "recipe/evaluate.py Finished.__init__: path.open('ab')",
    "recipe/evaluate.py main: "
    "(out / 'report.json').write_text(json.dumps(settings | {'results': results}, indent=2) + '\\n')",
    "recipe/evaluate.py server: log.open('w')",
    # aside, under a name of its own; it is renamed when it is complete
    "recipe/data.py write: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), partial)",
    "recipe/tiny.py main: args.out.with_name(f'.{args.out.name}.lock').open('w')",
    "recipe/tiny.py make: (building / MARKER).write_text(description)",
    "recipe/tiny.py make: model.save_pretrained(building / 'model')",
    "recipe/tiny.py make: tokenizer.save_pretrained(building / 'model')",
    "recipe/tiny.py write_parquet: frame.to_parquet(path)",
    "rollout/moved_kv.py write: unfinished.open('wb+')",
    "weights/checkpoints.py commit: written.open('w')",
    "weights/journal.py Output.__enter__: os.open(self.journal, flags, 420)",
    "weights/journal.py Output._begin: os.open(self.partial / file, os.O_RDWR | os.O_CREAT, 420)",
    "weights/journal.py Output.add_file: os.open(self.partial / name, os.O_RDWR | os.O_CREAT, 420)",
    # in a checkpoint that is being saved, .partial
    "glue/rollout_manager.py save: memory.save(checkpoint)",
    "glue/cann9_1/trainer.py Managed.save_more: self.agent_loop_manager.memory.save(directory)",
    "rollout/prompt_memory.py PromptMemory.save: np.savez(Path(directory, FILE), **saved)",
    "weights/checkpoints.py begin: (partial / POSITION).write_text(json.dumps(asdict(passes.after(step))))",
    # KV of moved requests, in directories of the servers
    "rollout/moved_kv.py Depot.expect: (directory / ABOUT).write_text(self._about(weights))",
    "rollout/moved_kv.py MovedKV.request_finished: directory.with_suffix(ENDED).touch()",
    "rollout/moved_kv.py _locked: os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 384)",
    # adds lines to the file that HDP_DUMP names
    "hdp/hdp_training.py HybridDataParallel._dump: open(self.dump, 'a')",
    # scripts: a file in .venv; a file of mktemp; a token that must not exist
    'build_project.sh: echo "$stamp" >"$VENV/.requirements"',
    "build_project.sh: grep -vE '^(torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)==' "
    '"$requirements" >"$VENV/without-torch.txt"',
    "internal/cluster/slurm.sh: (umask 077; set -o noclobber; "
    "od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' >\"$CLUSTER_TOKEN_FILE\")",
}


def deletes(call: ast.Call) -> bool:
    """Whether a call deletes, renames or cuts a file."""
    if isinstance(call.func, ast.Attribute):
        one = len(call.args) == 1 and not call.keywords  # Path.replace; that of a text takes two
        return call.func.attr in GONE or (call.func.attr == "replace" and one) or is_os(call, "replace")
    return False


def writes(call: ast.Call) -> bool:
    """Whether a call may write over a file; a mode or flag that is no literal may."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if is_os(call, "open"):
        return not re.fullmatch(
            "[^|]*O_(RDONLY|WRONLY)( [|] os.O_(NOFOLLOW|NONBLOCK|CLOEXEC))*", flags_of(call)
        )
    if name == "open":
        given = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
        modes = [
            value.value for value in given if isinstance(value, ast.Constant) and type(value.value) is str
        ]
        return any(re.fullmatch("[rwaxbt+]+", mode) and set(mode) & set("wax+") for mode in modes)
    return name in WRITE or (name in {"copy", "save"} and bool(call.args))


def is_os(call: ast.Call, name: str) -> bool:
    return ast.unparse(call.func) == f"os.{name}"


def flags_of(call: ast.Call) -> str:
    return ast.unparse(call.args[1])


def calls(path: Path, wanted: Callable[[ast.Call], bool]) -> set[str]:
    """ "function: call" of each such call in a module."""
    seen = set()

    def visit(node: ast.AST, where: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            where = (*where, node.name)
        if isinstance(node, ast.Call) and wanted(node):
            seen.add(f"{'.'.join(where)}: {ast.unparse(node)}")
        for child in ast.iter_child_nodes(node):
            visit(child, where)

    visit(ast.parse(path.read_text()), ())
    return seen


def of_house(wanted: Callable[[ast.Call], bool]) -> set[str]:
    house = ROOT / "ascend_rl"
    return {
        f"{path.relative_to(house)} {call}" for path in house.rglob("*.py") for call in calls(path, wanted)
    }


def of_scripts(pattern: str) -> set[str]:
    seen = set()
    for path in (*ROOT.glob("*.sh"), *(ROOT / "internal").rglob("*.sh")):
        lines = [line.strip() for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
        seen |= {f"{path.relative_to(ROOT)}: {line}" for line in lines if re.search(pattern, line)}
    return seen


def test_every_deletion_was_looked_at():
    of_shell = of_scripts(r"(^|[\s;&|('])(?<!ENGINE )(rm|rmdir|mv|shred|truncate|find .*-delete)\s+[^|]")
    assert of_house(deletes) | of_shell == REVIEWED


def test_every_write_was_looked_at():
    of_shell = of_scripts(r"^(?!.*\$\(\().*(?<![0-9&>-])>(?!/dev/null)[\w\"$.{/]|(^|[;&|(]\s*)(tee|cp|ln) ")
    assert of_house(writes) | of_shell == WRITTEN


def test_the_lists_see_what_deletes_and_what_writes(tmp_path):
    """Guards the tests above."""
    (path := tmp_path / "module.py").write_text(
        "import os, shutil\nclass A:\n    def f(self, p):\n        os.replace(p, 'x')\n"
        "        p.replace('y')\n        'a'.replace('a', 'b')\n"
        "        shutil.rmtree(p)\n        os.unlink(p)\n"
        "        open(p)\n        p.open('rb')\n        open(p, mode='r+')\n        p.open('w')\n"
        "        os.open(p, os.O_RDONLY)\n        os.open(p, flags)\n        p.write_text('')\n"
        "        shutil.copy(p, q)\n        p.copy()\n"
    )
    assert calls(path, deletes) == {
        "A.f: os.replace(p, 'x')",
        "A.f: p.replace('y')",
        "A.f: shutil.rmtree(p)",
        "A.f: os.unlink(p)",
    }
    assert calls(path, writes) == {
        "A.f: open(p, mode='r+')",
        "A.f: p.open('w')",
        "A.f: os.open(p, flags)",
        "A.f: p.write_text('')",
        "A.f: shutil.copy(p, q)",
    }

"""Checkpoints of verl's trainer that a kill cannot spoil: written aside, renamed when they are complete.

verl writes into global_step_N, then N into latest_checkpointed_iteration.txt, in place. A kill in between
leaves a tracker that is empty (the next start stops with a ValueError); with max_actor_ckpt_to_keep=1 its
workers delete the previous checkpoint before the tracker names the new one (the next start begins at step 0,
and says so in one line); after a restart nothing older is deleted, and the disk fills.

    begin    global_step_N.partial, in which workers and trainer write
    commit   sync -> rename to global_step_N -> the tracker, by rename -> delete all but the last KEEP and
             the best (`best_checkpoint`)
    latest   the checkpoint to resume from: the tracker's, else the newest complete one (`newest`)
    check_engine refuses the checkpoint of another engine, or of another number of FSDP's ranks
    unpack   what verl 0.9.1 wrote, moved to where `commit` expects it
    written_s   how long a save went on after the trainer did (`async_save`)
    passes   the steps that the data has left, whatever the batch size: a checkpoint says how many prompts of
             which pass are consumed

Invariants (tests/test_checkpoints.py, killed at every step of `commit`): a directory named global_step_N is
complete; `latest` finds one as soon as there was one, and never an older one than before; nothing is deleted
but complete checkpoints beyond KEEP and partial ones, and those only if they are directories with what a
checkpoint has: links and anything else of these names are moved aside.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import shutil
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ascend_rl.settings.switch import refuse
from ascend_rl.weights import best_checkpoint

TRACKER, PARTIAL, REPLACED = "latest_checkpointed_iteration.txt", ".partial", ".replaced"
POSITION = "position.json"  # of a checkpoint: a `Position`
CONTENTS = {"actor", "critic", "data.pt", "prompt_memory.npz", POSITION}  # a checkpoint has one or more
RNG_STATE = re.compile(r"rng_state/shard_0\.0_(\d+)\.(\d+)")
SHARD = re.compile(r"(.+)_world_size_(\d+)_rank_(\d+)\.pt")


class IncompleteCheckpoint(RuntimeError):
    """Which files are missing."""


def step_of(path: Path) -> int:
    """N of global_step_N; -1 for any other name."""
    found = re.fullmatch(r"global_step_(\d+)", path.name)
    return int(found.group(1)) if found else -1


def complete(directory: Path) -> list[Path]:
    """All complete checkpoints, oldest step first."""
    if not directory.is_dir():
        return []
    return sorted((p for p in directory.iterdir() if step_of(p) >= 0 and p.is_dir()), key=step_of)


def ours(path: Path) -> bool:
    """Whether a directory holds what a checkpoint does, or nothing; no link to one does."""
    if path.is_symlink() or not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir()}
    return not names or bool(names & CONTENTS)


def make_way(path: Path) -> None:
    """Free a name: what is `ours` is deleted, anything else moved aside; a link's target stays as it is."""
    if ours(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        names = (path.with_name(f"{path.name}.aside{number}") for number in itertools.count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        path.rename(aside)
        print(f"{path} is not a checkpoint of a run but is in its way: it is {aside.name} now", flush=True)


def begin(directory: str, step: int, passes: Passes | None = None) -> str:
    """The directory in which to write the checkpoint of a step, which says where in the data that is."""
    partial = Path(directory, f"global_step_{step}{PARTIAL}").absolute()
    make_way(partial)
    partial.mkdir(parents=True)
    if passes:
        (partial / POSITION).write_text(json.dumps(asdict(passes.after(step))))
    return str(partial)


def unpack(partial: str) -> None:
    """verl 0.9.1 writes into ``partial``/global_step_N, with a tracker beside it: move all of it up."""
    directory = Path(partial)
    written = directory / directory.stem
    for path in written.iterdir():
        path.rename(directory / path.name)
    written.rmdir()
    (directory / TRACKER).unlink()


def written_s(directory: str, step: int) -> float:
    """Seconds from `begin` to the newest shard of Megatron's in a step's checkpoint; 0 while there is none.

    By the times of the files, which processes beside the trainer write where ``async_save`` is on.
    """
    found = 0.0
    for name in (f"global_step_{step}", f"global_step_{step}{PARTIAL}"):
        with contextlib.suppress(OSError, ValueError):  # renamed just now; without shards
            path = Path(directory, name)
            newest = max(shard.stat().st_mtime for shard in path.rglob("*.distcp"))
            found = max(found, newest - (path / POSITION).stat().st_mtime)
    return found


def commit(partial: str, keep: int | None = None) -> None:
    """Make a checkpoint that is completely written the latest one.

    Args:
        partial: what `begin` returned.
        keep: how many checkpoints to keep, this one included; None or 0: all.

    Raises:
        IncompleteCheckpoint: files of some ranks are not there.
    """
    source = Path(partial)
    final, directory = source.with_suffix(""), source.parent
    check_shards(source)
    sync(source)
    if ours(final):  # a run that continued from an earlier step saves this one again
        replaced = final.with_name(final.name + REPLACED)
        make_way(replaced)
        final.rename(replaced)
    make_way(final)
    source.rename(final)
    sync_directory(directory)
    tracker = directory / TRACKER
    written = tracker.with_name(f"{TRACKER}.new")
    for path in (tracker, written):
        if path.is_symlink() or path.is_dir():
            make_way(path)
    with written.open("w") as file:
        file.write(str(step_of(final)))
        file.flush()
        os.fsync(file.fileno())
    written.replace(tracker)
    sync_directory(directory)
    remove_old(directory, step_of(final), keep)


def check_shards(directory: Path) -> None:
    """FSDP's shards are named by rank: all must be there. They are not where storage is not shared."""
    ranks: dict[tuple[str, int], set[int]] = defaultdict(set)
    for path in directory.glob("*/*.pt"):
        if found := SHARD.fullmatch(path.name):
            ranks[f"{path.parent.name}/{found.group(1)}", int(found.group(2))].add(int(found.group(3)))
    for (name, world_size), present in ranks.items():
        missing = sorted(set(range(world_size)) - present)
        if missing:
            ranks_missing = ", ".join(map(str, missing[:8])) + " ..." * (len(missing) > 8)
            raise IncompleteCheckpoint(
                f"{directory}: {name} of rank {ranks_missing} of {world_size} is missing; "
                "trainer.default_local_dir must be on storage that all nodes share"
            )


def sync(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            sync_directory(path)


def sync_directory(path: Path) -> None:
    """Wait until a file or the names in a directory are on the disk, where the file system can tell."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_old(directory: Path, step: int, keep: int | None) -> None:
    """Of the checkpoints up to a step, keep the last ones and the best; nothing partial from before it.

    A later partial one may be what another process writes (``async_save``); `latest` ends it at a start.
    """
    older = [path for path in complete(directory) if step_of(path) <= step and ours(path)]
    best = best_checkpoint.best([step_of(path) for path in older])
    for path in older[:-keep] if keep else []:
        if step_of(path) != best:
            shutil.rmtree(path, ignore_errors=True)
    for path in left_undone(directory, PARTIAL):
        if step_of(path.with_suffix("")) <= step:
            shutil.rmtree(path, ignore_errors=True)
    for path in left_undone(directory, REPLACED):
        shutil.rmtree(path, ignore_errors=True)


def left_undone(directory: Path, suffix: str) -> list[Path]:
    """What an unfinished save left of that kind."""
    found = directory.glob(f"global_step_*{suffix}")
    return [path for path in found if step_of(path.with_suffix("")) >= 0 and ours(path)]


def latest(directory: str) -> str | None:
    """The checkpoint to resume from, or None; for the trainer alone, since it ends what a kill left
    undone."""
    root = Path(directory).absolute()
    for path in left_undone(root, REPLACED):
        if not path.with_suffix("").exists():  # killed between the two renames
            make_way(path.with_suffix(""))
            path.rename(path.with_suffix(""))
    for path in left_undone(root, PARTIAL):
        shutil.rmtree(path, ignore_errors=True)
    found = newest(root)
    return str(found) if found else None


def newest(directory: Path) -> Path | None:
    """The checkpoint that the tracker names, else the newest complete one; changes nothing."""
    found = complete(directory)
    with contextlib.suppress(OSError, ValueError):
        step = int((directory / TRACKER).read_text())
        # Between a rename and the tracker the new checkpoint is complete already, but either will do.
        found = [path for path in found if step_of(path) == step] or found
    return found[-1] if found else None


def other_engine(checkpoint: str, strategy: str, ranks: int) -> str:
    """Why this run's engine cannot load a checkpoint; empty where it can, or where nothing tells.

    Args:
        checkpoint: global_step_N.
        strategy: ``fsdp``, ``fsdp2`` or ``megatron``.
        ranks: processes of the actor. Megatron reshards a checkpoint, FSDP needs as many as saved it.
    """
    actor, saved = Path(checkpoint, "actor"), ""
    with contextlib.suppress(OSError, ValueError, KeyError):
        saved = f"FSDP on {json.loads((actor / 'fsdp_config.json').read_text())['world_size']} dies"
    if not saved and any((actor / name).is_dir() for name in ("dist_ckpt", "optimizer")):  # verl 0.7.1, 0.9.1
        saved = "Megatron"
    wanted = "Megatron" if strategy == "megatron" else f"FSDP on {ranks} dies"
    return "" if saved in ("", wanted) else f"{saved} saved it, this run trains with {wanted}"


def check_engine(checkpoint: str, strategy: str, ranks: int) -> None:
    """Refuse `other_engine` before each worker ends with "No such file or directory".

    Raises:
        CannotWork: who saved it, and what to do.
    """
    reason = other_engine(checkpoint, strategy, ranks)
    others = "begin with its weights (python -m ascend_rl.export), or trainer.resume_mode=disable"
    refuse(f"resuming {checkpoint}", [f"{reason}: train as it was saved, {others}"] if reason else [])


@dataclass(frozen=True)
class Position:
    """Where in its data a run is after ``step``: in the pass ``epoch``, of which ``prompts`` are consumed."""

    step: int = 0
    epoch: int = 0
    prompts: int = 0


@dataclass(frozen=True)
class Passes:
    """The steps that a run can take from ``start`` on: prompts are counted, so the batch size may change.

    A step that ended a pass was saved before its end was seen: the restored dataloader still has that to say.
    DAPO's steps draw what they need, from an ``endless`` stream; each counts as ``batch`` prompts.

    Attributes:
        batch: prompts of a step.
        prompts: those of a pass; a rest that fills no batch is left out.
        epochs: passes of the whole run.

    3200 prompts, 32 per step; after step 50 the run continues with 64 per step:

    >>> passes = Passes(Passes(Position(), 32, 3200, 1).after(50), 64, 3200, 1)
    >>> passes.start, passes.steps
    (Position(step=50, epoch=0, prompts=1600), 75)
    >>> passes.first_pass(50, 75), passes.first_pass(75, 75) == sys.maxsize
    (0, True)
    """

    start: Position
    batch: int
    prompts: int
    epochs: int
    endless: bool = False

    @property
    def _rest(self) -> int:
        """Steps that are left of the pass that ``start`` is in."""
        return (self.prompts - self.start.prompts) // self.batch

    @property
    def steps(self) -> int:
        """The last step for which the data has prompts."""
        further = max(self.epochs - self.start.epoch - 1, 0)
        return self.start.step + self._rest + further * (self.prompts // self.batch)

    def last(self, wanted: int) -> int:
        """The last step of a run of ``wanted`` steps: verl would not know, and not save it."""
        return wanted if self.endless else min(wanted, self.steps)

    def after(self, step: int) -> Position:
        """Where the run is after a step."""
        taken = step - self.start.step
        if taken <= self._rest:
            return Position(step, self.start.epoch, self.start.prompts + taken * self.batch)
        further, nth = divmod(taken - self._rest - 1, max(1, self.prompts // self.batch))
        return Position(step, self.start.epoch + 1 + further, (nth + 1) * self.batch)

    def first_pass(self, step: int, steps: int) -> int:
        """The pass in which `fit` continues after ``step`` of ``steps``; none is left after the last."""
        if step >= steps:
            return sys.maxsize
        return 0 if self.endless else self.start.epoch


def passes(config: Any, loader: Any, batch: int | None = None) -> Passes:
    """Of the run that resumes from the checkpoint that ``config`` names, or begins.

    Args:
        config: verl's whole configuration.
        loader: verl's dataloader.
        batch: prompts of a step; by default those that the loader gives at once.

    Raises:
        CannotWork: there is no place for checkpoints, none would be complete, or the data has fewer prompts
            than were consumed.
    """
    trainer, root = config.trainer, Path(config.trainer.default_local_dir)
    broken = os.path.lexists(root) and not root.is_dir()
    refuse(f"trainer.default_local_dir={root}", ["it is not a directory"] if broken else [])
    actor = config.actor_rollout_ref.actor
    if actor.checkpoint.get("async_save") and actor.strategy != "megatron":
        reason = f"{actor.strategy} saves while the trainer waits, and verl would never complete a checkpoint"
        refuse("actor.checkpoint.async_save=True", [f"{reason}: set it to False"])
    found = latest(str(root))
    if trainer.resume_mode != "auto":
        found = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
    batch, prompts = batch or loader.batch_size, len(loader.sampler)
    start = position(Path(found), batch, prompts) if found else Position()
    filtered = bool((config.algorithm.get("filter_groups") or {}).get("enable"))
    reason = (
        f"{start.prompts} prompts of this pass are consumed, and the data has {prompts}: "
        "give the data of that run, or trainer.resume_mode=disable"
    )
    refuse(f"resuming {found}", [reason] if start.prompts > prompts and not filtered else [])
    made = Passes(start, batch, prompts, trainer.total_epochs, filtered)
    if start.step:
        print(
            f"after step {start.step}, {start.prompts} of {prompts} prompts of pass {start.epoch + 1} of "
            f"{made.epochs} are consumed: with {batch} per step the data lasts until step {made.steps}",
            flush=True,
        )
    return made


def position(checkpoint: Path, batch: int, prompts: int) -> Position:
    """Where in its data a checkpoint is.

    One that does not say so is of verl itself: the state of its dataloader has the prompts and the batches of
    this pass, and all batches were of one size.
    """
    step = max(step_of(checkpoint), 0)
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Position(**json.loads((checkpoint / POSITION).read_text()) | {"step": step})
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RuntimeError, pickle.UnpicklingError):
        import torch

        state = torch.load(checkpoint / "data.pt", weights_only=True)
        main = state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state
        batches = state["_snapshot"]["_snapshot_step"] if "_snapshot" in state else state["_num_yielded"]
        consumed = main["_sampler_iter_state"]["samples_yielded"]
        if batches and "passes" not in state:  # a stream of DAPO hands out other units
            batch = consumed // batches
    return Passes(Position(), batch, prompts, 1).after(step)


def has_rng_states(directory: str, mpu: Any) -> bool:
    """Whether a Megatron checkpoint has a state of random numbers for each rank of this TP and PP.

    They cannot be resharded, unlike weights and the optimizer; Megatron-LM leaves them out too.

    Args:
        directory: with ``.metadata`` of torch.distributed.checkpoint.
        mpu: megatron.core.parallel_state.
    """
    import torch

    from ascend_rl.weights.torch_dist import metadata_of

    keys = metadata_of(Path(directory))["state_dict_metadata"]
    saved = [tuple(map(int, found.groups())) for key in keys if (found := RNG_STATE.fullmatch(key))]
    here = mpu.get_pipeline_model_parallel_world_size(), mpu.get_tensor_model_parallel_world_size()
    if saved and here not in saved and torch.distributed.get_rank() == 0:
        print(
            f"the checkpoint is of PP{saved[0][0]} TP{saved[0][1]}, this run of PP{here[0]} TP{here[1]}: "
            "weights and optimizer continue, the trainer's random numbers start over",
            flush=True,
        )
    return here in saved

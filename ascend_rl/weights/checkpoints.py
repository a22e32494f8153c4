"""Checkpoints of verl's trainer that a kill cannot spoil: written aside, renamed when they are complete.

verl writes into global_step_N, then N into latest_checkpointed_iteration.txt, in place. A kill in between
leaves a tracker that is empty (the next start stops with a ValueError); with max_actor_ckpt_to_keep=1 its
workers delete the previous checkpoint before the tracker names the new one (the next start begins at step 0,
and says so in one line); after a restart nothing older is deleted, and the disk fills.

    begin    global_step_N.partial, in which workers and trainer write
    commit   sync -> rename to global_step_N -> the tracker, by rename -> delete all but the last KEEP
    latest   the checkpoint to go on from: the tracker's, else the newest complete one (`newest`)
    check_engine refuses the checkpoint of another engine, or of another number of FSDP's ranks
    first_pass   the pass over the data that `fit` goes on with

Invariants (tests/test_checkpoints.py, killed at every step of `commit`): a directory named global_step_N is
complete; `latest` finds one as soon as there was one, and never an older one than before; nothing is deleted
but complete checkpoints beyond KEEP and partial ones that are older than a complete one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from ascend_rl.settings.switch import refuse

TRACKER, PARTIAL, REPLACED = "latest_checkpointed_iteration.txt", ".partial", ".replaced"
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


def begin(directory: str, step: int) -> str:
    """The directory in which to write the checkpoint of a step, empty."""
    partial = Path(directory, f"global_step_{step}{PARTIAL}").absolute()
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return str(partial)


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
    if final.exists():  # a run that went on from an earlier step saves this one again
        replaced = final.with_name(final.name + REPLACED)
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    source.rename(final)
    sync_directory(directory)
    tracker = directory / TRACKER
    written = tracker.with_name(f"{TRACKER}.new")
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
    """Of the checkpoints up to a step, keep the last ones; nothing partial from before it."""
    older = [path for path in complete(directory) if step_of(path) <= step]
    for path in older[: -keep or None] if keep else []:
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(f"global_step_*{PARTIAL}"):
        if 0 <= step_of(path.with_suffix("")) <= step:
            shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(f"global_step_*{REPLACED}"):
        shutil.rmtree(path, ignore_errors=True)


def latest(directory: str) -> str | None:
    """The checkpoint to go on from, or None; for the trainer alone, since it ends what a kill left undone."""
    root = Path(directory).absolute()
    for path in root.glob(f"global_step_*{REPLACED}"):
        if not path.with_suffix("").exists():  # killed between the two renames
            path.rename(path.with_suffix(""))
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
        ranks: processes of the actor. Megatron splits a checkpoint anew, FSDP needs as many as saved it.
    """
    actor, saved = Path(checkpoint, "actor"), ""
    with contextlib.suppress(OSError, ValueError, KeyError):
        saved = f"FSDP on {json.loads((actor / 'fsdp_config.json').read_text())['world_size']} dies"
    if not saved and (actor / "dist_ckpt").is_dir():
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


def first_pass(step: int, batches: int, steps: int) -> int:
    """The pass over the data to go on with after a step; a pass has ``batches``, the run ``steps``.

    A step that ended a pass was saved before its end was seen: the restored dataloader still has that to say.
    A run that counted it as over would lose the pass that follows. After the last step no pass is left.

    >>> [first_pass(step, batches=6, steps=18) for step in (0, 5, 6, 7, 12)]
    [0, 0, 0, 1, 1]
    >>> list(range(first_pass(18, batches=6, steps=18), 3))
    []
    """
    return max(step - 1, 0) // batches if step < steps else sys.maxsize


def has_rng_states(directory: str, mpu: Any) -> bool:
    """Whether a Megatron checkpoint has a state of random numbers for each rank of this TP and PP.

    They cannot be split anew, unlike weights and the optimizer; Megatron-LM leaves them out too.

    Args:
        directory: with ``.metadata`` of torch.distributed.checkpoint.
        mpu: megatron.core.parallel_state.
    """
    import torch
    from torch.distributed.checkpoint import FileSystemReader

    keys = FileSystemReader(directory).read_metadata().state_dict_metadata
    saved = [tuple(map(int, found.groups())) for key in keys if (found := RNG_STATE.fullmatch(key))]
    here = mpu.get_pipeline_model_parallel_world_size(), mpu.get_tensor_model_parallel_world_size()
    if saved and here not in saved and torch.distributed.get_rank() == 0:
        print(
            f"the checkpoint is of PP{saved[0][0]} TP{saved[0][1]}, this run of PP{here[0]} TP{here[1]}: "
            "weights and optimizer go on, the trainer's random numbers start anew",
            flush=True,
        )
    return here in saved

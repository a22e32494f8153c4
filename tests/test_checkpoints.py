"""ascend_rl/weights/checkpoints.py: killed anywhere, the next start finds the last complete checkpoint."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_rl.settings.switch import CannotWork
from ascend_rl.weights import checkpoints

CALLS = ("rename", "replace", "rmdir", "unlink", "open", "fsync")


def save(directory: Path, step: int, keep: int | None = None, content: str = "x") -> None:
    partial = Path(checkpoints.begin(str(directory), step))
    (partial / "actor").mkdir()
    (partial / "actor/model_world_size_1_rank_0.pt").write_text(content)
    (partial / "data.pt").write_text(content)
    checkpoints.commit(str(partial), keep)


def killed_at(call: int, work) -> bool:
    """Run `work` in a process that is gone at its n-th call to the file system; whether it came that far."""
    pid = os.fork()
    if not pid:
        left = call

        def counted(real):
            def one(*args, **kwargs):
                nonlocal left
                left -= 1
                if left < 0:
                    os._exit(9)
                return real(*args, **kwargs)

            return one

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def steps(directory: Path) -> list[int]:
    return [checkpoints.step_of(path) for path in checkpoints.complete(directory)]


def found(directory: Path) -> tuple[int, str]:
    path = Path(checkpoints.latest(str(directory)))
    return checkpoints.step_of(path), (path / "data.pt").read_text() + (
        path / "actor/model_world_size_1_rank_0.pt"
    ).read_text()


@pytest.mark.parametrize("keep", [1, 2, None])
@pytest.mark.parametrize("again", [False, True], ids=["next", "same step again"])
def test_killed_at_any_moment_of_a_save(tmp_path, keep, again):
    """What is found is the old or the new checkpoint, whole; the start after it saves as if nothing was."""
    new = 10 if again else 15
    for moment in range(200):
        directory = tmp_path / str(moment)
        for step in (5, 10):
            save(directory, step, keep, "o")
        killed = killed_at(moment, lambda directory=directory: save(directory, new, keep, "n"))
        assert found(directory) in ([(10, "oo"), (new, "nn")] if killed else [(new, "nn")])
        save(directory, 20, keep, "l")
        assert found(directory) == (20, "ll")
        assert not [p.name for p in directory.iterdir() if p.name.endswith((".partial", ".replaced"))]
        if keep:
            assert len(steps(directory)) == keep and steps(directory)[-1] == 20
        if not killed:
            break
    assert moment > 10, "hardly any moment was tried"


def test_what_is_kept(tmp_path):
    for step in (2, 4, 6, 8):
        save(tmp_path, step, 2)
    assert steps(tmp_path) == [6, 8]
    (tmp_path / "notes").mkdir()  # of the user
    (tmp_path / "global_step_8_best").mkdir()
    save(tmp_path, 10, 1)
    assert steps(tmp_path) == [10] and {"notes", "global_step_8_best"} <= set(os.listdir(tmp_path))
    assert (tmp_path / checkpoints.TRACKER).read_text() == "10"


@pytest.mark.parametrize("sign", ["", "-"])
@given(
    st.lists(st.sampled_from([None, 0.25, 0.5, 0.75, math.nan]), min_size=3, max_size=8),
    st.integers(1, 3),
)
def test_the_best_is_kept_besides_the_last(sign, values, keep):
    """Judged when the next one is complete: verl validates a step after it saved it."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        directory, metrics = Path(name, "checkpoints"), Path(name, "metrics.jsonl")
        patch.setenv("KEEP_BEST", f"{sign}val/acc")
        patch.setenv("VERL_FILE_LOGGER_PATH", str(metrics))
        for step, value in enumerate(values, 1):
            save(directory, step, keep)
            judged = range(1, step)
            of = {
                n: values[n - 1]
                for n in judged
                if values[n - 1] is not None and values[n - 1] == values[n - 1]
            }
            order = sorted(of, key=lambda n: ((-1 if sign else 1) * of[n], n))
            assert steps(directory) == sorted({*range(max(1, step - keep + 1), step + 1), *order[-1:]})
            data = {"other": 1.0} | ({} if value is None else {"val/acc": value})
            with metrics.open("a") as file:
                file.write(json.dumps({"step": step, "data": data}) + "\n")


def test_a_metric_that_no_step_has_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {"val-core/a/acc/mean@1": 0.5}}\n{"st')
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    monkeypatch.setenv("KEEP_BEST", "val/acc/mean@1")
    for step in (1, 2):
        save(tmp_path / "checkpoints", step, 1)
    assert steps(tmp_path / "checkpoints") == [2]
    assert (
        "KEEP_BEST=val/acc/mean@1: no step has it; close to it: val-core/a/acc/mean@1"
        in capsys.readouterr().out
    )


def test_a_run_that_resumes_from_an_earlier_step_keeps_the_later_ones(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step)
    save(tmp_path, 3, 1)
    assert steps(tmp_path) == [3, 4, 6] and found(tmp_path)[0] == 3


@pytest.mark.parametrize("tracker", [None, "", "7", "six"], ids=["none", "empty", "gone", "damaged"])
def test_a_tracker_that_says_nothing_does_not_mean_from_scratch(tmp_path, tracker):
    assert checkpoints.latest(str(tmp_path / "nowhere")) is None
    save(tmp_path, 3)
    save(tmp_path, 12)
    (tmp_path / "global_step_20.partial").mkdir()
    (tmp_path / checkpoints.TRACKER).unlink()
    if tracker is not None:
        (tmp_path / checkpoints.TRACKER).write_text(tracker)
    assert found(tmp_path)[0] == 12


def test_shards_that_are_on_other_nodes_are_missed(tmp_path):
    save(tmp_path, 1)
    partial = Path(checkpoints.begin(str(tmp_path), 2))
    (partial / "actor").mkdir()
    (partial / "actor/optim_world_size_4_rank_2.pt").touch()
    with pytest.raises(checkpoints.IncompleteCheckpoint, match="actor/optim of rank 0, 1, 3 of 4 is missing"):
        checkpoints.commit(str(partial), 1)
    assert found(tmp_path)[0] == 1


# What is in the way of a save, by the name that it has; made with the directory of the checkpoints.
def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def linked(path: Path) -> None:
    kept = path.parent.parent / f"kept_{path.name}"
    save(kept, 4, content="k")
    path.symlink_to(kept / "global_step_4")


def of_a_user(path: Path) -> None:
    path.mkdir()
    (path / "notes").write_text("mine")


def a_file(path: Path) -> None:
    path.write_text("mine")


IN_THE_WAY = [dangling, linked, of_a_user, a_file]
NAMES = ["global_step_4", "global_step_4.partial", "global_step_4.replaced", "global_step_2.partial"]
NAMES += ["global_step_2.replaced", "global_step_9.partial", f"{checkpoints.TRACKER}.new"]


def contents(directory: Path) -> dict[str, str]:
    return {str(p.relative_to(directory)): p.read_text() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", IN_THE_WAY, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_ours_ends_no_save_and_is_not_deleted(tmp_path, capsys, name, kind):
    directory = tmp_path / "checkpoints"
    save(directory, 2, 1)
    kind(directory / name)
    elsewhere = contents(tmp_path)
    link = os.readlink(directory / name) if (directory / name).is_symlink() else None
    for step in (3, 4, 4, 6):
        checkpoints.latest(str(directory))
        save(directory, step, 1, "n")
    assert found(directory) == (6, "nn")
    if link:
        assert link in [os.readlink(path) for path in directory.iterdir() if path.is_symlink()]
    kept = contents(tmp_path)
    for path, content in elsewhere.items():
        if path.startswith("kept"):
            assert kept[path] == content
    if kind in (of_a_user, a_file) and name != f"{checkpoints.TRACKER}.new":
        assert "mine" in kept.values()
    moved = [path.name for path in directory.glob("*.aside*")]
    said = capsys.readouterr().out
    assert all(f"is {name} now" in said for name in moved)


def test_links_are_not_counted_among_the_checkpoints_to_keep(tmp_path):
    directory = tmp_path / "checkpoints"
    for step in (1, 2):
        save(tmp_path / "elsewhere", step)
        directory.mkdir(exist_ok=True)
        (directory / f"global_step_{step}").symlink_to(tmp_path / f"elsewhere/global_step_{step}")
    assert found(directory)[0] == 2  # a run may begin with a checkpoint that is linked
    for step in (3, 4, 5):
        save(directory, step, 2)
    assert steps(directory) == [1, 2, 4, 5] and steps(tmp_path / "elsewhere") == [1, 2]


def test_a_start_clears_what_any_unfinished_save_left(tmp_path):
    """Also of a step that this run will not save."""
    save(tmp_path, 4)
    for step in (3, 4, 9):
        left = Path(checkpoints.begin(str(tmp_path), step))
        (left / "actor").mkdir()
        (left / "actor/part.pt").touch()
    assert found(tmp_path)[0] == 4
    assert [path.name for path in tmp_path.glob("*.partial")] == []


def test_a_checkpoint_directory_that_is_not_one_is_refused_before_the_start(tmp_path):
    from omegaconf import OmegaConf

    for name in ("link", "file"):
        root = tmp_path / name
        root.symlink_to("nowhere") if name == "link" else root.touch()
        config = OmegaConf.create({"trainer": {"default_local_dir": str(root)}})
        with pytest.raises(CannotWork, match=f"trainer.default_local_dir={root} .*\n  it is not a directory"):
            checkpoints.passes(config, None)


@pytest.mark.parametrize(
    ("batches", "steps", "epochs", "last"),
    [((32, 64), 50, 1, 75), ((64, 32), 20, 1, 80), ((32, 64), 150, 3, 225), ((32, 33), 1, 1, 97)],
)
def test_steps_of_a_run_that_resumes_with_another_batch_size(tmp_path, batches, steps, epochs, last):
    """Of 3200 prompts; what a checkpoint says is what the next run begins with."""
    first = checkpoints.Passes(checkpoints.Position(), batches[0], 3200, epochs)
    partial = Path(checkpoints.begin(str(tmp_path), steps, first))
    checkpoints.commit(str(partial))
    start = checkpoints.position(tmp_path / f"global_step_{steps}", batches[1], 3200)
    then = checkpoints.Passes(start, batches[1], 3200, epochs)
    assert then.steps == then.last(10**6) == last and then.last(60) == 60


@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_positions_are_those_of_a_loop_over_the_data(prompts, epochs, runs):
    """Brute force: each run takes batches of its own size from what is left, and stops after some steps."""
    step, epoch, consumed = 0, 0, 0
    start = checkpoints.Position()
    for batch, wanted in runs:
        batch = min(batch, prompts)
        passes = checkpoints.Passes(start, batch, prompts, epochs)
        first = epoch
        taken = []
        for nth in range(epoch, epochs):
            done = consumed if nth == epoch else 0
            taken += [(nth, end) for end in range(done + batch, prompts + 1, batch)]
        assert passes.steps == step + len(taken)
        assert passes.first_pass(step, step + 1) == first and passes.last(step) == step
        assert passes.first_pass(step, step) == passes.first_pass(step + 1, step) == sys.maxsize
        endless = replace(passes, endless=True)
        assert endless.last(10**6) == 10**6 and endless.first_pass(step, step + 1) == 0
        assert endless.first_pass(step, step) == sys.maxsize
        for nth, end in taken[:wanted]:
            step, epoch, consumed = step + 1, nth, end
            assert passes.after(step) == checkpoints.Position(step, epoch, consumed)
        start = passes.after(step)


def config(directory: Path, **trainer):
    from omegaconf import OmegaConf

    given = {"default_local_dir": str(directory), "resume_mode": "auto", "total_epochs": 2}
    given |= {"resume_from_path": None} | trainer
    actor = {"checkpoint": {"async_save": False}, "strategy": "fsdp2"}
    return OmegaConf.create(
        {"trainer": given, "algorithm": {"filter_groups": None}, "actor_rollout_ref": {"actor": actor}}
    )


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "megatron"])
def test_a_save_that_nobody_would_complete_is_refused(tmp_path, strategy):
    """verl leaves that to Megatron's workers, whatever trains."""
    given = config(tmp_path)
    given.actor_rollout_ref.actor.merge_with({"checkpoint": {"async_save": True}, "strategy": strategy})
    if strategy == "megatron":
        return checkpoints.passes(given, LOADER)
    with pytest.raises(CannotWork, match=f"async_save=True .*\n  {strategy} saves while the trainer waits"):
        checkpoints.passes(given, LOADER)


LOADER = SimpleNamespace(batch_size=8, sampler=range(24))


@pytest.mark.parametrize(
    ("trainer", "step"),
    [
        ({}, 4),
        ({"resume_mode": "disable"}, 0),
        ({"resume_mode": "resume_path", "resume_from_path": "{}/global_step_2/"}, 2),
    ],
)
def test_the_passes_of_a_run_are_those_from_its_checkpoint_on(tmp_path, capsys, trainer, step):
    of_four = checkpoints.Passes(checkpoints.Position(), 4, 24, 2)
    for saved in (2, 4):
        checkpoints.commit(checkpoints.begin(str(tmp_path), saved, of_four))
    trainer = {key: value.format(tmp_path) for key, value in trainer.items()}
    passes = checkpoints.passes(config(tmp_path, **trainer), LOADER)
    assert passes == checkpoints.Passes(checkpoints.Position(step, 0, 4 * step), 8, 24, 2)
    said = capsys.readouterr().out
    if step:
        rest = (24 - 4 * step) // 8
        assert f"after step {step}, {4 * step} of 24 prompts of pass 1 of 2 are consumed" in said
        assert said.strip().endswith(f"with 8 per step the data lasts until step {step + rest + 3}")
    else:
        assert not said


def test_data_with_fewer_prompts_than_a_pass_has_consumed_is_refused(tmp_path):
    save_with = checkpoints.Passes(checkpoints.Position(), 25, 50, 2)
    checkpoints.commit(checkpoints.begin(str(tmp_path), 1, save_with))
    with pytest.raises(CannotWork, match="25 prompts of this pass are consumed, and the data has 24"):
        checkpoints.passes(config(tmp_path), LOADER)
    checkpoints.passes(config(tmp_path), SimpleNamespace(batch_size=8, sampler=range(25)))
    filtered = config(tmp_path)
    filtered.algorithm.filter_groups = {"enable": True}
    assert checkpoints.passes(filtered, LOADER).endless


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("batches", "position"), [(2, (2, 0, 8)), (6, (6, 0, 24)), (8, (8, 1, 8))])
def test_the_position_of_a_checkpoint_of_verl_is_that_of_its_dataloader(tmp_path, workers, batches, position):
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(list(range(25)), batch_size=4, drop_last=True, num_workers=workers)
    left = batches
    while left:
        for _, _ in zip(range(left), loader, strict=False):
            left -= 1
    where = tmp_path / f"global_step_{batches}"
    where.mkdir()
    torch.save(loader.state_dict(), where / "data.pt")
    assert checkpoints.position(where, 9, 25) == checkpoints.Position(*position)
    torch.save(loader.state_dict() | {"passes": 0}, where / "data.pt")  # of DAPO: units, not batches
    assert checkpoints.position(where, 4, 25) == checkpoints.Position(*position)


@pytest.mark.parametrize(
    ("saved", "strategy", "ranks", "said"),
    [
        ("fsdp", "fsdp", 4, ""),
        ("fsdp", "fsdp2", 4, ""),
        ("fsdp", "fsdp2", 8, "FSDP on 4 dies saved it, this run trains with FSDP on 8 dies"),
        ("fsdp", "megatron", 4, "FSDP on 4 dies saved it, this run trains with Megatron"),
        ("megatron", "megatron", 8, ""),
        ("megatron", "fsdp", 8, "Megatron saved it, this run trains with FSDP on 8 dies"),
        ("", "fsdp", 8, ""),
    ],
)
def test_the_checkpoint_of_another_engine_is_refused(tmp_path, saved, strategy, ranks, said):
    actor = tmp_path / "actor"
    actor.mkdir()
    if saved == "fsdp":
        (actor / "fsdp_config.json").write_text('{"world_size": 4}')
    elif saved:
        (actor / "dist_ckpt").mkdir()
    assert checkpoints.other_engine(str(tmp_path), strategy, ranks) == said
    if said:
        with pytest.raises(CannotWork, match=f"{said}: train as it was saved"):
            checkpoints.check_engine(str(tmp_path), strategy, ranks)
    else:
        checkpoints.check_engine(str(tmp_path), strategy, ranks)


@pytest.mark.parametrize(("layouts", "found"), [(["2.1"], True), (["4.1", "4.2"], False), ([], False)])
def test_states_of_random_numbers_are_those_of_this_layout(tmp_path, monkeypatch, capsys, layouts, found):
    import torch

    from ascend_rl.weights import torch_dist
    from ascend_rl.weights.files import Place

    place = Place("__0_0.distcp", 0, 9)
    states = [(f"rng_state/shard_0.0_{layout}", place) for layout in layouts]
    (tmp_path / ".metadata").write_bytes(torch_dist.metadata({}, [], states))
    mpu = SimpleNamespace(
        get_pipeline_model_parallel_world_size=lambda: 2, get_tensor_model_parallel_world_size=lambda: 1
    )
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        assert checkpoints.has_rng_states(str(tmp_path), mpu) is found
        said = "the checkpoint is of PP4 TP1, this run of PP2 TP1" in capsys.readouterr().out
        assert said == (rank == 0 and "4.1" in layouts)


def test_a_save_of_the_same_step_begins_with_nothing_of_the_last_one(tmp_path):
    for _ in range(2):
        partial = Path(checkpoints.begin(str(tmp_path), 5))
        assert not list(partial.iterdir())
        (partial / "actor").mkdir()
    save(tmp_path, 0)
    checkpoints.begin(str(tmp_path), 0)
    for suffix in (checkpoints.PARTIAL, checkpoints.REPLACED):
        assert len(checkpoints.left_undone(tmp_path, suffix)) == 2 * (suffix == checkpoints.PARTIAL)
    (tmp_path / "global_step_0.replaced/actor").mkdir(parents=True)
    save(tmp_path, 0, content="n")  # in the way of the second rename
    assert found(tmp_path) == (0, "nn") and not checkpoints.left_undone(tmp_path, checkpoints.REPLACED)


@pytest.mark.parametrize(("world", "named"), [(9, "0, 1, 2, 3, 4, 5, 6, 7 of 9"), (10, "6, 7 ... of 10")])
def test_missing_ranks_are_named_up_to_eight(tmp_path, world, named):
    partial = Path(checkpoints.begin(str(tmp_path), 2))
    (partial / "actor").mkdir()
    (partial / f"actor/model_world_size_{world}_rank_{world - 1}.pt").touch()
    with pytest.raises(checkpoints.IncompleteCheckpoint, match=f"{named} is missing"):
        checkpoints.commit(str(partial))


def test_what_cannot_be_deleted_ends_no_save_and_no_start(tmp_path, monkeypatch):
    save(tmp_path, 1)
    save(tmp_path, 2)
    checkpoints.begin(str(tmp_path), 1)
    (tmp_path / "global_step_1.replaced").mkdir()

    def rmdir(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "rmdir", rmdir)
    save(tmp_path, 3, 1)
    assert found(tmp_path)[0] == 3


def test_data_is_on_the_disk_before_a_name_says_so(tmp_path, monkeypatch):
    """In order: the files, the rename and its directory, the tracker's content, its rename, its directory."""
    save(tmp_path, 1)
    partial = Path(checkpoints.begin(str(tmp_path), 2))
    for name in ("actor/model_world_size_1_rank_0.pt", "data.pt", "actor/huggingface/config.json"):
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_text("x")
    events = []
    for name, call in ((name, getattr(os, name)) for name in ("fsync", "rename", "replace")):

        def noted(what, *more, name=name, call=call):
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
            content = Path(path).read_text() if Path(path).is_file() else None
            events.append((name, os.path.relpath(path, tmp_path), content))
            return call(what, *more)

        monkeypatch.setattr(os, name, noted)
    checkpoints.commit(str(partial))
    inside = "global_step_2.partial"
    files = {f"{inside}/{path}" for path in ("actor/model_world_size_1_rank_0.pt", "data.pt")}
    assert {path for _, path, _ in events[:3]} == files | {f"{inside}/actor/huggingface/config.json"}
    assert events[3:] == [
        ("rename", inside, None),
        ("fsync", ".", None),
        ("fsync", f"{checkpoints.TRACKER}.new", "2"),
        ("replace", f"{checkpoints.TRACKER}.new", "2"),
        ("fsync", ".", None),
    ]

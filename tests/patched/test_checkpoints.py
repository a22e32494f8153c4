"""verl's own training loop saves, is killed while it does, and goes on, on the stage of training_stage.py."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest
from training_stage import FILTER, Stage, train

SAVING = ["trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=1", "trainer.val_before_train=False"]
KILLED = 9


def shards(path: str, complete: bool = True) -> None:
    Path(path).mkdir(parents=True, exist_ok=True)
    for rank in range(2 if complete else 1):
        Path(path, f"model_world_size_2_rank_{rank}.pt").write_text(path)


def run(folder: Path, monkeypatch, *overrides: str, die_at: int = 0, when: str = "") -> int:
    """`fit` in a process of its own, killed while it saves a step."""
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

    manager = BaseCheckpointManager.__new__(BaseCheckpointManager)  # what the workers do with old checkpoints
    manager.previous_saved_paths = []

    def save_checkpoint(self, path, remote, step, max_ckpt_to_keep=None):
        shards(path, complete=not (step == die_at and when == "workers write"))
        if step == die_at and when == "workers write":
            os._exit(KILLED)
        manager.register_checkpoint(path, max_ckpt_to_keep)
        if step == die_at and when == "the trainer writes":
            os._exit(KILLED)

    def load_checkpoint(self, path, **kwargs):
        assert len(list(Path(path).glob("model_world_size_2_rank_*.pt"))) == 2

    monkeypatch.setattr(Stage, "save_checkpoint", save_checkpoint)
    monkeypatch.setattr(Stage, "load_checkpoint", load_checkpoint)
    pid = os.fork()
    if not pid:
        status = 1
        try:
            events, _ = train(folder, *SAVING, *overrides, monkeypatch=monkeypatch)
            with (folder / "events").open("a") as file:
                file.write(f"{[event[:2] for event in events if event[0] == 'train']}\n")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def trained(folder: Path) -> list[tuple]:
    return eval((folder / "events").read_text().splitlines()[-1])


@pytest.mark.parametrize("overrides", [[], FILTER], ids=["grpo", "dapo"])
@pytest.mark.parametrize("when", ["workers write", "the trainer writes"])
def test_killed_while_saving(tmp_path, monkeypatch, when, overrides):
    """With one checkpoint to keep: the next start goes on after step 2, with the same batches."""
    steps = [*overrides, "trainer.total_training_steps=6"]
    assert run(tmp_path / "whole", monkeypatch, *steps) == 0
    whole = trained(tmp_path / "whole")
    assert len(whole) == 6
    killed = tmp_path / "killed"
    assert run(killed, monkeypatch, *steps, die_at=4, when=when) == KILLED
    assert run(killed, monkeypatch, *steps) == 0
    assert len(trained(killed)) == 4
    if not overrides:  # the stage's rewards for dapo depend on how often it was asked
        assert trained(killed) == whole[2:]
    assert os.listdir(killed / "checkpoints") and sorted(
        path.name for path in (killed / "checkpoints").iterdir()
    ) == ["global_step_6", "latest_checkpointed_iteration.txt"]


def test_an_empty_tracker(tmp_path, monkeypatch):
    """As a kill leaves it that comes while verl writes it in place."""
    assert run(tmp_path, monkeypatch, "trainer.total_training_steps=2") == 0
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("")
    assert run(tmp_path, monkeypatch, "trainer.total_training_steps=3") == 0
    assert len(trained(tmp_path)) == 1


@pytest.mark.parametrize("stop", [8, 6, 12])
def test_a_run_of_several_passes_goes_on_wherever_it_was_cut(tmp_path, monkeypatch, stop):
    """A pass has six batches: in the second one, and exactly between two."""
    options = ["trainer.total_epochs=3", "trainer.test_freq=-1", "trainer.total_training_steps=null"]
    assert run(tmp_path / "whole", monkeypatch, *options) == 0
    whole = trained(tmp_path / "whole")
    assert len(whole) == 18 and len({str(whole[i : i + 6]) for i in (0, 6, 12)}) == 3
    cut = tmp_path / "cut"
    killed = {"die_at": min(2 * stop, 18), "when": "workers write"}
    assert run(cut, monkeypatch, *options, f"trainer.save_freq={stop}", **killed) == KILLED
    assert run(cut, monkeypatch, *options) == 0
    assert trained(cut) == whole[stop:]


def test_a_run_that_is_done_trains_nothing_more(tmp_path, monkeypatch):
    for steps in (2, 0):
        assert run(tmp_path, monkeypatch, "trainer.total_training_steps=2") == 0
        assert len(trained(tmp_path)) == steps


@pytest.mark.parametrize("resume", [[], ["trainer.resume_mode=resume_path"]], ids=["auto", "path"])
def test_a_checkpoint_of_other_ranks_is_refused_before_the_workers_load_it(
    tmp_path, monkeypatch, capfd, resume
):
    """Verl's workers would each end with "No such file or directory"."""
    assert run(tmp_path, monkeypatch, "trainer.total_training_steps=2") == 0
    saved = tmp_path / "checkpoints/global_step_2"
    more = [*resume, f"trainer.resume_from_path={saved}", "trainer.total_training_steps=3"]
    more += ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
    (saved / "actor/fsdp_config.json").write_text('{"FSDP_version": 1, "world_size": 4}')
    assert run(tmp_path, monkeypatch, *more) == 1
    said = capfd.readouterr().err
    assert f"resuming {saved} cannot work here:" in said
    assert "FSDP on 4 dies saved it, this run trains with FSDP on 2 dies" in said
    (saved / "actor/fsdp_config.json").write_text('{"FSDP_version": 1, "world_size": 2}')
    assert run(tmp_path, monkeypatch, *more) == 0

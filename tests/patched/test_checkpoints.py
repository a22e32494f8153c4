"""verl's own training loop saves, is killed meanwhile, and continues, on the stage of training_stage.py."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest
import training_stage
from training_stage import FILTER, OTHER_BATCH, PROMPTS, Stage, train

from ascend_rl.weights import checkpoints

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
    """With one checkpoint to keep: the next start continues after step 2, with the same batches."""
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
def test_a_run_of_several_passes_resumes_wherever_it_was_cut(tmp_path, monkeypatch, stop):
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


def prompts(events: list[tuple]) -> list[list[int]]:
    return [event[1] for event in events]


@pytest.mark.parametrize(
    ("case", "option"),
    [
        *((case, "data.shuffle=True") for case in OTHER_BATCH),
        ("larger", "data.shuffle=False"),
        ("smaller", "data.dataloader_num_workers=2"),
    ],
)
def test_a_run_resumes_with_another_batch_size(tmp_path, monkeypatch, case, option):
    """Each prompt of a pass that is left is trained on, once, and the last step is saved."""
    options = ["trainer.test_freq=-1", "trainer.total_training_steps=null", "trainer.save_freq=1", option]
    (batch, epochs, steps), (other, all_epochs, more) = OTHER_BATCH[case]
    first = [*options, f"data.train_batch_size={batch}", f"trainer.total_epochs={epochs}"]
    cut = tmp_path / "cut"
    assert run(cut, monkeypatch, *first, die_at=steps + 1, when="workers write") in (KILLED, 0)
    then = [*options, f"data.train_batch_size={other}", f"trainer.total_epochs={all_epochs}"]
    assert run(cut, monkeypatch, *then) == 0
    after = prompts(trained(cut))
    assert [len(batch) for batch in after] == [other] * more
    assert (cut / f"checkpoints/global_step_{steps + more}").is_dir()
    assert (cut / f"checkpoints/{checkpoints.TRACKER}").read_text() == str(steps + more)
    assert run(tmp_path / "whole", monkeypatch, *first[:-1], f"trainer.total_epochs={all_epochs}") == 0
    order = [prompt for batch in prompts(trained(tmp_path / "whole")) for prompt in batch]
    left = PROMPTS - steps * batch % PROMPTS if steps * batch % PROMPTS else 0
    in_this_pass = order[steps * batch :][: left // other * other]
    assert [prompt for batch in after for prompt in batch][: len(in_this_pass)] == in_this_pass
    if case == "larger":
        assert run(cut, monkeypatch, *then) == 0 and trained(cut) == []


def test_a_run_resumes_with_one_batch_size_after_another(tmp_path, monkeypatch):
    """Which one saved a step does not matter: 8 + 4 + 4 + 8 prompts."""
    options = ["trainer.test_freq=-1", "trainer.total_training_steps=null", "trainer.save_freq=1"]
    options += ["trainer.total_epochs=1"]
    for batch, die_at in ((8, 2), (4, 4), (8, 0)):
        more = [*options, f"data.train_batch_size={batch}"]
        status = run(tmp_path, monkeypatch, *more, die_at=die_at, when="workers write")
        assert status == (KILLED if die_at else 0)
    assert [len(batch) for batch in prompts(trained(tmp_path))] == [8]
    assert (tmp_path / "checkpoints/global_step_4").is_dir()


def test_a_run_ends_with_its_data_and_saves(tmp_path, monkeypatch):
    """More steps asked for than there are prompts: the last step is known, and saved."""
    options = ["trainer.test_freq=-1", "trainer.total_training_steps=100", "trainer.save_freq=4"]
    options += ["trainer.total_epochs=1"]
    first = [*options, "data.train_batch_size=8", "trainer.save_freq=1"]
    assert run(tmp_path, monkeypatch, *first, die_at=2, when="workers write") == KILLED
    assert run(tmp_path, monkeypatch, *options, "data.train_batch_size=4") == 0
    assert len(trained(tmp_path)) == 4 and (tmp_path / "checkpoints/global_step_5").is_dir()


def test_dapo_resumes_with_another_batch_size(tmp_path, monkeypatch):
    """Its steps draw as many prompts as they need; what counts are those that a step trains on."""
    options = [*FILTER, "trainer.test_freq=-1", "trainer.total_training_steps=null", "trainer.save_freq=1"]
    options += ["trainer.total_epochs=2"]
    first, then = ([f"data.train_batch_size={n}", f"+data.gen_batch_size={2 * n}"] for n in (4, 2))
    assert run(tmp_path, monkeypatch, *options, *first, die_at=3, when="workers write") == KILLED
    assert run(tmp_path, monkeypatch, *options, *then) == 0
    assert [len(batch) for batch in prompts(trained(tmp_path))] == [2] * 8
    assert (tmp_path / "checkpoints/global_step_10").is_dir()


def test_a_checkpoint_that_does_not_say_how_many_prompts_it_consumed(tmp_path, monkeypatch):
    """As verl's are; its dataloader says how many there were in how many batches of the pass."""
    options = ["trainer.test_freq=-1", "trainer.total_training_steps=null", "trainer.save_freq=1"]
    options += ["trainer.total_epochs=2"]
    assert run(tmp_path, monkeypatch, *options, die_at=9, when="workers write") == KILLED
    (tmp_path / "checkpoints/global_step_8" / checkpoints.POSITION).unlink()
    assert run(tmp_path, monkeypatch, *options, "data.train_batch_size=8") == 0
    assert [len(batch) for batch in prompts(trained(tmp_path))] == [8] * 2


def test_fewer_prompts_than_a_pass_consumed_are_refused(tmp_path, monkeypatch, capfd):
    assert run(tmp_path, monkeypatch, "trainer.total_training_steps=4") == 0
    monkeypatch.setattr(training_stage, "PROMPTS", 12)
    assert run(tmp_path, monkeypatch, "trainer.total_training_steps=6") == 1
    assert "16 prompts of this pass are consumed, and the data has 12" in capfd.readouterr().err


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
    assert f"resuming {saved} is incompatible with this configuration:" in said
    assert "FSDP on 4 dies saved it, this run trains with FSDP on 2 dies" in said
    (saved / "actor/fsdp_config.json").write_text('{"FSDP_version": 1, "world_size": 2}')
    assert run(tmp_path, monkeypatch, *more) == 0

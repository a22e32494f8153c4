"""verl's own training loop ends in time with its last step saved, on the stage of training_stage.py."""

from __future__ import annotations

import time

import pytest
from training_stage import FILTER, Stage, train

from ascend_rl.process import progress, save_by
from ascend_rl.weights import checkpoints

STEP_S = 0.5
SAVING = ["trainer.save_freq=2", "trainer.val_before_train=False", "trainer.test_freq=-1"]


def trained(events: list) -> int:
    return sum(event[0] == "train" for event in events)


@pytest.fixture
def slow(monkeypatch, tmp_path):
    """Steps of STEP_S; a function sets the limit."""
    update = Stage.update_actor

    def update_actor(self, batch):
        time.sleep(STEP_S)
        return update(self, batch)

    monkeypatch.setattr(Stage, "update_actor", update_actor)
    monkeypatch.setenv(progress.FILE, str(tmp_path / "progress"))
    return lambda left_s, stop=False: save_by.write(str(tmp_path / "progress"), time.time() + left_s, stop)


@pytest.mark.parametrize("more", [[], FILTER], ids=["ppo", "dapo"])
def test_a_step_that_is_not_due_is_saved_and_the_next_start_continues(slow, tmp_path, monkeypatch, more):
    slow(1000, stop=True)
    events, rows = train(tmp_path, *SAVING, *more, monkeypatch=monkeypatch)
    assert trained(events) == 1 and len(rows) == 1 and "timing_s/save_checkpoint" in rows[0]
    assert checkpoints.newest(tmp_path / "checkpoints").name == "global_step_1"
    slow(1000)
    (tmp_path / "metrics.jsonl").unlink()
    events, rows = train(tmp_path, *SAVING, *more, monkeypatch=monkeypatch)
    assert trained(events) == 4
    assert [row["training/global_step"] for row in rows] == [2, 3, 4, 5]
    assert [row["training/global_step"] for row in rows if "timing_s/save_checkpoint" in row] == [2, 4, 5]


def test_the_run_ends_before_the_limit(slow, tmp_path, monkeypatch):
    """Five steps would take longer: it ends after one of the first, saved."""
    begun = time.time()
    slow(5 * STEP_S)
    events, rows = train(tmp_path, *SAVING, monkeypatch=monkeypatch)
    last = trained(events)
    assert 1 <= last < 5 and len(rows) == last
    assert checkpoints.newest(tmp_path / "checkpoints").name == f"global_step_{last}"
    assert time.time() - begun > STEP_S


def test_without_saves_a_limit_changes_nothing(slow, tmp_path, monkeypatch):
    slow(0.1, stop=True)
    events, _ = train(tmp_path, "trainer.save_freq=-1", monkeypatch=monkeypatch)
    assert trained(events) == 5 and not (tmp_path / "checkpoints").exists()

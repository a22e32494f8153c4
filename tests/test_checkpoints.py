"""ascend_rl/weights/checkpoints.py: killed anywhere, the next start finds the last complete checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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


def test_a_run_that_goes_on_from_an_earlier_step_keeps_the_later_ones(tmp_path):
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

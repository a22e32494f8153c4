"""The decision at the end of a step against every other; how the limit travels; what SAVE_BY may be."""

from __future__ import annotations

import functools
import math
import os
import random
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from ascend_rl.launch import time_limit
from ascend_rl.launch.rendezvous import Head, Worker
from ascend_rl.launch.time_limit import TimeLimit, moment
from ascend_rl.process import progress, save_by
from ascend_rl.process.save_by import decide
from ascend_rl.settings.switch import CannotWork
from ascend_rl.weights import checkpoints


def lives(limit: float, steps: list[float], save: float, every: int, stops: set[int]) -> tuple[int, int]:
    """(last step trained, last step saved in time) of a run that saves each ``every`` steps, saves also and
    ends after those of ``stops``, and is killed at the limit."""
    now, saved = 0.0, 0
    for step, takes in enumerate(steps, 1):
        now += takes
        last = step == len(steps)
        if now > limit:
            return step - 1, saved
        if step % every == 0 or step in stops or last:
            now += save
            if now > limit:
                return step, saved
            saved = step
        if step in stops:
            break
    return step, saved


def decided(limit: float, steps: list[float], save: float, every: int, seen: float | None) -> set[int]:
    """After which step `decide` ends the run with a save, if at all; it sees the longest step and save."""
    now = 0.0
    for step, takes in enumerate(steps[:-1], 1):
        now += takes
        due = step % every == 0
        ends, saves = decide(limit - now, max(steps[:step]), seen, due)
        if ends:
            return {step} if saves else set()
        if due:
            now, seen = now + save, save
    return set()


def test_no_other_decision_saves_more():
    """Where predictions are right: of all steps after which a run may end, the decision's is the one that
    saves the most, and a run that fits goes to its end."""
    rng, ended, whole = random.Random(0), 0, 0
    for _ in range(3000):
        count, every = rng.randint(2, 12), rng.randint(1, 5)
        step, save = rng.uniform(1, 10), rng.uniform(0.1, 12)
        steps, limit = [step] * count, rng.uniform(0, 130)
        best = max(lives(limit, steps, save, every, {n} if n else set())[1] for n in range(count + 1))
        stops = decided(limit, steps, save, every, save)
        assert lives(limit, steps, save, every, stops)[1] == best, (limit, step, save, every, count, stops)
        ended += bool(stops)
        if lives(limit, steps, save, every, set())[1] == count:
            assert not stops
            whole += 1
    assert ended > 200 and whole > 200


def test_steps_that_vary_lose_at_most_what_is_longer_than_seen():
    """If no step is longer than the longest before it, the limit never comes within a step or a save."""
    rng, ended = random.Random(1), 0
    for _ in range(3000):
        steps = [10.0] + [rng.uniform(1, 10) for _ in range(rng.randint(2, 12))]
        save, limit = rng.uniform(0.1, 10), rng.uniform(15, 150)
        stops = decided(limit, steps, save, 1, None)
        last, saved = lives(limit, steps, save, 1, stops)
        if stops or last < len(steps):
            assert saved == last or limit < 10 + save, (limit, steps, save, stops)
            ended += 1
    assert ended > 500


def test_a_save_that_was_not_seen_counts_like_a_step_of_at_most_ten_minutes():
    assert decide(100, 50, None, due=False) == (False, False)
    assert decide(99, 50, None, due=False) == (True, True)
    assert decide(8599, 8000, None, due=False) == (True, True)
    assert decide(8601, 8000, None, due=False) == (False, False)
    assert decide(1, 50, None, due=False) == (True, True)  # it may fit: what is cut counts for nothing
    assert decide(1e9, 50, 5, due=False, stop=True) == (True, True)


def test_the_trainer_sees_steps_saves_and_a_limit_that_moves(monkeypatch, tmp_path, capsys):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setenv(progress.FILE, str(tmp_path / "progress"))
    run = save_by.SaveBy(lambda step: 0.0)
    for step, takes in enumerate((50, 10, 12), 1):  # the first one compiles
        now[0] += takes
        assert not run.ends(step, due=False) and not run.over
        with run.saving():
            now[0] += 5
    assert run.steps == [50, 10, 12] and run.saves == [5, 5, 5]
    save_by.write(str(tmp_path / "progress"), now[0] + 10 + 13.2 + 5.5 + 0.1, False)
    now[0] += 10
    assert not run.ends(4, due=False)
    save_by.write(str(tmp_path / "progress"), now[0] + 13.2 + 5.4, False)
    assert run.ends(5, due=False) and run.over
    assert "19 s are left, and the next step (13 s) would not fit: the run saves after step 5" in (
        capsys.readouterr().out
    )
    save_by.write(str(tmp_path / "progress"), now[0] + 5.4, True)
    assert not run.ends(6, due=False) and run.over
    assert "it was asked to stop: the run ends without a save, which would not fit" in capsys.readouterr().out


def test_what_is_written_while_the_trainer_trains_on_counts(monkeypatch, tmp_path):
    """The trainer waits for 5 s of a save; its last shard comes 300 s after the beginning."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setenv(progress.FILE, str(tmp_path / "progress"))
    root, passes = tmp_path / "checkpoints", checkpoints.Passes(checkpoints.Position(), 1, 9, 1)
    run = save_by.SaveBy(functools.partial(checkpoints.written_s, str(root)))

    def written(path: Path, at_s: float) -> None:
        path.touch()
        os.utime(path, (at_s, at_s))

    def saves(left_s: float) -> bool:
        """At the end of another step of 100 s, of which it expects 110."""
        now[0] += 100
        save_by.write(str(tmp_path / "progress"), now[0] + left_s, False)
        return run.ends(1 + bool(run.saves), due=False)

    assert not saves(1e6)
    with run.saving():
        partial, begun = Path(checkpoints.begin(str(root), 1, passes)), now[0]
        written(partial / checkpoints.POSITION, begun)
        now[0] += 5
    assert not saves(110 + 5.5 + 1) and saves(110 + 5.5 - 1)
    for number, took in enumerate((2, 200, 300)):
        written(partial / f"__{number}_0.distcp", begun + took)
        cost = 1.1 * max(took, 5)
        assert not saves(110 + cost + 1) and saves(110 + cost - 1)
    checkpoints.commit(str(partial))
    assert not saves(110 + 330 + 1) and saves(110 + 330 - 1)


def test_without_a_limit_nothing_is_over(monkeypatch):
    monkeypatch.delenv(progress.FILE, raising=False)
    run = save_by.SaveBy(lambda step: 0.0)
    assert save_by.told() == (math.inf, False) and not run.ends(1, due=True) and not run.over


@pytest.mark.parametrize("text", ["soon", "2026-13-01", "-5", "nan", "1 h", "@x"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(CannotWork, match="SAVE_BY"):
        moment(text, time.time())


def test_times():
    now = datetime(2026, 11, 27, 12).timestamp()
    assert moment("2026-11-27T18:00", now) == now + 6 * 3600
    assert moment("2026-11-27 18:00+00:00", 0) == datetime.fromisoformat("2026-11-27T18:00Z").timestamp()
    with pytest.raises(CannotWork, match="2026-11-27T11:00 is over"):
        moment("2026-11-27T11:00", now)


def test_a_worker_that_is_asked_to_stop_asks_the_head_which_tells_all(tmp_path, monkeypatch):
    """Over real sockets; each node's processes find the limit beside their signs of progress."""
    me = {"name": "n", "rank": "", "has": "", "must_equal": {}}
    head = Head("127.0.0.1", 0, "t" * 16, me | {"address": "head"}, 3, 30)
    port = head.listener.getsockname()[1]
    workers = [Worker("127.0.0.1", port, "t" * 16, me | {"address": str(i)}, 30) for i in range(2)]
    import threading

    threads = [threading.Thread(target=w.join, args=(60, lambda text: None)) for w in workers]
    for thread in threads:
        thread.start()
    head.gather([], 60, lambda text: None)
    for thread in threads:
        thread.join()
    limits = [TimeLimit(time.time() + 1000, 100), *(TimeLimit(grace_s=g, head=False) for g in (100, 0))]
    for i, (side, limit) in enumerate(zip([head, *workers], limits, strict=True)):
        side.share(limit)
        if i:
            limit.attach(str(tmp_path / str(i)))
    limits[0].attach(str(tmp_path / "0"))

    def agreed(by: float, stop: bool) -> bool:
        found = []
        for i in range(3):
            monkeypatch.setenv(progress.FILE, str(tmp_path / str(i)))
            found.append(save_by.told())
        return all(abs(its - by) < 5 and its_stop is stop for its, its_stop in found)

    def until(by: float, stop: bool) -> None:
        end = time.monotonic() + 60
        while not agreed(by, stop):
            assert time.monotonic() < end
            time.sleep(0.05)

    until(limits[0].by, False)
    assert limits[1].term()
    until(time.time() + 100, True)
    assert not limits[1].term()  # the second time it stops at once
    assert not any(limit.passed() for limit in limits)
    assert not limits[2].term()  # without a grace time
    monkeypatch.setattr(time_limit, "WORKERS_S", 0)
    for limit in limits:
        limit.by = time.time() - 1
    assert [limit.passed() for limit in limits] == [True, True, False]
    head.finish(0, "", 0)
    for worker in workers:
        worker.finish(0, "")


# As a trainer does it; $1: seconds of a step.
TRAINER = """
import json, os, sys, time
from ascend_rl.process.save_by import SaveBy
takes, every = float(sys.argv[1]), int(sys.argv[2])
run = SaveBy(lambda step: 0.0)
print("Training Progress:   0%|  | 0/50 [00:00<00:00]", flush=True)
for step in range(1, 51):
    time.sleep(takes)
    due = step % every == 0
    row = {"critic/rewards/mean": 0.5}
    if run.ends(step, due) or due:
        with run.saving():
            time.sleep(0.1)
        row["timing_s/save_checkpoint"] = 0.1
    with open(os.environ["METRICS"], "a") as file:
        print(json.dumps({"step": step, "data": row}), file=file)
    print(f"Training Progress:   1%|# | {step}/50 [00:05<02:00]", flush=True)
    if run.over:
        break
"""
SUPERVISED = """
import os, sys, time
from pathlib import Path
from ascend_rl.launch.supervise import supervise
from ascend_rl.launch.time_limit import TimeLimit
by, grace_s, place, *command = sys.argv[1:]
limit = TimeLimit(time.time() + float(by), float(grace_s))
sys.exit(supervise(command, Path(place, "log"), Path(place, "metrics.jsonl"), limit=limit))
"""


def start(tmp_path, by: float, grace_s: float, takes: float, every: int) -> subprocess.Popen:
    command = [sys.executable, "-c", TRAINER, str(takes), str(every)]
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISED, str(by), str(grace_s), str(tmp_path), *command],
        env=os.environ | {"METRICS": str(tmp_path / "metrics.jsonl")},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("by", "takes", "every", "code", "said"),
    [
        (20, 3, 100, 75, "the time limit ended it; saved at step "),
        (10, 7, 1, 75, "the time limit ended it; saved at step 1: the same command resumes."),
        (8, 60, 1, 124, "ERROR: the time limit, in step 1 ended it, and this start has saved no step."),
    ],
)
def test_the_launcher_ends_a_run_at_its_limit(tmp_path, by, takes, every, code, said):
    process = start(tmp_path, by, 0, takes, every)
    text = process.communicate(timeout=300)[1]
    assert process.returncode == code and said in text, text
    assert ("ERROR" in text) == (code == 124)


def test_sigterm_leaves_the_grace_time_and_a_second_one_does_not(tmp_path):
    """The first makes the trainer save its step and end; then the grace time ends a step that is too long."""
    for name, takes, terms, code, said in (
        ("a", 1, 1, 75, "; saved at step "),
        ("b", 60, 1, 124, "in step 1 ended it"),
        ("c", 60, 2, 143, "stopped by SIGTERM"),
    ):
        (place := tmp_path / name).mkdir()
        process = start(place, 1e6, 8 if name == "b" else 100, takes, 100)
        end = time.monotonic() + 100
        while "Training Progress" not in ((place / "log").read_text() if (place / "log").exists() else ""):
            assert time.monotonic() < end
            time.sleep(0.1)
        for _ in range(terms):
            process.send_signal(signal.SIGTERM)
            time.sleep(1)
        text = process.communicate(timeout=300)[1]
        assert process.returncode == code and said in text, (name, text)

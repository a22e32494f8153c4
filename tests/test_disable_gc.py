"""Collections between the steps of an engine, seen through gc's own callbacks."""

from __future__ import annotations

import gc
import time

import pytest

from ascend_rl.host import disable_gc
from ascend_rl.settings.switch import CannotWork


@pytest.fixture
def collected(monkeypatch):
    """Generations in the order in which they were collected, each with whether a step was running."""
    monkeypatch.setenv("ROLLOUT_DISABLE_GC", "1")
    found, thresholds = [], gc.get_threshold()

    def watch(phase, info):
        if phase == "start":
            found.append((info["generation"], Engine.inside))

    gc.collect()
    gc.callbacks.append(watch)
    yield found
    gc.callbacks.remove(watch)
    gc.enable()
    gc.set_threshold(*thresholds)


class Engine:
    """An engine whose step allocates."""

    inside = False

    def __init__(self, error=None, objects=2000):
        self.error, self.objects = error, objects

    @disable_gc.collect_between
    def step(self):
        """The step."""
        Engine.inside = True
        try:
            self.enabled = gc.isenabled()
            self.made = [[i] for i in range(self.objects)]
            if self.error:
                raise self.error
            return "executed"
        finally:
            Engine.inside = False


def test_collection_is_after_every_step_and_not_in_it(collected, counts):
    engine, thresholds = Engine(), gc.get_threshold()
    for _ in range(5):
        del collected[:]
        assert engine.step() == "executed" and not engine.enabled
        assert collected and not any(inside for _, inside in collected)
        assert gc.isenabled() and gc.get_threshold() == thresholds
    assert engine.step.__doc__ == "The step."
    assert counts().keys() == {"gc_between"} and counts()["gc_between"] >= 5


def test_even_a_step_that_allocates_little_is_followed_by_a_young_collection(collected):
    Engine(objects=1).step()
    assert collected[0][0] == 0


@pytest.mark.parametrize("error", [RuntimeError("model"), SystemExit(), KeyboardInterrupt()], ids=repr)
def test_the_collector_is_on_again_after_an_error(collected, error):
    engine, thresholds = Engine(error), gc.get_threshold()
    with pytest.raises(type(error)):
        engine.step()
    assert not engine.enabled and gc.isenabled() and gc.get_threshold() == thresholds


def test_what_was_off_stays_off(collected):
    gc.disable()
    assert Engine().step() == "executed" and not gc.isenabled() and not collected


@pytest.mark.parametrize("value", ["0", "", "false"])
def test_switched_off_python_collects_in_the_step(collected, monkeypatch, counts, value):
    monkeypatch.setenv("ROLLOUT_DISABLE_GC", value)
    engine = Engine()
    assert engine.step() == "executed" and engine.enabled and "_collector" not in vars(engine)
    within = [inside for _, inside in collected].count(True)
    assert within and counts() == {"gc_within": within}


def test_a_value_that_is_not_a_switch_is_refused(monkeypatch):
    monkeypatch.setenv("ROLLOUT_DISABLE_GC", "often")
    with pytest.raises(CannotWork, match="ROLLOUT_DISABLE_GC=often"):
        Engine().step()


class Counts:
    """gc with counts as they are told, which notes the thresholds while it is on."""

    def __init__(self, oldest):
        self.oldest, self.fulls, self.thresholds, self.seen = oldest, 0, (700, 11, 10), []

    def get_threshold(self):
        return self.thresholds

    def set_threshold(self, *thresholds):
        self.thresholds = thresholds

    def get_count(self):
        return 5, 3, self.oldest

    def get_stats(self):
        return [{"collections": 0}, {"collections": 0}, {"collections": self.fulls}]

    def enable(self):
        self.seen.append(self.thresholds)
        if self.thresholds[2] < self.oldest:
            time.sleep(0.02)
            self.fulls, self.oldest = self.fulls + 1, 0


def test_full_collections_are_paid_for_by_steps_unless_overdue(monkeypatch):
    """What one took is owed; steps pay SHARE of their time; ten times the threshold is overdue."""
    counts, collector = Counts(oldest=11), disable_gc.Collector()
    monkeypatch.setattr(disable_gc, "gc", counts)
    collector.between_steps(0.001)  # the first is free
    assert counts.fulls == 1 and 0.02 <= collector.full_s < 60 and collector.credit_s < 0
    assert counts.seen == [(1, 11, 10)] and counts.thresholds == (700, 11, 10)

    counts.oldest = 100  # not more than ten times the threshold
    collector.between_steps(0.001)
    assert counts.fulls == 1 and counts.seen[-1] == (1, 11, disable_gc.NEVER)

    owed = collector.full_s - collector.credit_s
    collector.between_steps(0.99 * owed / disable_gc.SHARE)
    assert counts.fulls == 1
    collector.between_steps(0.02 * owed / disable_gc.SHARE)
    assert counts.fulls == 2

    counts.oldest = 101
    collector.between_steps(0.0)
    assert counts.fulls == 3 and counts.thresholds == (700, 11, 10)


def test_the_first_full_collection_is_free(monkeypatch):
    counts = Counts(oldest=11)
    monkeypatch.setattr(disable_gc, "gc", counts)
    disable_gc.Collector().between_steps(0.0)
    assert counts.fulls == 1


def test_a_step_pays_for_no_more_than_its_time(collected):
    engine, begin = Engine(), time.perf_counter()
    engine.step()
    assert engine._collector.credit_s <= disable_gc.SHARE * (time.perf_counter() - begin)


def test_python_takes_the_threshold_that_no_count_reaches(collected):
    gc.set_threshold(1, 1, disable_gc.NEVER)  # the fixture sets it back
    assert gc.get_threshold()[2] == disable_gc.NEVER > 10**9


def test_credit_is_not_saved_up_for_several_full_collections(monkeypatch):
    counts, collector = Counts(oldest=0), disable_gc.Collector()
    monkeypatch.setattr(disable_gc, "gc", counts)
    collector.between_steps(1000.0)
    counts.oldest = 11
    collector.between_steps(0.0)
    assert counts.fulls == 1 and collector.credit_s <= 0


def test_a_threshold_of_0_means_never_and_stays(monkeypatch):
    counts, collector = Counts(oldest=0), disable_gc.Collector()
    counts.thresholds = (0, 11, 10)
    monkeypatch.setattr(disable_gc, "gc", counts)
    collector.between_steps(0.001)
    assert counts.seen == [(0, 11, 10)]


def test_a_worker_collects_after_the_last_call_of_a_step_only(collected, counts):
    """execute_model without output continues in sample_tokens; with output it is the last, as are others."""
    calls = [("execute_model", None), ("sample_tokens", 1), ("execute_model", 1), (b"any", None)]
    try:
        collector = disable_gc.CallCollector()
        frozen, times = gc.get_freeze_count(), []
        assert frozen > 0 and not gc.isenabled()
        for call in calls:
            collected.clear()
            Engine.allocated = [[] for _ in range(2000)]
            assert collected == []
            collector.after(*call)
            times.append(len(collected))
            assert not gc.isenabled()
        assert times[0] == 0 and min(times[1:]) >= 1 and counts() == {"gc_between": sum(times)}
        collector.after("compile_or_warm_up_model", 1.0)
        assert gc.get_freeze_count() > frozen  # what the start has left
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("switch", "was_on"), [("0", True), ("1", False)])
def test_a_worker_leaves_collection_as_it_is_without_the_switch_or_when_it_is_off(
    collected, counts, monkeypatch, switch, was_on
):
    monkeypatch.setenv("ROLLOUT_DISABLE_GC", switch)
    if not was_on:
        gc.disable()
    collected.clear()
    collector = disable_gc.CallCollector()
    collector.after("compile_or_warm_up_model", 1.0)
    collector.after("sample_tokens", 1)
    assert gc.isenabled() == was_on and collected == [] and not counts()
    gc.collect()
    collector.after("execute_model", None)  # the step continues
    assert not counts()
    collector.after("sample_tokens", 1)
    gc.collect()
    collector.after("wake_up", None)  # not a step
    assert counts() == {"gc_within": 1}

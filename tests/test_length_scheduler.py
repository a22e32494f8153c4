"""Invariants of the scheduler by length, against a profile of the KV computed step by step."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_rl.rollout.known_lengths import KEY, SCHEDULER, known_of, moved, schedules, with_lengths
from ascend_rl.rollout.length_scheduler import MARGIN, MOST_MARGIN, Lengths, LengthScheduler, Request
from ascend_rl.rollout.prompt_memory import PromptMemory

MOST = 4000
LONG = {"long": 1000, "short": 100}


def requests(draw_from, prefix: str, done: int = 0) -> list[Request]:
    return [Request(f"{prefix}{n}", prompt, min(done, MOST - 1), MOST) for n, prompt in enumerate(draw_from)]


def profile(scheduler: LengthScheduler, chosen: list[Request], steps: np.ndarray):
    """Mean and variance of the KV of requests in so many steps, if all run from now on."""
    mean = variance = np.zeros(len(steps))
    for one in chosen:
        middle, deviation = scheduler.lengths.guess(one.prompt, one.most)
        power = math.pi / math.sqrt(3) / deviation
        alive = 1 + (one.done / math.exp(middle)) ** power
        alive = alive / (1 + ((one.done + steps) / math.exp(middle)) ** power)
        alive = alive * (one.done + steps < one.most)
        held = one.prompt_tokens + one.done + steps
        mean = mean + alive * held
        variance = variance + alive * np.maximum(1 - alive, 0) * held**2
    return mean, variance


@given(
    st.lists(st.integers(1, 300), max_size=6),
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.lists(st.integers(300, 3000), min_size=12, max_size=12),
    st.integers(3000, 20000),
    st.integers(0, 12),
)
def test_what_is_admitted_fits_at_every_step(held, queued, lengths, capacity, places):
    scheduler = LengthScheduler(capacity)
    running, waiting = requests(held, "r", done=100), requests(queued, "w")
    for one, tokens in zip([*running, *waiting], [*lengths, *lengths], strict=False):
        scheduler.expect(one.prompt, [tokens, tokens])
    order, admitted = scheduler.choose(running, waiting, places)
    assert sorted(order) == list(range(len(waiting))) and admitted <= min(places, len(waiting))
    if not running and places:
        assert admitted
    rest = [scheduler.lengths.guess(waiting[i].prompt, MOST)[0] for i in order[admitted:]]
    chosen = [waiting[i] for i in order[:admitted]]
    if scheduler.lengths.alike():
        assert order == list(range(len(waiting))) and admitted == min(places, len(waiting))
        return
    if scheduler.lent or not admitted or len(running) + admitted < 2:
        return
    assert rest == pytest.approx(sorted(rest, reverse=True))
    mean, variance = profile(scheduler, running + chosen, np.arange(0, MOST, 5))
    # The scheduler looks at one point of the curve in 100 steps; no response here ends within so few.
    assert (mean + scheduler.margin * np.sqrt(variance)).max() <= 1.02 * capacity


def knowing(capacity: int, **lengths: int) -> LengthScheduler:
    scheduler = LengthScheduler(capacity)
    for prompt, tokens in lengths.items():
        for _ in range(50):
            scheduler.ended(prompt, tokens)
    return scheduler


def test_the_longest_goes_first_and_shorter_ones_fill_what_is_free_before_it():
    known = {"running": 2000, "long": 1900, "short": 150, "middle": 1200}
    running = [Request("running", 10, 1000, MOST)]
    waiting = [Request(prompt, 10, 0, MOST) for prompt in ("short", "middle", "long")]
    # When the one that runs ends, in 1000 steps, it has 2010 tokens, and the long one 1010.
    assert knowing(4500, **known).choose(running, waiting, 1) == ([2, 1, 0], 1)
    # Where that is too much, the short one has ended before.
    scheduler = knowing(3300, **known)
    assert scheduler.choose(running, waiting, 9) == ([0, 2, 1], 1) and not scheduler.lent


def test_without_known_lengths_the_order_is_that_of_arrival():
    waiting = [Request(n, 50, 0, MOST) for n in range(9)]
    order, admitted = LengthScheduler(10_000).choose([], waiting, 9)
    assert order == list(range(9)) and 1 <= admitted


def test_where_all_are_alike_there_is_nothing_to_order():
    scheduler = LengthScheduler(10_000)
    waiting = [Request("same", 10, n, 1000) for n in range(40)]
    scheduler.expect("same", [990] * 50)
    scheduler.expect("another prompt", [990] * 50)
    assert scheduler.choose([], waiting, 30) == (list(range(40)), 30)
    assert scheduler.choose([], waiting, -1) == (list(range(40)), 0)
    assert scheduler.choose([], [], 30) == ([], 0)


@pytest.mark.parametrize(("known", "most_free"), [(False, 0.1), (True, 0.25)])
def test_less_kv_stays_free_where_no_earlier_length_is_known(known, most_free):
    """The same is lent to the shortest; preemptions of these were to be expected."""
    scheduler = LengthScheduler(10_000)
    if known:  # but samples of a prompt differ as much as prompts do
        scheduler.expect("another prompt", [200.0, 3200.0] * 4)
    waiting = requests([50] * 60, "w")
    order, admitted = scheduler.choose([], waiting, 60)
    mean, _ = profile(scheduler, [waiting[i] for i in order[:admitted]], np.arange(0, MOST, 5))
    free = 1 - mean[: mean.argmax() + 1].mean() / 10_000
    assert admitted < 60 and most_free - 0.1 < free <= most_free + 0.01
    before, lent = scheduler.margin, scheduler.lent
    for _ in range(lent + 1):
        assert scheduler.margin == before
        scheduler.preempted()
    assert lent and scheduler.margin > before


def two_kinds(capacity: int, alone: bool = False) -> tuple[LengthScheduler, list[Request]]:
    """40 responses of 1000 tokens and 10 of 100, as certain as a rollout before has made them."""
    scheduler = LengthScheduler(capacity, alone)
    for _ in range(2):
        scheduler.forget()
        for prompt, tokens in LONG.items():
            scheduler.expect(prompt, [tokens] * 200)
            for _ in range(200):
                scheduler.ended(prompt, tokens)
    scheduler.forget()
    for prompt, tokens in LONG.items():
        scheduler.expect(prompt, [tokens] * 50)
    return scheduler, [Request("long", 10, 0, MOST)] * 40 + [Request("short", 10, 0, MOST)] * 10


def roll_out(scheduler: LengthScheduler, waiting: list[Request]) -> tuple[int, int]:
    """Steps that a rollout takes, and the most KV that it holds."""
    running, steps, peak = [], 0, 0
    while running or waiting:
        order, admitted = scheduler.choose(running, waiting, 50)
        running, waiting = (
            running + [waiting[i] for i in order[:admitted]],
            [waiting[i] for i in order[admitted:]],
        )
        running = [replace(one, done=one.done + 10) for one in running]
        steps += 10
        peak = max(peak, sum(one.prompt_tokens + one.done for one in running))
        for one in running:
            if one.done == LONG[one.prompt]:
                scheduler.ended(one.prompt, one.done)
        running = [one for one in running if one.done < LONG[one.prompt]]
    return steps, peak


@pytest.mark.parametrize("capacity", [10_500, 15_000])
def test_a_plan_starts_one_after_another_what_would_peak_together(capacity, monkeypatch):
    """If they start together, only as many fit as do at their peak; if not, nearly twice as many."""
    steps, peak = roll_out(*two_kinds(capacity))
    monkeypatch.setattr(Lengths, "telling", lambda lengths: False)
    monkeypatch.setattr("ascend_rl.rollout.length_scheduler.HOLE", (1.0, 1.0))
    waves, most = roll_out(*two_kinds(capacity))
    # The profile is known at 40 points, and these lengths are the same to the step.
    assert steps < 0.9 * waves and max(peak, most) <= 1.07 * capacity


def test_an_engine_alone_lends_what_a_plan_leaves_free():
    admitted = []
    for alone in (False, True):
        scheduler, waiting = two_kinds(10_500, alone)
        admitted.append(scheduler.choose([], waiting, 50)[1])
    assert admitted[1] > 1.5 * admitted[0]


def test_trust_is_kept_from_one_rollout_to_the_next_but_no_length():
    first, second = LengthScheduler(10_000), LengthScheduler(10_000)
    for n in range(100):
        first.expect(n, [100.0 + n] * 4)
        first.ended(n, 100 + n)
    first.forget()
    assert not first.lengths.earlier and not first.lengths.ended
    for scheduler in (first, second):
        scheduler.expect("a", [300.0] * 4)
    (middle, narrow), (same, wide) = (one.lengths.guess("a", MOST) for one in (first, second))
    assert narrow < 0.6 * wide and middle == pytest.approx(same, abs=0.3)
    for n in range(40):
        first.ended("b", 10 ** (1 + n % 4))
    assert first.lengths.guess("a", MOST)[1] > 2 * narrow


def test_siblings_count_more_than_an_earlier_epoch_and_that_more_than_other_prompts():
    lengths = Lengths()
    for n in range(8):
        lengths.expect(f"other {n}", [100.0])
    assert math.exp(lengths.guess("unknown", MOST)[0]) == pytest.approx(100, rel=0.5)
    lengths.expect("known", [1000.0])
    earlier, wide = lengths.guess("known", MOST)
    assert 400 < math.exp(earlier) < 1000
    for _ in range(5):
        lengths.learn("known", 2000)
    siblings, narrow = lengths.guess("known", MOST)
    assert 1800 < math.exp(siblings) < 2010 and narrow < wide


def test_growth_of_all_lengths_is_learned_and_wrong_lengths_lose_trust():
    rng = np.random.default_rng(0)
    true = np.exp(rng.normal(6, 0.6, 200))
    for name, earlier in (("grown", true / 1.5), ("shuffled", rng.permutation(true))):
        lengths = Lengths()
        for n in range(200):
            lengths.expect(n, [earlier[n]] * 4)
        for n in range(150):
            lengths.learn(n, round(true[n]))
        off = [lengths.guess(n, MOST)[0] - math.log(true[n]) for n in range(150, 200)]
        spread = np.mean([lengths.guess(n, MOST)[1] for n in range(150, 200)])
        if name == "grown":
            assert abs(np.mean(off)) < 0.08 and np.std(off) < 0.1
        else:
            assert np.std(off) < np.std(np.log(earlier[150:]) - np.log(true[150:])) and spread > 0.4


def test_preemptions_raise_the_margin_and_responses_that_end_lower_it():
    scheduler = LengthScheduler(1000)
    for _ in range(100):
        scheduler.preempted()
    assert scheduler.margin == MOST_MARGIN
    for _ in range(1000):
        scheduler.ended("a", 10)
    assert scheduler.margin == MARGIN[False]


def test_what_a_request_brings_goes_with_it():
    memory = PromptMemory()
    memory.lengths = {"a": [3.0, 4.0]}
    known = known_of(memory, ["a", "b"])
    assert known == [{"prompt": "a", "lengths": [3.0, 4.0]}, {"prompt": "b", "lengths": []}]
    given = with_lengths({"seed": 1, "extra_args": {"x": 2}}, known[0])
    assert given == {"seed": 1, "extra_args": {"x": 2, KEY: known[0]}}
    assert moved(given, 7)["extra_args"][KEY] == {"prompt": "a", "lengths": [3.0, 4.0], "done": 7}
    assert with_lengths({"seed": 1}, None) == moved({"seed": 1}, 7) == {"seed": 1}
    assert schedules({"scheduler_cls": SCHEDULER}) and not schedules({})

"""Invariants of the scheduler by length, against a profile of the KV computed step by step."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_rl.rollout.known_lengths import KEY, SCHEDULER, known_of, moved, schedules, with_lengths
from ascend_rl.rollout.length_scheduler import MARGIN, MOST_MARGIN, Lengths, LengthScheduler, Request
from ascend_rl.rollout.prompt_memory import PromptMemory

MOST = 4000


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
    if scheduler.lent or not admitted or len(running) + admitted < 2:
        return
    assert rest == sorted(rest, reverse=True)
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


def test_where_all_are_alike_what_would_stay_free_is_lent():
    """They all reach their length at the same time: until then half of the KV would be idle."""
    scheduler = LengthScheduler(10_000)
    waiting = [Request("same", 10, 0, 1000) for _ in range(40)]
    scheduler.expect("same", [990] * 50)
    _, admitted = scheduler.choose([], waiting, 40)
    assert scheduler.lent and 12 <= admitted <= 25
    before = scheduler.margin
    scheduler.preempted()
    assert scheduler.margin == before  # that was to be expected


@pytest.mark.parametrize(("known", "most_free"), [(False, 0.1), (True, 0.25)])
def test_less_kv_stays_free_where_no_earlier_length_is_known(known, most_free):
    scheduler = LengthScheduler(10_000)
    if known:
        scheduler.expect("another prompt", [800.0] * 2)
    waiting = requests([50] * 60, "w")
    order, admitted = scheduler.choose([], waiting, 60)
    mean, _ = profile(scheduler, [waiting[i] for i in order[:admitted]], np.arange(0, MOST, 5))
    free = 1 - mean[: mean.argmax() + 1].mean() / 10_000
    assert admitted < 60 and most_free - 0.1 < free <= most_free + 0.01


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

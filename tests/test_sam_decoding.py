"""The proposer's bookkeeping: which requests it drafts for, and in which steps that pays."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from ascend_rl.settings.switch import CannotWork
from ascend_rl.speculation.bs_threshold_for_spec_decode import step_time
from ascend_rl.speculation.sam import BUDGET
from ascend_rl.speculation.sam_decoding import (
    ALLOWANCE,
    LOOK_ROWS,
    MOST_ALLOWED,
    SamProposer,
    takes_drafts,
)
from ascend_rl.speculation.sam_history import with_history
from ascend_rl.speculation.sam_options import BEYOND_BYTES, LEAST_BYTES, measured_steps

PLAIN = {
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0,
    "logit_bias": None, "bad_words_token_ids": None, "min_tokens": 0, "max_tokens": 10_000,
    "extra_args": None,
}  # fmt: skip
FREE = {"step_times": {"1": 1, "1000": 1}}  # drafts cost nothing
DEAR = {"step_times": {"1": 1, "1000": 1000}}  # a token costs a token


class Runner:
    """What the proposer sees of a runner: a batch of texts that grow."""

    def __init__(self, texts: dict[str, list[int]], max_model_len: int = 4096, options=None, **params):
        self.proposer = SamProposer(4, max_model_len, options)
        self.texts, self.prompts = texts, {name: len(text) for name, text in texts.items()}
        self.requests = {
            name: SimpleNamespace(sampling_params=SimpleNamespace(**PLAIN | params)) for name in texts
        }

    def step(self, emitted: dict[str, list[int]], graph_tokens: int | None = None) -> dict[str, list[int]]:
        """Append what each request emitted; its draft for the next step."""
        names = list(self.requests)
        for name, tokens in emitted.items():
            self.texts[name] += tokens
        ids = np.zeros((len(names), 8192), np.int32)
        for row, name in enumerate(names):
            ids[row, : len(self.texts[name])] = self.texts[name]
        batch = SimpleNamespace(
            req_ids=names, token_ids_cpu=ids,
            num_tokens_no_spec=np.array([len(self.texts[name]) for name in names]),
            num_prompt_tokens=np.array([self.prompts[name] for name in names]),
        )  # fmt: skip
        sampled = [emitted.get(name, []) for name in names]
        drafts = self.proposer.propose(batch, self.requests, sampled, graph_tokens)
        return dict(zip(names, drafts, strict=True))

    def follow(self, name: str, text: list[int]) -> list[list[int]]:
        """Emit ``text`` as an engine does: what of the draft is right, and one more. All drafts, in order."""
        drafts: list[list[int]] = []
        while (start := len(self.texts[name])) < len(text):
            draft = drafts[-1] if drafts else []
            right = [token == truth for token, truth in zip(draft, text[start:], strict=False)]
            count = next((i for i, is_right in enumerate(right) if not is_right), len(right))
            drafts.append(self.step({name: text[start : start + count + 1]})[name])
        return drafts


def repeating(count: int) -> list[int]:
    return [i % 7 + 1 for i in range(count)]


def test_drafts_what_repeats_and_only_after_a_sampled_token(counts):
    runner = Runner({"a": repeating(30), "within its prompt": repeating(30)})
    drafts = runner.follow("a", repeating(100))
    end = len(runner.texts["a"])
    assert drafts[-1] == repeating(end + 4)[end:] and len(drafts) < 30
    # What each step emits is what was right, and one more; the last drafts have not been verified.
    right = end - 30 - len(drafts)
    assert counts() == {"sam_drafted": sum(map(len, drafts)), "sam_accepted": right}
    assert runner.step({"a": repeating(end + 1)[end:]})["within its prompt"] == []


@pytest.mark.parametrize("limit", ["max_tokens", "max_model_len"])
def test_never_beyond_the_last_token(limit):
    text = repeating(70)
    most = {"max_tokens": 40} if limit == "max_tokens" else {"max_model_len": 70}
    runner = Runner({"a": text[:30]}, options=FREE, **most)
    runner.follow("a", text[:60])
    for end in range(61, 71):
        draft = runner.step({"a": [text[end - 1]]})["a"]
        assert len(draft) == min(4, max(0, 70 - end - 1))  # a draft is followed by one more token
        assert runner.proposer.expected <= len(draft)


@pytest.mark.parametrize("params", [
    {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 1.1}, {"min_p": 0.1},
    {"logit_bias": {1: 1.0}}, {"bad_words_token_ids": [[1]]}, {"min_tokens": 1000},
], ids=str)  # fmt: skip
def test_no_drafts_where_they_cannot_be_verified(params):
    runner = Runner({"a": repeating(30)}, **params)
    assert not any(runner.follow("a", repeating(60)))


def test_min_tokens_matter_until_they_are_reached():
    params = SimpleNamespace(**PLAIN | {"min_tokens": 5})
    assert not takes_drafts(params, 4) and takes_drafts(params, 5)


def times(options) -> dict[int, float]:
    return measured_steps((options or {}).get("step_times"))


@pytest.mark.parametrize("options", [None, DEAR], ids=["published times", "dear tokens"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("graph_tokens", [None, 4096], ids=["any length", "padded"])
def test_drafts_that_are_never_right_cost_little(options, rows, graph_tokens):
    """Of 2000 steps, at most the first trials and the allowance, though the text seems to repeat."""
    names = [f"r{i}" for i in range(rows)]
    runner = Runner({name: repeating(30) for name in names}, options=options)
    text, taken, plain = repeating(5000), 0.0, 0.0
    for i in range(30, 2030):
        drafts = runner.step({name: [text[i]] for name in names}, graph_tokens)
        plain += step_time(times(options), rows)
        taken += step_time(times(options), rows + sum(map(len, drafts.values())))
    assert 0 <= taken - plain <= (MOST_ALLOWED + 10 + 2000 * ALLOWANCE) * plain / 2000
    assert options or taken > plain


def test_where_they_are_right_again_it_drafts_in_every_step_soon():
    runner = Runner({"a": repeating(30)})
    text = repeating(9000)
    for i in range(30, 2030):
        runner.step({"a": [text[i]]})
    drafts = runner.follow("a", text[:3030])
    assert all(drafts[-100:]) and sum(map(bool, drafts)) > 0.5 * len(drafts)


def test_what_a_draft_costs_decides():
    """The same texts and drafts: all steps draft for nothing, none for more than they can bring."""
    for options, least, most in ((FREE, 0.95, 1), (DEAR, 0, 0.05)):
        names = [f"r{i}" for i in range(4)]
        rng = np.random.default_rng(0)
        runner = Runner({name: rng.integers(0, 3, 60).tolist() for name in names}, options=options)
        steps = [
            any(runner.step({name: [int(rng.integers(0, 3))] for name in names}).values()) for _ in range(400)
        ]
        assert least <= np.mean(steps[100:]) <= most


@pytest.mark.parametrize("seed", range(20))
def test_the_tokens_of_a_step_emit_most_for_its_time(seed):
    """Of all ways to shorten four drafts, with times that rise in steps and chances that tie."""
    rng = np.random.default_rng(seed)
    sizes = np.cumsum([1, *rng.integers(1, 9, 3)]).tolist()
    steps = dict(zip(map(str, sizes), np.cumsum(rng.random(4) + 0.05).tolist(), strict=True))
    proposer = SamProposer(4, 100, {"step_times": steps})
    proposer.came_true = rng.random()
    chances = [np.cumprod(rng.integers(1, 5, n) / 4) for n in rng.integers(0, 5, 4)]

    def rate(lengths) -> float:
        right = sum(of[:n].sum() for of, n in zip(chances, lengths, strict=True))
        return (4 + proposer.trust * right) / step_time(proposer.times, 4 + sum(lengths))

    every = [lengths for lengths in product(*(range(len(of) + 1) for of in chances)) if any(lengths)]
    assert rate(proposer._best_lengths(chances, 4)) == pytest.approx(max(map(rate, every)), rel=1e-12)


def test_a_large_batch_is_looked_at_rarely_while_drafts_do_not_pay():
    names = [f"r{i}" for i in range(3 * LOOK_ROWS)]
    wall = {"step_times": {"1": 1, str(len(names)): 1, str(len(names) + 1): 99}}
    rng = np.random.default_rng(0)
    runner = Runner({name: rng.integers(0, 9999, 60).tolist() for name in names}, options=wall)
    looks, propose = [], runner.proposer.drafter.propose
    runner.proposer.drafter.propose = lambda *args: (looks.append(1), propose(*args))[1]
    for _ in range(40):
        runner.step({name: [int(rng.integers(0, 9999))] for name in names})
    assert 0.7 * 40 * LOOK_ROWS <= len(looks) <= 1.1 * 40 * LOOK_ROWS


def test_for_graphs_all_rows_get_all_tokens_or_none():
    texts = {"a": repeating(40), "b": [99, 98, 97, 96, 95]}
    runner = Runner({name: list(text) for name, text in texts.items()}, options=FREE)
    drafts = runner.step({"a": [repeating(41)[40]], "b": [94]}, graph_tokens=10)
    assert drafts["a"] == repeating(45)[41:] and drafts["b"] == [94] * 4
    assert not any(runner.step({"a": [repeating(42)[41]], "b": [93]}, graph_tokens=9).values())
    within_a_prompt = runner.step({"a": [repeating(43)[42]]}, graph_tokens=10)
    assert within_a_prompt == {"a": repeating(47)[43:], "b": []}


def test_no_graph_for_rows_that_cannot_have_all_tokens_except_finished_ones():
    runner = Runner({"a": repeating(40), "b": repeating(45)}, max_model_len=50, options=FREE)
    for length in (41, 42, 43, 44):  # b, 5 tokens longer, ends at 50
        step = {"a": [repeating(length)[-1]], "b": [repeating(length + 5)[-1]]}
        assert not any(runner.step(step, graph_tokens=10).values())
    drafts = runner.step({"a": [repeating(45)[-1]], "b": [repeating(50)[-1]]}, graph_tokens=10)
    assert drafts["a"] == repeating(49)[45:] and len(drafts["b"]) == 4


STEPS = ({"4": 1}, {"4": 1, "0": 2}, {"4": 1, "8": -1}, {"a": 1, "b": 2}, [1, 2])
IMPOSSIBLE = [
    *(("step_times", value) for value in STEPS),
    *(("worth", value) for value in (-0.1, 1, "0.1", True)),
    *(("max_bytes", value) for value in (LEAST_BYTES - 1, BEYOND_BYTES, 1e9, True)),
    *(("history", value) for value in (-1, 1.5, "2", True)),
    ("steps", 1),
]


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE, ids=str)
def test_incompatible_options_are_refused(name, value):
    with pytest.raises(CannotWork) as error:
        SamProposer(4, 100, {name: value})
    (reason,) = str(error.value).splitlines()[1:]
    assert reason.strip().startswith(f"sam_decoding.{name}: ")


@pytest.mark.parametrize("max_bytes", [LEAST_BYTES, BEYOND_BYTES - 1])
def test_the_least_and_the_most_memory_will_do(max_bytes):
    assert SamProposer(4, 100, {"max_bytes": max_bytes, "history": 0, "worth": 0}).drafter.max_bytes > 4 << 20


def test_finished_requests_are_forgotten():
    runner = Runner({"a": repeating(30), "b": repeating(30)})
    for token in repeating(50)[30:]:
        runner.step({"a": [token], "b": [token]})
    del runner.requests["a"]
    runner.step({"b": [repeating(51)[50]]})
    assert runner.proposer.known == {"b"} and runner.proposer.drafted <= {"b"}


def bringing(*texts: list[int], prompt_tokens: int) -> dict:
    """Sampling parameters of a request that brings these earlier texts."""
    brought = [(prompt_tokens, np.array(text, np.int32).tobytes()) for text in texts]
    return with_history({}, brought)


def noise(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 50_000, count).tolist()


def test_drafts_from_what_a_request_brings(counts):
    earlier, other = noise(600), noise(20) + noise(300, seed=1)
    runner = Runner({"a": earlier[:20]}, options=FREE, **bringing(earlier, other, prompt_tokens=20))
    assert len(runner.follow("a", earlier)) < 600 / 5 + 4
    assert counts()["sam_history"] == 580 + 300 and not runner.proposer.history
    assert not runner.requests["a"].sampling_params.extra_args  # does not take memory twice
    without = Runner({"a": earlier[:20]}, options=FREE).follow("a", earlier)
    assert len(without) > 570 and sum(map(bool, without)) < 20


def test_history_of_a_request_that_moved_is_found():
    """Its prompt here is the first part of its text."""
    earlier = noise(600)
    runner = Runner({"a": earlier[:200]}, options=FREE, **bringing(earlier, prompt_tokens=20))
    assert len(runner.follow("a", earlier)) < 400 / 5 + 4


def test_a_known_prompt_needs_no_history(counts):
    """Of requests with one prompt, the first one's is enough, and what the engine wrote itself as well."""
    earlier = noise(300)
    runner = Runner({name: earlier[:20] for name in "ab"}, **bringing(earlier, prompt_tokens=20))
    for _ in range(3):
        runner.step({name: [1] for name in "ab"})
    assert counts()["sam_history"] == 280


def test_history_is_taken_in_piece_by_piece(counts):
    texts = [noise(16_000, seed) for seed in range(2)]
    texts[1][:20] = texts[0][:20]
    runner = Runner({"a": texts[0][:20]}, **bringing(*texts, prompt_tokens=20))
    taken = [0]
    while runner.proposer.history or len(taken) == 1:
        runner.step({"a": [1]})
        taken.append(counts().get("sam_history", 0))
    assert max(np.diff(taken)) <= BUDGET / 8 and taken[-1] == sum(map(len, texts)) - 40
    assert len(taken) < 100


@pytest.mark.parametrize("finished", [False, True])
def test_history_leaves_half_of_the_memory(finished):
    """To texts that grow; those of finished requests make room."""
    options = {"max_bytes": 24 << 20}  # 8 MiB for texts, some 130,000 tokens
    long = noise(90_000, seed=2)
    brought = noise(20, seed=3) + noise(20_000, seed=4)
    runner = Runner({"b": brought[:20]}, options=options, **bringing(brought, prompt_tokens=20))
    drafter = runner.proposer.drafter
    for end in range(1000, 90_001, 1000):
        drafter.propose("a", np.array(long[:end], np.int32), 10)
    assert drafter.used_bytes > drafter.max_bytes / 2
    if finished:
        drafter.end("a")
    for _ in range(30):
        runner.step({"b": [1]})
    assert not runner.proposer.history and len(drafter._texts) == 2 - finished
    assert (drafter.used_bytes < drafter.max_bytes / 2) == finished
    drafts = [runner.step({"b": [token]}) for token in brought[20:60]]
    assert any(draft["b"] for draft in drafts) == finished


def taken_in(runner: Runner) -> int:
    """Tokens that the drafter has taken in."""
    return sum(max(0, runner.proposer.drafter.seen(name)) for name in runner.texts)


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_a_step_does_the_work_of_one_budget_however_many_prompts_it_begins(rows):
    """No row is left out: each step takes in tokens of every prompt, and all drafts begin together."""
    texts = {f"r{i}": noise(2000, seed=i) for i in range(rows)}
    runner, before, most = Runner(texts, options=FREE), 0, 0
    alone = Runner({"r": noise(2000)}, options=FREE)
    alone.step({"r": [1]})
    while taken_in(runner) < sum(map(len, texts.values())):
        behind = [name for name in texts if runner.proposer.drafter.seen(name) < len(texts[name])]
        seen = {name: runner.proposer.drafter.seen(name) for name in behind}
        runner.step({name: [1] for name in texts})
        assert all(runner.proposer.drafter.seen(name) > seen[name] for name in behind)
        most, before = max(most, taken_in(runner) - before), taken_in(runner)
    assert most <= 1.2 * taken_in(alone)


def test_rows_that_write_draft_in_each_step_while_long_prompts_are_taken_in():
    names = [f"r{i}" for i in range(60)]
    texts = {name: noise(4000, seed=i) for i, name in enumerate(names)} | {"a": repeating(30)}
    runner = Runner(texts, options=FREE)
    for end in range(31, 60):
        drafts = runner.step({name: [1] for name in names} | {"a": [repeating(end)[-1]]})
    assert drafts["a"] == repeating(63)[59:] and not any(drafts[name] for name in names)


def test_a_long_prompt_gets_what_the_others_leave():
    """Though theirs are longer texts, and come after it in the batch; they are looked at in its order."""
    alone = Runner({"r": noise(2000)}, options=FREE)
    alone.step({"r": [1]})
    names = [f"r{i}" for i in range(8)]
    runner = Runner({"long": noise(2000)} | {name: repeating(2500) for name in names}, options=FREE)
    text, looked, propose = repeating(2600), [], runner.proposer.drafter.propose
    end = 2500
    while not all(runner.step({name: [text[end]] for name in names})[name] for name in names):
        end += 1
    runner.proposer.drafter.propose = lambda name, *args: (looked.append(name), propose(name, *args))[1]
    runner.step({"long": [1]} | {name: text[end + 1 : end + 2 + i % 3] for i, name in enumerate(names)})
    assert looked == [*names, "long"]
    assert runner.proposer.drafter.seen("long") > 0.8 * taken_in(alone)


def test_history_and_prompts_share_the_budget(counts):
    alone = Runner({"r": noise(2000)}, options=FREE)
    alone.step({"r": [1]})
    most, texts = taken_in(alone), {f"r{i}": noise(2000, seed=i) for i in range(8)}
    runner = Runner(texts, options=FREE, **bringing(noise(9000, seed=9), prompt_tokens=20))
    runner.step({name: [1] for name in texts})
    for _ in range(3):
        before = taken_in(runner), counts().get("sam_history", 0)
        runner.step({name: [1] for name in texts})
        prompts, history = taken_in(runner) - before[0], counts()["sam_history"] - before[1]
        assert min(prompts, history) > most / 3 and prompts + history < 1.2 * most

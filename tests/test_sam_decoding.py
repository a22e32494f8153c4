"""The proposer's bookkeeping: which requests it drafts for, and in which steps that pays."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ascend_rl.settings.switch import CannotWork
from ascend_rl.speculation.bs_threshold_for_spec_decode import step_time
from ascend_rl.speculation.sam_decoding import (
    ALLOWANCE,
    LOOK_ROWS,
    MOST_ALLOWED,
    SamProposer,
    measured_steps,
    takes_drafts,
)

PLAIN = {
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0,
    "logit_bias": None, "min_tokens": 0, "max_tokens": 10_000,
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


@pytest.mark.parametrize("params", [
    {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 1.1}, {"min_p": 0.1},
    {"logit_bias": {1: 1.0}}, {"min_tokens": 1000},
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


def test_a_large_batch_is_looked_at_rarely_while_drafts_do_not_pay():
    names = [f"r{i}" for i in range(3 * LOOK_ROWS)]
    wall = {"step_times": {"1": 1, str(len(names)): 1, str(len(names) + 1): 99}}
    rng = np.random.default_rng(0)
    runner = Runner({name: rng.integers(0, 9999, 60).tolist() for name in names}, options=wall)
    looks, propose = [], runner.proposer.drafter.propose
    runner.proposer.drafter.propose = lambda *args: (looks.append(1), propose(*args))[1]
    for _ in range(40):
        runner.step({name: [int(rng.integers(0, 9999))] for name in names})
    assert len(looks) <= 1.1 * 40 * LOOK_ROWS


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


@pytest.mark.parametrize("given", [{"4": 1}, {"4": 1, "0": 2}, {"4": 1, "8": -1}, {"a": 1, "b": 2}, [1, 2]])
def test_step_times_that_are_none_are_refused(given):
    with pytest.raises(CannotWork, match="give measured times of decode steps"):
        SamProposer(4, 100, {"step_times": given})


def test_unknown_options_are_refused():
    with pytest.raises(CannotWork, match="'steps'"):
        SamProposer(4, 100, {"steps": 1})


def test_finished_requests_are_forgotten():
    runner = Runner({"a": repeating(30), "b": repeating(30)})
    for token in repeating(50)[30:]:
        runner.step({"a": [token], "b": [token]})
    del runner.requests["a"]
    runner.step({"b": [repeating(51)[50]]})
    assert runner.proposer.known == {"b"} and runner.proposer.drafted <= {"b"}

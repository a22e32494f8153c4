"""The proposer's bookkeeping: which requests it drafts for, and how rarely if drafts do not pay off."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ascend_rl.speculation.sam_decoding import (
    FREE_DEBT,
    MAX_DEBT,
    MAX_PERIOD,
    SamProposer,
    period,
    takes_drafts,
)

PLAIN = {
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0,
    "logit_bias": None, "min_tokens": 0, "max_tokens": 10_000,
}  # fmt: skip


class Runner:
    """What the proposer sees of a runner: a batch of texts that grow."""

    def __init__(self, texts: dict[str, list[int]], max_model_len: int = 4096, **params):
        self.proposer = SamProposer(4, max_model_len)
        self.texts, self.prompts = texts, {name: len(text) for name, text in texts.items()}
        self.requests = {
            name: SimpleNamespace(sampling_params=SimpleNamespace(**PLAIN | params)) for name in texts
        }

    def step(self, emitted: dict[str, list[int]]) -> dict[str, list[int]]:
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
        drafts = self.proposer.propose(batch, self.requests, [emitted.get(name, []) for name in names])
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


def test_drafts_what_repeats_and_only_after_a_sampled_token():
    runner = Runner({"a": repeating(30), "within its prompt": repeating(30)})
    drafts = runner.follow("a", repeating(100))
    end = len(runner.texts["a"])
    assert drafts[-1] == repeating(end + 4)[end:] and len(drafts) < 30
    assert runner.step({"a": repeating(end + 1)[end:]})["within its prompt"] == []


@pytest.mark.parametrize("limit", ["max_tokens", "max_model_len"])
def test_never_beyond_the_last_token(limit):
    text = repeating(70)
    options = {"max_tokens": 40} if limit == "max_tokens" else {"max_model_len": 70}
    runner = Runner({"a": text[:30]}, **options)
    runner.follow("a", text[:60])
    for end in range(61, 71):
        runner.proposer.debts.clear()  # it emits less than was drafted
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


def test_a_request_whose_drafts_fail_drafts_rarely_and_recovers_at_once():
    runner = Runner({"a": repeating(30)})
    text, drafted = repeating(5000), []
    for i in range(30, 2030):  # whatever is drafted is wrong, though the text does repeat
        drafted.append(bool(runner.step({"a": [text[i]]})["a"]))
    assert sum(drafted) < FREE_DEBT + 12 + 2000 / MAX_PERIOD
    assert runner.proposer.debts["a"] == MAX_DEBT
    position, steps = 2030, 0
    draft: list[int] = []
    while runner.proposer.debts["a"] > FREE_DEBT:  # now drafts are right
        emitted = text[position : position + len(draft) + 1]
        position, steps = position + len(emitted), steps + 1
        draft = runner.step({"a": emitted})["a"]
    assert steps <= 2 * MAX_PERIOD


def test_requests_in_debt_draft_in_the_same_steps():
    names = [f"r{i}" for i in range(8)]
    runner = Runner({name: repeating(30 + i) for i, name in enumerate(names)})
    runner.proposer.usual_debt = MAX_DEBT
    text = repeating(1000)
    with_drafts = [
        any(runner.step({name: [text[len(runner.texts[name])]] for name in names}).values())
        for _ in range(512)
    ]
    assert 1 <= sum(with_drafts) <= 512 / MAX_PERIOD


def test_finished_requests_are_forgotten():
    runner = Runner({"a": repeating(30), "b": repeating(30)})
    for token in repeating(50)[30:]:
        runner.step({"a": [token], "b": [token]})
    del runner.requests["a"]
    runner.step({"b": [repeating(51)[50]]})
    assert runner.proposer.debts.keys() == {"b"} and runner.proposer.drafted <= {"b"}


def test_period_doubles_with_debt():
    assert [period(debt) for debt in range(MAX_DEBT + 1)] == [1, 1, 1, 2, 4, 8, 16, 32, 64, 128]

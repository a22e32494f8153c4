"""What the trainer keeps of earlier responses, and how a request brings them to the engine."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_rl.speculation.response_history import KEY, ResponseHistory, take_history, with_history

PROMPT, RESPONSE = 4, 6


def batch_of(texts: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """verl's batch: prompts padded on the left, responses on the right."""
    rows = [(prompt, response, PROMPT - len(prompt), RESPONSE - len(response)) for prompt, response in texts]
    return {
        "input_ids": torch.tensor([[0] * left + p + r + [0] * right for p, r, left, right in rows]),
        "attention_mask": torch.tensor(
            [[0] * left + [1] * len(p + r) + [0] * right for p, r, left, right in rows]
        ),
        "responses": torch.tensor([r + [0] * right for _, r, _, right in rows]),
    }


def brought(history: ResponseHistory, prompt) -> list[tuple[list[int], int]]:
    params = with_history({}, {KEY: history.texts.get(prompt, [])})
    found = take_history(SimpleNamespace(extra_args=params.get("extra_args")))
    return [(tokens.tolist(), length) for tokens, length in found]


token = st.integers(0, 2**31 - 1)
texts = st.tuples(
    st.lists(token, min_size=1, max_size=PROMPT), st.lists(token, min_size=0, max_size=RESPONSE)
)


@settings(max_examples=10)
@given(token.map(lambda number: time.sleep(0.15) or number))
def test_a_slow_machine_fails_no_test_of_properties(number):
    """Hypothesis by itself draws for a second at most before the first ten examples."""
    assert number >= 0


@given(st.lists(st.lists(texts, min_size=1, max_size=8), min_size=1, max_size=4), st.integers(1, 3))
def test_the_last_rollouts_first_different_responses_are_kept(rollouts, keep):
    history, expected = ResponseHistory(keep), {}
    for rollout in rollouts:
        names = [str(prompt) for prompt, _ in rollout]
        history.learn(names, batch_of(rollout))
        for name in dict.fromkeys(names):
            rows = [(p + r, len(p)) for p, r in rollout if str(p) == name]
            expected[name] = list(dict.fromkeys((tuple(t), n) for t, n in rows))[:keep]
    assert {name: [(tuple(t), n) for t, n in brought(history, name)] for name in expected} == expected
    assert history.bytes == sum(4 * len(tokens) for kept in expected.values() for tokens, _ in kept)


def test_prompts_of_long_ago_are_dropped_when_memory_is_short():
    history = ResponseHistory(1, max_bytes=4 * 12)  # two texts of 6 tokens
    for prompt in (1, 2, 1, 3):
        history.learn([prompt], batch_of([([prompt] * 2, [9] * 4)]))
    assert list(history.texts) == [1, 3] and history.bytes == 48


def test_a_sample_without_history_changes_nothing():
    params, sample = {"temperature": 1.0}, {"raw_prompt": "a"}
    assert with_history(params, sample) is params
    sample = {"raw_prompt": "a", KEY: []}
    assert with_history(params, sample) is params and KEY not in sample
    assert take_history(SimpleNamespace(extra_args=None)) == []
    assert take_history(SimpleNamespace(extra_args={"another": np.ones(1)})) == []

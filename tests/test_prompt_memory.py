"""What the trainer remembers of earlier responses, in memory and in a checkpoint."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_rl.rollout.prompt_memory import FILE, PromptMemory, keys_of

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


token = st.integers(0, 2**31 - 1)
texts = st.tuples(
    st.lists(token, min_size=1, max_size=PROMPT), st.lists(token, min_size=0, max_size=RESPONSE)
)


@settings(max_examples=10)
@given(token.map(lambda number: time.sleep(0.15) or number))
def test_a_slow_machine_fails_no_test_of_properties(number):
    """Hypothesis by itself draws for a second at most before the first ten examples."""
    assert number >= 0


def known(memory: PromptMemory) -> dict[str, tuple]:
    """Of each prompt: the lengths of its responses, and its texts as (tokens, tokens of the prompt)."""
    return {
        prompt: (
            lengths,
            [(np.frombuffer(t, np.int32).tolist(), p) for p, t in memory.texts.get(prompt, [])],
        )
        for prompt, lengths in memory.lengths.items()
    }


@given(st.lists(st.lists(texts, min_size=1, max_size=8), min_size=1, max_size=4), st.integers(0, 3))
def test_the_last_rollout_of_each_prompt_is_remembered(tmp_path_factory, rollouts, keep):
    memory, expected = PromptMemory(keep), {}
    for rollout in rollouts:
        names = keys_of(prompt for prompt, _ in rollout)
        memory.learn(names, batch_of(rollout))
        for name in dict.fromkeys(names):
            rows = [row for row, its in zip(rollout, names, strict=True) if its == name]
            different = list(dict.fromkeys((tuple(p + r), len(p)) for p, r in rows))
            kept = [(list(tokens), prompt_tokens) for tokens, prompt_tokens in different[:keep]]
            expected[name] = [float(len(response)) for _, response in rows], kept
    assert known(memory) == expected
    assert memory.bytes == sum(4 * len(tokens) for _, texts in expected.values() for tokens, _ in texts)

    directory = tmp_path_factory.mktemp("checkpoint")
    memory.save(directory)
    resumed = PromptMemory(keep)
    resumed.load(directory)
    assert known(resumed) == expected and resumed.bytes == memory.bytes
    assert list(resumed.texts) == list(memory.texts)  # which go first when memory is short
    lengths_only = PromptMemory(0)
    lengths_only.load(directory)
    assert known(lengths_only) == {name: (lengths, []) for name, (lengths, _) in expected.items()}


def test_a_checkpoint_without_it_leaves_nothing(tmp_path):
    memory = PromptMemory(2)
    memory.load(tmp_path)
    assert not memory.lengths and not memory.texts
    memory.save(tmp_path)
    memory.load(tmp_path)
    assert not memory.lengths and (tmp_path / FILE).exists()


def test_prompts_of_long_ago_are_dropped_when_memory_is_short(tmp_path):
    memory = PromptMemory(1, max_bytes=4 * 12)  # two texts of 6 tokens
    for prompt in (1, 2, 1, 3):
        memory.learn([str(prompt)], batch_of([([prompt] * 2, [9] * 4)]))
    assert list(memory.texts) == ["1", "3"] and memory.bytes == 48
    assert list(memory.lengths) == ["1", "2", "3"]  # a few bytes each
    memory.save(tmp_path)
    smaller = PromptMemory(1, max_bytes=4 * 6)
    smaller.load(tmp_path)
    assert list(smaller.texts) == ["3"]


def test_a_rollout_of_another_size_is_an_error():
    with pytest.raises(ValueError):
        PromptMemory(1).learn(["a", "b"], batch_of([([1], [2])]))

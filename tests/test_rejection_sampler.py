"""Rejection sampling equals a plain loop, and the emitted tokens have the target's distribution."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from ascend_rl.speculation.rejection_sampler import draw, expand, rejection_sample, vllm_rejection_sample

VOCABULARY = 4


def one_request(drafts, target, bonus, greedy, uniform, exponential, draft_probs):
    """The algorithm of the paper for one request, token by token."""
    emitted = []
    for i, token in enumerate(drafts):
        q = 1.0 if draft_probs is None else draft_probs[i][token]
        if token == target[i].argmax() if greedy else uniform[i] < target[i][token] / q:
            emitted.append(token)
            continue
        if greedy:
            return [*emitted, int(target[i].argmax())]
        rest = target[i].clone()
        if draft_probs is None:
            rest[token] = 0
        else:
            rest = (rest - draft_probs[i]).clamp(min=0)
        return [*emitted, int((rest / exponential).argmax())]
    return [*emitted, bonus]


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    mode=st.sampled_from(["greedy", "random", "both"]),
    with_draft_probs=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=200)
def test_equals_a_loop(lengths, mode, with_draft_probs, seed):
    torch.manual_seed(seed)
    requests, tokens = len(lengths), sum(lengths)
    target = (3 * torch.randn(tokens, VOCABULARY)).softmax(-1)
    draft_probs = (3 * torch.randn(tokens, VOCABULARY)).softmax(-1) if with_draft_probs else None
    drafts = torch.randint(VOCABULARY, (tokens,), dtype=torch.int32)
    bonus = torch.randint(VOCABULARY, (requests, 1), dtype=torch.int32)
    uniform, exponential = draw(lengths, VOCABULARY, {}, torch.device("cpu"))
    greedy = {"greedy": True, "random": False, "both": torch.rand(requests) < 0.5}[mode]
    random = {} if mode == "greedy" else {"uniform": uniform, "exponential": exponential}
    ours = rejection_sample(
        drafts,
        torch.tensor(lengths),
        target,
        bonus,
        max_draft_tokens=max(lengths),
        greedy=greedy,
        draft_probs=draft_probs,
        **random,
    )
    greedy = torch.as_tensor(greedy).expand(requests).tolist()
    assert ours.shape == (requests, max(lengths) + 1) and ours.dtype == torch.int32
    for row, end in enumerate(itertools.accumulate(lengths)):
        own = slice(end - lengths[row], end)
        expected = one_request(
            drafts[own].tolist(),
            target[own],
            int(bonus[row]),
            greedy[row],
            uniform[own],
            exponential[row],
            draft_probs[own] if with_draft_probs else None,
        )
        assert ours[row].tolist() == expected + [-1] * (max(lengths) + 1 - len(expected))


@pytest.mark.parametrize("with_draft_probs", [False, True])
@pytest.mark.parametrize("length", [1, 3, 5])
def test_emits_the_target_distribution(with_draft_probs, length):
    """Joint distribution of the first two emitted tokens; the second depends on the first."""
    torch.manual_seed(length)
    rows = 60_000
    table = (2 * torch.randn(1 + VOCABULARY, VOCABULARY)).softmax(-1)  # p(first), then p(second | first)
    later = (2 * torch.randn(length + 1, VOCABULARY)).softmax(-1)
    if with_draft_probs:
        q = (2 * torch.randn(length, VOCABULARY)).softmax(-1)
        drafts = torch.stack([torch.multinomial(q[i], rows, replacement=True) for i in range(length)], 1)
        draft_probs = q.repeat(rows, 1)
    else:
        drafts, draft_probs = torch.randint(VOCABULARY, (rows, length)), None

    def target_of(i, before):  # the distribution at position i when the drafts before it were kept
        if i == 1:
            return table[1 + before]
        return (later[i] if i else table[0]).expand(rows, -1)

    target = torch.stack([target_of(i, drafts[:, 0]) for i in range(length)], 1)
    bonus = torch.multinomial(target_of(length, drafts[:, 0]), 1)
    uniform, exponential = draw([length] * rows, VOCABULARY, {}, torch.device("cpu"))
    emitted = rejection_sample(
        drafts.flatten(),
        torch.full((rows,), length),
        target.flatten(0, 1),
        bonus,
        max_draft_tokens=length,
        uniform=uniform,
        exponential=exponential,
        draft_probs=draft_probs,
    ).long()
    # Where only one token came out, the next step samples the second one without a draft.
    second = torch.where(
        emitted[:, 1] < 0, torch.multinomial(table[1 + emitted[:, 0]], 1)[:, 0], emitted[:, 1]
    )
    seen = torch.bincount(emitted[:, 0] * VOCABULARY + second, minlength=VOCABULARY**2).double()
    expected = rows * (table[0][:, None] * table[1:]).flatten().double()
    distance = ((seen - expected) ** 2 / expected).sum().item()
    assert distance < chi2.ppf(1 - 1e-4, VOCABULARY**2 - 1)


def test_a_certain_draft_is_kept_and_an_impossible_one_never():
    certain = torch.tensor([[0.0, 1.0, 0.0]]).repeat(2, 1)
    emitted = rejection_sample(
        torch.tensor([1, 0]),
        torch.tensor([1, 1]),
        certain,
        torch.tensor([2, 2]),
        max_draft_tokens=1,
        uniform=torch.tensor([1 - 2**-53, 0.0], dtype=torch.float64),
        exponential=torch.ones(2, 3),
    )
    assert emitted.tolist() == [[1, 2], [1, -1]]


@pytest.mark.parametrize("generators", [{}, {0: torch.Generator()}])
def test_a_zero_among_the_exponential_numbers_draws_no_impossible_token(monkeypatch, generators):
    """float32 gives one now and then; an impossible token must not win by 0 / 0."""
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator=None: self.zero_())
    uniform, exponential = draw([1], 3, generators, torch.device("cpu"))
    emitted = rejection_sample(
        torch.tensor([1]),
        torch.tensor([1]),
        torch.tensor([[0.0, 0.0, 1.0]]),
        torch.tensor([0]),
        max_draft_tokens=1,
        uniform=uniform,
        exponential=exponential,
    )
    assert emitted.tolist() == [[2, -1]]


def test_a_request_with_a_generator_draws_the_same_in_any_batch():
    def own(lengths, row):
        generators = {row: torch.Generator().manual_seed(3)}
        uniform, exponential = draw(lengths, VOCABULARY, generators, torch.device("cpu"))
        start = sum(lengths[:row])
        return [*uniform[start : start + lengths[row]].tolist(), *exponential[row].tolist()]

    assert own([2, 3], 1) == own([3], 0)
    unused = torch.Generator().manual_seed(3)
    draw([0, 1], VOCABULARY, {0: unused}, torch.device("cpu"))
    assert torch.equal(unused.get_state(), torch.Generator().manual_seed(3).get_state())


def test_expand():
    values, cumulative = torch.tensor([0.0, 8, 9]), torch.tensor([2, 2, 3])
    assert expand(values, cumulative, 3, replace_from=0, replace_to=1).tolist() == [1, 1, 9]


@pytest.mark.parametrize("temperatures", [[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
def test_with_the_arguments_of_vllm(temperatures):
    """Certain distributions: greedy or sampled, the target decides."""
    metadata = SimpleNamespace(
        all_greedy=not any(temperatures),
        all_random=all(temperatures),
        generators={},
        temperature=None if not any(temperatures) else torch.tensor(temperatures),
    )
    target = torch.eye(VOCABULARY)[[1, 2, 3]]
    emitted = vllm_rejection_sample(
        torch.tensor([1, 0, 3], dtype=torch.int32),
        [2, 1],
        2,
        torch.tensor([2, 3], dtype=torch.int32),
        None,
        target,
        torch.tensor([[0], [0]], dtype=torch.int32),
        metadata,
    )
    assert emitted.tolist() == [[1, 2, -1], [3, 0, -1]]

"""Decide which drafted tokens to keep, and what replaces the first one rejected.

Speculative decoding is lossless if the emitted tokens have the target's distribution whatever was drafted
(Leviathan et al., arXiv 2211.17192). A draft token ``x`` with draft probability q(x) (1 for a drafter without
probabilities, such as n-grams or a suffix automaton) is kept if a uniform number, drawn for that token alone,
is below p(x) / q(x). The first token rejected is replaced by a sample of max(p - q, 0), normalised; if all
are kept, the bonus token follows. A greedy row keeps tokens that equal the argmax of p, and replaces the
first that does not with the argmax.

Everything is a pure function of tensors on one device: no loop over requests or tokens, no wait for the
device. The replacement is drawn once per request, not for each drafted token.

Invariants: each row emits 1 to n + 1 tokens, padded with -1; greedy output equals decoding without drafts;
sampled output has the target's distribution. Cost: O(B V), for B requests and V tokens in the vocabulary;
O(T V) for T drafted tokens if a row is greedy.
"""

from __future__ import annotations

from itertools import accumulate

import torch

PLACEHOLDER = -1


def rejection_sample(
    draft_ids: torch.Tensor,
    draft_lengths: torch.Tensor,
    target_probs: torch.Tensor,
    bonus_ids: torch.Tensor,
    *,
    max_draft_tokens: int,
    greedy: torch.Tensor | bool = False,
    uniform: torch.Tensor | None = None,
    exponential: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """The tokens that each request emits.

    Args:
        draft_ids: [T] int, the drafts of all requests, concatenated; T >= 1.
        draft_lengths: [B] int, how many of them each request has; 0 is allowed.
        target_probs: [T, V] float, the target's distribution at each drafted position, after temperature,
            top-k and top-p.
        bonus_ids: [B] or [B, 1] int, the token to emit after a draft that is kept whole.
        max_draft_tokens: the largest draft length S, passed in to avoid a wait for the device.
        greedy: [B] bool, or one value for all.
        uniform: [T] float in [0, 1); optional if all rows are greedy.
        exponential: [B, V] float, Exp(1), used for the replacement; optional if all rows are greedy.
        draft_probs: [T, V] float, the distribution each draft was sampled from; None if it was not sampled.

    Returns:
        [B, S + 1] int32, each row followed by -1.

    >>> probs = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    >>> rejection_sample(torch.tensor([1, 1]), torch.tensor([2, 0]), probs, torch.tensor([1, 0]),
    ...                  max_draft_tokens=2, greedy=True)
    tensor([[ 1,  0, -1],
            [ 0, -1, -1]], dtype=torch.int32)
    """
    device, tokens, requests = target_probs.device, len(draft_ids), len(draft_lengths)
    draft_ids, lengths = draft_ids.long(), draft_lengths.long()
    starts = lengths.cumsum(0) - lengths
    row = torch.repeat_interleave(torch.arange(requests, device=device), lengths, output_size=tokens)
    column = torch.arange(tokens, device=device) - starts[row]

    all_random, all_greedy = greedy is False, greedy is True
    if not all_random:
        argmax = target_probs.argmax(-1)
        kept = draft_ids == argmax
    if not all_greedy:
        ratio = target_probs.gather(1, draft_ids[:, None])[:, 0]
        if draft_probs is not None:
            ratio = ratio / draft_probs.gather(1, draft_ids[:, None])[:, 0]
        kept = uniform < ratio if all_random else torch.where(greedy[row], kept, uniform < ratio)

    drafts = torch.full((requests, max_draft_tokens + 1), PLACEHOLDER, dtype=torch.int64, device=device)
    drafts[row, column] = draft_ids
    keeps = torch.zeros(requests, max_draft_tokens, dtype=torch.int64, device=device)
    keeps[row, column] = kept.long()
    accepted = keeps.cumprod(1).sum(1)

    # The one token after the kept ones: the bonus, or the replacement for the draft at `first` [B].
    first = (starts + accepted).clamp(max=tokens - 1)
    if all_greedy:
        replacement = argmax[first]
    else:
        rest = target_probs[first]
        if draft_probs is None:
            rest = rest.scatter(1, draft_ids[first, None], 0)
        else:
            rest = (rest - draft_probs[first]).clamp(min=0)
        replacement = (rest / exponential).argmax(-1)
        if not all_random:
            replacement = torch.where(greedy, argmax[first], replacement)
    last = torch.where(accepted == lengths, bonus_ids.reshape(-1).long(), replacement)

    position = torch.arange(max_draft_tokens + 1, device=device)
    emitted = torch.where(position < accepted[:, None], drafts, PLACEHOLDER)
    return torch.where(position == accepted[:, None], last[:, None], emitted).to(torch.int32)


def draw(
    draft_lengths: list[int], vocabulary: int, generators: dict[int, torch.Generator], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The random numbers of one call: ``uniform`` [T] float64 and ``exponential`` [B, vocabulary] float32.

    A request with its own generator, ``{row: generator}``, draws from it, and only if it has a draft.
    Exponential numbers are positive: a zero would turn an impossible token into 0 / 0.
    """
    uniform = torch.rand(sum(draft_lengths), dtype=torch.float64, device=device)
    exponential = torch.empty(len(draft_lengths), vocabulary, device=device).exponential_()
    starts = [0, *accumulate(draft_lengths)]
    for row, generator in generators.items():
        if draft_lengths[row]:
            uniform[starts[row] : starts[row + 1]].uniform_(generator=generator)
            exponential[row].exponential_(generator=generator)
    return uniform, exponential.clamp_(min=torch.finfo(torch.float32).tiny)


def lengths_of(cumulative: torch.Tensor) -> torch.Tensor:
    """Lengths [B] from cumulative lengths [B]."""
    return cumulative.diff(prepend=cumulative.new_zeros(1))


def expand(
    values: torch.Tensor, cumulative: torch.Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """``expand_batch_to_tokens`` of vLLM 0.13: repeat each request's value [B] for its tokens, [tokens].

    >>> expand(torch.tensor([7, 8, 9]), torch.tensor([2, 2, 3]), 3, replace_from=9, replace_to=1)
    tensor([7, 7, 1])
    """
    values = torch.where(values == replace_from, replace_to, values)
    return torch.repeat_interleave(values, lengths_of(cumulative), output_size=tokens)


def vllm_rejection_sample(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata,
) -> torch.Tensor:
    """``rejection_sample`` of vLLM 0.13: same arguments (with SamplingMetadata), same result, no Triton."""
    numbers, greedy = {}, True
    if not sampling_metadata.all_greedy:
        greedy = False if sampling_metadata.all_random else sampling_metadata.temperature == 0
        drawn = draw(
            num_draft_tokens, target_probs.shape[1], sampling_metadata.generators, target_probs.device
        )
        numbers = dict(zip(("uniform", "exponential"), drawn, strict=True))
    return rejection_sample(
        draft_token_ids,
        lengths_of(cu_num_draft_tokens),
        target_probs,
        bonus_token_ids,
        max_draft_tokens=max_spec_len,
        greedy=greedy,
        draft_probs=draft_probs,
        **numbers,
    )

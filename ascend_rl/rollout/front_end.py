"""The front end of a rollout server: how many requests it lets in, and what it does for each token.

verl's server is one Ray actor, however many DP engines it deals to: with DP32 x TP4 one process takes all
8192 requests of a step. verl lets in max(1000, max_num_seqs + 16) calls at a time, the number of one engine:
31 requests an engine where 256 fit. The others wait in Ray, where no engine, mover or abort sees them, and so
do calls that are no requests (progress, what a server holds, pause), behind all of them. For each token of
each request it then makes text and an output and wakes a task, and keeps only the last output.

Idea: Ray does not hold requests back; vLLM's scheduler already admits max_num_seqs per engine and queues the
rest in order. A request asks for token ids and log-probs when it ends, and for nothing before.
Invariants (tests/patched/test_rollout_concurrency.py, test_front_end.py): all requests of a step are in the
server at once, and a question is answered meanwhile; what `generate` returns is what verl's request returns.
Cost: O(1) a token; no text, no task switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Calls that Ray runs at a time in a server: more than any step has requests, those queued in vLLM included.
CALLS_AT_ONCE = 1 << 20


def result_only(sampling_params: dict[str, Any], final_only: Any) -> dict[str, Any]:
    """Sampling parameters of a request of which only the end counts, without text. What is given stays.

    Args:
        sampling_params: of vLLM.
        final_only: vLLM's RequestOutputKind.FINAL_ONLY.

    >>> result_only({"top_p": 0.9}, "final")
    {'output_kind': 'final', 'detokenize': False, 'flat_logprobs': True, 'top_p': 0.9}
    >>> result_only({"stop": ["</s>"]}, "final")["detokenize"]  # vLLM looks for it in the text
    True
    """
    quiet = {
        "output_kind": final_only,
        "detokenize": bool(sampling_params.get("stop")),
        "flat_logprobs": True,  # a few lists per request, instead of a dict and an object per token
    }
    return quiet | sampling_params


def append_sampled(
    flat: Any, token_ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]], ranks: Sequence[int]
) -> float:
    """Append the sampled token of each position to vLLM's FlatLogprobs; returns the sum of their log-probs.

    Args:
        flat: vLLM's FlatLogprobs, with one entry a position.
        token_ids, log_probs: [positions][1 or more], the sampled token first.
        ranks: [positions]
    """
    count, total = len(flat.logprobs), 0.0
    for ids, values, rank in zip(token_ids, log_probs, ranks, strict=True):
        flat.start_indices.append(count)
        count += 1
        flat.end_indices.append(count)
        flat.token_ids.append(ids[0])
        flat.logprobs.append(values[0])
        flat.ranks.append(rank)
        flat.decoded_tokens.append(None)
        total += values[0]
    return total


def sampled_log_probs(token_ids: Sequence[int], logprobs: Any) -> list[float]:
    """[tokens] of the sampled tokens, from vLLM's FlatLogprobs or its list of dicts by token."""
    if len(getattr(logprobs, "logprobs", ())) == len(token_ids):  # flat, one entry a position
        return logprobs.logprobs
    return [position[token].logprob for token, position in zip(token_ids, logprobs, strict=True)]

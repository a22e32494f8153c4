"""Draft with the suffix automaton inside a vLLM engine: for which requests, how many tokens, and how often.

`SamDrafter` predicts how a text continues. This module applies it to the runner's batch: a request gets a
draft after each step that sampled a token for it, but never beyond its last token (max_tokens, the model's
length), and not while its sampling needs something that is computed for one token a step (penalties, min_p,
logit_bias, min_tokens not yet reached). This affects only speed, never what is emitted.

The tokens of a rejected draft are computed for nothing. So each request keeps an account: a draft costs 1,
each accepted token earns 1. The deeper a request is in debt, the more rarely it drafts: in every step up to
FREE_DEBT, then in every second, fourth, ... down to every MAX_PERIOD-th. The count is in engine steps, so
requests in debt draft in the same step, and the other steps run without the cost of verification. A request
starts with the recent average debt of the others. One long accepted draft pays off all of its debt.

Cost of a step: O(new tokens) for requests that draft, O(1) for the others, which catch up later.
"""

from __future__ import annotations

import numpy as np

from ascend_rl.settings.switch import CannotWork
from ascend_rl.speculation.sam import SamDrafter

MAX_DRAFT_TOKENS = 128
"""MAX_SPEC_LEN of vLLM's rejection sampler."""
FREE_DEBT = 2
MAX_PERIOD = 128
MAX_DEBT = FREE_DEBT + MAX_PERIOD.bit_length() - 1
OTHER_METHODS = (
    "model", "quantization", "draft_tensor_parallel_size", "max_model_len", "prompt_lookup_max",
    "prompt_lookup_min", "speculative_token_tree", "disable_by_batch_size",
)  # fmt: skip


def check_sam_config(config) -> None:
    """Check vLLM's SpeculativeConfig for method ``sam``.

    Raises:
        CannotWork: num_speculative_tokens is missing or too large, or an option of another method is given.
    """
    tokens = config.num_speculative_tokens
    if tokens is None or not 1 <= tokens <= MAX_DRAFT_TOKENS:
        raise CannotWork(
            f"speculative_config: method sam needs num_speculative_tokens from 1 to {MAX_DRAFT_TOKENS}, got "
            f'{tokens}; for example {{"method": "sam", "num_speculative_tokens": 8}}'
        )
    if unused := [name for name in OTHER_METHODS if getattr(config, name) is not None]:
        raise CannotWork(
            f"speculative_config: {', '.join(unused)} has no effect with method sam, which has no model; "
            "leave it out"
        )


def period(debt: float) -> int:
    """How many steps a request with this debt waits from one draft to the next.

    >>> [period(debt) for debt in (0, 2, 3, 4.5, 9, 20)]
    [1, 1, 2, 4, 128, 128]
    """
    return 1 << max(0, min(int(debt), MAX_DEBT) - FREE_DEBT)


def takes_drafts(params, output_tokens: int) -> bool:
    """Whether drafts of a request with these SamplingParams can be verified at this point."""
    return not (
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1
        or params.min_p
        or params.logit_bias
        or output_tokens < params.min_tokens
    )


class SamProposer:
    """The drafter for method ``sam`` in vLLM's model runners."""

    def __init__(self, num_speculative_tokens: int, max_model_len: int):
        self.drafter = SamDrafter(num_speculative_tokens)
        self.tokens = num_speculative_tokens
        self.max_model_len = max_model_len
        self.steps = 0
        self.debts: dict[str, float] = {}  # of each request the drafter knows
        self.drafted: set[str] = set()  # requests whose draft is being verified
        self.usual_debt = 0.0

    def load_model(self, *args, **kwargs) -> None:
        """Do nothing: there is no model."""

    def propose(
        self,
        input_batch,
        requests: dict,
        sampled_token_ids: list[list[int]],
        graph_tokens: int | None = None,
    ) -> list[list[int]]:
        """The drafts for the next step.

        Args:
            input_batch: the runner's InputBatch, with this step's tokens.
            requests: the runner's unfinished requests by id, with ``sampling_params``.
            sampled_token_ids: the tokens each row of the batch emitted in this step; empty within a prompt.
            graph_tokens: tokens of the largest decode graph, if the next step replays one only with as many
                drafted tokens in each row; None if drafts may have any lengths.

        Returns:
            a draft, possibly empty, for each row.
        """
        self.steps += 1
        for request_id in self.debts.keys() - requests.keys():
            self.drafter.end(request_id)
            del self.debts[request_id]
            self.drafted.discard(request_id)
        rows = enumerate(zip(input_batch.req_ids, sampled_token_ids, strict=True))
        drafts = [
            self._draft(request_id, row, len(sampled), input_batch, requests) if sampled else []
            for row, (request_id, sampled) in rows
        ]
        if graph_tokens is None or not any(drafts) or not all(sampled_token_ids):
            return drafts  # after a part of a prompt comes the next part, and no graph
        return self._pad(drafts, input_batch, requests, graph_tokens)

    def _pad(
        self, drafts: list[list[int]], input_batch, requests: dict, graph_tokens: int
    ) -> list[list[int]]:
        """The drafts with num_speculative_tokens each, or none if that is impossible for some row.

        Padding repeats the last token of the text. It is verified like any draft, so it changes nothing.
        """
        fits = len(drafts) * (1 + self.tokens) <= graph_tokens
        for row, request_id in enumerate(input_batch.req_ids):
            prompt, length = int(input_batch.num_prompt_tokens[row]), int(input_batch.num_tokens_no_spec[row])
            params = requests[request_id].sampling_params
            if length < min(self.max_model_len, prompt + params.max_tokens):  # else it has just finished
                fits &= length + self.tokens < self.max_model_len and takes_drafts(params, length - prompt)
            last = int(input_batch.token_ids_cpu[row, length - 1])
            drafts[row] = drafts[row] + [last] * (self.tokens - len(drafts[row]))
        if fits:
            return drafts
        self.drafted.clear()
        return [[] for _ in drafts]

    def _draft(self, request_id: str, row: int, sampled: int, input_batch, requests: dict) -> list[int]:
        debt = self.debts.setdefault(request_id, self.usual_debt)
        if request_id in self.drafted:
            self.drafted.discard(request_id)
            debt = self.debts[request_id] = min(max(debt + 2 - sampled, 0), MAX_DEBT)
            self.usual_debt += 0.05 * (debt - self.usual_debt)
        if self.steps % period(debt):
            return []
        prompt, length = int(input_batch.num_prompt_tokens[row]), int(input_batch.num_tokens_no_spec[row])
        params = requests[request_id].sampling_params
        room = min(self.max_model_len, prompt + params.max_tokens) - length - 1
        if room < 1 or not takes_drafts(params, length - prompt):
            return []
        tokens: np.ndarray = input_batch.token_ids_cpu[row, :length]
        draft = self.drafter.propose(request_id, tokens, prompt)[:room].tolist()
        if draft:
            self.drafted.add(request_id)
        return draft

"""Draft with the suffix automaton inside a vLLM engine: for which requests, how many tokens, and when.

`SamDrafter` predicts how a text continues. This module applies it to the runner's batch: a request gets a
draft after each step that sampled a token for it, but never beyond its last token (max_tokens, the model's
length), and not while its sampling needs something that is computed for one token per step (penalties, min_p,
logit_bias, bad words, min_tokens not yet reached). This affects only speed, never what is emitted.

The tokens of a rejected draft are computed for nothing, and a step takes as long as all its tokens need. So
a step verifies those tokens of all drafts that are likeliest to be right, as many as make it emit most for
its time. A graph takes whole drafts or none. Drafts pay if the tokens that they are expected to add, over
those that the step emits anyway, are at least the time they add, over the time without them. Times come from
measured steps, interpolated to the number of tokens (`step_time`), padding to a graph included. What the
drafter expects is corrected by how much of it came true lately. Drafts that do not pay are tried now and
then, for at most ALLOWANCE of the time, so that what is known of them stays true. A large batch is looked at
more rarely while drafts do not pay, about LOOK_ROWS requests per step.

A request may bring earlier responses to its prompt (`sam_history`). They are taken in piece by piece.

A step takes in no more text than one BUDGET allows, shared among requests and history: those with few new
tokens are never held up by long prompts, which all get an equal part of the rest and catch up step by step.

Cost of a step: O(new tokens) for requests that are looked at, up to BUDGET; the others catch up later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from ascend_rl.process.counts import count
from ascend_rl.settings.switch import CannotWork
from ascend_rl.speculation import sam_options
from ascend_rl.speculation.bs_threshold_for_spec_decode import step_time
from ascend_rl.speculation.sam import BUDGET, SamDrafter
from ascend_rl.speculation.sam_history import take_history

MAX_DRAFT_TOKENS = 128
"""MAX_SPEC_LEN of vLLM's rejection sampler."""
LOOK_ROWS = 32
FEW = 64  # new tokens; requests with fewer take them in first, in the order of the batch
LEAST_SHARE = 128  # of BUDGET, for each request, so that it keeps up with the tokens that it emits
FORGET = 1 / 50  # what each step with drafts forgets of the drafts before
ALLOWANCE, MOST_ALLOWED = 0.01, 1.0  # time to try poor drafts: a step's share, and saved up, in steps
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


def takes_drafts(params, output_tokens: int) -> bool:
    """Whether drafts of a request with these SamplingParams can be verified at this point."""
    return not (
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1
        or params.min_p
        or params.logit_bias
        or params.bad_words_token_ids
        or output_tokens < params.min_tokens
    )


class SamProposer:
    """The drafter for method ``sam`` in vLLM's model runners.

    Args:
        num_speculative_tokens: the most tokens in a draft.
        max_model_len: the most tokens of a request.
        options: additional_config.sam_decoding; `sam_options` has the defaults. ``history`` is the trainer's.

    Raises:
        CannotWork: for options that are incompatible.
    """

    def __init__(self, num_speculative_tokens: int, max_model_len: int, options: Mapping | None = None):
        options = dict(options or {})
        sam_options.check(options)
        options.pop("history", None)
        self.times = sam_options.measured_steps(options.pop("step_times", None))
        self.drafter = SamDrafter(num_speculative_tokens, **options)
        self.history: deque[tuple[str, np.ndarray, int]] = deque()  # to take in: name, text, prompt tokens
        self.taken = 0  # of the first of these, after its prompt
        self.tokens = num_speculative_tokens
        self.max_model_len = max_model_len
        self.known: set[str] = set()  # requests the drafter knows
        self.drafted: set[str] = set()  # requests whose drafts are being verified
        self.expected = 0.0  # tokens of these drafts that should be right
        self.came_true = self.promised = 1.0  # tokens of lately verified drafts: right, and expected right
        self.wait = 0  # steps until the next look
        self.behind: set[str] = set()  # requests whose text is not all taken in; these are looked at anyway
        self.allowed = MOST_ALLOWED  # time for trials, in steps
        self.paid = 0.0  # for the drafts that are being verified, if they are a trial

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
        for request_id in self.known - requests.keys():
            self.drafter.end(request_id)
        self.known &= requests.keys()
        left = BUDGET - self._take_in_history(BUDGET // 2)
        self._learn(input_batch.req_ids, sampled_token_ids)
        none: list[list[int]] = [[] for _ in sampled_token_ids]
        looked_at = [
            row
            for row, name in enumerate(input_batch.req_ids)
            if sampled_token_ids[row] and (not self.wait or name in self.behind)
        ]
        drafts, chances = self._look(looked_at, input_batch, requests, left)
        if self.wait:
            self.wait -= 1
            return none
        rows, lengths = len(looked_at), [len(draft) for draft in drafts]
        if graph_tokens is not None and rows == len(drafts) and any(drafts):
            drafts = self._pad(drafts, input_batch, requests, graph_tokens)
        else:  # no graph, as after a part of a prompt, which the next part follows
            lengths = self._best_lengths(chances, rows)
            drafts = [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]
        expected = sum(float(of[:length].sum()) for of, length in zip(chances, lengths, strict=True))
        tokens = sum(map(len, drafts))
        self.allowed = min(self.allowed + ALLOWANCE, MOST_ALLOWED)
        price = self.price(rows, tokens) if tokens else 0.0
        trial = expected * self.trust < price * rows
        if not tokens or (trial and price > self.allowed):
            self.wait = rows // LOOK_ROWS
            return none
        if trial:
            self.allowed, self.paid = self.allowed - price, price
        self.expected = expected
        count("sam_drafted", tokens)
        self.drafted = {name for name, draft in zip(input_batch.req_ids, drafts, strict=True) if draft}
        return drafts

    @property
    def trust(self) -> float:
        """What to multiply expected tokens with: how many of those expected lately came true; at first 1."""
        return self.came_true / self.promised

    def price(self, rows: int, tokens: int) -> float:
        """Time that ``tokens`` of drafts add to a step of ``rows``, over that of the step without them."""
        return step_time(self.times, rows + tokens) / step_time(self.times, rows) - 1

    def _best_lengths(self, chances: list[np.ndarray], rows: int) -> list[int]:
        """How many tokens of each draft to verify for most emitted tokens per time; at least one in all.

        These are n of those likeliest to be right: the step emits rows + (right of n) in time(rows + n).
        """
        lengths = [len(of) for of in chances]
        if not any(lengths):
            return lengths
        of_all = np.concatenate(chances)
        order = np.argsort(-of_all, kind="stable")  # of a draft the first tokens: its chances never rise
        emitted = rows + self.trust * np.cumsum(of_all[order])
        best = np.argmax(emitted / step_time(self.times, rows + 1 + np.arange(len(order)))) + 1
        taken = np.repeat(np.arange(len(lengths)), lengths)[order[:best]]
        return np.bincount(taken, minlength=len(lengths)).tolist()

    def _learn(self, req_ids: list[str], sampled_token_ids: list[list[int]]) -> None:
        """Compare what was emitted with what was expected. A trial gets its price back if it paid off."""
        if not self.drafted:
            return
        lengths = [len(sampled) for sampled in sampled_token_ids if sampled]
        right = sum(lengths) - len(lengths)
        count("sam_accepted", right)
        self.came_true = (1 - FORGET) * self.came_true + right
        self.promised = (1 - FORGET) * self.promised + self.expected
        self.allowed += min(self.paid, right / max(len(lengths), 1))
        self.drafted, self.expected, self.paid = set(), 0.0, 0.0

    def _bring_history(self, request_id: str, params) -> None:
        """Queue the earlier responses that a request brings, unless its prompt is known here anyway."""
        texts = take_history(params)
        if texts and not self.drafter.knows(*texts[0]):
            for number, (tokens, prompt_tokens) in enumerate(texts):
                name = f"{request_id}/{number}"
                self.drafter.propose(name, tokens[:prompt_tokens], prompt_tokens, 0)  # what follows joins it
                self.history.append((name, tokens, prompt_tokens))

    def _take_in_history(self, budget: int) -> int:
        """Take in what the budget allows of the queue, as texts of finished requests. Returns the steps.

        Half of the memory is left for texts that will grow.
        """
        left = budget
        while self.history and left > 0:
            name, tokens, prompt_tokens = self.history[0]
            if room := self.drafter.make_room(self.drafter.max_bytes // 2):
                self.drafter.propose(name, tokens, prompt_tokens, left)
                left -= self.drafter.spent
                before, self.taken = self.taken, max(self.drafter.seen(name) - prompt_tokens, 0)
                count("sam_history", self.taken - before)
            if prompt_tokens + self.taken == len(tokens) or not room:
                self.drafter.end(name)
                self.history.popleft()
                self.taken = 0
            else:
                break  # the budget is spent, or the memory
        return budget - left

    def _look(
        self, rows: list[int], input_batch, requests: dict, budget: int
    ) -> tuple[list[list[int]], list[np.ndarray]]:
        """Take in the text of these rows. Their drafts, by row of the batch, and the chances of the tokens.

        The budget is shared: what rows with few new tokens leave goes to the others in equal parts.
        """
        drafts, chances = [[] for _ in input_batch.req_ids], [np.empty(0) for _ in input_batch.req_ids]

        def new(row: int) -> int:
            length, seen = input_batch.num_tokens_no_spec[row], self.drafter.seen(input_batch.req_ids[row])
            return int(length - seen) // FEW

        self.behind = set()
        for done, row in enumerate(sorted(rows, key=new)):
            request_id, share = input_batch.req_ids[row], max(budget // (len(rows) - done), LEAST_SHARE)
            drafts[row], spent = self._draft(request_id, row, input_batch, requests, share)
            chances[row], budget = self.drafter.chances[: len(drafts[row])], budget - spent
            if spent >= share:
                self.behind.add(request_id)
        return drafts, chances

    def _draft(
        self, request_id: str, row: int, input_batch, requests: dict, budget: int
    ) -> tuple[list[int], int]:
        """A draft for a request, and the steps that it took."""
        if request_id not in self.known:
            self._bring_history(request_id, requests[request_id].sampling_params)
        self.known.add(request_id)
        prompt, length = int(input_batch.num_prompt_tokens[row]), int(input_batch.num_tokens_no_spec[row])
        params = requests[request_id].sampling_params
        room = min(self.max_model_len, prompt + params.max_tokens) - length - 1
        if room < 1 or not takes_drafts(params, length - prompt):
            return [], 0
        tokens: np.ndarray = input_batch.token_ids_cpu[row, :length]
        return self.drafter.propose(request_id, tokens, prompt, budget)[:room].tolist(), self.drafter.spent

    def _pad(
        self, drafts: list[list[int]], input_batch, requests: dict, graph_tokens: int
    ) -> list[list[int]]:
        """The drafts with num_speculative_tokens each, or none if that is impossible for some row.

        Padding repeats the last token of the text. It is verified like any draft, so it changes nothing.
        """
        fits, padded = len(drafts) * (1 + self.tokens) <= graph_tokens, []
        for row, (request_id, draft) in enumerate(zip(input_batch.req_ids, drafts, strict=True)):
            prompt, length = int(input_batch.num_prompt_tokens[row]), int(input_batch.num_tokens_no_spec[row])
            params = requests[request_id].sampling_params
            if length < min(self.max_model_len, prompt + params.max_tokens):  # else it has just finished
                fits &= length + self.tokens < self.max_model_len and takes_drafts(params, length - prompt)
            last = int(input_batch.token_ids_cpu[row, length - 1])
            padded.append(draft + [last] * (self.tokens - len(draft)))
        return padded if fits else [[] for _ in drafts]

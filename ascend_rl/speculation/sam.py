"""Draft tokens for speculative decoding from a suffix automaton of the texts so far, without a draft model.

Long reasoning repeats itself, and the n samples of one prompt repeat each other. Requests with equal prompts
form a group. One generalized suffix automaton (Blumer et al. 1985) per group knows every substring of their
texts, and each request knows its place in it. A draft proposes the tokens that last followed the most
reliable suffix of the text; if the group knows too little, a table of all texts proposes the tokens that last
followed the last 1 to 5 tokens. How reliable a suffix is, given its length and whether the previous guess
from it was right, is learned as text comes in. These odds choose the suffix and end the draft, so text that
does not repeat gets no drafts.

- A text gives the same automaton whether it arrives at once, in pieces or interleaved with others; no
  substring spans two texts. Drafting never changes the automaton.
- A call does the work that its budget allows. Later calls do the rest; until then there are no drafts.
- Memory is one mapping, handed out in chunks. When memory is short, groups without requests give theirs
  back, oldest group first. A token takes amortised O(1) time and at most 2 states and 3 edges; a draft of k
  tokens takes O(k).
"""

from __future__ import annotations

import mmap
from collections import Counter

import numpy as np

from ascend_rl.speculation import sam_options
from ascend_rl.speculation.sam_automaton import (
    BUDGET,
    CHUNK,
    CHUNK_LINKS,
    GROUP,
    LENGTH_CLASSES,
    LIMIT,
    NEGATIVE,
    ORDERS,
    PLACES,
    PROMPT,
    REPLACED,
    SEEN,
    SHARING,
    SHORTEST_SHARED,
    SPARE_CHUNKS,
    TABLE,
    UNUSED,
    USED,
    free_group,
    new_group,
    new_text,
    prefix_hashes,
    propose,
)


class SamDrafter:
    """Drafts for the requests of one engine. Not thread-safe. The first one compiles for a few seconds.

    Args:
        num_speculative_tokens: the most tokens in a draft.
        share_groups: also draft from the texts of other requests, those with an equal prompt first.
            Otherwise a request knows only its own text.
        max_bytes: limit for the texts of all requests, about 60 bytes per token, and 16 MiB for the table.
            Allocated as needed. When it is reached, texts of finished requests are dropped, then drafts stop.
        worth: a draft ends before a token whose odds of being accepted are lower than this.

    Attributes:
        chances: [tokens] of the latest draft: how likely it is right up to and with each of its tokens, by
            what was learned so far. Their sum is the number of tokens expected to be right.
        spent: steps of the latest call.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        *,
        share_groups: bool = True,
        max_bytes: int = sam_options.MAX_BYTES,
        worth: float = sam_options.WORTH,
    ):
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens={num_speculative_tokens}: give at least 1")
        chunks = max_bytes // (4 * CHUNK)
        first = -(-(CHUNK_LINKS + chunks + SPARE_CHUNKS + 2 * PLACES) // CHUNK)
        if not first < chunks < 1 << 18:
            raise ValueError(
                f"max_bytes={max_bytes}: give more than {4 * CHUNK * first + (4 << 20)}, less than 4 GiB"
            )
        # Pages of a mapping cost nothing until they are written to. Huge pages would take long to clear.
        pages = mmap.mmap(
            -1, 4 * CHUNK * (chunks + SPARE_CHUNKS), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        self._memory = np.frombuffer(pages, dtype=np.int32)
        self._memory[[UNUSED, LIMIT, SHARING]] = first, chunks - first, share_groups
        self._memory[TABLE] = first * CHUNK - 2 * PLACES
        # Touch it now, not page by page in the first calls.
        self._memory[self._memory[TABLE] : first * CHUNK] = 0
        # Initial odds, close to those of mathematics and code.
        lengths = np.array([*range(LENGTH_CLASSES), *range(ORDERS + 1)])
        once, again = lengths / (lengths + 2.5), (lengths / (lengths + 2.5)) ** 0.5
        self._odds = np.stack([once, again], axis=1).ravel()
        self._draft = np.empty(2 * num_speculative_tokens, dtype=np.int32)
        self._chances = np.empty(2 * num_speculative_tokens)
        self._k, self._share, self._worth = num_speculative_tokens, share_groups, worth
        self._texts: dict[str, int] = {}
        self._keys: dict[str, tuple] = {}
        self._groups: dict[tuple, int] = {}
        self._members: Counter[tuple] = Counter()
        self._idle: dict[tuple, None] = {}  # groups without members, oldest first
        self._prompt_lengths: Counter[int] = Counter()
        for dtype in (np.int32, np.int64):
            self.propose("", np.zeros(1, dtype), 1)
            self.end("")
        while self._free_oldest():
            pass

    @property
    def used_bytes(self) -> int:
        """Bytes of memory that the automatons use."""
        return int(self._memory[USED]) * 4 * CHUNK

    @property
    def max_bytes(self) -> int:
        """The limit of `used_bytes`."""
        return int(self._memory[LIMIT]) * 4 * CHUNK

    def make_room(self, most: int) -> bool:
        """Drop texts of finished requests, oldest first, until ``used_bytes`` <= ``most``; whether it is."""
        while self.used_bytes > most:
            if not self._free_oldest():
                return False
        return True

    def knows(self, tokens: np.ndarray, prompt_tokens: int) -> bool:
        """Whether there is a group for this prompt."""
        return self._key("", tokens[:prompt_tokens]) in self._groups

    def seen(self, request_id: str) -> int:
        """How many tokens of a request, from the first of its prompt on, have been taken in."""
        if (text := self._texts.get(request_id)) is None:
            return 0
        memory = self._memory
        seen = memory[text + SEEN]
        return int(seen if seen >= 0 else memory[memory[memory[text + GROUP] + PROMPT] + SEEN])

    def propose(
        self, request_id: str, tokens: np.ndarray, prompt_tokens: int, budget: int = BUDGET
    ) -> np.ndarray:
        """Take in the new part of ``tokens`` and draft what may follow.

        Without a draft until all is taken in, which may take several calls after a long pause or a long
        prompt. Tokens that do not continue the known text of this id (judged by its last 8 tokens) start a
        new text.

        Args:
            request_id: any name; valid until `end`.
            tokens: [L] int32 or int64, contiguous: prompt and output so far.
            prompt_tokens: length of the prompt. Requests with equal prompts form a group, which requests join
                whose prompt begins with that one (a request continued elsewhere, a later turn).
            budget: steps of this call; the last token that it begins may take some more. With 0, the call
                only makes the request known.

        Returns:
            [<= num_speculative_tokens] int32, empty where no token is worth drafting.
        """
        text = self._texts.get(request_id)
        if text is None:
            text = self._start(request_id, tokens, prompt_tokens)
        work = self._draft, self._chances, self._k, self._worth
        n, left = propose(self._memory, self._odds, text, tokens, *work, budget)
        while n < 0:
            if n == NEGATIVE:
                raise ValueError(f"request {request_id!r} has a token below 0: pass those that were sampled")
            if n == REPLACED:
                self.end(request_id)
                text = self._start(request_id, tokens, prompt_tokens)
            elif not self._free_oldest():
                n = 0
                break
            n, left = propose(self._memory, self._odds, text, tokens, *work, left)
        self.spent = budget - left
        self.chances = self._chances[:n].copy()
        return self._draft[:n].copy()

    def end(self, request_id: str) -> None:
        """Finish a request. Its text stays available to others as long as there is room."""
        if self._texts.pop(request_id, None) is None:
            return
        key = self._keys.pop(request_id)
        self._members[key] -= 1
        if not self._members[key]:
            self._idle[key] = None
            if not self._share:
                self._free_oldest()

    def _start(self, request_id: str, tokens: np.ndarray, prompt_tokens: int) -> int:
        if not 0 < prompt_tokens <= len(tokens):
            raise ValueError(
                f"{prompt_tokens} prompt tokens of {len(tokens)}: pass the whole prompt, not empty"
            )
        key = self._key(request_id, tokens[:prompt_tokens])
        if key not in self._groups:
            while self._memory[USED] >= self._memory[LIMIT] and self._free_oldest():
                pass
            self._groups[key] = new_group(self._memory, key[0])
            self._prompt_lengths[key[0]] += 1
        self._idle.pop(key, None)
        self._members[key] += 1
        self._keys[request_id] = key
        text = self._texts[request_id] = new_text(self._memory, self._groups[key])
        return text

    def _key(self, request_id: str, prompt: np.ndarray) -> tuple:
        """The group of a prompt: that of the longest known prompt it begins with, or its own."""
        if not self._share:
            return len(prompt), request_id
        hashes = prefix_hashes(prompt)
        for length in sorted(self._prompt_lengths, reverse=True):
            if length == len(prompt) or SHORTEST_SHARED <= length < len(prompt):
                key = length, int(hashes[length - 1])
                if key in self._groups:
                    return key
        return len(prompt), int(hashes[-1])

    def _free_oldest(self) -> bool:
        key = next(iter(self._idle), None)
        if key is None:
            return False
        del self._idle[key], self._members[key]
        free_group(self._memory, self._groups.pop(key))
        self._prompt_lengths[key[0]] -= 1
        if not self._prompt_lengths[key[0]]:
            del self._prompt_lengths[key[0]]
        return True

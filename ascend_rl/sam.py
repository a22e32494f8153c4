"""Drafts for speculative decoding from a suffix automaton of the text so far, no draft model needed.

Long reasoning repeats itself, and the n samples of one prompt repeat each other. The automaton of a group
(all requests with equal prompts) knows every substring of their texts; a request drafts what followed the
longest suffix of its text that was seen before.
"""

from __future__ import annotations

import numpy as np


class _Group:
    def __init__(self):
        self.next, self.link, self.length, self.recent = [{}], [-1], [0], [-1]
        self.members = 0

    def _new(self, length, edges=None, link=0):
        self.next.append(edges if edges is not None else {})
        self.link.append(link)
        self.length.append(length)
        self.recent.append(-1)
        return len(self.link) - 1

    def append(self, last: int, token: int) -> int:
        p = last
        while p >= 0 and p != 0 and self.recent[p] != token:
            self.recent[p] = token
            p = self.link[p]
        if token in self.next[last]:
            return self._split(last, token)
        state = self._new(self.length[last] + 1)
        p = last
        while p >= 0 and token not in self.next[p]:
            self.next[p][token] = state
            p = self.link[p]
        self.link[state] = 0 if p < 0 else self._split(p, token)
        return state

    def _split(self, p: int, token: int) -> int:
        q = self.next[p][token]
        if self.length[q] == self.length[p] + 1:
            return q
        clone = self._new(self.length[p] + 1, dict(self.next[q]), self.link[q])
        self.recent[clone] = self.recent[q]
        self.link[q] = clone
        while p >= 0 and self.next[p].get(token) == q:
            self.next[p][token] = clone
            p = self.link[p]
        return clone


class SamDrafter:
    """Drafts for the requests of one engine. Not thread-safe.

    Args:
        num_speculative_tokens: most tokens of a draft.
        share_groups: draft from the other requests with an equal prompt, too.
        max_bytes: memory for the texts of all requests.
    """

    def __init__(self, num_speculative_tokens: int, *, share_groups: bool = True, max_bytes: int = 1 << 30):
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens={num_speculative_tokens}: give at least 1")
        self.num_speculative_tokens, self.share_groups = num_speculative_tokens, share_groups
        self._requests: dict[str, list] = {}
        self._groups: dict[bytes, _Group] = {}

    def propose(self, request_id: str, tokens: np.ndarray, prompt_tokens: int) -> np.ndarray:
        """Take in what is new in ``tokens`` and draft what may follow.

        Args:
            request_id: any name, until `end`.
            tokens: [L] int32 or int64, prompt and output so far.
            prompt_tokens: length of the prompt; requests with equal prompts share their texts.

        Returns:
            [<= num_speculative_tokens] int32, empty where nothing is worth trying.
        """
        request = self._requests.get(request_id)
        if request is not None and (len(tokens) < request[1] or tokens[request[1] - 1] != request[3]):
            self.end(request_id)
            request = None
        if request is None:
            key = tokens[:prompt_tokens].astype(np.int32).tobytes()
            key = key if self.share_groups else key + request_id.encode()
            group = self._groups.setdefault(key, _Group())
            request = self._requests[request_id] = [group, 0, 0, -1, key]
        group, seen, last, _, _ = request
        for token in tokens[seen:].tolist():
            last = group.append(last, token)
        request[1:4] = len(tokens), last, int(tokens[-1])
        state, length = last, len(tokens)
        while state > 0 and group.recent[state] < 0:
            state = group.link[state]
            length = group.length[state]
        draft, most = [], min(self.num_speculative_tokens, length - 1)
        while state > 0 and group.recent[state] >= 0 and len(draft) < most:
            draft.append(group.recent[state])
            state = group.next[state][group.recent[state]]
        return np.array(draft, dtype=np.int32)

    def end(self, request_id: str) -> None:
        """The request is over; its text stays for its siblings."""
        request = self._requests.pop(request_id, None)
        if request is not None and not self.share_groups:
            del self._groups[request[4]]

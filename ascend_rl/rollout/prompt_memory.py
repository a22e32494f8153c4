"""What the trainer remembers of a prompt from rollout to rollout: the lengths and texts of its responses.

A prompt comes again in the next epoch and in each validation. The lengths of its last responses say where its
samples go (data_rebalance); their texts are what SAM decoding drafts from (sam_history). Prompts are
recognised by a hash of their messages, since verl's ``uid`` is new in every step.

Invariants (tests/test_prompt_memory.py): a rollout replaces what was known of its prompts and touches no
other; the texts are the first different ones, at most ``max_bytes`` in all; what `load` reads is what `save`
wrote. Cost: 4 bytes per token of a text, in memory and in each checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FILE = "prompt_memory.npz"  # of a checkpoint
MAX_BYTES = 8 << 30
Text = tuple[int, bytes]  # the length of its prompt; the tokens of prompt and response, int32


def keys_of(messages: Iterable[Any]) -> list[str]:
    """[N] what tells the prompts of N samples apart, in every epoch and run."""
    return [hashlib.blake2b(str(prompt).encode(), digest_size=16).hexdigest() for prompt in messages]


class PromptMemory:
    """The last responses to each prompt.

    Args:
        keep: texts kept per prompt; 0: lengths only.
        max_bytes: limit of the texts; beyond it, prompts whose last rollout is longest ago lose theirs.
    """

    def __init__(self, keep: int = 0, max_bytes: int = MAX_BYTES):
        self.keep, self.max_bytes, self.bytes = keep, max_bytes, 0
        self.lengths: dict[str, list[float]] = {}
        self.texts: dict[str, list[Text]] = {}  # oldest first

    def learn(self, prompts: Sequence[str], batch: Mapping[str, Any]) -> None:
        """Take in a rollout.

        Args:
            prompts: [N] as `keys_of` gives them.
            batch: ``input_ids`` and ``attention_mask`` [N, P + R], ``responses`` [N, R], of verl's rollout.
        """
        mask = np.asarray(batch["attention_mask"]) != 0
        prompt_width = mask.shape[1] - batch["responses"].shape[1]
        prompt_tokens, tokens = mask[:, :prompt_width].sum(1).tolist(), mask.sum(1).tolist()
        rows = (row[real] for row, real in zip(np.asarray(batch["input_ids"]), mask, strict=True))
        self.take_in(prompts, prompt_tokens, tokens, rows)

    def take_in(
        self,
        prompts: Sequence[str],
        prompt_tokens: Sequence[int],
        tokens: Sequence[int],
        texts: Iterable[np.ndarray] = (),
    ) -> None:
        """Take in N samples.

        Args:
            prompts: [N] as `keys_of` gives them.
            prompt_tokens: [N] of the prompt.
            tokens: [N] of prompt and response.
            texts: [N] the tokens of prompt and response [L]; read only where texts are kept.
        """
        lengths: dict[str, list[float]] = {}
        for prompt, before, all_of in zip(prompts, prompt_tokens, tokens, strict=True):
            lengths.setdefault(prompt, []).append(float(all_of - before))
        self.lengths |= lengths
        if not self.keep:
            return
        found: dict[str, list[Text]] = {}
        for prompt, before, row in zip(prompts, prompt_tokens, texts, strict=True):
            known = found.setdefault(prompt, [])
            if len(known) < self.keep:
                text = before, np.asarray(row).astype(np.int32).tobytes()
                known += [text] * (text not in known)
        self._keep(found)

    def _keep(self, texts: Mapping[str, list[Text]]) -> None:
        for prompt, known in texts.items():
            self._forget(prompt)
            self.texts[prompt] = known
            self.bytes += sum(len(text) for _, text in known)
        while self.bytes > self.max_bytes:
            self._forget(next(iter(self.texts)))

    def _forget(self, prompt: str) -> None:
        self.bytes -= sum(len(text) for _, text in self.texts.pop(prompt, ()))

    def save(self, directory: str | Path) -> None:
        """Write all of it into a checkpoint's directory."""
        flat = [(prompt, *text) for prompt, texts in self.texts.items() for text in texts]
        saved = {
            "prompts": np.array(list(self.lengths), dtype="U32"),
            "counts": np.array([len(known) for known in self.lengths.values()], dtype=np.int64),
            "lengths": np.array([tokens for known in self.lengths.values() for tokens in known], dtype=float),
            "text_prompts": np.array([prompt for prompt, _, _ in flat], dtype="U32"),
            "text_prompt_tokens": np.array([tokens for _, tokens, _ in flat], dtype=np.int64),
            "text_bytes": np.array([len(text) for _, _, text in flat], dtype=np.int64),
            "texts": np.frombuffer(b"".join(text for _, _, text in flat), dtype=np.uint8),
        }
        np.savez(Path(directory, FILE), **saved)

    def load(self, directory: str | Path) -> None:
        """Read what `save` wrote; a checkpoint of a run that remembered nothing has no such file."""
        if not (path := Path(directory, FILE)).exists():
            return
        with np.load(path) as file:
            saved = dict(file)
        ends = np.cumsum(saved["counts"])[:-1]
        lengths = np.split(saved["lengths"], ends) if len(saved["counts"]) else []
        self.lengths = {
            p: known.tolist() for p, known in zip(saved["prompts"].tolist(), lengths, strict=True)
        }
        texts: dict[str, list[Text]] = {}
        end, every = 0, saved["texts"].tobytes()
        for prompt, tokens, size in zip(
            *(saved[name].tolist() for name in ("text_prompts", "text_prompt_tokens", "text_bytes")),
            strict=True,
        ):
            texts.setdefault(prompt, []).append((tokens, every[end : end + size]))
            end += size
        if self.keep:
            self._keep({prompt: known[: self.keep] for prompt, known in texts.items()})


def fitting(texts: list[Text], most_bytes: float) -> list[Text]:
    """The first texts, as long as they take no more than so many bytes together.

    >>> fitting([(1, b"12345678"), (1, b"1234")], 8)
    [(1, b'12345678')]
    """
    ends = np.cumsum([len(text) for _, text in texts])
    return texts[: int(np.searchsorted(ends, most_bytes, side="right"))]

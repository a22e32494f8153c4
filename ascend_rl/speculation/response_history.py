"""Earlier responses to a prompt travel with its samples, and SAM decoding drafts from them.

A prompt comes again in the next epoch and in each validation, and its responses repeat much of the earlier
ones. The engine that gets a sample has seldom seen those: the samples of a prompt are spread over engines,
and texts of an epoch ago have made room for others. So the trainer keeps the last responses to each prompt
(`ResponseHistory`), each sample brings them along (`attach`, `with_history`), and the engine takes them in
as texts of finished requests (`SamProposer`). Older weights wrote them, but a draft is only a draft.

Each sample brings them, wherever it goes or moves to; an engine takes in those of the first and drops the
others'. Cost: 4 bytes a token in the trainer, at most MAX_BYTES; the same again on the way for each sample,
at most SENT_BYTES a rollout, whatever the lengths.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ascend_rl.speculation import sam_options

KEY = "sam_history"  # of a sample, in a DataProto's non_tensor_batch; in SamplingParams.extra_args
MAX_BYTES, SENT_BYTES = 8 << 30, 4 << 30
Text = tuple[int, bytes]  # the length of its prompt; the tokens of prompt and response, int32


class ResponseHistory:
    """The latest responses to each prompt, in the trainer's memory.

    Args:
        keep: responses to a prompt that are kept, from its last rollout.
        max_bytes: limit; when it is reached, prompts whose last rollout is longest ago are dropped.
    """

    def __init__(self, keep: int, max_bytes: int = MAX_BYTES):
        self.keep, self.max_bytes, self.bytes = keep, max_bytes, 0
        self.texts: dict[Hashable, list[Text]] = {}  # oldest first

    def learn(self, prompts: Sequence[Hashable], batch: Mapping[str, Any]) -> None:
        """Keep responses of a rollout, in place of older ones to the same prompts.

        Args:
            prompts: [B], what tells prompts apart.
            batch: ``input_ids`` and ``attention_mask`` [B, P + R], ``responses`` [B, R], of verl's rollout.
        """
        tokens, mask = (np.asarray(batch[name]) for name in ("input_ids", "attention_mask"))
        prompt_width = tokens.shape[1] - batch["responses"].shape[1]
        now: dict[Hashable, list[Text]] = {}
        for prompt, row, real in zip(prompts, tokens, mask != 0, strict=True):
            texts = now.setdefault(prompt, [])
            if len(texts) < self.keep:
                text = int(real[:prompt_width].sum()), row[real].astype(np.int32).tobytes()
                texts += [text] * (text not in texts)
        for prompt, texts in now.items():
            self._forget(prompt)
            self.texts[prompt] = texts
            self.bytes += sum(len(text) for _, text in texts)
        while self.bytes > self.max_bytes:
            self._forget(next(iter(self.texts)))

    def _forget(self, prompt: Hashable) -> None:
        self.bytes -= sum(len(text) for _, text in self.texts.pop(prompt, ()))


def kept(vllm: Mapping) -> int:
    """How many responses to a prompt engine_kwargs.vllm says to keep; 0 where nothing is drafted by SAM.

    >>> sam = {"speculative_config": {"method": "sam"}}
    >>> kept(sam), kept(sam | {"additional_config": '{"sam_decoding": {"history": 3}}'}), kept({})
    (2, 3, 0)
    """
    speculative, additional = (
        json.loads(given) if isinstance(given := vllm.get(name), str) else given or {}
        for name in ("speculative_config", "additional_config")
    )
    if speculative.get("method") != "sam":
        return 0
    return (additional.get(sam_options.NAME) or {}).get("history", sam_options.HISTORY)


def fitting(texts: list[Text], most_bytes: float) -> list[Text]:
    """The first texts, as long as they are no more than so many bytes together.

    >>> fitting([(1, b"12345678"), (1, b"1234")], 8)
    [(1, b'12345678')]
    """
    ends = np.cumsum([len(text) for _, text in texts])
    return texts[: int(np.searchsorted(ends, most_bytes, side="right"))]


def attach(manager: Any) -> None:
    """If an AgentLoopManager's rollout drafts by SAM, let each sample bring what `ResponseHistory` has."""
    keep = kept((manager.rollout_config.get("engine_kwargs") or {}).get("vllm") or {})
    if not keep:
        return
    history, generate = ResponseHistory(keep), manager.generate_sequences

    def generate_sequences(prompts):
        keys = list(map(str, prompts.non_tensor_batch["raw_prompt"]))  # verl's uid is new in every step
        sent = {key: fitting(history.texts.get(key, []), SENT_BYTES / len(keys)) for key in keys}
        earlier = np.empty(len(keys), dtype=object)
        for row, key in enumerate(keys):
            earlier[row] = sent[key]
        prompts.non_tensor_batch[KEY] = earlier
        output = generate(prompts)
        for batch in (prompts, output):
            batch.non_tensor_batch.pop(KEY, None)
        history.learn(keys, output.batch)
        output.meta_info["timing"][f"{KEY}/known_share"] = sum(map(bool, earlier)) / len(keys)
        return output

    manager.generate_sequences = generate_sequences


def with_history(sampling_params: dict, sample: dict) -> dict:
    """The sampling parameters of a sample of verl's agent loop, with the history that it brings, if any."""
    if not (texts := sample.pop(KEY, None)):
        return sampling_params
    return {**sampling_params, "extra_args": {**(sampling_params.get("extra_args") or {}), KEY: texts}}


def take_history(sampling_params: Any) -> list[tuple[np.ndarray, int]]:
    """In the engine: take what `with_history` put into SamplingParams out of them, as they live long.

    Returns:
        [(tokens [L] int32 of prompt and response, tokens of the prompt)].
    """
    texts = (sampling_params.extra_args or {}).pop(KEY, ())
    return [(np.frombuffer(bytearray(text), dtype=np.int32), prompt_tokens) for prompt_tokens, text in texts]

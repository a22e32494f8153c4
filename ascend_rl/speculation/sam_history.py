"""Earlier responses to a prompt travel with its samples, and SAM decoding drafts from them.

A prompt's responses repeat much of its earlier ones. The engine that gets a sample has seldom seen those: the
samples of a prompt are spread over engines, and texts of an epoch ago have made room for others. So the
trainer keeps the last responses to each prompt (`rollout.prompt_memory`), each sample brings them along
(`with_history`), and the engine takes them in as texts of finished requests (`SamProposer`). Older weights
wrote them, but a draft is only a draft.

Each sample brings them, wherever it goes or moves to; an engine takes in those of the first and drops the
others'. Cost: at most SENT_BYTES per rollout on the way, whatever the lengths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ascend_rl.speculation import sam_options

KEY = "sam_history"  # of a sample, in a DataProto's non_tensor_batch; in SamplingParams.extra_args
SENT_BYTES = 4 << 30


def kept(vllm: Mapping) -> int:
    """How many responses to a prompt engine_kwargs.vllm says to keep; 0 where nothing is drafted by SAM.

    >>> sam = {"speculative_config": {"method": "sam"}}
    >>> kept({"speculative_config": {"method": "custom_class", "model": "glue.SamDrafter"}})
    2
    >>> kept(sam), kept(sam | {"additional_config": '{"sam_decoding": {"history": 3}}'}), kept({})
    (2, 3, 0)
    """
    speculative, additional = (
        json.loads(given) if isinstance(given := vllm.get(name), str) else given or {}
        for name in ("speculative_config", "additional_config")
    )
    drafter = str(speculative.get("model")).endswith(".SamDrafter")  # on vLLM 0.23
    if speculative.get("method") != "sam" and not drafter:
        return 0
    return (additional.get(sam_options.NAME) or {}).get("history", sam_options.HISTORY)


def with_history(sampling_params: dict, texts: list[tuple[int, bytes]] | None) -> dict:
    """The sampling parameters of a sample that brings these earlier texts, if any."""
    if not texts:
        return sampling_params
    return {**sampling_params, "extra_args": {**(sampling_params.get("extra_args") or {}), KEY: texts}}


def take_history(sampling_params: Any) -> list[tuple[np.ndarray, int]]:
    """In the engine: take what `with_history` put into SamplingParams out of them, as they live long.

    Returns:
        [(tokens [L] int32 of prompt and response, tokens of the prompt)].
    """
    texts = (sampling_params.extra_args or {}).pop(KEY, ())
    return [(np.frombuffer(bytearray(text), dtype=np.int32), prompt_tokens) for prompt_tokens, text in texts]

"""Refuse a request whose sampling parameters would end the engine, or mean nothing, before it gets there.

An engine computes all its requests in one step: what one of them raises there ends all of them. vLLM's front
end checks many parameters and leaves others to the engine, whose input is typed and whose tensors have the
vocabulary's size. `InputProcessor` calls ``check`` with each request's SamplingParams before its own checks,
and ``check_prompt``; a ValueError reaches the caller of that request alone.

Invariants: what is refused names the parameter and what to do; no parameter is changed; what the engine can
serve is not refused. Cost: one encoding and decoding, 20 us a request without lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

HISTORY = "sam_history"  # of extra_args: earlier responses to draft from


def check(params: Any, vocabulary: int) -> None:
    """Check vLLM's SamplingParams.

    Args:
        vocabulary: tokens that the model has a logit for.

    Raises:
        ValueError: the engine cannot serve them.
    """
    check_types(params)
    for name in ("temperature", "repetition_penalty"):
        if not math.isfinite(getattr(params, name)):
            raise ValueError(f"{name} is {getattr(params, name)}: pass a finite number")
    for token, bias in (params.logit_bias or {}).items():
        if math.isnan(bias) or bias == math.inf:
            raise ValueError(f"logit_bias of token {token} is {bias}: pass a number, or -inf to ban it")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocabulary:
            raise ValueError(f"{name} is {getattr(params, name)}, and the model has {vocabulary} tokens")
    if not all(word.strip() for word in params.bad_words or ()):
        raise ValueError("bad_words has an empty word: leave it out")
    check_tokens("allowed_token_ids", params.allowed_token_ids or (), vocabulary)
    if params.min_tokens:
        check_tokens("stop_token_ids with min_tokens", params._all_stop_token_ids, vocabulary)
    for word in params._bad_words_token_ids or ():
        if not word:
            raise ValueError("_bad_words_token_ids has an empty word: leave it out")
        check_tokens("_bad_words_token_ids", word, vocabulary)
    check_history((params.extra_args or {}).get(HISTORY) or (), vocabulary)


def check_prompt(tokens: Sequence[int], vocabulary: int) -> None:
    """Check the token ids of a prompt; what is empty or too long vLLM refuses itself.

    Raises:
        ValueError: the model has no embedding for one of them.
    """
    if strange := {kind for kind in set(map(type, tokens)) if not issubclass(kind, int | np.integer)}:
        raise ValueError(f"the prompt has {strange.pop().__name__} values: pass token ids")
    check_tokens("the prompt", (min(tokens), max(tokens)), vocabulary)


def check_types(params: Any) -> None:
    """Decode the parameters as the engine will: Python lets any value into a SamplingParams."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(params, enc_hook=_other), type=type(params))
    except (msgspec.MsgspecError, OverflowError, TypeError) as error:
        raise ValueError(f"sampling parameters: {error}") from None
    if isinstance(params.structured_outputs, dict):
        raise ValueError("structured_outputs is a dict: pass StructuredOutputsParams")


def _other(value: Any) -> None:
    """Values for which vLLM has its own encoding, or its own refusal."""
    if type(value).__module__.partition(".")[0] not in ("numpy", "torch") and not callable(value):
        raise TypeError(f"{type(value).__name__} values cannot be sent to the engine")


def check_history(texts: Any, vocabulary: int) -> None:
    """What `with_history` attached; a token without an embedding would be drafted."""
    try:
        for prompt_tokens, text in texts:
            tokens = np.frombuffer(text, dtype=np.int32)
            if not 0 <= prompt_tokens <= len(tokens):
                raise ValueError(f"{prompt_tokens} prompt tokens of {len(tokens)}")
            check_tokens("a text", (int(tokens.min(initial=0)), int(tokens.max(initial=0))), vocabulary)
    except (TypeError, ValueError) as error:
        form = "[(prompt tokens, int32 tokens as bytes)]"
        raise ValueError(f"extra_args: {HISTORY} is not {form}: {error}") from None


def check_tokens(name: str, tokens: Iterable[int], vocabulary: int) -> None:
    if outside := sorted(token for token in tokens if not 0 <= token < vocabulary):
        raise ValueError(f"{name} has {outside[:5]}: token ids are from 0 to {vocabulary - 1}")

"""What is refused before it reaches an engine; tests/patched/test_npu_sampling_params.py has all fields."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from ascend_rl.rollout.request_checks import check, check_prompt


class Params(msgspec.Struct):
    """Of vLLM's SamplingParams what is checked."""

    temperature: float = 1.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int = 0
    structured_outputs: dict | None = None
    extra_args: dict | None = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    _bad_words_token_ids: list[list[int]] | None = None


SERVED = [
    {}, {"logprobs": 16}, {"logprobs": -1}, {"prompt_logprobs": 16}, {"allowed_token_ids": [0, 15]},
    {"logit_bias": {3: -math.inf}}, {"_all_stop_token_ids": {99}},
    {"min_tokens": 1, "_all_stop_token_ids": {0, 15}},
    {"bad_words": ["a"]}, {"_bad_words_token_ids": [[0, 15]]},
    {"extra_args": {"a": np.zeros(1), "b": len}}, {"extra_args": {"sam_history": []}},
    {"extra_args": {"sam_history": [(0, b"")]}},
    {"extra_args": {"sam_history": [(2, bytes(4) + b"\x0f\0\0\0")]}},
]  # fmt: skip
REFUSED = [
    ({"temperature": math.nan}, "temperature is nan"),
    ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
    ({"logit_bias": {3: math.inf}}, "logit_bias of token 3"),
    ({"logit_bias": {3: math.nan}}, "logit_bias of token 3"),
    ({"logprobs": 17}, "logprobs is 17"),
    ({"prompt_logprobs": 17}, "prompt_logprobs is 17"),
    ({"logprobs": 1.5}, r"Expected `int \| null`, got `float` - at `\$.logprobs`"),
    ({"logprobs": 2**70}, "serialize"),
    ({"allowed_token_ids": [3, 16]}, r"allowed_token_ids has \[16\]"),
    ({"allowed_token_ids": [-1]}, r"allowed_token_ids has \[-1\]: token ids are from 0 to 15"),
    ({"min_tokens": 1, "_all_stop_token_ids": {16}}, r"stop_token_ids with min_tokens has \[16\]"),
    ({"bad_words": ["a", " "]}, "bad_words has an empty word"),
    ({"_bad_words_token_ids": [[1], []]}, "_bad_words_token_ids has an empty word"),
    ({"_bad_words_token_ids": [[1, 16]]}, r"_bad_words_token_ids has \[16\]"),
    ({"structured_outputs": {}}, "pass StructuredOutputsParams"),
    ({"extra_args": {"a": object()}}, "object values cannot be sent"),
    ({"extra_args": {"sam_history": 5}}, "sam_history is not"),
    ({"extra_args": {"sam_history": [(3, bytes(8))]}}, "3 prompt tokens of 2"),
    ({"extra_args": {"sam_history": [(-1, bytes(8))]}}, "-1 prompt tokens"),
    ({"extra_args": {"sam_history": [(1, bytes(3))]}}, "multiple"),
    ({"extra_args": {"sam_history": [(1, b"\x10\0\0\0")]}}, r"a text has \[16\]"),
    ({"extra_args": {"sam_history": [(1, b"\xff\xff\xff\xff")]}}, "a text has"),
]


@pytest.mark.parametrize("params", SERVED, ids=repr)
def test_what_an_engine_can_serve_is_not_refused(params):
    check(Params(**params), 16)


@pytest.mark.parametrize(
    ("params", "why"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_it_cannot_is_refused_by_name(params, why):
    with pytest.raises(ValueError, match=why):
        check(Params(**params), 16)


def test_a_prompt_is_token_ids_of_the_model():
    for served in ([0], [15, 0], np.arange(16), (3, np.int64(4))):
        check_prompt(served, 16)
    strange = [([0, 16], "16"), ([-1, 3], "-1"), ([1.0], "float"), (["1"], "str"), ([0, None], "NoneType")]
    for refused, why in strange:
        with pytest.raises(ValueError, match=f"the prompt has .*{why}"):
            check_prompt(refused, 16)

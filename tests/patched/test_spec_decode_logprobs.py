"""If log-probs are requested, vLLM continues speculating; they equal those of a teacher-forced pass."""

from __future__ import annotations

import pytest
import torch
from spec_engines import Engine, log_probs, processed, prompts, random_model, teacher_forced

from ascend_rl.settings.stack import DEFAULT, NAME

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
SAMPLING = [
    {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.3, "top_k": 6, "top_p": 0.8},
]  # fmt: skip


@pytest.mark.skipif(NAME != DEFAULT, reason="vLLM 0.23 switches it off for no request")
def test_log_probs_do_not_switch_speculation_off():
    from vllm import SamplingParams
    from vllm.v1.spec_decode.utils import is_spec_decode_unsupported

    assert not is_spec_decode_unsupported(SamplingParams(logprobs=0))
    assert is_spec_decode_unsupported(SamplingParams(logprobs=0, presence_penalty=0.1))  # as upstream


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return path, random_model(path)


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_log_probs_equal_a_teacher_forced_pass(model, mode):
    """verl asks for processed log-probs. Greedy and sampled requests share the batches."""
    from vllm import SamplingParams

    path, reference = model
    engine = Engine(path, speculative_config=NGRAM, logprobs_mode=mode)
    given = prompts(24)
    sampling = [SAMPLING[i % len(SAMPLING)] for i in range(len(given))]
    completions = engine.run(given, [
        SamplingParams(max_tokens=40 + i, logprobs=0, ignore_eos=True, detokenize=False, **sampling[i])
        for i in range(len(given))
    ])  # fmt: skip
    assert engine.counts["accepted"] > 100 and engine.counts["drafted"] > engine.counts["accepted"]
    for i, completion in enumerate(completions):
        response = list(completion.token_ids)
        assert len(response) == 40 + i
        logits = teacher_forced(reference, given[i], response)
        changes = mode == "processed_logprobs" and sampling[i]["temperature"] > 0
        expected = processed(logits, **sampling[i]) if changes else logits.double().log_softmax(-1)
        expected = expected[torch.arange(len(response)), response]
        assert (expected - log_probs(completion)).abs().max() < 1e-4


def test_more_log_probs_than_the_sampled_one(model):
    """logprobs=3: the three likeliest tokens of each position, and the emitted one."""
    from vllm import SamplingParams

    path, reference = model
    engine = Engine(path, speculative_config=NGRAM, max_num_batched_tokens=32)  # long prompts come in chunks
    given = prompts(6, 40, 60)
    parameters = SamplingParams(temperature=0.5, max_tokens=50, logprobs=3, ignore_eos=True, detokenize=False)
    for prompt, completion in zip(given, engine.run(given, parameters), strict=True):
        response = list(completion.token_ids)
        expected = teacher_forced(reference, prompt, response).log_softmax(-1)
        for position, (seen, token) in enumerate(zip(completion.logprobs, response, strict=True)):
            assert {token, *expected[position].topk(3).indices.tolist()} == seen.keys()
            assert all(abs(entry.logprob - expected[position, t]) < 1e-4 for t, entry in seen.items())
    assert engine.counts["accepted"] > 20

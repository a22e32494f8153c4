"""speculative_config={"method": "sam"} is validated, takes effect, and is lossless, greedy and sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from spec_engines import (
    Engine,
    assert_distributed,
    exact_distributions,
    log_probs,
    processed,
    prompts,
    random_model,
    teacher_forced,
)

SAM = {"method": "sam", "num_speculative_tokens": 6}


def test_config_stays_sam_and_refuses_what_it_cannot_do():
    from vllm.config import SpeculativeConfig

    config = SpeculativeConfig(**SAM)
    assert (config.method, config.num_speculative_tokens) == ("sam", 6)
    assert "sam" in repr(config)
    with pytest.raises(ValueError, match="needs num_speculative_tokens from 1 to 128, got None"):
        SpeculativeConfig(method="sam")
    for wrong, message in [
        ({"num_speculative_tokens": 129}, "needs num_speculative_tokens from 1 to 128, got 129"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"model": "some/draft"}, "model has no effect with method sam"),
        ({"prompt_lookup_max": 4}, "prompt_lookup_max has no effect"),
        ({"disable_by_batch_size": 4}, "disable_by_batch_size has no effect"),
    ]:
        with pytest.raises(ValueError, match=message):
            SpeculativeConfig(**SAM | wrong)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return path, random_model(path)


def test_async_scheduling_is_refused_as_upstream(model):
    with pytest.raises(ValueError, match="async scheduling is only supported with EAGLE/MTP"):
        Engine(model[0], speculative_config=SAM, async_scheduling=True)


@pytest.fixture(scope="module")
def plain(model):
    return Engine(model[0])


@pytest.fixture(scope="module")
def sam(model):
    engine = Engine(model[0], speculative_config=SAM, logprobs_mode="processed_logprobs")
    engine.proposer = engine.core.model_executor.driver_worker.worker.model_runner.drafter
    return engine


@pytest.fixture
def always_drafts(monkeypatch, sam):
    """Drafts that fail do not stop the next ones, as they cost no time: many more rejections to get wrong."""
    monkeypatch.setattr(sam.proposer, "times", {1: 1.0, 1000: 1.0})


def given(**options):
    """SamplingParams without an end token or text."""
    from vllm import SamplingParams

    usual = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**usual | options)


@pytest.fixture(scope="module")
def expected(plain):
    """Greedy continuations of 40 prompts, without speculation: 100 tokens each."""
    return plain.tokens(prompts(40), given(max_tokens=100))


def test_greedy_is_the_same_in_fewer_steps(plain, sam, expected):
    from ascend_rl.speculation.sam_decoding import SamProposer

    assert isinstance(sam.proposer, SamProposer)
    assert sam.tokens(prompts(40), given(max_tokens=100)) == expected
    assert sam.counts["accepted"] > 1000
    assert sam.counts["steps"] < 0.6 * plain.counts["steps"]
    # One at a time, and by different lengths so that requests come and go within the batch.
    assert sam.tokens(prompts(1), given(max_tokens=100)) == expected[:1]
    lengths = [1 + 7 * i % 100 for i in range(40)]
    assert sam.tokens(prompts(40), [given(max_tokens=n) for n in lengths]) == [
        tokens[:n] for tokens, n in zip(expected, lengths, strict=True)
    ]


def test_greedy_is_the_same_with_preemption_chunked_prefill_and_prefix_cache(model, expected):
    """5 blocks of 32 tokens for 6 requests of up to 150, 24 tokens per step."""
    engine = Engine(
        model[0], speculative_config=SAM, max_num_seqs=6, block_size=32, num_gpu_blocks_override=9,
        max_num_batched_tokens=24, enable_prefix_caching=True, enable_chunked_prefill=True,
    )  # fmt: skip
    for _ in range(2):  # the second time with a full prefix cache
        assert engine.tokens(prompts(40)[:16], given(max_tokens=100)) == expected[:16]
        assert engine.counts["preempted"] > 3 and engine.counts["accepted"] > 200
    engine = Engine(model[0], speculative_config=SAM, max_model_len=128)  # ends at the model's length
    outputs = engine.tokens(prompts(40)[:8], given(max_tokens=None))
    for prompt, tokens, longer in zip(prompts(40), outputs, expected, strict=False):
        assert len(prompt) + len(tokens) == 128
        assert tokens[:100] == longer[: len(tokens)]


def test_earlier_responses_make_drafts_and_no_difference(sam, expected):
    """Right ones save steps from the first token on; wrong ones cost no token."""
    from ascend_rl.speculation.sam_history import with_history

    def bringing(prompt, response):
        earlier = (len(prompt), np.array(prompt + response, np.int32).tobytes())
        return given(max_tokens=100, **with_history({}, [earlier]))

    steps = {}
    for name, shift in {"right": 0, "of other prompts": 1}.items():
        chosen = [[5, 3 + shift] + prompt for prompt in prompts(16)]  # not seen by this engine before
        truth = sam.tokens(chosen, given(max_tokens=100, presence_penalty=1e-9))  # one by one: no drafts
        assert sam.counts["drafted"] == 0
        brought = truth[shift:] + truth[:shift]
        parameters = [bringing(prompt, response) for prompt, response in zip(chosen, brought, strict=True)]
        assert sam.tokens(chosen, parameters) == truth
        steps[name] = sam.counts["steps"]
    assert steps["right"] < 25 < steps["of other prompts"] <= 101


def test_stop_within_a_draft(sam, expected):
    """Stop tokens, the end token and max_tokens cut the output where they would without drafts."""
    for tokens, prompt in list(zip(expected, prompts(40), strict=True))[:12]:
        stop = tokens[-1]
        (output,) = sam.run([prompt], given(max_tokens=100, stop_token_ids=[stop], logprobs=0))
        assert list(output.token_ids) == tokens[: tokens.index(stop) + 1]
        assert len(output.logprobs) == len(output.token_ids) and output.stop_reason == stop
    for length in range(1, 20):
        assert sam.tokens(prompts(1), given(max_tokens=length)) == [expected[0][:length]]


def test_parameters_that_need_one_token_per_step(plain, sam, expected):
    """min_tokens, penalties, logit_bias, bad words, allowed tokens: as without speculation."""
    special = [
        {"min_tokens": 30, "stop_token_ids": [expected[0][3]]},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"logit_bias": {3: 5.0, 7: -100.0}},
        {"allowed_token_ids": [1, 2, 3, 4]},
        {},
    ]
    parameters = [given(**{"max_tokens": 80} | special[i % len(special)]) for i in range(28)]
    without = plain.tokens(prompts(28), parameters)
    assert sam.tokens(prompts(28), parameters) == without
    assert sam.counts["accepted"] > 100
    assert [len(tokens) >= 31 for tokens in without[:: len(special)]] == [True] * 4
    assert all(set(tokens) <= {1, 2, 3, 4} for tokens in without[5 :: len(special)])


def test_aborted_requests_are_forgotten(sam, expected):
    """Half of the requests are aborted on the way; the others are not disturbed, and nothing is left over."""
    from vllm.sampling_params import RequestOutputKind

    engine = sam.llm.llm_engine
    for i, prompt in enumerate(prompts(16)):
        parameters = given(max_tokens=100)
        parameters.output_kind = RequestOutputKind.FINAL_ONLY
        engine.add_request(f"abort-{i}", {"prompt_token_ids": prompt}, parameters)
    finished, steps = {}, 0
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        steps += 1
        if steps == 10:
            engine.abort_request([f"abort-{i}" for i in range(0, 16, 2)])
    assert [list(finished[f"abort-{i}"].outputs[0].token_ids) for i in range(1, 16, 2)] == expected[1:16:2]
    sam.tokens(prompts(1), given(max_tokens=3))
    assert len(sam.proposer.known) <= 1 and sam.proposer.known >= sam.proposer.drafted


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        pytest.param({"temperature": 0.5, "top_k": 5, "top_p": 0.9}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_sampled_output_has_the_exact_distribution(model, sam, always_drafts, sampling):
    """3,000 samples of one prompt, all within one group: each position against all beginnings."""
    torch.manual_seed(0)
    prompt = [5, 3, 5, 3, 5, 3, 9, 5, 3]
    outputs = sam.tokens([prompt], given(max_tokens=5, n=3000, **sampling))
    assert sam.counts["drafted"] - 100 > sam.counts["accepted"] > 50, sam.counts
    for position, probs in enumerate(exact_distributions(model[1], prompt, 5, **sampling)):
        assert_distributed([tokens[position] for tokens in outputs], probs)


def test_log_probs_of_every_token_greedy_and_sampled(model, sam, always_drafts):
    """As verl asks for them, with n samples of a prompt; equal to a teacher-forced pass."""
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.4, "top_k": 3}]
    torch.manual_seed(0)
    for kind, some in zip(kinds, np.array_split(np.arange(18), 3), strict=True):
        chosen = [prompts(18)[i] for i in some]
        count = 1 if not kind["temperature"] else 3
        completions = sam.run(chosen, given(max_tokens=80, logprobs=0, n=count, **kind))
        assert sam.counts["drafted"] > sam.counts["accepted"] > 10, (kind, sam.counts)
        for prompt, completion in zip(np.repeat(np.array(chosen, object), count), completions, strict=True):
            response = list(completion.token_ids)
            logits = teacher_forced(model[1], prompt, response)
            exact = processed(logits, **kind) if kind["temperature"] else logits.double().log_softmax(-1)
            exact = exact[torch.arange(len(response)), response]
            assert (exact - log_probs(completion)).abs().max() < 1e-4


def test_drafts_for_random_text_cost_little(sam):
    """What the drafts of 200 steps take is at most 2% more than what they save, whatever text came before."""
    torch.manual_seed(0)
    rng = np.random.default_rng(1)
    noise = given(max_tokens=200, temperature=5.0)
    for _ in range(2):
        sam.tokens([rng.integers(1, 12, 20).tolist() for _ in range(16)], noise)
    taken = sam.counts["drafted"] * sam.proposer.price(16, 1)
    assert taken - sam.counts["accepted"] / 16 < 0.02 * 200
    assert sam.counts["drafted"] < 0.4 * 16 * 200 and sam.counts["steps"] <= 200

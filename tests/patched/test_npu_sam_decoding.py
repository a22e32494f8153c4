"""Speculation on vllm-ascend's runner (npu_ground.py) emits what plain decoding emits, in fewer steps."""

from __future__ import annotations

import random

import pytest
import torch
from npu_ground import make_llm, save_random_model

DRAFT_TOKENS = 4
NEW_TOKENS = 24
LAYERS = 2
METHODS = {
    "sam": {"method": "sam", "num_speculative_tokens": DRAFT_TOKENS},
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": DRAFT_TOKENS, "prompt_lookup_max": 3},
}


def engine_runs(path: str, prompts: list[list[int]], methods: dict, options: dict, sampling: dict) -> dict:
    """A job. For each method: token ids and log-probs by prompt; the engine's steps, drafted and accepted
    tokens and preemptions; calls of operators; the class of the drafter."""
    from software_npu.kernels.training import calls
    from vllm import SamplingParams

    runs = {}
    for name, speculation in methods.items():
        llm = make_llm(path, speculative_config=speculation, **options)
        core = llm.llm_engine.engine_core.engine_core
        counts = {"steps": 0, "drafted": 0, "accepted": 0, "preempted": 0}

        def count(owner, method, event, counts=counts):
            original = getattr(owner, method)

            def counted(*args, **kwargs):
                for key, value in event(kwargs).items():
                    counts[key] += value
                return original(*args, **kwargs)

            setattr(owner, method, counted)

        count(core, "step_fn", lambda given: {"steps": 1})
        count(core.scheduler, "_preempt_request", lambda given: {"preempted": 1})
        count(
            core.scheduler,
            "make_spec_decoding_stats",
            lambda given: {"drafted": given["num_draft_tokens"], "accepted": given["num_accepted_tokens"]},
        )
        calls.clear()
        outputs = llm.generate(
            [{"prompt_token_ids": p} for p in prompts], SamplingParams(logprobs=0, **sampling), use_tqdm=False
        )
        completions = [output.outputs[0] for output in outputs]
        runner = core.model_executor.driver_worker.worker.model_runner
        runs[name] = counts | {
            "ids": [list(c.token_ids) for c in completions],
            "log_probs": [
                [step[token].logprob for step, token in zip(c.logprobs, c.token_ids, strict=True)]
                for c in completions
            ],
            "calls": dict(calls),
            "drafter": type(getattr(runner, "drafter", None)).__name__,
        }
    return runs


def log_probs_of(path, prompts, continued) -> list[list[float]]:
    """Log-probs of the continuations by Hugging Face, teacher-forced."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), []
    for prompt, tokens in zip(prompts, continued, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        log_probs = logits.log_softmax(-1)
        found.append(log_probs[torch.arange(len(tokens)), tokens].tolist())
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("npu"))


def repeating(count: int) -> list[list[int]]:
    """Prompts of about 100 tokens with a repetition at the end: they outgrow a block of the cache."""
    rng = random.Random(0)
    texts = [[rng.randrange(13) for _ in range(rng.randrange(60, 64))] for _ in range(count)]
    return [text + text[: rng.randrange(56, 60)] for text in texts]


@pytest.fixture(scope="module")
def runs(npu_ground, model):
    """Greedy: six requests for four places, prompts cut in pieces, and too few blocks for four to grow."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 6}
    sampling = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    return npu_ground.run(engine_runs, str(model), repeating(6), METHODS, options, sampling)


@pytest.mark.parametrize("method", ["ngram", "sam"])
def test_greedy_output_is_that_of_plain_decoding(runs, method):
    assert runs[method]["ids"] == runs["plain"]["ids"]
    assert runs[method]["steps"] < runs["plain"]["steps"]
    assert runs[method]["accepted"] > 0 and runs[method]["drafted"] > runs[method]["accepted"]


def test_requests_were_preempted(runs):
    assert all(run["preempted"] for run in runs.values())


def test_every_step_went_through_the_runner(runs):
    for run in runs.values():
        attention = run["calls"]["npu_fused_infer_attention_score"]
        assert attention == run["calls"]["_npu_rotary_embedding"]
        assert attention in (LAYERS * run["steps"], LAYERS * (run["steps"] - 1))  # the last may be empty
    drafters = {"plain": "NoneType", "ngram": "NgramProposer", "sam": "SamDecodingProposer"}
    assert {name: run["drafter"] for name, run in runs.items()} == drafters


def test_log_probs_are_the_models(runs, model):
    expected = log_probs_of(model, repeating(6), runs["plain"]["ids"])
    for run in runs.values():
        torch.testing.assert_close(torch.tensor(run["log_probs"]), torch.tensor(expected), atol=1e-4, rtol=0)


def test_log_probs_of_sampled_tokens_are_the_models(npu_ground, model):
    """Raw log-probs, though temperature and top-p shaped what was sampled."""
    prompts = repeating(4)
    sampling = {"temperature": 0.7, "top_p": 0.9, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    run = npu_ground.run(engine_runs, str(model), prompts, {"sam": METHODS["sam"]}, {}, sampling)["sam"]
    assert run["accepted"] > 0
    expected = log_probs_of(model, prompts, run["ids"])
    torch.testing.assert_close(torch.tensor(run["log_probs"]), torch.tensor(expected), atol=1e-4, rtol=0)

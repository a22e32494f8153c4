"""NPUModelRunner drafts only in batches up to the threshold, and its output does not change."""

from __future__ import annotations

import pytest
from npu_ground import make_llm, save_random_model
from test_npu_sam_decoding import repeating

NEW_TOKENS = [8, 12, 16, 20, 24, 28]


def drafting(path: str, prompts: list[list[int]], runs: dict[str, dict]) -> dict[str, dict]:
    """A job. For each run, given by engine options and a variable: token ids by prompt, and for each step
    how many requests were in it and how many tokens were drafted."""
    import os

    from vllm import SamplingParams

    results = {}
    for name, (options, threshold) in runs.items():
        os.environ.pop("VLLM_SPECULATIVE_BATCH_SIZE_THRE", None)
        if threshold is not None:
            os.environ["VLLM_SPECULATIVE_BATCH_SIZE_THRE"] = str(threshold)
        llm = make_llm(path, **options)
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        take, steps = runner.take_draft_token_ids, []

        def taken(take=take, steps=steps, runner=runner):
            drafts = take()
            drafted = sum(map(len, drafts.draft_token_ids)) if drafts else 0
            steps.append([runner.input_batch.num_reqs, drafted])
            return drafts

        runner.take_draft_token_ids = taken
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in NEW_TOKENS],
            use_tqdm=False,
        )
        results[name] = {"ids": [list(output.outputs[0].token_ids) for output in outputs], "steps": steps}
    return results


def speculating(method: str, **options) -> dict:
    speculation = {"method": method, "num_speculative_tokens": 4}
    if method == "ngram":
        speculation["prompt_lookup_max"] = 3
    return {"speculative_config": speculation, **options}


def test_a_threshold_of_zero_is_refused(npu_ground, tmp_path):
    runs = {"refused": (speculating("ngram"), 0)}
    with pytest.raises(AssertionError, match="give a batch size of 1 or more, or unset it"):
        npu_ground.run(drafting, str(save_random_model(tmp_path)), repeating(len(NEW_TOKENS)), runs)


@pytest.fixture(scope="module")
def results(npu_ground, tmp_path_factory):
    model = save_random_model(tmp_path_factory.mktemp("npu"))
    configured = {"additional_config": {"bs_threshold_for_spec_decode": 3}}
    runs = {"plain": ({}, None), "always": (speculating("ngram"), None)}
    runs |= {"ngram": (speculating("ngram"), 3), "sam": (speculating("sam", **configured), None)}
    return npu_ground.run(drafting, str(model), repeating(len(NEW_TOKENS)), runs)


def test_without_a_threshold_full_batches_draft_too(results):
    assert any(drafted for requests, drafted in results["always"]["steps"] if requests == len(NEW_TOKENS))


@pytest.mark.parametrize("method", ["ngram", "sam"])
def test_only_small_batches_draft(results, method):
    """From the variable and from the configuration. Once off, 7/8 of 3 requests are few enough, that is 2."""
    steps = results[method]["steps"]
    assert steps[0][0] == len(NEW_TOKENS) and min(requests for requests, _ in steps) <= 2
    assert not any(drafted for requests, drafted in steps if requests > 2)
    assert any(drafted for requests, drafted in steps if requests <= 2)


def test_the_output_is_that_of_plain_decoding(results):
    assert all(run["ids"] == results["plain"]["ids"] for run in results.values())

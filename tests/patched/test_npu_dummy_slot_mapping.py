"""An idle data-parallel engine replays its decode graph for the others, and keeps its prefix cache intact."""

from __future__ import annotations

import os

import pytest
import torch
from npu_ground import make_llm, on_ranks, save_random_model
from test_npu_sam_decoding import log_probs_of

PROMPT = [(7 * i + i * i // 5) % 13 for i in range(127)]
NEW_TOKENS = 2  # the last step writes the last slot of a block of 128, which stays in the prefix cache
IDLE_STEPS = 20
CASES = {
    "plain": {},
    "drafts": {"speculative_config": {"method": "sam", "num_speculative_tokens": 4}},
    "graphs by rank": {"additional_config": {"graphs_by_rank": True}},
}


def answer_twice(path: str, options: dict) -> dict:
    """A job of each rank: what the first said, and how it continues from there after steps of the other."""
    from vllm import SamplingParams

    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 5, 10]}
    llm = make_llm(
        path, enforce_eager=False, compilation_config=graphs, data_parallel_size=2,
        enable_expert_parallel=True, distributed_executor_backend="external_launcher", **options,
    )  # fmt: skip

    def run(prompt: list[int], tokens: int):
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        return llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]

    torch.npu.graphs.reset_counts()
    longer = 0 if os.environ["RANK"] == "0" else 5 * IDLE_STEPS  # 5 tokens per step, with drafts
    text = PROMPT + list(run(PROMPT, NEW_TOKENS + longer).outputs[0].token_ids)
    replays = torch.npu.graphs.counts()["replays"]
    after = run(text, 1)
    (token,), (entry,) = after.outputs[0].token_ids, after.outputs[0].logprobs
    found = {"text": text, "next": token, "log_prob": entry[token].logprob}
    return found | {"cached": after.num_cached_tokens, "replays": replays}


def on_two_ranks(*args) -> dict:
    return on_ranks("A3", 2, answer_twice, *args)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("moe"), moe=True)


@pytest.mark.parametrize("case", CASES)
def test_the_prefix_cache_outlives_idle_steps(npu_ground, model, case):
    found = npu_ground.run(on_two_ranks, str(model), CASES[case])
    ((expected,),) = log_probs_of(model, [found["text"]], [[found["next"]]])
    assert found["cached"] == len(PROMPT) + 1 and found["replays"] >= IDLE_STEPS
    assert found["log_prob"] == pytest.approx(expected, abs=1e-5)

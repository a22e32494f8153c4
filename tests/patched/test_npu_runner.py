"""vllm-ascend's NPUWorker and NPUModelRunner compute what Hugging Face computes; npu_ground.py runs them."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
from npu_ground import generate, on_ranks, save_random_model

NEW_TOKENS = 16
LAYERS = 2


def greedy(path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations by Hugging Face, without a cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    continued = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(new_tokens):
                ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
        continued.append(ids[0, len(prompt) :].tolist())
    return continued


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_greedy_tokens_equal_hugging_face(npu_ground, tmp_path, kind):
    save_random_model(tmp_path, moe=kind == "moe")
    rng = random.Random(0)
    prompts = [[rng.randrange(13) for _ in range(length)] for length in (1, 5, 17, 130)]
    sampling = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    result = npu_ground.run(generate, str(tmp_path), prompts, sampling)
    assert result["ids"] == greedy(tmp_path, prompts, NEW_TOKENS)
    assert result["runner"] == "vllm_ascend.worker.model_runner_v1.NPUModelRunner"
    each_layer = NEW_TOKENS * LAYERS
    experts = {"moe_gating_top_k": 1, "npu_moe_init_routing_custom": 1, "npu_grouped_matmul": 2,
               "npu_swiglu": 1, "npu_moe_token_unpermute": 1}  # fmt: skip
    expected = {"_npu_rotary_embedding": 1, "_npu_reshape_and_cache": 1, "npu_fused_infer_attention_score": 1,
                "npu_add_rms_norm_bias": 2} | ({"npu_swiglu": 1} if kind == "dense" else experts)  # fmt: skip
    calls = {name: each_layer * calls for name, calls in expected.items()}
    assert result["calls"] == calls | {"npu_rms_norm": NEW_TOKENS * (2 * LAYERS + 1)}


def fail_on_the_second_of_two_ranks() -> None:
    on_ranks("A3", 2, fail_as_second)


def fail_as_second() -> None:
    if os.environ["RANK"] == "1":
        raise RuntimeError("the second rank's own error")
    time.sleep(3600)


def sleep_for(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_a_job_that_dies_or_hangs_leaves_the_ground_to_the_next(npu_ground):
    """Whichever rank failed first: the whole suite once failed where the second had."""
    with pytest.raises(AssertionError, match=r"died(.|\n)*the second rank's own error"):
        npu_ground.run(fail_on_the_second_of_two_ranks)
    with pytest.raises(AssertionError, match=r"no answer from \[0\] in 1 s") as error:
        npu_ground.run(sleep_for, 3600.0, seconds=1)
    assert "sleep_for (test_npu_runner.py" in error.value.__notes__[0]
    assert npu_ground.run(sleep_for, 0.1) == 0.1

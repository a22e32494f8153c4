"""ROUTER_REPLAY=R3: the routes that vLLM returns are those that the model took."""

from __future__ import annotations

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    from ascend_rl.recipe.tiny import make_model, make_tokenizer

    path, tokenizer = tmp_path_factory.mktemp("moe"), make_tokenizer()
    tokenizer.save_pretrained(path)
    make_model(tokenizer, seed=0, moe=True).save_pretrained(path)
    return path


def test_a_rollout_returns_the_routes_that_it_took(path):
    from transformers import AutoModelForCausalLM

    from vllm import LLM, SamplingParams

    options = dict(dtype="float32", enforce_eager=True, max_model_len=64, num_gpu_blocks_override=64)
    engine = LLM(str(path), enable_return_routed_experts=True, **options)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = [[1, 2, 10, 3, 4, 11], [5, 6, 10, 7, 11, 3, 2, 8]]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def generate():
        answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
        return [answer.outputs[0] for answer in answers]

    for prompt, output in zip(prompts, generate(), strict=True):
        ids = torch.tensor([[*prompt, *output.token_ids]])
        with torch.no_grad():
            logits = model(ids, output_router_logits=True).router_logits
        taken = torch.stack([layer.topk(2).indices for layer in logits], 1).sort(-1).values
        got = np.sort(output.routed_experts, -1)
        assert got.shape == (len(prompt) + 7, 2, 2)  # the last token was not computed
        assert (got == taken[: len(got)].numpy()).all()

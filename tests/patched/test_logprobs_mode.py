"""Log-probs of vllm-ascend's runner are those of what it samples from, where the engine is told so."""

from __future__ import annotations

import pytest
import torch
from test_npu_sam_decoding import METHODS, NEW_TOKENS, engine_runs, model, repeating  # noqa: F401

SAMPLING = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 0.9, "top_k": 5},
    "top-p": {"temperature": 1.3, "top_p": 0.8},
    "top-p of the top-k": {"temperature": 1.3, "top_k": 6, "top_p": 0.8},
}


def processed(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """[rows, vocabulary] log-probs after temperature, top-k, and top-p of what top-k leaves, as in vLLM."""
    probs = (logits / temperature).softmax(-1)
    for row in probs:
        likeliest, total = row.argsort(descending=True).tolist(), 0.0
        row /= row[likeliest[: top_k or None]].sum()
        for place, token in enumerate(likeliest):
            outside = (top_k and place >= top_k) or total >= top_p  # of the smallest set that has top_p
            total += row[token].item()
            if outside:
                row[token] = 0
    return (probs / probs.sum(-1, keepdim=True)).log()


@pytest.mark.parametrize("kind", SAMPLING)
def test_processed_log_probs_are_those_of_the_sampled_distribution(npu_ground, model, kind):  # noqa: F811
    from transformers import AutoModelForCausalLM

    prompts, sampling = repeating(3), SAMPLING[kind]
    methods = {name: METHODS[name] for name in ("plain", "sam")}
    options = {"logprobs_mode": "processed_logprobs"}
    more = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "seed": 1}
    runs = npu_ground.run(engine_runs, str(model), prompts, methods, options, sampling | more)
    assert runs["sam"]["drafted"] > 0
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for run in runs.values():
        for prompt, ids, found in zip(prompts, run["ids"], run["log_probs"], strict=True):
            with torch.no_grad():
                logits = network(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            expected, raw = processed(logits, **sampling), logits.log_softmax(-1)
            at = torch.arange(len(ids)), torch.tensor(ids)
            torch.testing.assert_close(torch.tensor(found), expected[at], atol=1e-4, rtol=0)
            assert (expected[at] - raw[at]).abs().max() > 0.05  # the modes differ here

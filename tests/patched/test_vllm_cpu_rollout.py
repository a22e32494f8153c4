"""vLLM's CPU rollout computes the same as the trainer, also after its weights changed."""

from __future__ import annotations

import random

import pytest
import torch
from vllm_sync import make_llm


def test_rms_norm_of_strided_views():
    from vllm import _custom_ops  # noqa: F401
    from vllm.model_executor.layers.layernorm import rms_norm

    torch.manual_seed(0)
    qkv = torch.randn(5, 4 * 32)
    view = qkv[:, 32:96].view(5, 2, 32)  # as Qwen3's k_norm gets it
    assert not view.is_contiguous()
    weight = torch.rand(32)
    expected = view.double() / (view.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(view, weight, 1e-6).double(), expected, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def llm(tiny):
    return make_llm(tiny / "model", max_num_seqs=7, num_gpu_blocks_override=128)


def worst_log_prob_error(llm, model, tokenizer) -> float:
    """Largest gap of a sampled token's log-prob between vLLM and Hugging Face, 32 requests in 5 waves."""
    from vllm import SamplingParams

    rng = random.Random(0)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{rng.randint(0, 99)}+{rng.randint(0, 99)}"}],
            add_generation_prompt=True,
        )
        for _ in range(32)
    ]
    parameters = SamplingParams(temperature=1, max_tokens=16, logprobs=0, seed=1)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
    worst = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        response = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            log_probs = logits.log_softmax(-1)
        ours = torch.tensor(
            [step[token].logprob for step, token in zip(output.outputs[0].logprobs, response, strict=True)]
        )
        worst = max(worst, (log_probs[torch.arange(len(response)), response] - ours).abs().max().item())
    return worst


def test_log_probs_equal_hugging_face_before_and_after_a_weight_update(llm, tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    assert worst_log_prob_error(llm, model, tokenizer) < 2e-5

    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    assert worst_log_prob_error(llm, model, tokenizer) > 1e-2  # the change is visible
    weights = list(model.state_dict().items())
    llm.collective_rpc(lambda worker: worker.model_runner.model.load_weights(weights))
    llm.reset_prefix_cache()
    assert worst_log_prob_error(llm, model, tokenizer) < 2e-5


def test_weights_stay_where_updates_go(llm, monkeypatch):
    """Where vLLM was built with oneDNN, it would drop the weight and compute from a packed copy."""
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
    from vllm import _custom_ops, envs
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    def packed(weight, cache_size):
        copy = weight.clone()
        return lambda x: x @ copy

    monkeypatch.setattr(_custom_ops, "_supports_onednn", True)  # such a build, with stubs for its kernels
    monkeypatch.setattr(_custom_ops, "create_onednn_mm", packed, raising=False)
    monkeypatch.setattr(_custom_ops, "onednn_mm", lambda handler, x, bias: handler(x), raising=False)
    monkeypatch.setenv("VLLM_CPU_SGL_KERNEL", "1")

    vLLMColocateWorkerExtension.__new__(vLLMColocateWorkerExtension)  # what verl's worker does before loading
    layer = torch.nn.Linear(4, 3, bias=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert not envs.VLLM_CPU_SGL_KERNEL
    with torch.no_grad():
        layer.weight.fill_(1.0)
    assert layer.cpu_linear(torch.ones(1, 4), layer.weight, None).tolist() == [[4.0] * 3]

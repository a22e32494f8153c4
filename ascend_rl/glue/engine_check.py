"""The rollout of `ray_start_npu.sh --check`: a token of a random Qwen3 by vLLM and by Hugging Face."""

from __future__ import annotations

import tempfile

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from vllm import LLM, SamplingParams
from vllm.platforms import current_platform


def gap(dies: int, device: str) -> float:
    """Of the log-probs of one token, by vLLM and by Hugging Face, the difference."""
    if (chosen := current_platform.device_type) != device:
        raise RuntimeError(f"vLLM runs on {chosen or 'nothing'} and not on {device}: it finds no vllm-ascend")
    torch.manual_seed(0)
    shapes = {"hidden_size": 256, "intermediate_size": 64 * dies, "vocab_size": 1024, "head_dim": 128}
    heads = {"num_attention_heads": 2 * dies, "num_key_value_heads": dies, "num_hidden_layers": 2}
    model = Qwen3ForCausalLM(Qwen3Config(**shapes, **heads, initializer_range=0.08)).eval()
    ids = list(range(1, 65))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        llm = LLM(
            directory, tensor_parallel_size=dies, distributed_executor_backend="mp" if dies > 1 else None,
            skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, max_num_seqs=1, seed=0,
            gpu_memory_utilization=0.2, num_gpu_blocks_override=16,
        )  # fmt: skip
        sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=0, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    (token,), (log_probs,) = output.outputs[0].token_ids, output.outputs[0].logprobs
    return abs(log_probs[token].logprob - expected[token].item())

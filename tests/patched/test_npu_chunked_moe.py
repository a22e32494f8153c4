"""MoE layers of vllm-ascend's runner in chunks: the same log-probs, with fewer tokens at a time."""

from __future__ import annotations

import pytest
import torch
from npu_ground import on_ranks, save_random_model

from ascend_rl.settings.stack import DEFAULT, NAME

ROUTES = {"enable_return_routed_experts": True} if NAME != DEFAULT else {}  # ROUTER_REPLAY=R3
RANKS, CHUNK, EXPERTS_OF_A_TOKEN = 2, 64, 2
LENGTHS = 191, 70, 5  # an even sum: gloo gathers equal shares of ranks only


def prefill(path: str, parallel: str) -> dict:
    """Log-probs of what follows prompts, routes, and the largest number of rows that experts computed on."""
    import torch_npu
    from npu_ground import make_llm

    from vllm import SamplingParams

    grouped_matmul, rows = torch_npu.npu_grouped_matmul, []

    def counted(x, *args, **kwargs):
        rows.append(len(x[0]))
        return grouped_matmul(x, *args, **kwargs)

    torch_npu.npu_grouped_matmul = counted
    llm = make_llm(
        path, distributed_executor_backend="external_launcher", enable_expert_parallel=True,
        enable_prefix_caching=False, max_logprobs=50, **{parallel: RANKS}, **ROUTES,
    )  # fmt: skip
    profiled = max(rows)
    rows.clear()
    prompts = [[(i * i + 3 * i + length) % 13 for i in range(length)] for length in LENGTHS]
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=vocabulary),
        use_tqdm=False,
    )
    log_probs = [
        [[at[token].logprob for token in sorted(at)] for at in output.outputs[0].logprobs]
        for output in outputs
    ]
    routes = [output.outputs[0].routed_experts.tolist() for output in outputs] if ROUTES else []
    return {
        "log_probs": log_probs,
        "routes": routes,
        "rows": max(rows),
        "profiled": profiled,
        "calls": len(rows),
    }


def run(device: str, path: str, parallel: str, chunk: str) -> dict:
    import os

    if chunk:
        os.environ["VLLM_FUSED_MOE_CHUNK_SIZE"] = chunk
    return on_ranks(device, RANKS, prefill, path, parallel)


@pytest.mark.parametrize("device, parallel", [
    ("A3", "data_parallel_size"), ("A2", "tensor_parallel_size"),
])  # fmt: skip
def test_chunks_bring_the_same_log_probs(npu_ground, tmp_path, device, parallel):
    save_random_model(tmp_path, moe=True)
    whole, chunked = (npu_ground.run(run, device, str(tmp_path), parallel, size) for size in ("", str(CHUNK)))
    print(device, parallel, {key: (whole[key], chunked[key]) for key in ("rows", "profiled", "calls")})
    torch.testing.assert_close(
        torch.tensor(chunked["log_probs"]), torch.tensor(whole["log_probs"]), atol=1e-5, rtol=0
    )
    assert chunked["routes"] == whole["routes"]
    # A chunk has CHUNK tokens of each DP rank at most, and all their copies may meet on a rank.
    most = CHUNK * EXPERTS_OF_A_TOKEN * (RANKS if parallel == "data_parallel_size" else 1)
    assert chunked["rows"] <= most < whole["rows"] and chunked["profiled"] <= most < whole["profiled"]

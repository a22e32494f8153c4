"""After a weight sync a Qwen3-MoE in vLLM computes only with new weights, whatever happened to the old ones.

The sync is verl's own (buckets through shared memory); the oracle is Hugging Face with the same weights.
Between syncs the weights are overwritten with NaN, because sleep level 2 gives up their memory. "transposed"
does after loading what vllm-ascend does on an NPU; with hidden size = 2 x expert size one of the two shapes
does not show it.
"""

from __future__ import annotations

import pytest
import torch
from megatron_tiny import VOCAB, hugging_face, make_checkpoint
from safetensors.torch import load_file
from vllm_sync import make_llm, sync

PROMPTS = [[5 + i, 17, 40 - i, 9, 3 * i] for i in range(6)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("moe", tmp_path_factory.mktemp("moe") / "model", layers=2, expert_size=32)


def transpose_after_loading(monkeypatch):
    """The layout of vllm-ascend's AscendUnquantizedFusedMoEMethod; the CPU kernel has taken its weights
    before."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    process = UnquantizedFusedMoEMethod.process_weights_after_loading

    def process_and_transpose(self, layer):
        process(self, layer)
        for name in ("w13_weight", "w2_weight"):
            fast = getattr(layer, name).data.transpose(1, 2).contiguous()
            setattr(layer, name, torch.nn.Parameter(fast, requires_grad=False))

    monkeypatch.setattr(UnquantizedFusedMoEMethod, "process_weights_after_loading", process_and_transpose)


def overwrite_with_nan(worker) -> None:
    for parameter in worker.model_runner.model.parameters():
        parameter.data.fill_(float("nan"))


def expert_shapes(worker) -> list[tuple[int, ...]]:
    named = worker.model_runner.model.named_parameters()
    return [tuple(weight.shape) for name, weight in named if name.endswith(("w13_weight", "w2_weight"))]


def log_probs(llm) -> torch.Tensor:
    """Log-probs of the whole vocabulary for the next token: [prompts, VOCAB]."""
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in PROMPTS],
        SamplingParams(temperature=1, max_tokens=1, logprobs=VOCAB),
        use_tqdm=False,
    )
    return torch.tensor(
        [[output.outputs[0].logprobs[0][token].logprob for token in range(VOCAB)] for output in outputs]
    )


@pytest.mark.parametrize(
    "dtype,layout,tolerance",
    [("float32", "plain", 2e-5), ("float32", "transposed", 2e-5), ("bfloat16", "transposed", 0.45)],
)
def test_rollout_follows_the_trainer(path, monkeypatch, tmp_path, dtype, layout, tolerance):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    if layout == "transposed":
        transpose_after_loading(monkeypatch)
    llm = make_llm(path, dtype=dtype, max_logprobs=VOCAB, enable_prefix_caching=False)
    model = hugging_face(path).to(getattr(torch, dtype))

    def error() -> float:
        with torch.no_grad():
            expected = model(torch.tensor(PROMPTS)).logits[:, -1].float().log_softmax(-1)
        return (log_probs(llm) - expected).abs().max().item()

    def state() -> dict[str, torch.Tensor]:
        """By the names of checkpoints: transformers 5 keeps experts together in memory."""
        model.save_pretrained(tmp_path / "now")
        return load_file(tmp_path / "now/model.safetensors")

    original = state()
    at_first, shapes = log_probs(llm), llm.collective_rpc(expert_shapes)
    assert error() < tolerance
    torch.manual_seed(1)
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.5 * torch.randn_like(parameter))
        assert error() > 4 * tolerance  # the change is visible
        llm.collective_rpc(overwrite_with_nan)
        sync(llm, state())
        assert error() < tolerance
        assert llm.collective_rpc(expert_shapes) == shapes  # loaded weights were processed again
    sync(llm, original)
    torch.testing.assert_close(
        log_probs(llm), at_first, atol=1e-5, rtol=0
    )  # in bf16 too: the very same weights

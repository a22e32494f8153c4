"""Qwen2, whose QKV projection has a bias, computes and learns on MindSpeed's modules as on Hugging Face's."""

from __future__ import annotations

import pytest
import torch
from megatron_tiny import VOCAB, Layout, make_batch, make_checkpoint, make_worker
from mindspeed_tree import MINDSPEED, needs_mindspeed
from ranks import run_ranks
from test_megatron_actor import OVERRIDES, UPDATES, reference, update
from test_megatron_models import forward_in
from test_mindspeed import FLASH

pytestmark = needs_mindspeed
LAYOUTS = [Layout(options=FLASH), Layout(tp=2, options=FLASH)]


def make_qwen2(path):
    """A random Qwen2 whose biases are not 0."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    make_checkpoint("dense", path, layers=1)  # its tokenizer stays
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            rope_theta=10000.0,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.uniform_(parameter, -1.0, 1.0)
        else:
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.08)
    model.save_pretrained(path)
    return path


def on_mindspeed(rank: int, path) -> tuple[list, list[list[float]]]:
    """Errors of log-probs and exports by layout; gradient norms of updates by layout."""
    forward = forward_in(rank, LAYOUTS, {"dense": path})
    from megatron.core.models.gpt.gpt_layer_specs import TELayerNormColumnParallelLinear

    assert TELayerNormColumnParallelLinear.__name__ == "MindSpeedTELayerNormColumnParallelLinear"
    norms = []
    for layout in LAYOUTS:
        worker = make_worker(layout, path, *OVERRIDES)
        norms.append([update(worker, make_batch())[0] for _ in range(UPDATES)])
    return forward, norms


def test_the_bias_takes_part(tmp_path):
    path = make_qwen2(tmp_path / "qwen2")
    ranks = run_ranks(2, on_mindspeed, path, stubs=(MINDSPEED,), npu=True)
    _, expected, _ = reference(path, make_batch())
    for forward, norms in ranks:
        for layout, (error, *wrong), got in zip(LAYOUTS, forward, norms, strict=True):
            assert error <= 1e-5, f"{layout}: log-probs are off by {error}"
            assert wrong == [[], []], layout
            assert got == pytest.approx(expected, rel=1e-5), layout

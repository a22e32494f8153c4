"""Qwen2, whose QKV projection has a bias, computes and learns on MindSpeed's modules as on Hugging Face's."""

from __future__ import annotations

import pytest
from megatron_tiny import Layout, make_batch, make_checkpoint, make_worker
from mindspeed_tree import MINDSPEED, needs_mindspeed
from ranks import run_ranks
from test_megatron_actor import OVERRIDES, UPDATES, reference, update
from test_megatron_models import forward_in
from test_mindspeed import FLASH

pytestmark = needs_mindspeed
LAYOUTS = [Layout(options=FLASH), Layout(tp=2, options=FLASH)]


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
    path = make_checkpoint("qwen2", tmp_path / "qwen2", layers=2)
    ranks = run_ranks(2, on_mindspeed, path, stubs=(MINDSPEED,), npu=True)
    _, expected, _ = reference(path, make_batch())
    for forward, norms in ranks:
        for layout, (error, *wrong), got in zip(LAYOUTS, forward, norms, strict=True):
            assert error <= 1e-5, f"{layout}: log-probs are off by {error}"
            assert wrong == [[], []], layout
            assert got == pytest.approx(expected, rel=1e-5), layout

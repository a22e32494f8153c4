"""The Megatron tests again on MindSpeed's modules, if frameworks/mindspeed is present.

verl enables MindSpeed as on an NPU: its adaptor is imported before Megatron, and the worker's configuration
goes through ``repatch``. MindSpeed runs unchanged on software NPUs, and nothing replaces TransformerEngine.
Forward passes and exports only.
"""

from __future__ import annotations

import os

import pytest
from megatron_tiny import Layout, make_checkpoint
from mindspeed_tree import MINDSPEED, needs_mindspeed
from ranks import run_ranks
from test_megatron_models import forward_in
from test_weight_converter_alltoall_overlap import export_in

from ascend_rl.weights import converter

pytestmark = [needs_mindspeed, pytest.mark.long]


def options(**values) -> tuple[str, ...]:
    prefix = "+actor_rollout_ref.actor.megatron.override_transformer_config"
    return tuple(f"{prefix}.{name}={value}" for name, value in values.items())


FLASH = options(use_flash_attn=True)
RING = FLASH + options(
    context_parallel_size=2, context_parallel_algo="megatron_cp_algo", attention_mask_type="causal"
)
# repatch knows these options only: without the second and third the layer stays megatron-core's
OVERLAP = FLASH + options(
    moe_alltoall_overlap_comm=True,
    moe_token_dispatcher_type="alltoall",
    moe_grouped_gemm=True,
    context_parallel_size=1,
)
LAYOUTS = [
    Layout(options=FLASH),
    Layout(tp=2, options=FLASH),
    Layout("moe", ep=2, options=FLASH),
    Layout(cp=2, options=RING),
]
OVERLAPPING = [Layout("moe", ep=2, options=OVERLAP)]  # last: repatch cannot take all of it back


def on_mindspeed(rank: int, paths: dict, mcore) -> tuple[list, list, set[str]]:
    """What the two bodies return, and which kernels of an NPU they called."""
    from software_npu.kernels.training import calls

    forward = forward_in(rank, LAYOUTS, paths)
    os.environ["USE_ALLTOALL_OVERLAP"] = "1"
    overlapping = export_in(rank, OVERLAPPING, paths["moe"], mcore)
    from megatron.core.transformer.moe.moe_layer import MoELayer

    assert MoELayer.__name__ == "MindSpeedAlltoAllOverlapMoeLayerAdaptor"
    return forward, overlapping, set(calls)


def test_every_layout_equals_hugging_face(tmp_path):
    """The last one has its experts as weight1/weight2 in MindSpeed's own MoE layer, loaded as the converter
    wrote them."""
    paths = {kind: make_checkpoint(kind, tmp_path / kind) for kind in ("dense", "moe")}
    settings = converter.Options(quiet=True, layout="grouped", ep_size=2)
    converter.to_mcore(paths["moe"], tmp_path / "mcore", settings)
    ranks = run_ranks(2, on_mindspeed, paths, tmp_path / "mcore", stubs=(MINDSPEED,), npu=True)
    for rank, (forward, overlapping, kernels) in enumerate(ranks):
        assert {"npu_fusion_attention", "npu_grouped_matmul", "npu_gmm"} <= kernels
        for layout, (error, *wrong) in zip(LAYOUTS + OVERLAPPING, forward + overlapping, strict=True):
            assert error <= 1e-5, f"{layout}, rank {rank}: log-probs are off by {error}"
            assert not any(wrong), f"{layout}, rank {rank}: {wrong}"
            print(f"{layout}, rank {rank}: {error:.1e}")

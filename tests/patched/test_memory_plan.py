"""ascend_rl.memory_plan counts the parameters that megatron-core's own model holds on a rank, to the last
one.

The real Qwen3-235B on 128 ranks: torch's fake process group stands for the other ranks, the meta device for
memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ascend_rl import memory_plan as mp


def held_by(model: mp.Model, rank: int, layout: mp.Training) -> int:
    """Parameters of the GPTModel that megatron-core builds on this rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    split = layout.layer_split or mp.split_layers(model.layers, layout.pp)
    options: dict = {}
    if model.experts:
        options |= dict(num_moe_experts=model.experts, moe_router_topk=model.experts_per_token)
        options |= dict(moe_ffn_hidden_size=model.ffn)
    if len(set(split)) > 1:
        options |= dict(num_layers_in_first_pipeline_stage=split[0])
        options |= dict(num_layers_in_last_pipeline_stage=split[-1])
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.dies)
    try:
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )
        config = TransformerConfig(
            num_layers=model.layers,
            hidden_size=model.hidden,
            num_attention_heads=model.heads,
            num_query_groups=model.kv_heads,
            kv_channels=model.head_dim,
            ffn_hidden_size=model.ffn,
            add_bias_linear=False,
            add_qkv_bias=model.qkv_bias,
            normalization="RMSNorm",
            gated_linear_unit=True,
            qk_layernorm=model.qk_norm,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            sequence_parallel=layout.tp > 1,
            pipeline_dtype=torch.bfloat16,
            use_cpu_initialization=True,
            perform_initialization=False,
            persist_layer_norm=False,
            **options,
        )
        config.sequence_parallel = False  # torch's layers refuse it, and CP; no shape depends on them
        spec = get_gpt_layer_local_spec(
            num_experts=model.experts or None,
            moe_grouped_gemm=False,
            qk_layernorm=model.qk_norm,
            normalization="RMSNorm",
        )
        with torch.device("meta"):
            built = GPTModel(
                config,
                spec,
                model.vocabulary,
                max_sequence_length=4096,
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
                share_embeddings_and_output_weights=model.tied,
                position_embedding_type="rope",
            )
        return sum(parameter.numel() for parameter in built.parameters())
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@pytest.fixture
def without_devices(monkeypatch):
    for backend in ("FLASH", "FUSED", "UNFUSED"):
        monkeypatch.setenv(f"NVTE_{backend}_ATTN", "1")  # GPTModel sets them, and refuses to find other values
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda *_, **__: None
    )  # of a tied embedding's values


@pytest.mark.parametrize(
    "name,layout",
    [
        ("qwen3-235b-a22b", mp.Training(dies=128, tp=4, pp=4, cp=4, ep=32)),  # published
        ("qwen3-235b-a22b", mp.Training(dies=64, tp=4, pp=2, ep=16, etp=2)),
        ("qwen3-32b", mp.Training(dies=32, tp=8, pp=2, cp=2)),  # published
        ("qwen2.5-3b", mp.Training(dies=4, tp=2, pp=2)),  # tied embeddings on both ends
        ("qwen2.5-3b", mp.Training(dies=2, tp=2)),
    ],
)
def test_every_stage_holds_what_megatron_builds(name, layout, without_devices):
    model = mp.Model.load(name)
    dies = layout.dies // layout.pp
    for index, stage in enumerate(mp.training_stages(model, layout)):
        built = held_by(model, rank=index * dies + dies - 1, layout=layout)
        assert stage.weights == mp.WEIGHT_BYTES * built
        assert stage.gradients == mp.GRADIENT_BYTES * built


@pytest.mark.parametrize(
    "change",
    [dict(tp=8), dict(cp=3), dict(ep=3), dict(ep=64)],
)
def test_what_the_planner_refuses_megatron_refuses(change, without_devices):
    model = mp.Model.load("qwen3-235b-a22b")
    layout = replace(mp.Training(dies=128, tp=4, pp=4, cp=4, ep=32), **change)
    assert mp.training_problems(model, layout)
    with pytest.raises((AssertionError, RuntimeError, ValueError, ZeroDivisionError)):
        held_by(model, rank=0, layout=layout)

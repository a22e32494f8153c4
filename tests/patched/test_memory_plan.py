"""ascend_rl.estimate counts what the frameworks really hold on a rank.

Megatron-core's own model, parameter by parameter: the real Qwen3-235B on 128 ranks, with torch's fake process
group for the other ranks and the meta device for memory. FSDP as verl wraps it, byte by byte: small models on
4 processes over gloo.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks

from ascend_rl.estimate import fsdp_memory, layouts, megatron_memory, tensors
from ascend_rl.settings.model import Model


def held_by(model: Model, rank: int, layout: layouts.Training) -> int:
    """Parameters of the GPTModel that megatron-core builds on this rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    split = layout.layer_split or megatron_memory.split_layers(model.layers, layout.pp)
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
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda *_, **__: None
    )  # of a tied embedding's values


@pytest.mark.parametrize(
    "name,layout",
    [
        ("qwen3-235b-a22b", layouts.Training(dies=128, tp=4, pp=4, cp=4, ep=32)),  # published
        ("qwen3-235b-a22b", layouts.Training(dies=64, tp=4, pp=2, ep=16, etp=2)),
        ("qwen3-32b", layouts.Training(dies=32, tp=8, pp=2, cp=2)),  # published
        ("qwen2.5-3b", layouts.Training(dies=4, tp=2, pp=2)),  # tied embeddings on both ends
        ("qwen2.5-3b", layouts.Training(dies=2, tp=2)),
    ],
)
def test_every_stage_holds_what_megatron_builds(name, layout, without_devices):
    model = Model.load(name)
    dies = layout.dies // layout.pp
    for index, stage in enumerate(megatron_memory.training_stages(model, layout)):
        built = held_by(model, rank=index * dies + dies - 1, layout=layout)
        assert stage.weights == tensors.WEIGHT_BYTES * built
        assert stage.gradients == megatron_memory.GRADIENT_BYTES * built


@pytest.mark.parametrize(
    "change",
    [dict(tp=8), dict(cp=3), dict(ep=3), dict(ep=64)],
)
def test_what_the_planner_refuses_megatron_refuses(change, without_devices):
    model = Model.load("qwen3-235b-a22b")
    layout = replace(layouts.Training(dies=128, tp=4, pp=4, cp=4, ep=32), **change)
    assert layouts.training_problems(model, layout)
    with pytest.raises((AssertionError, RuntimeError, ValueError, ZeroDivisionError)):
        held_by(model, rank=0, layout=layout)


# Shapes that 4 divides and that it does not; tied and untied; a mixture of experts. fsdp_size 0 is all ranks.
SMALL = {
    "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 1024,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
ODD = SMALL | {
    "vocab_size": 1023, "hidden_size": 66, "intermediate_size": 131, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 34,
}  # fmt: skip
EXPERTS = SMALL | {
    "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 96,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
WRAPPED = [
    (config, version, size)
    for config in (SMALL, ODD, ODD | {"tie_word_embeddings": True}, EXPERTS)
    for version in (1, 2)
    for size in (0, 2)
]


def wrapped(config: dict, version: int, size: int):
    """The model in FSDP, as verl's worker wraps it; importing that worker takes too long."""
    from torch.distributed import fsdp, init_device_mesh
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl.utils import fsdp_utils

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    shape, names = ((4 // size, size), ("ddp", "fsdp")) if size else ((4,), ("fsdp",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    if version == 1:
        return fsdp.FullyShardedDataParallel(
            model,
            auto_wrap_policy=fsdp_utils.get_fsdp_wrap_policy(model),
            sharding_strategy=fsdp.ShardingStrategy["HYBRID_SHARD" if size else "FULL_SHARD"],
            mixed_precision=fsdp.MixedPrecision(buffer_dtype=torch.float32, **dtypes),
            device_mesh=mesh,
            device_id=torch.device("cpu"),
        )
    options = {
        "mesh": mesh,
        "mp_policy": fsdp.MixedPrecisionPolicy(cast_forward_inputs=True, **dtypes),
        "reshard_after_forward": True,
        "shard_placement_fn": fsdp_utils.get_shard_placement_fn(mesh.shape[-1]),
    }
    fsdp_utils.apply_fsdp2(model, options, {})
    return model


def backward(model) -> None:
    tokens = torch.arange(64).view(1, 64)
    model(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)[..., 0].sum().backward()


def allocated(tensors) -> int:
    """Bytes of the storages behind these tensors, each counted once."""
    local = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in local if storage.nbytes()}.values())


def bytes_held(rank: int) -> tuple[list[tuple[int, int, int]], list[dict[str, int]]]:
    """(weights, gradients, optimizer) of each of WRAPPED after an update; what torch's own tracker saw at
    the peak of a backward pass, and of a step, of SMALL in FSDP2.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    found, peaks = [], []
    for config, version, size in WRAPPED:
        model = wrapped(config, version, size)
        optimizer = torch.optim.AdamW(model.parameters())
        backward(model)
        parameters = list(model.parameters())
        gradients = allocated(parameter.grad for parameter in parameters)
        optimizer.step()
        moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        found.append((allocated(parameters), gradients, allocated(moments)))

    model = wrapped(SMALL, version=2, size=0)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # as on a device
    for update in (backward, lambda _: optimizer.step()):
        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            update(model)
        kinds = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        peaks.append({getattr(kind, "value", kind): size for kind, size in kinds.items()})
    return found, peaks


@pytest.mark.weekly
def test_fsdp_holds_what_is_planned():
    ranks = run_ranks(4, bytes_held)
    for index, (config, version, size) in enumerate(WRAPPED):
        layout = layouts.Fsdp(dies=4, version=version, size=size, max_token_len_per_gpu=64)
        plan = fsdp_memory.plan_fsdp(Model.from_config(config), layout)
        planned = (plan.weights, plan.gradients, plan.optimizer)
        assert ranks[0][0][index] == planned, (config, version, size)
        for found, _ in ranks[1:]:  # the moments of the last ranks have no padding
            assert found[index][:2] == planned[:2] and found[index][2] <= planned[2]

    plan = fsdp_memory.plan_fsdp(Model.from_config(SMALL), layouts.Fsdp(dies=4, max_token_len_per_gpu=64))
    during_backward, during_step = ranks[0][1]
    moving = ("Unsharded Param", "Unsharded Grad", "All Gather", "Reduce Scatter", "Temp")
    # A temporary tensor of the activations may be among them, when the snapshot is taken.
    assert 0.7 <= sum(during_backward[kind] for kind in moving) / plan.gathered <= 1.01
    steps = 4 * len(fsdp_memory.layer_shapes(Model.from_config(SMALL))) * SMALL["num_hidden_layers"] + 4 * 3
    assert during_step["OptState"] == plan.optimizer + plan.step + steps  # AdamW counts steps in tensors

"""verl counts the MoE layers of any pipeline stage on megatron-core 0.12.1 as megatron-core places them."""

from __future__ import annotations

from ranks import run_ranks

# (layers, first stage, last stage, MoE pattern) on 4 pipeline stages; 94 layers are Qwen3-235B-A22B's.
CASES = [
    (8, None, None, 1),
    (8, None, None, [0, 0, 1, 1, 0, 1, 1, 1]),
    (94, 23, 23, 1),
    (94, 23, 23, [i % 3 > 0 for i in range(94)]),
    (10, 1, None, 2),
    (10, None, 1, 2),
]


def layers(rank: int) -> list:
    """Of each case: the MoE layers of this stage, and what it says all stages have."""
    import torch

    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from verl.utils.megatron.router_replay_utils import get_moe_num_layers_to_build, is_moe_layer

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4)
    found = []
    for count, first, last, pattern in CASES:
        config = TransformerConfig(
            num_layers=count,
            hidden_size=8,
            num_attention_heads=2,
            num_moe_experts=4,
            pipeline_model_parallel_size=4,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
            moe_layer_freq=pattern if isinstance(pattern, int) else [int(x) for x in pattern],
            pipeline_dtype=torch.float32,
            add_bias_linear=False,
        )
        offset = get_transformer_layer_offset(config)  # megatron-core knows its own stage only
        own = sum(is_moe_layer(config, i) for i in range(offset, offset + get_num_layers_to_build(config)))
        assert get_moe_num_layers_to_build(config) == own
        found.append((own, [get_moe_num_layers_to_build(config, None, stage) for stage in range(4)]))
    return found


def test_every_stage_counts_what_megatron_places():
    by_case = list(zip(*run_ranks(4, layers), strict=True))
    for case, stages in zip(CASES, by_case, strict=True):
        own = [count for count, _ in stages]
        assert [view for _, view in stages] == [own] * 4, case
    assert sum(own for own, _ in by_case[2]) == 94

"""verl counts the MoE layers of any pipeline stage on megatron-core 0.12.1 as megatron-core places them."""

from __future__ import annotations

import os

import torch.multiprocessing as mp

# (layers, first stage, last stage, MoE pattern) on 4 pipeline stages; 94 layers are Qwen3-235B-A22B's.
CASES = [
    (8, None, None, 1),
    (8, None, None, [0, 0, 1, 1, 0, 1, 1, 1]),
    (94, 23, 23, 1),
    (94, 23, 23, [i % 3 > 0 for i in range(94)]),
    (10, 1, None, 2),
    (10, None, 1, 2),
]


def _stage(rank: int, port: int, results) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from verl.utils.megatron.router_replay_utils import get_moe_num_layers_to_build, is_moe_layer

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4)
    for number, (layers, first, last, pattern) in enumerate(CASES):
        config = TransformerConfig(
            num_layers=layers,
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
        results.put(
            (number, rank, own, [get_moe_num_layers_to_build(config, None, stage) for stage in range(4)])
        )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_every_stage_counts_what_megatron_places():
    from verl.utils.net_utils import get_free_port

    results = mp.get_context("spawn").SimpleQueue()
    port, _ = get_free_port("127.0.0.1")
    mp.spawn(_stage, (port, results), nprocs=4)
    counts: dict[int, dict] = {number: {} for number in range(len(CASES))}
    views: dict[int, list] = {number: [] for number in range(len(CASES))}
    for _ in range(4 * len(CASES)):
        number, rank, own, all_stages = results.get()
        counts[number][rank] = own
        views[number].append(all_stages)
    for number in range(len(CASES)):
        expected = [counts[number][stage] for stage in range(4)]
        assert views[number] == [expected] * 4, CASES[number]
    assert sum(counts[2].values()) == 94

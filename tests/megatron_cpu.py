"""The GPTModel that verl builds for a Hugging Face model, in a rank of ``ranks.run_ranks``."""

from __future__ import annotations

import contextlib


def build(hf_path, *, tp=1, pp=1, ep=1, etp=1, experts="te", dtype=None):
    """This rank's model in a new layout, what is left of the ranks being data parallel.

    ``experts``: te (TEGroupedMLP), grouped (GroupedMLP, with weight1 and weight2) or sequential.
    """
    import torch
    from transformers import AutoConfig

    from megatron.core import parallel_state
    from verl.models.mcore import hf_to_mcore_config, init_mcore_model

    parallel_state.destroy_model_parallel()
    parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None  # destroying forgets this one
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    config = AutoConfig.from_pretrained(hf_path)
    options = dict(use_cpu_initialization=True, perform_initialization=False, persist_layer_norm=False)
    options |= {
        "te": {},
        "grouped": dict(moe_use_legacy_grouped_gemm=True),
        "sequential": dict(moe_grouped_gemm=False),
    }[experts]
    with contextlib.redirect_stdout(None):
        transformer_config = hf_to_mcore_config(config, dtype or torch.float32, **options)
        return init_mcore_model(
            transformer_config,
            config,
            parallel_state.is_pipeline_first_stage(),
            parallel_state.is_pipeline_last_stage(),
            value=False,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
        )

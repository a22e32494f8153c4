# shellcheck shell=bash
# Sourced by the Megatron recipes of Qwen3-32B (64 layers, 8 query groups): how the model is laid out on the dies.

# qwen3_32b_layout: append to ARGS. Reads DIES, CP, MAX_PROMPT, MAX_RESPONSE, MAX_NUM_SEQS, GRAPH_SIZES and GPU_MEMORY.
qwen3_32b_layout() {
    # 8 query groups allow TP8; one vLLM server per 8 dies.
    local TP=8 PP=2 GEN_TP=8 t=actor_rollout_ref.actor.megatron.override_transformer_config
    whole "$DIES" $((TP * PP * CP)) "DIES must be a multiple of TP x PP x CP = $TP x $PP x $CP"

    ARGS+=(
        actor_rollout_ref.model.path="$MODEL_PATH"
        actor_rollout_ref.actor.strategy=megatron
        actor_rollout_ref.actor.megatron.use_mbridge=True   # reads and writes Hugging Face weights
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size="$TP"
        actor_rollout_ref.actor.megatron.sequence_parallel=True
        actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="$PP"
        actor_rollout_ref.actor.megatron.param_offload=True
        actor_rollout_ref.actor.megatron.grad_offload=True
        actor_rollout_ref.ref.megatron.param_offload=True
        actor_rollout_ref.actor.use_torch_compile=False
        # Keep only the input of each layer and recompute the rest in the backward pass: a third more compute, 33 GiB less
        # (docs/training_memory.md).
        "$t".recompute_granularity=full
        "$t".recompute_method=uniform
        "$t".recompute_num_layers=1

        actor_rollout_ref.rollout.tensor_model_parallel_size="$GEN_TP"
    )
    rollout_with_graphs
    mindspeed
    swap_optimizer
    ring_attention
}

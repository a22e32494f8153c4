# shellcheck shell=bash
# Sourced by the recipes of Qwen3-235B-A22B (94 layers, 4 query groups, 128 experts): how the model is laid out on the dies.

# qwen3_235b_layout: append to ARGS. Reads DIES, CP, MAX_PROMPT, MAX_RESPONSE, MAX_NUM_SEQS, GRAPH_SIZES, GPU_MEMORY and
# TRUE_WEIGHTS (1: the checkpoint in DIST_CKPT_PATH; 0: random weights).
qwen3_235b_layout() {
    # Training: 4 query groups allow TP4; with PP4 a die holds 24 layers; experts spread over all dies of a stage.
    local TP=4 PP=4 EP=$((DIES / 4)) t=+actor_rollout_ref.actor.megatron.override_transformer_config
    # Rollout: one server over all dies, so that a die holds 128 / DIES of the experts: 7.09 GB of weights at 128 dies.
    local GEN_TP=4 GEN_DP=$((DIES / 4))
    local load
    whole "$DIES" $((TP * PP * CP)) "DIES must be a multiple of TP x PP x CP = $TP x $PP x $CP"
    whole 128 "$DIES" "the rollout spreads 128 experts over $DIES dies"
    load="$([ "$TRUE_WEIGHTS" = 1 ] && echo True || echo False)"

    ARGS+=(
        actor_rollout_ref.model.path="$MODEL_PATH"
        actor_rollout_ref.actor.strategy=megatron
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size="$TP"
        actor_rollout_ref.actor.megatron.sequence_parallel=True
        actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="$PP"
        "$t".num_layers_in_first_pipeline_stage=23        # the embedding and
        "$t".num_layers_in_last_pipeline_stage=23         # the output layer take the place of a layer: 23 + 24 + 24 + 23
        # Quoted, since MindSpeed reads a string and stops at OmegaConf's list.
        "$t.pipeline_num_transformer_layers='[[23],[24],[24],[23]]'"
        actor_rollout_ref.actor.megatron.expert_model_parallel_size="$EP"
        actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
        actor_rollout_ref.actor.megatron.param_offload=True
        actor_rollout_ref.actor.megatron.grad_offload=True
        actor_rollout_ref.ref.megatron.param_offload=True
        actor_rollout_ref.actor.use_torch_compile=False

        # Weights: a Megatron checkpoint from converter_hf_to_mcore.py, or none. mbridge supports neither the expert layout of
        # the alltoall overlap (weight1, weight2) nor such checkpoints.
        actor_rollout_ref.actor.megatron.use_mbridge=False
        actor_rollout_ref.actor.load_weight="$load"
        actor_rollout_ref.ref.load_weight="$load"
        actor_rollout_ref.actor.megatron.use_dist_checkpointing="$load"
        actor_rollout_ref.ref.megatron.use_dist_checkpointing="$load"
        actor_rollout_ref.actor.megatron.dist_checkpointing_path="${DIST_CKPT_PATH:-null}"
        actor_rollout_ref.ref.megatron.dist_checkpointing_path="${DIST_CKPT_PATH:-null}"

        # MoE: exchange tokens while experts compute; drop the experts' activations and regenerate them in the backward pass,
        # hidden by its communication. level1, unlike level0, fits at any imbalance of the experts; for the costs see
        # docs/training_memory.md. Recomputing whole layers as well would repeat the exchange with nothing to hide it.
        "$t".moe_token_dispatcher_type=alltoall
        "$t".moe_alltoall_overlap_comm=True
        "$t".moe_grouped_gemm=True
        "$t".moe_zero_memory=level1
        "$t".moe_permute_fusion=True
        "$t".gemm_gradient_accumulation_fusion=True

        actor_rollout_ref.rollout.tensor_model_parallel_size="$GEN_TP"
        actor_rollout_ref.rollout.data_parallel_size="$GEN_DP"
        actor_rollout_ref.rollout.expert_parallel_size=$((GEN_TP * GEN_DP))
    )
    rollout_with_graphs
    mindspeed
    swap_optimizer
    ring_attention
}

# distributed_checkpoint: set and check DIST_CKPT_PATH.
distributed_checkpoint() {
    DIST_CKPT_PATH="${DIST_CKPT_PATH:-$MODEL_PATH-mcore}"
    input "$DIST_CKPT_PATH" "set DIST_CKPT_PATH, or convert the weights with the layout the recipe trains: \
USE_ALLTOALL_OVERLAP=1 python converter_hf_to_mcore.py --hf_model_path $MODEL_PATH --output_path $DIST_CKPT_PATH --verify"
}

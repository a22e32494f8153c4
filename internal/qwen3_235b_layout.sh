# shellcheck shell=bash disable=SC2034 # recipe.sh reads them
# Sourced by recipe.sh. Qwen3-235B-A22B: 94 layers, 4 query groups, 128 experts.

# Without weights. Reads CP, MAX_PROMPT, MAX_RESPONSE and DATA.
qwen3_235b_random_init() {
    local t=+actor_rollout_ref.actor.megatron.override_transformer_config
    dies 8 16
    inputs Qwen/Qwen3-235B-A22B "$DATA" aime
    TOKENS=$(((MAX_PROMPT + MAX_RESPONSE) / CP))
    on_npus
    megatron 4 4 "$CP"              # 4 query groups allow TP4; with PP4 a die holds 24 layers
    mindspeed
    experts_everywhere 4            # 7.09 GB of weights at 128 dies
    ARGS+=(
        "$t".num_layers_in_first_pipeline_stage=23        # the embedding and
        "$t".num_layers_in_last_pipeline_stage=23         # the output layer take the place of a layer: 23 + 24 + 24 + 23
        # Quoted, since MindSpeed reads a string and stops at OmegaConf's list.
        "$t.pipeline_num_transformer_layers='[[23],[24],[24],[23]]'"
        actor_rollout_ref.actor.megatron.expert_model_parallel_size=$((DIES / 4))   # over all dies of a stage
        actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1

        # MoE: exchange tokens while experts compute; drop the experts' activations and regenerate them in the backward pass,
        # hidden by its communication. level1, unlike level0, fits at any imbalance of the experts; for the costs see
        # docs/training_memory.md. Recomputing whole layers as well would repeat the exchange with nothing to hide it.
        "$t".moe_token_dispatcher_type=alltoall
        "$t".moe_alltoall_overlap_comm=True
        "$t".moe_grouped_gemm=True
        "$t".moe_zero_memory=level1
        "$t".moe_permute_fusion=True
        "$t".gemm_gradient_accumulation_fusion=True

        actor_rollout_ref.actor.load_weight=False
        actor_rollout_ref.ref.load_weight=False
        # mbridge supports neither the expert layout of the alltoall overlap (weight1, weight2) nor Megatron checkpoints.
        actor_rollout_ref.actor.megatron.use_mbridge=False
        actor_rollout_ref.rollout.top_k=50
        actor_rollout_ref.rollout.top_p=0.9
        trainer.save_freq=5
    )
    decode_graphs 256 "[32,64,128,256]"
}

# With the weights in DIST_CKPT_PATH, a Megatron checkpoint from converter_hf_to_mcore.py.
qwen3_235b() {
    local part
    qwen3_235b_random_init
    if [ "$STACK" != cann8.5 ]; then  # verl 0.9.1 reads the weights in MODEL_PATH
        ARGS+=(actor_rollout_ref.{actor,ref}.load_weight=True)
        return
    fi
    DIST_CKPT_PATH="${DIST_CKPT_PATH:-$MODEL_PATH-mcore}"
    input "$DIST_CKPT_PATH" "set DIST_CKPT_PATH, or convert the weights with the layout the recipe trains: \
USE_ALLTOALL_OVERLAP=1 python converter_hf_to_mcore.py --hf_model_path $MODEL_PATH --output_path $DIST_CKPT_PATH --verify"
    for part in actor ref; do
        ARGS+=(
            "actor_rollout_ref.$part.load_weight=True"
            "actor_rollout_ref.$part.megatron.use_dist_checkpointing=True"
            "actor_rollout_ref.$part.megatron.dist_checkpointing_path=$DIST_CKPT_PATH"
        )
    done
}

# shellcheck shell=bash disable=SC2034 # recipe.sh reads them
# Sourced by recipe.sh. Qwen3-32B: 64 layers, 8 query groups.

# Megatron, which reads and writes Hugging Face weights. Reads CP, MAX_PROMPT, MAX_RESPONSE and DATA.
qwen3_32b() {
    dies 2 16
    inputs Qwen/Qwen3-32B "$DATA" aime
    TOKENS=$(((MAX_PROMPT + MAX_RESPONSE) / CP))
    on_npus
    megatron 8 2 "$CP"
    mindspeed
    recompute_layers
    ARGS+=(
        actor_rollout_ref.rollout.top_k=-1
        actor_rollout_ref.rollout.top_p=1
        actor_rollout_ref.rollout.tensor_model_parallel_size=8
        actor_rollout_ref.rollout.gpu_memory_utilization=0.87
    )
    decode_graphs 128 "[16,32,64,128]"
}

# FSDP2 over all dies: 16 servers on 64 dies.
qwen3_32b_fsdp2() {
    MAX_PROMPT=16384 MAX_RESPONSE=16384
    TRAIN_BATCH=256 MINI_BATCH=64       # four updates per step
    SP=4 TOKENS=$(((MAX_PROMPT + MAX_RESPONSE) / SP))   # Ulysses splits a sequence into SP pieces
    dies 4 16
    whole "$DIES" 4 "DIES must be a multiple of the rollout's TP"
    inputs Qwen/Qwen3-32B dapo_math aime
    on_npus
    fsdp fsdp2
    sampling_of_the_paper
    ARGS+=(
        data.filter_overlong_prompts=False
        data.truncation=left
        actor_rollout_ref.actor.optim.lr_warmup_steps=10
        actor_rollout_ref.actor.fsdp_config.fsdp_size=-1
        actor_rollout_ref.actor.fsdp_config.forward_prefetch=True
        actor_rollout_ref.actor.entropy_from_logits_with_chunking=True
        actor_rollout_ref.ref.fsdp_config.forward_prefetch=True
        actor_rollout_ref.ref.entropy_checkpointing=True
        actor_rollout_ref.ref.entropy_from_logits_with_chunking=True
        actor_rollout_ref.rollout.tensor_model_parallel_size=4
        actor_rollout_ref.rollout.gpu_memory_utilization=0.90
        actor_rollout_ref.rollout.free_cache_engine=True
    )
    decode_graphs 256 "[8,16,32,64,128,192,256]"
}

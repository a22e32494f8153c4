# shellcheck shell=bash disable=SC2034 # recipe.sh reads them
# Sourced by recipe.sh. Qwen3-30B-A3B: 48 layers, 4 query groups, 128 experts.

# 2 responses per prompt. Everything is offloaded, and all activations are recomputed (docs/training_memory.md).
qwen3_30b_a3b() {
    MAX_PROMPT=2048 MAX_RESPONSE=8192 OVERLONG_LEN=4096 OVERLONG_FACTOR=0.5
    TRAIN_BATCH=32 MINI_BATCH=4         # eight updates per step
    TOKENS=$((MAX_PROMPT + MAX_RESPONSE))
    dies 2 8
    inputs Qwen/Qwen3-30B-A3B dapo_math aime
    on_npus
    megatron 4 4 1
    experts_everywhere 4
    recompute_layers
    sampling_of_the_paper
    overlong_penalty
    ARGS+=(
        reward.reward_kwargs.overlong_buffer_cfg.enable=True
        data.filter_overlong_prompts=False
        data.truncation=left
        actor_rollout_ref.actor.clip_ratio_c=10.0
        actor_rollout_ref.actor.optim.lr_warmup_steps=10
        actor_rollout_ref.actor.optim.use_checkpoint_opt_param_scheduler=True   # else a resumed run warms up again
        actor_rollout_ref.actor.optim.clip_grad=1.0
        actor_rollout_ref.actor.megatron.expert_model_parallel_size=$((DIES / 4))
        actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
        actor_rollout_ref.actor.megatron.optimizer_offload=True
        # Routing depends on small differences.
        +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
        actor_rollout_ref.rollout.n=2
        actor_rollout_ref.rollout.gpu_memory_utilization=0.80
        trainer.total_training_steps=300
        trainer.log_val_generations=10
    )
    decode_graphs 64 "[8,16,32,64]"
}

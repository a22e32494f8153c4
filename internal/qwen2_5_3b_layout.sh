# shellcheck shell=bash disable=SC2034 # recipe.sh reads them
# Sourced by recipe.sh. Qwen2.5-3B-Instruct: 36 layers, 2 query groups.

# FSDP; the rollout is eager, because a 3B model gains little from graphs.
qwen2_5_3b() {
    MAX_PROMPT=2048 MAX_RESPONSE=8192 OVERLONG_LEN=4096 OVERLONG_FACTOR=0.5
    TRAIN_BATCH=512 MINI_BATCH=128      # four updates per step, as in the paper
    SP=4 TOKENS=$((MAX_PROMPT + MAX_RESPONSE))  # SP dies share SP times as many tokens
    dies 1 8
    inputs Qwen/Qwen2.5-3B-Instruct gsm8k gsm8k
    on_npus
    fsdp fsdp
    sampling_of_the_paper
    overlong_penalty
    ARGS+=(
        actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
        actor_rollout_ref.rollout.tensor_model_parallel_size=2
        actor_rollout_ref.rollout.gpu_memory_utilization=0.6
        actor_rollout_ref.rollout.enforce_eager=True
        trainer.use_legacy_worker_impl=enable
        trainer.total_training_steps=500
        trainer.test_freq=10
        trainer.log_val_generations=2
    )
}

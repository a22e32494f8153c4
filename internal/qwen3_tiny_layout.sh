# shellcheck shell=bash disable=SC2034 # recipe.sh reads them
# Sourced by recipe.sh. The models of ascend_rl.tiny, with 2 layers, on CPUs: float32, gloo, 4 responses per prompt.

# tiny DATA_DIR OPTIONS...: what does not depend on the trainer. Two updates per step, so that the second is off-policy and
# clipping matters. GSPO's bounds are ten times those of the paper because a tiny model's learning rate is hundreds of times
# that of a 32B model.
tiny() {
    NNODES="${NNODES:-1}" NPUS_PER_NODE="${NPUS_PER_NODE:-1}" DATA_DIR="${DATA_DIR:-$1}"
    MODEL_PATH="$DATA_DIR/model" TRAIN_FILE="$DATA_DIR/train.parquet" TEST_FILE="$DATA_DIR/val.parquet"
    MAX_PROMPT=16 MAX_RESPONSE=16 TRAIN_BATCH=16 MINI_BATCH=8
    GSPO_LOW=0.003 GSPO_HIGH=0.004
    python -m ascend_rl.tiny --out "$DATA_DIR" "${@:2}"
    ARGS+=(
        data.dataloader_num_workers=0
        reward.custom_reward_function.path="$ROOT/ascend_rl/recipe/tiny.py"
        reward.custom_reward_function.name=compute_score
        reward.num_workers=1
        actor_rollout_ref.actor.use_dynamic_bsz=True
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048      # all of a step

        # vLLM's async server in the trainer's precision.
        actor_rollout_ref.rollout.n=4
        actor_rollout_ref.rollout.dtype=float32
        actor_rollout_ref.rollout.tensor_model_parallel_size=1
        actor_rollout_ref.rollout.enforce_eager=True
        actor_rollout_ref.rollout.free_cache_engine=False
        actor_rollout_ref.rollout.max_model_len=64
        actor_rollout_ref.rollout.max_num_seqs=64
        actor_rollout_ref.rollout.max_num_batched_tokens=1024
        actor_rollout_ref.rollout.agent.num_workers=1
        actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16
        +actor_rollout_ref.rollout.enable_sleep_mode=False
        +actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=uni
        +actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=128

        trainer.device=cpu
        trainer.total_training_steps=80
        trainer.total_epochs=1
        trainer.val_before_train=True
        trainer.test_freq=80
        trainer.save_freq=-1
        trainer.resume_mode=disable
    )
}

# The dense model: FSDP.
qwen3_tiny() {
    tiny "$STACK_DATA/tiny"
    ARGS+=(
        actor_rollout_ref.actor.optim.lr=5e-4
        actor_rollout_ref.actor.optim.lr_scheduler_type=cosine
        actor_rollout_ref.actor.optim.min_lr_ratio=0.1
        +actor_rollout_ref.model.override_config.attn_implementation=sdpa
        actor_rollout_ref.model.use_remove_padding=False
        actor_rollout_ref.model.enable_gradient_checkpointing=False
        actor_rollout_ref.actor.strategy=fsdp
        actor_rollout_ref.actor.fsdp_config.dtype=float32
        actor_rollout_ref.actor.use_torch_compile=False
    )
}

# The MoE: Megatron; experts are distributed over EP workers, the rest is replicated in PP stages.
qwen3_moe_tiny() {
    EP="${EP:-2}" PP="${PP:-1}"
    local workers=$((${NNODES:-1} * ${NPUS_PER_NODE:-1}))
    [ $((workers % (EP * PP))) = 0 ] ||
        die "EP=$EP x PP=$PP needs a multiple of $((EP * PP)) workers, there are $workers: set NPUS_PER_NODE"
    importable transformer_engine ||
        die "TransformerEngine and its stub are both missing: use internal/cpu_megatron_env.sh as the environment script"
    tiny "$STACK_DATA/tiny_moe" --moe --warm-start 0.85
    ARGS+=(
        --config-name=ppo_megatron_trainer
        actor_rollout_ref.actor.whole_batch_loss=True
        actor_rollout_ref.actor.optim.lr=4e-4
        actor_rollout_ref.actor.optim.lr_decay_style=cosine
        actor_rollout_ref.actor.optim.min_lr=4e-5
        # Else a resumed run restarts the learning rate schedule.
        actor_rollout_ref.actor.optim.use_checkpoint_opt_param_scheduler=True
        actor_rollout_ref.actor.strategy=megatron
        actor_rollout_ref.actor.megatron.dtype=float32
        actor_rollout_ref.actor.megatron.expert_model_parallel_size="$EP"
        actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
        actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="$PP"
    )
}

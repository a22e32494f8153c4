# shellcheck shell=bash
# Sourced by the CPU recipes of the tiny models: settings of the rollout and the run, independent of the trainer.
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

# qwen3_tiny_layout: append to ARGS. Reads NNODES, NPUS_PER_NODE, STEPS and OUTPUT_DIR.
qwen3_tiny_layout() {
    ARGS+=(
        # vLLM's async server in the trainer's precision; its log-probs are compared with the trainer's.
        actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.rollout.n=4
        actor_rollout_ref.rollout.dtype=float32
        actor_rollout_ref.rollout.tensor_model_parallel_size=1
        actor_rollout_ref.rollout.enforce_eager=True
        actor_rollout_ref.rollout.free_cache_engine=False
        actor_rollout_ref.rollout.calculate_log_probs=True
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64
        actor_rollout_ref.rollout.max_model_len=64
        actor_rollout_ref.rollout.max_num_seqs=64
        actor_rollout_ref.rollout.max_num_batched_tokens=1024
        actor_rollout_ref.rollout.agent.num_workers=1
        actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16
        +actor_rollout_ref.rollout.enable_sleep_mode=False
        +actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=uni
        +actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=128

        trainer.device=cpu
        trainer.nnodes="${NNODES:-1}"
        trainer.n_gpus_per_node="${NPUS_PER_NODE:-1}"
        trainer.total_training_steps="${STEPS:-80}"
        trainer.total_epochs=1
        trainer.val_before_train=True
        trainer.test_freq=40
        trainer.save_freq=-1
        trainer.resume_mode=disable
        "trainer.logger=[console,file,tensorboard]"
        trainer.project_name=ascend_rl
        trainer.experiment_name="$(basename "$OUTPUT_DIR")"
        trainer.default_local_dir="$OUTPUT_DIR/checkpoints"
        hydra.run.dir="$OUTPUT_DIR/hydra"
    )
    if smoking; then die "SMOKE=1: this recipe already is a small run on CPUs; unset SMOKE"; fi
    if [ -n "${PROFILE:-}" ]; then die "PROFILE=$PROFILE: the profiler is that of NPUs; unset it for a run on CPUs"; fi
    rollout_switches
    refuse_unread
}

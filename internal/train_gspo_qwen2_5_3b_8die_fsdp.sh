#!/usr/bin/env bash
# GSPO on Qwen2.5-3B-Instruct with FSDP on one node: 2K prompts, 8K responses, GSM8K; Ulysses SP4, vLLM TP2.
#
# Usage:    bash ray_start_npu.sh internal/train_gspo_qwen2_5_3b_8die_fsdp.sh internal/qwen2_5_3b_env.sh [HYDRA_OVERRIDES...]
# Example:  NPU_SERIES=a2 bash ray_start_npu.sh internal/train_gspo_qwen2_5_3b_8die_fsdp.sh internal/qwen2_5_3b_env.sh
#           SMOKE=1 bash ray_start_npu.sh internal/train_gspo_qwen2_5_3b_8die_fsdp.sh internal/qwen2_5_3b_env.sh
# Writes:   OUTPUT_DIR (outputs/gspo_qwen2_5_3b_8die_fsdp): train.log, metrics.jsonl, the report, checkpoints/
# Hardware: one Atlas 800T A2 node of 8 NPUs with 64 GB (NPUS_PER_NODE=16: an A3 node)
# Duration: not published
#
# Variables: NNODES (1), NPUS_PER_NODE (8), MODEL_PATH, TRAIN_FILE and TEST_FILE (GSM8K), OUTPUT_DIR, WORKERS (enable: verl's
#            legacy workers; disable: its engine workers), SAVE_FREQ (10), OVERLONG (False: penalise responses near the
#            limit); SMOKE=1 runs it scaled down on a laptop (docs/rehearsal.md)
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
case "${1:-}" in -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;; esac
use_python
dies 1 8
inputs Qwen/Qwen2.5-3B-Instruct gsm8k gsm8k

MAX_PROMPT=2048 MAX_RESPONSE=8192 OVERLONG_LEN=4096 OVERLONG_FACTOR=0.5
TRAIN_BATCH=512 MINI_BATCH=128      # four updates per step, as in the paper
SP=4 GEN_TP=2
TOKENS_PER_DIE=$((MAX_PROMPT + MAX_RESPONSE))           # SP dies share SP times as many tokens
whole "$DIES" "$SP" "DIES must be a multiple of SP"

ARGS=(
    data.train_files="$TRAIN_FILE"
    data.val_files="$TEST_FILE"
    data.max_prompt_length="$MAX_PROMPT"
    data.max_response_length="$MAX_RESPONSE"
    data.filter_overlong_prompts=True
    data.truncation=error
    data.shuffle=True
    data.train_batch_size="$TRAIN_BATCH"

    # GSPO: 16 responses per prompt, advantages relative to their mean; ratios and clipping per response (docs/gspo.md).
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    algorithm.kl_ctrl.kl_coef=0.0
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.clip_ratio_low=0.0003
    actor_rollout_ref.actor.clip_ratio_high=0.0004
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.kl_loss_coef=0.0
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05
    actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.grad_clip=1.0

    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.strategy=fsdp
    actor_rollout_ref.actor.ulysses_sequence_parallel_size="$SP"
    actor_rollout_ref.actor.use_torch_compile=False     # inductor has no NPU backend: raise e.remove_dynamo_frames()
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.actor.entropy_checkpointing=True
    actor_rollout_ref.ref.fsdp_config.param_offload=True
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.whole_batch_loss=True
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$TOKENS_PER_DIE"
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu="$TOKENS_PER_DIE"
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$TOKENS_PER_DIE"

    # The rollout: vLLM's async server, the only one in verl 0.7.1; eager, because a 3B model gains little from graphs.
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
    actor_rollout_ref.rollout.top_k=-1
    actor_rollout_ref.rollout.tensor_model_parallel_size="$GEN_TP"
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.max_model_len=$((MAX_PROMPT + MAX_RESPONSE))
    actor_rollout_ref.rollout.max_num_batched_tokens=$((MAX_PROMPT + MAX_RESPONSE))
    actor_rollout_ref.rollout.enable_chunked_prefill=True
    actor_rollout_ref.rollout.enforce_eager=True
    actor_rollout_ref.rollout.calculate_log_probs=True  # training/rollout_probs_diff_* shows whether it is the same model
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
    actor_rollout_ref.rollout.val_kwargs.top_k=-1

    trainer.use_legacy_worker_impl="${WORKERS:-enable}"
    trainer.total_epochs=10
    trainer.total_training_steps=500
    trainer.val_before_train=False
    trainer.test_freq=10
    trainer.save_freq="${SAVE_FREQ:-10}"
    trainer.max_actor_ckpt_to_keep=2
    trainer.log_val_generations=2
)
math_reward
overlong_penalty
trainer
smoke dense fsdp

train verl.trainer.main_ppo "${ARGS[@]}" "$@"

#!/usr/bin/env bash
# GSPO on a 2-layer Qwen3 that learns to add 2-digit numbers: verl + FSDP (gloo) + vLLM, on a CPU.
#
# Usage:    bash ray_start_npu.sh internal/train_gspo_qwen3_tiny_cpu.sh internal/cpu_env.sh [HYDRA_OVERRIDES...]
# Example:  bash ray_start_npu.sh internal/train_gspo_qwen3_tiny_cpu.sh internal/cpu_env.sh trainer.total_training_steps=20
# Writes:   OUTPUT_DIR (outputs/gspo_qwen3_tiny_cpu): train.log, metrics.jsonl, the report
# Hardware: 2 cores, 8 GiB
# Duration: about 3 minutes, half of which is startup
#
# Variables: STEPS (80), NNODES (1), NPUS_PER_NODE (1, each with a worker and a vLLM server), DATA_DIR (data/tiny),
#            OUTPUT_DIR (outputs/gspo_qwen3_tiny_cpu), LOSS_MODE (gspo), LOSS_AGG_MODE (seq-mean-token-mean),
#            CLIP_RATIO_LOW and CLIP_RATIO_HIGH (0.003, 0.004)
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
. "$(dirname "${BASH_SOURCE[0]}")/qwen3_tiny_layout.sh"
case "${1:-}" in -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;; esac
use_python

DATA_DIR="${DATA_DIR:-$ROOT/data/tiny}"
OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/outputs/gspo_qwen3_tiny_cpu}"
LOSS_MODE="${LOSS_MODE:-gspo}"
python -m ascend_rl.tiny --out "$DATA_DIR"

ARGS=(
    # The group: 4 samples per prompt, advantages relative to their mean.
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    data.train_files="$DATA_DIR/train.parquet"
    data.val_files="$DATA_DIR/val.parquet"
    data.train_batch_size=16
    data.max_prompt_length=16
    data.max_response_length=16
    data.filter_overlong_prompts=True
    data.truncation=error
    data.dataloader_num_workers=0
    reward.custom_reward_function.path="$ROOT/ascend_rl/recipe/tiny.py"
    reward.custom_reward_function.name=compute_score
    reward.num_workers=1

    # The loss. Two updates per step, so that the second is off-policy and clipping matters. The bounds are ten times
    # those of the paper because a tiny model's learning rate is hundreds of times that of a 32B model.
    actor_rollout_ref.actor.policy_loss.loss_mode="$LOSS_MODE"
    actor_rollout_ref.actor.loss_agg_mode="${LOSS_AGG_MODE:-seq-mean-token-mean}"
    actor_rollout_ref.actor.clip_ratio_low="${CLIP_RATIO_LOW:-0.003}"
    actor_rollout_ref.actor.clip_ratio_high="${CLIP_RATIO_HIGH:-0.004}"
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
    actor_rollout_ref.actor.optim.lr=5e-4
    actor_rollout_ref.actor.optim.lr_scheduler_type=cosine
    actor_rollout_ref.actor.optim.min_lr_ratio=0.1

    # The trainer: FSDP in fp32 over gloo.
    actor_rollout_ref.model.path="$DATA_DIR/model"
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa
    actor_rollout_ref.model.use_remove_padding=False
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.strategy=fsdp
    actor_rollout_ref.actor.fsdp_config.dtype=float32
    actor_rollout_ref.actor.use_torch_compile=False
)
qwen3_tiny_layout  # rollout, length and outputs of the run

train verl.trainer.main_ppo "${ARGS[@]}" "$@"

#!/usr/bin/env bash
# GSPO on a 2-layer Qwen3-MoE that learns to add 2-digit numbers: verl + Megatron (EP2, gloo) + vLLM, on a CPU.
#
# Usage:    NPUS_PER_NODE=2 bash ray_start_npu.sh internal/train_gspo_qwen3_moe_tiny_cpu.sh \
#               internal/cpu_megatron_env.sh [HYDRA_OVERRIDES...]
# Example:  NPUS_PER_NODE=2 bash ray_start_npu.sh internal/train_gspo_qwen3_moe_tiny_cpu.sh internal/cpu_megatron_env.sh
# Writes:   OUTPUT_DIR (outputs/gspo_qwen3_moe_tiny_cpu): train.log, metrics.jsonl, the report
# Hardware: 2 cores, 12 GiB
# Duration: about 3 minutes, two thirds of which is startup
#
# Variables: STEPS (80), NNODES (1), NPUS_PER_NODE (2 here, each with a worker and a vLLM server), EP (2), PP (1),
#            DATA_DIR (data/tiny_moe), OUTPUT_DIR (outputs/gspo_qwen3_moe_tiny_cpu), LOSS_MODE (gspo),
#            LOSS_AGG_MODE (seq-mean-token-mean), CLIP_RATIO_LOW and CLIP_RATIO_HIGH (0.003, 0.004)
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
. "$(dirname "${BASH_SOURCE[0]}")/qwen3_tiny_layout.sh"
case "${1:-}" in -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;; esac
use_python

DATA_DIR="${DATA_DIR:-$ROOT/data/tiny_moe}"
OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/outputs/gspo_qwen3_moe_tiny_cpu}"
EP="${EP:-2}" PP="${PP:-1}"
NNODES="${NNODES:-1}" NPUS_PER_NODE="${NPUS_PER_NODE:-1}"
[ $((NNODES * NPUS_PER_NODE % (EP * PP))) = 0 ] ||
    die "EP=$EP x PP=$PP needs a multiple of $((EP * PP)) workers, there are $((NNODES * NPUS_PER_NODE)): set NPUS_PER_NODE"
importable transformer_engine ||
    die "TransformerEngine and its stub are both missing: use internal/cpu_megatron_env.sh as the environment script"
python -m ascend_rl.tiny --out "$DATA_DIR" --moe --warm-start 0.85

ARGS=(
    --config-name=ppo_megatron_trainer
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

    # The loss, as in train_gspo_qwen3_tiny_cpu.sh.
    actor_rollout_ref.actor.policy_loss.loss_mode="${LOSS_MODE:-gspo}"
    actor_rollout_ref.actor.loss_agg_mode="${LOSS_AGG_MODE:-seq-mean-token-mean}"
    actor_rollout_ref.actor.clip_ratio_low="${CLIP_RATIO_LOW:-0.003}"
    actor_rollout_ref.actor.clip_ratio_high="${CLIP_RATIO_HIGH:-0.004}"
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
    actor_rollout_ref.actor.whole_batch_loss=True
    actor_rollout_ref.actor.optim.lr=4e-4
    actor_rollout_ref.actor.optim.lr_decay_style=cosine
    actor_rollout_ref.actor.optim.min_lr=4e-5
    # Else a resumed run restarts the learning rate schedule.
    actor_rollout_ref.actor.optim.use_checkpoint_opt_param_scheduler=True

    # The trainer: Megatron in fp32 over gloo; experts are distributed over the workers, the rest is replicated.
    actor_rollout_ref.model.path="$DATA_DIR/model"
    actor_rollout_ref.actor.strategy=megatron
    actor_rollout_ref.actor.megatron.dtype=float32
    actor_rollout_ref.actor.megatron.expert_model_parallel_size="$EP"
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="$PP"
)
qwen3_tiny_layout  # rollout, length and outputs of the run

train verl.trainer.main_ppo "${ARGS[@]}" "$@"

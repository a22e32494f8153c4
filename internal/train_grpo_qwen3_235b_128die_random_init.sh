#!/usr/bin/env bash
# GRPO on Qwen3-235B-A22B with random weights, to measure without the 440 GB download: TP4 PP4 CP8 EP32, vLLM TP4 DP32 EP128.
#
# Usage:    bash ray_start_npu.sh internal/train_grpo_qwen3_235b_128die_random_init.sh internal/qwen3_235b_env.sh \
#               [HYDRA_OVERRIDES...]
# Example:  bash download_weights.sh Qwen/Qwen3-235B-A22B --out models/Qwen3-235B-A22B --random-init
#           bash ray_start_npu.sh internal/train_grpo_qwen3_235b_128die_random_init.sh internal/qwen3_235b_env.sh
#           SMOKE=1 bash ray_start_npu.sh internal/train_grpo_qwen3_235b_128die_random_init.sh internal/qwen3_235b_env.sh
# Writes:   OUTPUT_DIR (outputs/grpo_qwen3_235b_128die_random_init): train.log, metrics.jsonl, the report
# Hardware: 8 Atlas A3 nodes of 16 dies, storage shared by all of them
# Duration: not published; every response runs to its limit or stops at random
#
# Variables: NNODES (8), NPUS_PER_NODE (16), MODEL_PATH (configuration and tokenizer), TRAIN_FILE (DeepScaleR), TEST_FILE
#            (AIME), OUTPUT_DIR, SAVE_FREQ (-1); SMOKE=1 runs it scaled down on a laptop (docs/rehearsal.md)
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
. "$(dirname "${BASH_SOURCE[0]}")/qwen3_235b_layout.sh"
case "${1:-}" in -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;; esac
use_python
dies 8 16
inputs Qwen/Qwen3-235B-A22B deepscaler aime

MAX_PROMPT=2048 MAX_RESPONSE=32768
TRAIN_BATCH=512 MINI_BATCH=512      # one update per step: on-policy
CP=8 TRUE_WEIGHTS=0
MAX_NUM_SEQS=256 GRAPH_SIZES="[32,64,128,256]" GPU_MEMORY=0.85

ARGS=(
    --config-name=ppo_megatron_trainer
    data.train_files="$TRAIN_FILE"
    data.val_files="$TEST_FILE"
    data.max_prompt_length="$MAX_PROMPT"
    data.max_response_length="$MAX_RESPONSE"
    data.filter_overlong_prompts=True
    data.truncation=error
    data.shuffle=False
    data.train_batch_size="$TRAIN_BATCH"

    # GRPO: 16 responses per prompt, advantages relative to their mean, and a KL term in the loss.
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.recompute_old_log_prob=False    # one update a step: the old log-probs are the new ones
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.temperature=0.9
    actor_rollout_ref.rollout.top_k=50
    actor_rollout_ref.rollout.top_p=0.9

    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.clip_grad=10000
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH"

    # Micro-batches of one sequence: with random weights nearly all have the same length.
    actor_rollout_ref.actor.use_dynamic_bsz=False
    actor_rollout_ref.actor.whole_batch_loss=True
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4

    trainer.balance_batch=False
    trainer.total_epochs=1
    trainer.val_before_train=False
    trainer.test_freq=-1
    trainer.save_freq="${SAVE_FREQ:--1}"
)
qwen3_235b_layout
math_reward
trainer
smoke moe megatron

train verl.trainer.main_ppo "${ARGS[@]}" "$@"

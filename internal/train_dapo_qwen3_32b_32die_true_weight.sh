#!/usr/bin/env bash
# DAPO on Qwen3-32B: 2K prompts, 34K responses, DAPO-Math-17k; Megatron TP8 PP2 CP2, vLLM TP8.
#
# Usage:    bash ray_start_npu.sh internal/train_dapo_qwen3_32b_32die_true_weight.sh internal/qwen3_32b_env.sh \
#               [HYDRA_OVERRIDES...]
# Example:  bash ray_start_npu.sh internal/train_dapo_qwen3_32b_32die_true_weight.sh internal/qwen3_32b_env.sh
#           SMOKE=1 bash ray_start_npu.sh internal/train_dapo_qwen3_32b_32die_true_weight.sh internal/qwen3_32b_env.sh
# Writes:   OUTPUT_DIR (outputs/dapo_qwen3_32b_32die_true_weight): train.log, metrics.jsonl, the report, checkpoints/
# Hardware: 2 Atlas A3 nodes of 16 dies (or 4 Atlas A2 nodes of 8), storage shared by all of them
# Duration: published: 4562 s for the rollout of the first step, at batch 128
#
# Variables: NNODES (2), NPUS_PER_NODE (16), MODEL_PATH, TRAIN_FILE (DAPO-Math-17k), TEST_FILE (AIME), OUTPUT_DIR, OVERLONG
#            (False: the penalty on responses near the limit); SMOKE=1 runs it scaled down on a laptop (docs/rehearsal.md)
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
. "$(dirname "${BASH_SOURCE[0]}")/qwen3_32b_layout.sh"
case "${1:-}" in -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;; esac
use_python
dies 2 16
inputs Qwen/Qwen3-32B dapo_math aime

MAX_PROMPT=2048 MAX_RESPONSE=34816 OVERLONG_LEN=16384 OVERLONG_FACTOR=0.1
TRAIN_BATCH=32 MINI_BATCH=32      # one update per step: on-policy
CP=2
MAX_NUM_SEQS=128 GRAPH_SIZES="[16,32,64,128]" GPU_MEMORY=0.87

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

    # DAPO: GRPO's advantages over 16 responses per prompt; loss and dynamic sampling are in recipe.sh.
    algorithm.adv_estimator=grpo
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.temperature=0.9
    actor_rollout_ref.rollout.top_k=-1
    actor_rollout_ref.rollout.top_p=1

    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.clip_grad=10000
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH"

    # Micro-batches by tokens: the budget of a die is the longest sequence, which CP splits into CP pieces.
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.whole_batch_loss=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((MAX_PROMPT + MAX_RESPONSE) / CP))
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4

    trainer.balance_batch=False
    trainer.total_epochs=1
    trainer.val_before_train=False
    trainer.test_freq=-1
    trainer.save_freq="${SAVE_FREQ:-10}"
    trainer.max_actor_ckpt_to_keep=2
)
dapo_loss
dynamic_sampling
qwen3_32b_layout
math_reward
overlong_penalty
trainer
smoke dense megatron

train verl.trainer.main_ppo "${ARGS[@]}" "$@"

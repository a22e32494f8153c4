#!/usr/bin/env bash
# GRPO on Qwen3-235B-A22B: 2K prompts, 32K responses, DeepScaleR; Megatron TP4 PP4 CP4 EP32, vLLM TP4 DP32 EP128.
#
# Usage:    bash ray_start_npu.sh internal/train_grpo_qwen3_235b_128die_true_weight.sh internal/qwen3_235b_env.sh \
#               [HYDRA_OVERRIDES...]
# Example:  DIST_CKPT_PATH=/shared/Qwen3-235B-A22B-mcore bash ray_start_npu.sh \
#               internal/train_grpo_qwen3_235b_128die_true_weight.sh internal/qwen3_235b_env.sh
#           SMOKE=1 bash ray_start_npu.sh internal/train_grpo_qwen3_235b_128die_true_weight.sh internal/qwen3_235b_env.sh
# Writes:   OUTPUT_DIR (outputs/grpo_qwen3_235b_128die_true_weight): train.log, metrics.jsonl, the report, checkpoints/
# Hardware: 8 Atlas A3 nodes of 16 dies, storage shared by all of them
# Duration: published: 7833 s per step, of which the rollout takes 6638 s
#
# Variables: NNODES (8), NPUS_PER_NODE (16), MODEL_PATH, DIST_CKPT_PATH (MODEL_PATH-mcore), TRAIN_FILE (DeepScaleR),
#            TEST_FILE (AIME), OUTPUT_DIR, SAVE_FREQ (5); SMOKE=1 runs it scaled down on a laptop (docs/rehearsal.md)
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

MAX_PROMPT=2048 MAX_RESPONSE=32768 DATA=deepscaler CP=4
TRAIN_BATCH=512 MINI_BATCH=512      # one update per step: on-policy
ARGS=(
    actor_rollout_ref.actor.compute_old_log_prob=False    # one update per step: the old log-probs are the new ones
    actor_rollout_ref.rollout.gpu_memory_utilization=0.87
)
recipe qwen3_235b grpo "$@"

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
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

MAX_PROMPT=2048 MAX_RESPONSE=32768 DATA=deepscaler CP=8
TRAIN_BATCH=512 MINI_BATCH=512      # one update per step: on-policy
ARGS=(
    actor_rollout_ref.actor.compute_old_log_prob=False    # one update per step: the old log-probs are the new ones
    # Micro-batches of one sequence: with random weights nearly all have the same length.
    actor_rollout_ref.actor.use_dynamic_bsz=False
    trainer.save_freq=-1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.85
)
recipe qwen3_235b_random_init grpo "$@"

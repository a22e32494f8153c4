#!/usr/bin/env bash
# DAPO on Qwen3-235B-A22B: 2K prompts, 34K responses, DAPO-Math-17k; Megatron TP4 PP4 CP4 EP32, vLLM TP4 DP32 EP128.
#
# Usage:    bash ray_start_npu.sh internal/train_dapo_qwen3_235b_128die_true_weight.sh internal/qwen3_235b_env.sh \
#               [HYDRA_OVERRIDES...]
# Example:  DIST_CKPT_PATH=/shared/Qwen3-235B-A22B-mcore bash ray_start_npu.sh \
#               internal/train_dapo_qwen3_235b_128die_true_weight.sh internal/qwen3_235b_env.sh
#           SMOKE=1 bash ray_start_npu.sh internal/train_dapo_qwen3_235b_128die_true_weight.sh internal/qwen3_235b_env.sh
# Writes:   OUTPUT_DIR (outputs/dapo_qwen3_235b_128die_true_weight): train.log, metrics.jsonl, the report, checkpoints/
# Hardware: 8 Atlas A3 nodes of 16 dies, storage shared by all of them
# Duration: published: 6620 s for the first step, with two generation batches
#
# Variables: NNODES (8), NPUS_PER_NODE (16), MODEL_PATH, DIST_CKPT_PATH (MODEL_PATH-mcore), TRAIN_FILE (DAPO-Math-17k),
#            TEST_FILE (AIME), OUTPUT_DIR, OVERLONG (False: the penalty on responses near the limit); SMOKE=1 runs
#            it scaled down on a laptop (docs/rehearsal.md)
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

MAX_PROMPT=2048 MAX_RESPONSE=34816 DATA=dapo_math CP=4 OVERLONG_LEN=8192 OVERLONG_FACTOR=0.1
TRAIN_BATCH=128 MINI_BATCH=128      # one update per step: on-policy
ARGS=(
    actor_rollout_ref.rollout.gpu_memory_utilization=0.85
    actor_rollout_ref.rollout.max_num_seqs=64
    "actor_rollout_ref.rollout.cudagraph_capture_sizes=[8,16,32,64]"
)
recipe qwen3_235b dapo "$@"

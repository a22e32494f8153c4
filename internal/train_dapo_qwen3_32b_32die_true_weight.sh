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
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

MAX_PROMPT=2048 MAX_RESPONSE=34816 DATA=dapo_math CP=2 OVERLONG_LEN=16384 OVERLONG_FACTOR=0.1
TRAIN_BATCH=32 MINI_BATCH=32        # one update per step: on-policy
recipe qwen3_32b dapo "$@"

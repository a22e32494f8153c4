#!/usr/bin/env bash
# GRPO on Qwen3-32B: 2K prompts, 34K responses, DeepScaleR; Megatron TP8 PP2 CP2, vLLM TP8.
#
# Usage:    bash ray_start_npu.sh internal/train_grpo_qwen3_32b_32die_true_weight.sh internal/qwen3_32b_env.sh \
#               [HYDRA_OVERRIDES...]
# Example:  bash ray_start_npu.sh internal/train_grpo_qwen3_32b_32die_true_weight.sh internal/qwen3_32b_env.sh
#           SMOKE=1 bash ray_start_npu.sh internal/train_grpo_qwen3_32b_32die_true_weight.sh internal/qwen3_32b_env.sh
# Writes:   OUTPUT_DIR (outputs/grpo_qwen3_32b_32die_true_weight): train.log, metrics.jsonl, the report, checkpoints/
# Hardware: 2 Atlas A3 nodes of 16 dies (or 4 Atlas A2 nodes of 8), storage shared by all of them
# Duration: published: 2444 s for the rollout of the first step, at batch 128
#
# Variables: NNODES (2), NPUS_PER_NODE (16), MODEL_PATH, TRAIN_FILE (DeepScaleR), TEST_FILE (AIME),
#            OUTPUT_DIR, SAVE_FREQ (10); SMOKE=1 runs it scaled down on a laptop (docs/rehearsal.md)
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

MAX_PROMPT=2048 MAX_RESPONSE=34816 DATA=deepscaler CP=2
TRAIN_BATCH=32 MINI_BATCH=32        # one update per step: on-policy
recipe qwen3_32b grpo "$@"

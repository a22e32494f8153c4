#!/usr/bin/env bash
# GSPO on Qwen3-32B with FSDP2: 16K prompts, 16K responses, DAPO-Math-17k; Ulysses SP4, vLLM TP4.
#
# Usage:    bash ray_start_npu.sh internal/train_gspo_qwen3_32b_64die_true_weight.sh internal/qwen3_32b_env.sh \
#               [HYDRA_OVERRIDES...]
# Example:  bash ray_start_npu.sh internal/train_gspo_qwen3_32b_64die_true_weight.sh internal/qwen3_32b_env.sh
#           SMOKE=1 bash ray_start_npu.sh internal/train_gspo_qwen3_32b_64die_true_weight.sh internal/qwen3_32b_env.sh
# Writes:   OUTPUT_DIR (outputs/gspo_qwen3_32b_64die_true_weight): train.log, metrics.jsonl, the report, checkpoints/
# Hardware: 4 Atlas A3 nodes of 16 dies (or 8 Atlas A2 nodes of 8), storage shared by all of them
# Duration: not published
#
# Variables: NNODES (4), NPUS_PER_NODE (16), MODEL_PATH, TRAIN_FILE (DAPO-Math-17k), TEST_FILE (AIME),
#            OUTPUT_DIR, SAVE_FREQ (10); SMOKE=1 runs it scaled down on a laptop (docs/rehearsal.md)
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

recipe qwen3_32b_fsdp2 gspo "$@"

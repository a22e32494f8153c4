#!/usr/bin/env bash
# GSPO on Qwen3-30B-A3B with Megatron on 2 nodes of 8: 2K prompts, 8K responses, DAPO-Math-17k; TP4 PP4, vLLM TP4 and EP.
#
# Usage:    bash ray_start_npu.sh internal/train_gspo_qwen3_30b_a3b_16die_true_weight.sh internal/qwen3_30b_a3b_env.sh \
#               [HYDRA_OVERRIDES...]
# Example:  NPU_SERIES=a2 bash ray_start_npu.sh internal/train_gspo_qwen3_30b_a3b_16die_true_weight.sh \
#               internal/qwen3_30b_a3b_env.sh
#           SMOKE=1 bash ray_start_npu.sh internal/train_gspo_qwen3_30b_a3b_16die_true_weight.sh internal/qwen3_30b_a3b_env.sh
# Writes:   OUTPUT_DIR (outputs/gspo_qwen3_30b_a3b_16die_true_weight): train.log, metrics.jsonl, the report, checkpoints/
# Hardware: 2 Atlas 800T A2 nodes of 8 NPUs with 64 GB, storage shared by both
# Duration: not published
#
# Experts are spread over the dies of a stage (EP = dies / PP) and of the rollout (DP = dies / TP): EP4 and DP4 here, and
# with NNODES=4 the published EP8 and DP8, for which 16 dies are too few.
#
# Variables: NNODES (2), NPUS_PER_NODE (8), MODEL_PATH, TRAIN_FILE (DAPO-Math-17k), TEST_FILE (AIME), OUTPUT_DIR, OVERLONG
#            (True: penalise responses near the limit); SMOKE=1 runs it scaled down on a laptop (docs/rehearsal.md)
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

# The published aggregation mode, token-mean, had no effect in verl's GSPO; here it would.
recipe qwen3_30b_a3b gspo "$@"

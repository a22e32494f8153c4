#!/usr/bin/env bash
# GSPO on Qwen3-30B-A3B, asynchronous: 16 dies train as the recipe for 16 dies does, 16 more roll out. STACK=cann9.1 only.
#
# Usage:    STACK=cann9.1 bash ray_start_npu.sh internal/train_gspo_qwen3_30b_a3b_32die_true_weight_async.sh \
#               internal/qwen3_30b_a3b_env.sh [HYDRA_OVERRIDES...]
# Example:  STACK=cann9.1 NPU_SERIES=a2 bash ray_start_npu.sh \
#               internal/train_gspo_qwen3_30b_a3b_32die_true_weight_async.sh internal/qwen3_30b_a3b_env.sh
#           STACK=cann9.1 SMOKE=1 bash ray_start_npu.sh internal/train_gspo_qwen3_30b_a3b_32die_true_weight_async.sh \
#               internal/qwen3_30b_a3b_env.sh
# Writes:   OUTPUT_DIR (outputs/gspo_qwen3_30b_a3b_32die_true_weight_async): train.log, metrics.jsonl, the report, checkpoints/
# Hardware: 4 Atlas 800T A2 nodes of 8 NPUs with 64 GB, storage shared by all of them
# Duration: not published
#
# Variables: those of train_gspo_qwen3_30b_a3b_16die_true_weight.sh, and ROLLOUT_NNODES (half of NNODES),
#            NUM_WARMUP_BATCHES (1), MAX_OFF_POLICY_THRESHOLD (2), MAX_OFF_POLICY_STRATEGY (wait),
#            PARAMETER_SYNC_STEP (8), PARTIAL_ROLLOUT (True)
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

recipe qwen3_30b_a3b_async gspo "$@"

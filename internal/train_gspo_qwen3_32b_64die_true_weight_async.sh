#!/usr/bin/env bash
# GSPO on Qwen3-32B with FSDP2, asynchronous: 32 dies train, 32 others roll out (docs/async.md). STACK=cann9.1 only.
#
# Usage:    STACK=cann9.1 bash ray_start_npu.sh internal/train_gspo_qwen3_32b_64die_true_weight_async.sh \
#               internal/qwen3_32b_env.sh [HYDRA_OVERRIDES...]
# Example:  STACK=cann9.1 bash ray_start_npu.sh internal/train_gspo_qwen3_32b_64die_true_weight_async.sh \
#               internal/qwen3_32b_env.sh
#           STACK=cann9.1 SMOKE=1 bash ray_start_npu.sh internal/train_gspo_qwen3_32b_64die_true_weight_async.sh \
#               internal/qwen3_32b_env.sh
# Writes:   OUTPUT_DIR (outputs/gspo_qwen3_32b_64die_true_weight_async): train.log, metrics.jsonl, the report, checkpoints/
# Hardware: 4 Atlas A3 nodes of 16 dies (or 8 Atlas A2 nodes of 8), storage shared by all of them
# Duration: not published
#
# Variables: those of train_gspo_qwen3_32b_64die_true_weight.sh, and ROLLOUT_NNODES (half of NNODES),
#            NUM_WARMUP_BATCHES (1), MAX_OFF_POLICY_THRESHOLD (2), MAX_OFF_POLICY_STRATEGY (wait),
#            PARAMETER_SYNC_STEP (4), PARTIAL_ROLLOUT (True)
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

recipe qwen3_32b_fsdp2_async gspo "$@"

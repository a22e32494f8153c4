#!/usr/bin/env bash
# The GRPO counterpart of train_gspo_qwen3_30b_a3b_16die_true_weight.sh: the same run with token-level ratios and PPO clipping.
#
# Usage:    bash ray_start_npu.sh internal/train_grpo_qwen3_30b_a3b_16die_true_weight.sh internal/qwen3_30b_a3b_env.sh \
#               [HYDRA_OVERRIDES...]
# Example:  NPU_SERIES=a2 bash ray_start_npu.sh internal/train_grpo_qwen3_30b_a3b_16die_true_weight.sh \
#               internal/qwen3_30b_a3b_env.sh
#           SMOKE=1 bash ray_start_npu.sh internal/train_grpo_qwen3_30b_a3b_16die_true_weight.sh internal/qwen3_30b_a3b_env.sh
# Writes:   OUTPUT_DIR (outputs/grpo_qwen3_30b_a3b_16die_true_weight): train.log, metrics.jsonl, the report, checkpoints/
# Hardware: 2 Atlas 800T A2 nodes of 8 NPUs with 64 GB, storage shared by both
# Duration: not published
#
# Variables: those of train_gspo_qwen3_30b_a3b_16die_true_weight.sh.
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

recipe qwen3_30b_a3b ppo "$@"

#!/usr/bin/env bash
# The GRPO counterpart of train_gspo_qwen3_tiny_cpu.sh: the same run with token-level ratios and PPO clipping.
#
# Usage:    bash ray_start_npu.sh internal/train_grpo_qwen3_tiny_cpu.sh internal/cpu_env.sh [HYDRA_OVERRIDES...]
# Example:  bash ray_start_npu.sh internal/train_grpo_qwen3_tiny_cpu.sh internal/cpu_env.sh
# Writes:   OUTPUT_DIR (outputs/grpo_qwen3_tiny_cpu): train.log, metrics.jsonl, the report
# Hardware: 2 cores, 8 GiB
# Duration: about 3 minutes, half of which is startup
#
# Variables: as in train_gspo_qwen3_tiny_cpu.sh, with the defaults below.
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
case "${1:-}" in -h | --help) . "$HERE/common.sh"; usage "${BASH_SOURCE[0]}"; exit 0 ;; esac
export LOSS_MODE="${LOSS_MODE:-vanilla}" LOSS_AGG_MODE="${LOSS_AGG_MODE:-token-mean}"
export CLIP_RATIO_LOW="${CLIP_RATIO_LOW:-0.2}" CLIP_RATIO_HIGH="${CLIP_RATIO_HIGH:-0.2}"
export OUTPUT_DIR="${OUTPUT_DIR:-$HERE/../outputs/grpo_qwen3_tiny_cpu}"
exec bash "$HERE/train_gspo_qwen3_tiny_cpu.sh" "$@"

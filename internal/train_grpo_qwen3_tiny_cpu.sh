#!/usr/bin/env bash
# The GRPO counterpart of train_gspo_qwen3_tiny_cpu.sh: the same run with token-level ratios and PPO clipping.
#
# Usage:    bash ray_start_npu.sh internal/train_grpo_qwen3_tiny_cpu.sh internal/cpu_env.sh [HYDRA_OVERRIDES...]
# Example:  bash ray_start_npu.sh internal/train_grpo_qwen3_tiny_cpu.sh internal/cpu_env.sh
# Writes:   OUTPUT_DIR (outputs/grpo_qwen3_tiny_cpu): train.log, metrics.jsonl, the report
# Hardware: 2 cores, 8 GiB
# Duration: about 3 minutes, half of which is startup
#
# Variables: those of train_gspo_qwen3_tiny_cpu.sh.
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

recipe qwen3_tiny ppo "$@"

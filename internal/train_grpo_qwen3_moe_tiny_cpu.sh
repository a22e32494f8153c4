#!/usr/bin/env bash
# The GRPO counterpart of train_gspo_qwen3_moe_tiny_cpu.sh: the same run with token-level ratios and PPO clipping.
#
# Usage:    NPUS_PER_NODE=2 bash ray_start_npu.sh internal/train_grpo_qwen3_moe_tiny_cpu.sh \
#               internal/cpu_megatron_env.sh [HYDRA_OVERRIDES...]
# Example:  NPUS_PER_NODE=2 bash ray_start_npu.sh internal/train_grpo_qwen3_moe_tiny_cpu.sh internal/cpu_megatron_env.sh
#           python -m ascend_rl.report outputs/gspo_qwen3_moe_tiny_cpu outputs/grpo_qwen3_moe_tiny_cpu
# Writes:   OUTPUT_DIR (outputs/grpo_qwen3_moe_tiny_cpu): train.log, metrics.jsonl, the report
# Hardware: 2 cores, 12 GiB
# Duration: about 3 minutes, two thirds of which is startup
#
# Variables: those of train_gspo_qwen3_moe_tiny_cpu.sh.
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

recipe qwen3_moe_tiny ppo "$@"

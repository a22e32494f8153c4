#!/usr/bin/env bash
# GSPO on a 2-layer Qwen3-MoE that learns to add 2-digit numbers: verl + Megatron (EP2, gloo) + vLLM, on a CPU.
#
# Usage:    NPUS_PER_NODE=2 bash ray_start_npu.sh internal/train_gspo_qwen3_moe_tiny_cpu.sh \
#               internal/cpu_megatron_env.sh [HYDRA_OVERRIDES...]
# Example:  NPUS_PER_NODE=2 bash ray_start_npu.sh internal/train_gspo_qwen3_moe_tiny_cpu.sh internal/cpu_megatron_env.sh
# Writes:   OUTPUT_DIR (outputs/gspo_qwen3_moe_tiny_cpu): train.log, metrics.jsonl, the report
# Hardware: 2 cores, 12 GiB
# Duration: about 3 minutes, two thirds of which is startup
#
# Variables: STEPS (80), NNODES (1), NPUS_PER_NODE (2 here, each with a worker and a vLLM server), EP (2), PP (1),
#            DATA_DIR (data/tiny_moe), OUTPUT_DIR (outputs/gspo_qwen3_moe_tiny_cpu)
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

recipe qwen3_moe_tiny gspo "$@"

#!/usr/bin/env bash
# GSPO on a 2-layer Qwen3 that learns to add 2-digit numbers: verl + FSDP (gloo) + vLLM, on a CPU.
#
# Usage:    bash ray_start_npu.sh internal/train_gspo_qwen3_tiny_cpu.sh internal/cpu_env.sh [HYDRA_OVERRIDES...]
# Example:  bash ray_start_npu.sh internal/train_gspo_qwen3_tiny_cpu.sh internal/cpu_env.sh trainer.total_training_steps=20
# Writes:   OUTPUT_DIR (outputs/gspo_qwen3_tiny_cpu): train.log, metrics.jsonl, the report
# Hardware: 2 cores, 8 GiB
# Duration: about 3 minutes, half of which is startup
#
# Variables: STEPS (80), NNODES (1), NPUS_PER_NODE (1, each with a worker and a vLLM server), DATA_DIR (data/tiny),
#            OUTPUT_DIR (outputs/gspo_qwen3_tiny_cpu)
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

recipe qwen3_tiny gspo "$@"

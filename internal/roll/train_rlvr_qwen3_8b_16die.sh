#!/usr/bin/env bash
# RLVR of Qwen3-8B on mathematics with ROLL: DeepSpeed ZeRO-3 on 8 NPUs, vLLM on 4, reference on 4.
#
# Usage:    bash ray_start_npu.sh internal/roll/train_rlvr_qwen3_8b_16die.sh internal/roll/roll_env.sh [HYDRA_OVERRIDES...]
# Example:  bash ray_start_npu.sh internal/roll/train_rlvr_qwen3_8b_16die.sh internal/roll/roll_env.sh max_steps=2
#           the same with resources=1x16 (vLLM on 8), or resources=1x8 deepspeed=zero3_cpuoffload
# Hardware: one A3 node of 16 dies
# Duration: not measured
#
# Without ray_start_npu.sh, on every node: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as in docs/roll.md.
# Variables: MODEL_PATH (weights), ROLL_DATA (directory of the data), OUTPUT_DIR. The settings are in
# internal/roll/conf/rlvr_qwen3_8b.yaml; resources=NAME selects another file of conf/resources.
. "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"

roll rlvr_qwen3_8b "$@"

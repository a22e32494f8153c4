#!/usr/bin/env bash
# RLVR of Qwen2.5-7B on mathematics and code with ROLL: training on one node, vLLM on the other.
#
# Usage:    bash ray_start_npu.sh internal/roll/train_rlvr_qwen2_5_7b_2x8die.sh internal/roll/roll_env.sh [HYDRA_OVERRIDES...]
# Example:  bash ray_start_npu.sh internal/roll/train_rlvr_qwen2_5_7b_2x8die.sh internal/roll/roll_env.sh max_steps=2
#           the same with resources=2x8_spread
# Hardware: two nodes of 8 NPUs
# Duration: not measured
#
# Without ray_start_npu.sh, on every node: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as in docs/roll.md.
# Variables: MODEL_PATH (weights), ROLL_DATA (directory of the data), OUTPUT_DIR. The settings are in
# internal/roll/conf/rlvr_qwen2_5_7b_2nodes.yaml; resources=NAME selects another file of conf/resources.
. "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"

roll rlvr_qwen2_5_7b_2nodes "$@"

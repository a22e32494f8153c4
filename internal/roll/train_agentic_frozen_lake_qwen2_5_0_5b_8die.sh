#!/usr/bin/env bash
# Agentic GRPO of Qwen2.5-0.5B on FrozenLake with ROLL: DeepSpeed ZeRO-3 on 4 NPUs, vLLM on 4.
#
# Usage:    bash ray_start_npu.sh internal/roll/train_agentic_frozen_lake_qwen2_5_0_5b_8die.sh internal/roll/roll_env.sh [HYDRA_OVERRIDES...]
# Example:  bash ray_start_npu.sh internal/roll/train_agentic_frozen_lake_qwen2_5_0_5b_8die.sh internal/roll/roll_env.sh max_steps=2
#           the same with resources=1x16 on an A3 node
# Hardware: one node of 8 NPUs
# Duration: not measured
#
# Without ray_start_npu.sh, on every node: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as in docs/roll.md.
# Variables: MODEL_PATH (weights), ROLL_DATA (directory of the data), OUTPUT_DIR. The settings are in
# internal/roll/conf/agentic_frozen_lake_qwen2_5_0_5b.yaml; resources=NAME selects another file of conf/resources.
. "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"

roll agentic_frozen_lake_qwen2_5_0_5b "$@"

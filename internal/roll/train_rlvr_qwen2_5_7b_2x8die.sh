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
. "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
case "${1:-}" in -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;; esac
. "$ROOT/internal/roll/roll_env.sh"
[ ! -x "$ROOT/.venv/bin/python" ] || export PATH="$ROOT/.venv/bin:$PATH"
export OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/outputs/rlvr_qwen2_5_7b_2nodes}" ROLL_DATA="${ROLL_DATA:-$ROOT/frameworks/roll/data}"
export ROLL_LOG_DIR="${ROLL_LOG_DIR:-$OUTPUT_DIR/logs}" # not in the current directory
train ascend_rl.launch.start_roll rlvr_qwen2_5_7b_2nodes "$@"

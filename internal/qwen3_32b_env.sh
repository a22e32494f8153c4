# shellcheck shell=bash
# Environment of the recipes of Qwen3-32B, Atlas A3 (or NPU_SERIES=a2). Set a variable before to override it.
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-1}"  # the rollout decodes with graphs
. "$(dirname "${BASH_SOURCE[0]}")/npu_env.sh"

# A dense model under TP: reduce-scatter and all-gather around the norms instead of all-reduce, and the MLP's weights fetched
# while attention computes. (VLLM_ASCEND_ENABLE_FLASHCOMM and _DENSE_OPTIMIZE of older versions are this first one.)
export VLLM_ASCEND_ENABLE_FLASHCOMM1="${VLLM_ASCEND_ENABLE_FLASHCOMM1:-1}"
export VLLM_ASCEND_ENABLE_PREFETCH_MLP="${VLLM_ASCEND_ENABLE_PREFETCH_MLP:-1}"

# 1: unfinished requests move between the vLLM servers of a rollout (docs/rollout_rebalance.md). Not yet run on NPUs.
export ROLLOUT_REBALANCE_ENABLE="${ROLLOUT_REBALANCE_ENABLE:-0}"

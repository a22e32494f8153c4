# shellcheck shell=bash
# Environment of the Qwen3-32B recipes, Atlas A3 (or NPU_SERIES=a2). Set a variable beforehand to override it.
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-1}"  # the rollout decodes with graphs
. "$(dirname "${BASH_SOURCE[0]}")/npu_env.sh"

# A dense model with TP: reduce-scatter and all-gather around the norms instead of all-reduce, and the MLP's weights
# prefetched while attention computes. (VLLM_ASCEND_ENABLE_FLASHCOMM and _DENSE_OPTIMIZE of older versions are the former.)
export VLLM_ASCEND_ENABLE_FLASHCOMM1="${VLLM_ASCEND_ENABLE_FLASHCOMM1:-1}"
export VLLM_ASCEND_ENABLE_PREFETCH_MLP="${VLLM_ASCEND_ENABLE_PREFETCH_MLP:-1}"

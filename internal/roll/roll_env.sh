# shellcheck shell=bash
# Environment of ROLL on Ascend, sourced before Ray starts. Each variable has its reason; set one beforehand to override it.
# What differs between training and rollout (TASK_QUEUE_ENABLE, PYTORCH_NPU_ALLOC_CONF) is in internal/roll/conf/ascend.yaml.

# Collectives: an hour for ranks that wait for others to load or generate; no deterministic order.
# HCCL_OP_EXPANSION_MODE stays unset: AIV is for one communication domain at a time.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-3600}" HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-3600}"
export HCCL_DETERMINISTIC="${HCCL_DETERMINISTIC:-false}"
export HCCL_IF_BASE_PORT="${HCCL_IF_BASE_PORT:-23456}"
# Combine small operators; one OpenMP thread each, as there are many workers.
export COMBINED_ENABLE="${COMBINED_ENABLE:-1}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# vLLM: prefetch the MLP's weights.
export VLLM_ASCEND_ENABLE_PREFETCH_MLP="${VLLM_ASCEND_ENABLE_PREFETCH_MLP:-1}"
# Keep compiled operators between runs: without them the first request after a start takes minutes.
export ACL_OP_COMPILER_CACHE_MODE="${ACL_OP_COMPILER_CACHE_MODE:-enable}"
export ACL_OP_COMPILER_CACHE_DIR="${ACL_OP_COMPILER_CACHE_DIR:-/tmp/npu_cache}"
export ASCEND_MAX_OP_CACHE_SIZE="${ASCEND_MAX_OP_CACHE_SIZE:-5000}"
# Errors only.
export ASDOPS_LOG_LEVEL="${ASDOPS_LOG_LEVEL:-ERROR}" ATB_LOG_LEVEL="${ATB_LOG_LEVEL:-ERROR}"
# Models come from ModelScope unless MODEL_PATH is a directory.
export USE_MODELSCOPE="${USE_MODELSCOPE:-1}"
. "$(dirname "${BASH_SOURCE[0]}")/../hccl_env.sh"

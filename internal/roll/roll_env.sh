# shellcheck shell=bash
# Environment of ROLL on Ascend, sourced before Ray starts. Each variable has its reason; set one beforehand to override it.
# What differs between training and rollout (TASK_QUEUE_ENABLE, PYTORCH_NPU_ALLOC_CONF) is in internal/roll/conf/ascend.yaml.

# Collectives: an hour for ranks that wait for others to load or generate; no deterministic order; free ports, so that runs
# and processes on one node do not collide. HCCL_OP_EXPANSION_MODE stays unset: AIV is for one communication domain at a time.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-3600}" HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-3600}"
# vLLM ends an engine whose step takes longer than this, by default 300 s: after HCCL, which names a rank, has given up.
export VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="${VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS:-$((
    HCCL_EXEC_TIMEOUT ? HCCL_EXEC_TIMEOUT + 300 : 2147483647))}"
export HCCL_DETERMINISTIC="${HCCL_DETERMINISTIC:-false}"
export HCCL_IF_BASE_PORT="${HCCL_IF_BASE_PORT:-23456}"
export HCCL_HOST_SOCKET_PORT_RANGE="${HCCL_HOST_SOCKET_PORT_RANGE:-auto}"
export HCCL_NPU_SOCKET_PORT_RANGE="${HCCL_NPU_SOCKET_PORT_RANGE:-auto}"
# Let streams reuse each other's memory, and combine small operators.
export MULTI_STREAM_MEMORY_REUSE="${MULTI_STREAM_MEMORY_REUSE:-1}" COMBINED_ENABLE="${COMBINED_ENABLE:-1}"
# torch_npu binds nothing: Ray shows each worker one die, so that mode 2 would put all main threads on CPU 0
# (docs/host_bound.md). One OpenMP thread each, as there are many workers.
export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-0}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# vLLM: prefetch the MLP's weights; NZ format off, because weights in it cannot be updated.
export VLLM_ASCEND_ENABLE_PREFETCH_MLP="${VLLM_ASCEND_ENABLE_PREFETCH_MLP:-1}"
export VLLM_ASCEND_ENABLE_NZ="${VLLM_ASCEND_ENABLE_NZ:-0}"
# Keep compiled operators between runs: without them the first request after a start takes minutes.
export ACL_OP_COMPILER_CACHE_MODE="${ACL_OP_COMPILER_CACHE_MODE:-enable}"
export ACL_OP_COMPILER_CACHE_DIR="${ACL_OP_COMPILER_CACHE_DIR:-/tmp/npu_cache}"
export ASCEND_MAX_OP_CACHE_SIZE="${ASCEND_MAX_OP_CACHE_SIZE:-5000}"
# Errors only.
export ASCEND_GLOBAL_LOG_LEVEL="${ASCEND_GLOBAL_LOG_LEVEL:-3}" ASDOPS_LOG_LEVEL="${ASDOPS_LOG_LEVEL:-ERROR}"
export ATB_LOG_LEVEL="${ATB_LOG_LEVEL:-ERROR}"
# Models come from ModelScope unless MODEL_PATH is a directory.
export USE_MODELSCOPE="${USE_MODELSCOPE:-1}"

# shellcheck shell=bash
# Sourced by npu_env.sh and roll/roll_env.sh after their own values: what every Ascend run needs. Set a variable beforehand to
# override it.

# vLLM ends an engine whose step takes longer than this, by default 300 s. Five minutes more than HCCL's limit, so that HCCL
# names the rank first; HCCL_EXEC_TIMEOUT=0 sets no limit; its default is 1836 s.
export VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="${VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS:-$((
    ${HCCL_EXEC_TIMEOUT:-1836} ? ${HCCL_EXEC_TIMEOUT:-1836} + 300 : 2147483647))}"
# Free ports, so that runs and processes on one node do not collide.
export HCCL_HOST_SOCKET_PORT_RANGE="${HCCL_HOST_SOCKET_PORT_RANGE:-auto}"
export HCCL_NPU_SOCKET_PORT_RANGE="${HCCL_NPU_SOCKET_PORT_RANGE:-auto}"
# torch_npu binds nothing: without ranges it counts the dies that a process sees, and Ray shows a worker one, so that mode 1
# gives each worker all CPUs and mode 2 puts all main threads on CPU 0 (docs/host_bound.md). CORE_BINDING binds by the node.
export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-0}"
# Streams reuse each other's freed memory.
export MULTI_STREAM_MEMORY_REUSE="${MULTI_STREAM_MEMORY_REUSE:-1}"
# vllm-ascend: keep weights in the layout used in training; NZ (a packed layout) breaks weight updates.
export VLLM_ASCEND_ENABLE_NZ="${VLLM_ASCEND_ENABLE_NZ:-0}"
# Only errors from CANN.
export ASCEND_GLOBAL_LOG_LEVEL="${ASCEND_GLOBAL_LOG_LEVEL:-3}"

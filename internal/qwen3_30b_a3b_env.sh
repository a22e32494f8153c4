# shellcheck shell=bash
# Environment of the Qwen3-30B-A3B recipes. Set a variable beforehand to override it, NPU_SERIES=a2 for Atlas 800T A2.
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-1}"  # the rollout decodes with graphs
. "$(dirname "${BASH_SOURCE[0]}")/npu_env.sh"

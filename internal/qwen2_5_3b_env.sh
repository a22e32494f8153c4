# shellcheck shell=bash
# Environment of the Qwen2.5-3B recipes, for 8 dies of a node, without graphs. Set a variable beforehand to override it,
# NPU_SERIES=a2 for Atlas 800T A2.
export NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
. "$(dirname "${BASH_SOURCE[0]}")/npu_env.sh"

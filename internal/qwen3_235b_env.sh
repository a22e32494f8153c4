# shellcheck shell=bash
# Environment of the Qwen3-235B-A22B recipes, Atlas A3 (or NPU_SERIES=a2). Set a variable beforehand to override it.
#
# Published variables that nothing in the pinned versions reads, and what replaces them:
#   VLLM_DP_SIZE, VLLM_ENABLE_EXPERT_PARALLEL   rollout.data_parallel_size and expert_parallel_size, from the dies
#   VLLM_ENABLE_GRAPH_MODE                      compilation_config.cudagraph_mode
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-1}"  # the rollout decodes with graphs
. "$(dirname "${BASH_SOURCE[0]}")/npu_env.sh"

# Store experts as weight1 and weight2, which MindSpeed's overlap of exchange and computation needs: in training, in the
# checkpoint that is loaded, and in the weights sent to vLLM.
export USE_ALLTOALL_OVERLAP="${USE_ALLTOALL_OVERLAP:-1}"
# After an update each die receives only its own rollout experts, instead of gathering all experts everywhere.
export ALL_TO_ALL_RESHARD="${ALL_TO_ALL_RESHARD:-1}"

# Off. USE_HDP=1: ring attention only for sequences that need it, with micro-batches by tokens (docs/hdp.md).
# VLLM_ENABLE_EPLB=1: balance the rollout's experts; needs ALL_TO_ALL_RESHARD=0, and copies of experts where a die holds one
# (docs/eplb.md).
# VLLM_FUSED_MOE_CHUNK_SIZE=8192: MoE layers of a prefill in chunks, for more KV cache (docs/training_memory.md).
export USE_HDP="${USE_HDP:-0}" VLLM_ENABLE_EPLB="${VLLM_ENABLE_EPLB:-0}"

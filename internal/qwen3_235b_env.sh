# shellcheck shell=bash
# Environment of the recipes of Qwen3-235B-A22B, Atlas A3 (or NPU_SERIES=a2). Set a variable before to override it.
#
# Names of the published environment that nothing in the pinned versions reads, and what says it now:
#   VLLM_DP_SIZE, VLLM_ENABLE_EXPERT_PARALLEL   rollout.data_parallel_size and expert_parallel_size, from the dies
#   VLLM_ENABLE_GRAPH_MODE                      compilation_config.cudagraph_mode
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-1}"  # the rollout decodes with graphs
. "$(dirname "${BASH_SOURCE[0]}")/npu_env.sh"

# Experts as weight1 and weight2, which MindSpeed's overlap of exchange and computation needs: in training, in the
# checkpoint that is loaded, and in the weights sent to vLLM.
export USE_ALLTOALL_OVERLAP="${USE_ALLTOALL_OVERLAP:-1}"
# After an update each die gets its experts of the rollout directly, instead of gathering all of them everywhere.
export ALL_TO_ALL_RESHARD="${ALL_TO_ALL_RESHARD:-1}"

# Off, as published. USE_HDP=1: ring attention only for sequences that need it, with micro-batches by tokens (docs/hdp.md).
# VLLM_ENABLE_EPLB=1: the rollout's experts are balanced; needs ALL_TO_ALL_RESHARD=0 (docs/eplb.md).
# VLLM_FUSED_MOE_CHUNK_SIZE=8192: a prefill's MoE layers in chunks, for more KV cache (docs/training_memory.md).
export USE_HDP="${USE_HDP:-0}" VLLM_ENABLE_EPLB="${VLLM_ENABLE_EPLB:-0}"

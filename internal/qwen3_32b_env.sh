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

# 1: the rollout drafts NUM_SPECULATIVE_TOKENS tokens a step from text it has seen. Drafting stops above a quarter of the
# recipes' max_num_seqs requests: larger batches gain nothing from it. Not yet run on NPUs.
export ENABLE_SAM="${ENABLE_SAM:-0}" NUM_SPECULATIVE_TOKENS="${NUM_SPECULATIVE_TOKENS:-3}"
export VLLM_SPECULATIVE_BATCH_SIZE_THRE="${VLLM_SPECULATIVE_BATCH_SIZE_THRE:-32}"
# 1: decode graphs are optimised by npugraph_ex, with kernels compiled for their sizes (docs/npu_options.md).
export ENABLE_NPUGRAPH_EX="${ENABLE_NPUGRAPH_EX:-0}" ENABLE_STATIC_KERNEL="${ENABLE_STATIC_KERNEL:-0}"
# Where collectives of the rollout's TP are laid out, if not as HCCL_OP_EXPANSION_MODE says: HOST, AI_CPU or AIV. AI_CPU is
# to be tried where all-gathers time out.
export HCCL_TP_EXPANSION_MODE="${HCCL_TP_EXPANSION_MODE:-}"

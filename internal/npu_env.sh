# shellcheck shell=bash
# Sourced by the environment scripts of Ascend runs. Each variable has its reason; set one beforehand to override it.
#
# NPU_SERIES=a3 (default: Atlas A3, 16 dies per node) or a2 (Atlas 800T A2, 8 NPUs a node).
case "${NPU_SERIES:=a3}" in
a3) export NPUS_PER_NODE="${NPUS_PER_NODE:-16}" ;;
# HCCL_INTRA_PCIE_ENABLE and HCCL_INTRA_ROCE_ENABLE, the hierarchical exchange of MC2, stay unset: a rollout that shares its
# card with the trainer runs no MC2 on A2 (patch a2_shared_card), and the exchange takes 16, 32 or 64 dies only.
a2) export NPUS_PER_NODE="${NPUS_PER_NODE:-8}" ;;
*) echo "ERROR: NPU_SERIES is '$NPU_SERIES'; set a3 or a2" >&2; exit 1 ;;
esac

# HCCL. Ranks wait for the slowest: the first compilation and the end of a 32K rollout take longer than the defaults of
# 120 s and 1836 s. The error then names the rank that waited, not the one that was late.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-7200}" HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-7200}"
# Ports: avoid 16666, which a second process or run would find taken.
export HCCL_IF_BASE_PORT="${HCCL_IF_BASE_PORT:-64021}"
# Buffer of each communication group, MB, for sending and receiving: 235B has many groups, and the MoE exchange needs 300.
export HCCL_BUFFSIZE="${HCCL_BUFFSIZE:-300}"
# Collectives of the rollout's TP on the vector cores: fewer launches in decoding. CANN documents AIV for one communication
# domain at a time, so HCCL_OP_EXPANSION_MODE, which is for all, stays unset. Empty: TP too as CANN decides; AI_CPU or HOST: if
# all-gathers time out.
export HCCL_TP_EXPANSION_MODE="${HCCL_TP_EXPANSION_MODE-AIV}"

# Operator launch: 1 with graphs, 2 without (2 cannot be captured). Recipes with graphs set 1.
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-2}"
# Off until tested on NPUs (docs/host_bound.md). CORE_BINDING=1: divide the CPUs by NUMA node between the dies, vLLM's engine
# core and Ray; ROLLOUT_DISABLE_GC=1: no garbage collection within steps.
export CORE_BINDING="${CORE_BINDING:-0}" ROLLOUT_DISABLE_GC="${ROLLOUT_DISABLE_GC:-0}"
# Off until run on NPUs; every recipe takes them. ENABLE_SAM=1: drafts from text seen before, NUM_SPECULATIVE_TOKENS a step;
# ENABLE_NPUGRAPH_EX=1: optimise decode graphs, with ENABLE_STATIC_KERNEL=1 with kernels compiled for their sizes
# (docs/npu_options.md). ROLLOUT_REBALANCE_ENABLE=1: move unfinished requests between the engines of a rollout, and capture
# smaller graphs for them (docs/rollout_rebalance.md). LENGTH_SCHEDULER=1: admit requests by the lengths expected of them
# (docs/length_scheduler.md).
export ENABLE_SAM="${ENABLE_SAM:-0}" ENABLE_NPUGRAPH_EX="${ENABLE_NPUGRAPH_EX:-0}"
export ENABLE_STATIC_KERNEL="${ENABLE_STATIC_KERNEL:-0}" ROLLOUT_REBALANCE_ENABLE="${ROLLOUT_REBALANCE_ENABLE:-0}"
export LENGTH_SCHEDULER="${LENGTH_SCHEDULER:-0}"
# Megatron requires it where tensor or context parallelism overlaps communication.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# Memory: free cached blocks above 60% of a limit of the process, if one is set, and do not split blocks of more than 24 MB.
# torch_npu takes either these or expandable segments. No expandable_segments here: vLLM's sleep mode refuses it. Empty: verl
# switches it on between weight syncs in the training processes alone (patch hot_swap_expandable_segments).
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF-garbage_collection_threshold:0.6,max_split_size_mb:24}"
# Logs: full errors from Hydra, every actor's lines.
export HYDRA_FULL_ERROR=1 RAY_DEDUP_LOGS="${RAY_DEDUP_LOGS:-0}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
. "$(dirname "${BASH_SOURCE[0]}")/hccl_env.sh"
# Ray, HCCL and checkpoints keep many files open; if the limit cannot be raised, the launcher's check reports it.
ulimit -n 32768 2>/dev/null || true

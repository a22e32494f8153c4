# finds: rollout.sleep_segments
# Expandable segments and the memory pool of sleep mode exclude each other.
. "$(dirname "$0")/megatron.bash"
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True #-
export PYTORCH_NPU_ALLOC_CONF=garbage_collection_threshold:0.6,max_split_size_mb:24 #+
run "$@"

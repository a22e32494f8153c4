# finds: parallel.vllm_dp
# VLLM_DP_SIZE of another cluster.
. "$(dirname "$0")/megatron.bash"
export VLLM_DP_SIZE=32 #-
export VLLM_DP_SIZE=4 #+
run "$@"

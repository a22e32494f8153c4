# finds: rollout.graph_mode
# vllm-ascend makes it PIECEWISE.
. "$(dirname "$0")/megatron.bash"
SET[$vllm.compilation_config.cudagraph_mode]=FULL_AND_PIECEWISE #-
run "$@"

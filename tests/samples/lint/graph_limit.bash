# finds: rollout.graph_mode rollout.graph_limit
# PIECEWISE graphs of 48 layers leave room for 7 sizes; vllm-ascend drops the rest.
. "$(dirname "$0")/megatron.bash"
SET[$vllm.compilation_config.cudagraph_mode]=PIECEWISE #-
SET[$rollout.cudagraph_capture_sizes]=[1,2,4,8,16,24,32,40,48,56,64]
run "$@"

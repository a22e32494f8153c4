# finds: rollout.graph_stride
# With 3 speculative tokens a sequence brings 4 tokens to a step.
. "$(dirname "$0")/megatron.bash"
SET[$vllm.speculative_config.num_speculative_tokens]=3
SET[$rollout.cudagraph_capture_sizes]=[18,64,256] #-
SET[$rollout.cudagraph_capture_sizes]=[16,64,256] #+
run "$@"

# finds: rollout.speculative_log_probs
# vLLM does not speculate for requests that ask for log-probs.
. "$(dirname "$0")/megatron.bash"
SET[$vllm.speculative_config.num_speculative_tokens]=3
SET[$rollout.cudagraph_capture_sizes]=[64,128,256]
SET[$rollout.calculate_log_probs]=True #-
run "$@"

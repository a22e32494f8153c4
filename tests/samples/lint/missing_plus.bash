# finds: config.unknown_key
# engine_kwargs.vllm is empty in verl 0.7.1, so keys below it have to be added.
. "$(dirname "$0")/megatron.bash"
unset "SET[$vllm.compilation_config.cudagraph_mode]" #-
SET[$rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode]=FULL_DECODE_ONLY #-
run "$@"

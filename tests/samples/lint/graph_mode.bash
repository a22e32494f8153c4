# finds: rollout.graph_mode
# verl's default becomes PIECEWISE on NPUs.
. "$(dirname "$0")/megatron.bash"
unset "SET[$vllm.compilation_config.cudagraph_mode]" #-
run "$@"

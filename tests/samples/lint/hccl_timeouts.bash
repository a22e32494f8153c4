# finds: env.hccl_timeouts
# Two nodes with HCCL's default of 120 s.
. "$(dirname "$0")/megatron.bash"
unset HCCL_CONNECT_TIMEOUT #-
run "$@"

# finds: parallel.rollout_servers
# Requests move between servers, and here is one over all 8 dies.
. "$(dirname "$0")/fsdp.bash"
export ROLLOUT_REBALANCE_ENABLE=1
SET[$rollout.tensor_model_parallel_size]=8 #-
run "$@"

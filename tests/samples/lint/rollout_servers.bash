# finds: parallel.rollout_servers
# Requests move between engines. The one server here has four, but for verl only with expert parallelism.
. "$(dirname "$0")/megatron.bash"
export ROLLOUT_REBALANCE_ENABLE=1
SET[$rollout.expert_parallel_size]=1 #-
run "$@"

# finds: algorithm.old_log_prob
# Old log-probs left out with two updates a step.
. "$(dirname "$0")/megatron.bash"
SET[$actor.compute_old_log_prob]=False #-
SET[$actor.ppo_mini_batch_size]=32
run "$@"

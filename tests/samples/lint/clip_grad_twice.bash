# finds: config.duplicate
# The second clip_grad wins; whoever reads the first is wrong.
. "$(dirname "$0")/megatron.bash"
run actor_rollout_ref.actor.optim.clip_grad=10000 "$@" #-
SET[$actor.optim.clip_grad]=10000 #+
run "$@" #+

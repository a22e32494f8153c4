# finds: config.unknown_key
# Hydra stops; the nearest name is given.
. "$(dirname "$0")/megatron.bash"
run actor_rollout_ref.actor.clip_grad=1.0 "$@" #-
run "$@" #+

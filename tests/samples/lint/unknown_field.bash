# finds: config.unknown_field
# With a + Hydra accepts it; verl's dataclass does not.
. "$(dirname "$0")/megatron.bash"
run +actor_rollout_ref.rollout.max_model_length=10240 "$@" #-
run +actor_rollout_ref.rollout.enable_sleep_mode=True "$@" #+

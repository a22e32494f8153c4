# finds: rollout.mode
# verl 0.7 has no synchronous rollout.
. "$(dirname "$0")/fsdp.bash"
SET[$rollout.mode]=sync #-
SET[$rollout.mode]=async #+
run "$@"

# finds: script.placeholder
# The path of a document, not of a disk.
. "$(dirname "$0")/megatron.bash"
SET[actor_rollout_ref.model.path]=xx/weights/Qwen3-30B-A3B #-
SET[actor_rollout_ref.model.path]=/data/weights/Qwen3-30B-A3B #+
run "$@"

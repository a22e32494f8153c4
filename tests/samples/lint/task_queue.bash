# finds: rollout.task_queue
# Level 2 of the task queue with graphs.
. "$(dirname "$0")/megatron.bash"
export TASK_QUEUE_ENABLE=2 #-
run "$@"

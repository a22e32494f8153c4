# finds: batch.micro_missing
# Neither micro-batches nor dynamic batches.
. "$(dirname "$0")/fsdp.bash"
unset "SET[$actor.ppo_micro_batch_size_per_gpu]" #-
run "$@"

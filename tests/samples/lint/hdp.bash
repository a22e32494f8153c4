# finds: train.hdp
# Hybrid data parallelism with micro-batches that are weighed alike.
. "$(dirname "$0")/megatron.bash"
export USE_HDP=1
SET[$actor.whole_batch_loss]=True #+
run "$@"

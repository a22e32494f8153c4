# finds: train.shared_storage
# Two nodes write their shards to their own disks.
. "$(dirname "$0")/megatron.bash"
SET[trainer.save_freq]=10
SET[trainer.default_local_dir]=checkpoints/run #-
run "$@"

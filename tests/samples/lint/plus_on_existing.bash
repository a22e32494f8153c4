# finds: config.existing_key
# Hydra refuses to add what is there.
. "$(dirname "$0")/megatron.bash"
run +trainer.test_freq=-1 "$@" #-
run trainer.test_freq=-1 "$@" #+

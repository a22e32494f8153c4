# finds: algorithm.filter_groups
# Two batches of 128 prompts can never fill a batch of 512, whatever the responses are.
. "$(dirname "$0")/fsdp.bash"
run algorithm.filter_groups.enable=True +data.gen_batch_size=128 algorithm.filter_groups.max_num_gen_batches=2 "$@" #-
run algorithm.filter_groups.enable=True +data.gen_batch_size=128 "$@" #+

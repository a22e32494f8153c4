# finds: rollout.graph_sizes
# Batches of 65 to 96 sequences run without a graph.
. "$(dirname "$0")/megatron.bash"
SET[data.train_batch_size]=4096
SET[$rollout.max_num_seqs]=96 #-
SET[$rollout.max_num_seqs]=64 #+
run "$@"

# finds: parallel.world
# TP 4 x PP 2 x CP 4 needs 32 dies, there are 16.
. "$(dirname "$0")/megatron.bash"
SET[$megatron.context_parallel_size]=4 #-
SET[$megatron.context_parallel_size]=2 #+
run "$@"

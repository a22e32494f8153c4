# finds: parallel.node
# 16 dies a node on machines that have 8.
. "$(dirname "$0")/fsdp.bash"
SET[trainer.n_gpus_per_node]=16 #-
SET[trainer.n_gpus_per_node]=$NPUS_PER_NODE #+
run "$@"

# finds: algorithm.gspo_aggregation_unset
# verl's default is token-mean, and the patched GSPO honours it.
. "$(dirname "$0")/fsdp.bash"
unset "SET[$actor.loss_agg_mode]" #-
run "$@"

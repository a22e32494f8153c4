# finds: algorithm.gspo_aggregation
# Long responses weigh more: not GSPO's objective.
. "$(dirname "$0")/fsdp.bash"
SET[$actor.loss_agg_mode]=token-mean #-
run "$@"

# finds: algorithm.clip_range
# Bounds made for tokens never clip a sequence.
. "$(dirname "$0")/fsdp.bash"
SET[$actor.clip_ratio_low]=0.2 #-
SET[$actor.clip_ratio_high]=0.28 #-
run "$@"

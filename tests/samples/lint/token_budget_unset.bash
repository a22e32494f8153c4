# finds: script.used_before_set batch.token_budget config.empty_value
# The budget is divided by sp_size, which is set below it: bash divides by zero and leaves the budget empty.
. "$(dirname "$0")/fsdp.bash"
SET[$actor.use_dynamic_bsz]=True
sp_size=4 #+
budget=$(((2048 + 8192) / sp_size))
sp_size=4 #-
SET[$actor.ppo_max_token_len_per_gpu]=$budget
run "$@"

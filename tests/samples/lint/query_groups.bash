# finds: parallel.kv_heads
# Qwen3-30B-A3B has 4 query groups.
. "$(dirname "$0")/megatron.bash"
SET[$megatron.tensor_model_parallel_size]=8 #-
SET[$megatron.tensor_model_parallel_size]=4 #+
SET[$megatron.pipeline_model_parallel_size]=2
SET[$megatron.context_parallel_size]=1
SET[$actor.ppo_max_token_len_per_gpu]=10240
run "$@"

# finds: options.vllm
# vLLM 0.13 has no such option of its server; Hydra takes any name that is added here.
. "$(dirname "$0")/megatron.bash"
run "$vllm".max_num_batch_tokens=10240 "$@" #-
run "$vllm".max_num_batched_tokens=10240 "$@" #+

# finds: env.required
# vllm-ascend refuses to wake up with weights in FRACTAL_NZ.
. "$(dirname "$0")/megatron.bash"
unset VLLM_ASCEND_ENABLE_NZ #-
run "$@"

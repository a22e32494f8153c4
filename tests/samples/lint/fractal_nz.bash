# finds: env.required
# vllm-ascend refuses to wake up with weights in FRACTAL_NZ.
. "$(dirname "$0")/megatron.bash"
export VLLM_ASCEND_ENABLE_NZ=1 #-
run "$@"

# shellcheck shell=bash
# Environment of a CPU run whose trainer is Megatron, sourced by ray_start_npu.sh: that of cpu_env.sh plus
# the stubs for CUDA and TransformerEngine, which reach Ray's workers through PYTHONPATH (docs/megatron_on_cpu.md).
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$here/cpu_env.sh"
export PYTHONPATH="${here%/*}/tests/stubs${PYTHONPATH:+:$PYTHONPATH}"
# megatron-core requires it where tensor or context parallelism overlaps communication; it has no effect on gloo.
export CUDA_DEVICE_MAX_CONNECTIONS=1

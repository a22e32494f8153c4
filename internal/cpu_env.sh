# shellcheck shell=bash
# Environment of a CPU run, sourced by ray_start_npu.sh. Each variable has its reason; set one beforehand to override it.

# vLLM's CPU backend: a small KV cache (GiB), no thread pinning (several workers share few cores), and one thread
# each: a tiny model gains nothing from more, and OpenMP threads that wait for another one, whose core may be busy, spin.
# numba, for vLLM's n-gram drafts, sets their number too.
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" NUMBA_NUM_THREADS="${NUMBA_NUM_THREADS:-1}" TQ_NUM_THREADS="${TQ_NUM_THREADS:-1}"
# With several workers of an engine: they wait in a loop otherwise, and take a core each.
export VLLM_SLEEP_WHEN_IDLE="${VLLM_SLEEP_WHEN_IDLE:-1}" ROLLOUT_SPIN_S="${ROLLOUT_SPIN_S:-0.002}"
# With graphs (tests of vllm-ascend): keep frozen what a warm start froze, see smoke_env.sh.
export VLLM_ENABLE_CUDAGRAPH_GC="${VLLM_ENABLE_CUDAGRAPH_GC:-1}"
# Where no plug-in is needed for it (STACK=cann8.5), verl does not read this.
export VERL_PLATFORM="${VERL_PLATFORM:-cpu}"
# Compiling a 2-layer model takes longer than running it.
export TORCHDYNAMO_DISABLE="${TORCHDYNAMO_DISABLE:-1}"
# No hub, no telemetry, no colours in logs.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 RAY_COLOR_PREFIX=0 NO_COLOR=1
export TOKENIZERS_PARALLELISM=false
# Every message of every actor; full Hydra errors.
export RAY_DEDUP_LOGS="${RAY_DEDUP_LOGS:-0}" HYDRA_FULL_ERROR=1
export VERL_LOGGING_LEVEL="${VERL_LOGGING_LEVEL:-WARN}" VLLM_LOGGING_LEVEL="${VLLM_LOGGING_LEVEL:-WARNING}"
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
# Collectives and vLLM's sockets stay on this machine.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" VLLM_HOST_IP="${VLLM_HOST_IP:-127.0.0.1}"
# What most processes of a run import, one after another on few cores: imported once, and they are forks of that
# (ascend_rl/launch/warm_start.py).
export WARM_START="${WARM_START:-1}"

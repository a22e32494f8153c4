# shellcheck shell=bash
# Sourced by ray_start_npu.sh after common.sh: what a rehearsal (docs/rehearsal.md) needs of the machine. Where torch_npu finds
# no NPU, the software NPU takes its place; the environment script of the recipe follows and is the cluster's.

# smoke_environment ARGUMENTS...: export it, for a launcher with these arguments. Called with SMOKE=1.
smoke_environment() {
    local script npu
    for script in "$@"; do
        if [ -f "$script" ] && grep -q '^recipe ' "$script" && ! importable mindspeed &&
            DRY_RUN=1 bash "$script" 2>/dev/null | grep -q 'actor.strategy=megatron'; then
            die "$script trains with MindSpeed, whose sources are not here; fetch, patch and install them with
    bash download_frameworks_source_code.sh --only mindspeed && bash build_project.sh --target cpu
If $(python3 "$ROOT/patches/sources.py" get mindspeed url) cannot be reached, name a repository that can be:
    git config --global url.REPOSITORY.insteadOf $(python3 "$ROOT/patches/sources.py" get mindspeed url)"
        fi
    done
    # One thread each: a tiny model gains nothing from more. Compiling it takes longer than running it.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" NUMBA_NUM_THREADS="${NUMBA_NUM_THREADS:-1}" TQ_NUM_THREADS="${TQ_NUM_THREADS:-1}"
    export TORCHDYNAMO_DISABLE="${TORCHDYNAMO_DISABLE:-1}" VLLM_USE_AOT_COMPILE="${VLLM_USE_AOT_COMPILE:-0}"
    # vLLM's workers wait in a loop: eight of them leave little of two cores to those that compute.
    export VLLM_SLEEP_WHEN_IDLE="${VLLM_SLEEP_WHEN_IDLE:-1}" ROLLOUT_SPIN_S="${ROLLOUT_SPIN_S:-0.002}"
    # Without 1, vLLM lets go of what WARM_START froze when its graphs are captured; each later gc.collect() of a worker
    # (two a step) then walks through all modules, which took a sixth of the time of GRPO 235B.
    export VLLM_ENABLE_CUDAGRAPH_GC="${VLLM_ENABLE_CUDAGRAPH_GC:-1}"
    # No hub, no telemetry, no colours in logs.
    export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 RAY_COLOR_PREFIX=0 NO_COLOR=1
    export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
    # Collectives and vLLM's sockets stay on this machine.
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" VLLM_HOST_IP="${VLLM_HOST_IP:-127.0.0.1}"
    # The dies of the largest rehearsal, as resources of Ray; a rehearsal takes as many as its parallel sizes need.
    export NNODES=1 NPUS_PER_NODE="${NPUS_PER_NODE:-8}" RAY_OBJECT_STORE="${RAY_OBJECT_STORE:-300000000}"

    if ! importable torch_npu; then
        export WARM_START="${WARM_START:-1}" # as in cpu_env.sh; a fork can use a software NPU
        export SOFTWARE_NPU_COUNT="$NPUS_PER_NODE" SOFTWARE_NPU_CHIP="${SOFTWARE_NPU_CHIP:-ascend910_9391}"
        # vllm-ascend's compiled part is the software NPU's too, for whichever chip that is.
        export SOFTWARE_NPU_VLLM_ASCEND="${SOFTWARE_NPU_VLLM_ASCEND:-1}"
        SOFTWARE_NPU_WHEELS="$(python "$ROOT/patches/npu_wheels.py")" || die "the rehearsal needs the pinned torch_npu's schemas"
        python -m software_npu.build >/dev/null || die "the rehearsal needs the software NPU"
        export SOFTWARE_NPU_WHEELS PYTHONPATH
        npu="$ROOT/software_npu/site_$(python3 "$ROOT/patches/sources.py" get ascend torch_npu)" # metadata of another version
        if [ -d "$npu" ]; then npu+=:; else npu=; fi
        # torch, too, is the CPU's: on_npu gives Megatron what it needs of torch 2.8 to save checkpoints.
        PYTHONPATH="$npu$ROOT/software_npu/site:$ROOT/tests/stubs/on_npu:$STACK_DIR/frameworks/vllm_ascend${PYTHONPATH:+:$PYTHONPATH}"
        export PATH="$ROOT/software_npu/node/bin:$PATH" ASCEND_HOME_PATH="$ROOT/software_npu/node/cann"
        export ATB_HOME_PATH="$ROOT/software_npu/node/atb"
    fi
}

#!/usr/bin/env bash
# Start a container of the Ascend image with this host's NPUs and driver; optionally build the image first.
#
# Usage:    bash run_container.sh [OPTIONS] NAME IMAGE [COMMAND...]
# Example:  bash run_container.sh --build --mount /data qwen3 ascend-rl:latest
#           STACK=cann9.1 bash run_container.sh --build qwen3 ascend-rl:cann9.1
#           bash run_container.sh --dry-run --devices 0-7 qwen3 ascend-rl:latest
# Writes:   nothing on the host; with --build an image of the engine
# Hardware: an aarch64 Ascend host with the driver installed, and docker (or podman: ENGINE=podman). --build also works on a
#           host without NPUs, where no container is started.
# Duration: seconds; with --build about half an hour the first time (an estimate, not measured)
#
#   --build           build IMAGE from the Dockerfile here, with the pins of the stack's frameworks.lock
#   --mooncake        with --build: add Mooncake
#   --soc CHIP        the chip of the image: ascend910b1 to ascend910b4 (Atlas A2) or ascend910_93xx (A3). Default: what npu-smi
#                     shows on this host, else ascend910_9391
#   --devices LIST    NPUs to pass, e.g. 0-7 or 0,2,4 (default: all of the host)
#   --mount PATH      a directory for data, weights or results, at the same path inside; may be repeated
#   --shm-size SIZE   shared memory (default 64g), used by Ray's object store and vLLM's queues
#   --privileged      give the container every device and capability of the host; not needed for training
#   --dry-run         print the commands instead of running them
#
# Variables that --build passes on if set: REGISTRY (of the CANN image, default ascendai), DNF_MIRROR, GIT_MIRROR,
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_TRUSTED_HOST, http_proxy, https_proxy, no_proxy.
#
# The container shares the host's network (HCCL and Ray need it), so its ports are the host's. COMMAND defaults to a shell
# that keeps running: enter it with docker exec -it NAME bash.
. "$(dirname "${BASH_SOURCE[0]}")/internal/common.sh"

ENGINE="${ENGINE:-docker}" SHM_SIZE=64g
BUILD='' MOONCAKE='' SOC='' DRY_RUN='' DEVICES='' FLAGS=() MOUNTS=()
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;;
    --build) BUILD=1; shift ;;
    --mooncake) MOONCAKE=1; shift ;;
    --dry-run) DRY_RUN=1; shift ;;
    --privileged) FLAGS+=(--privileged); shift ;;
    --devices | --mount | --shm-size | --soc)
        [ $# -gt 1 ] || die "$1 needs a value; see: bash run_container.sh -h"
        case "$1" in --devices) DEVICES="$2" ;; --mount) MOUNTS+=("$2") ;; --soc) SOC="$2" ;; *) SHM_SIZE="$2" ;; esac
        shift 2
        ;;
    -*) die "unknown option '$1'; see: bash run_container.sh -h" ;;
    *) break ;;
    esac
done
[ $# -ge 2 ] || die "give a container name and an image; see: bash run_container.sh -h"
NAME="$1" IMAGE="$2"
shift 2
[[ "$SHM_SIZE" =~ ^[1-9][0-9]*[bkmg]?$ ]] || die "--shm-size is a number with b, k, m or g, e.g. 64g; it is '$SHM_SIZE'"

# pin KEY: a value of [ascend] in frameworks.lock, read without Python, as the host's may be too old.
pin() {
    local value
    value="$(sed -n "/^\[ascend\]/,/^\[cpu\]/s/^$1 = \"\(.*\)\"\$/\1/p" "$STACK_DIR/frameworks.lock")"
    [ -n "$value" ] || die "frameworks.lock has no [ascend] $1"
    echo "$value"
}

# The chip decides which CANN image is the base, what vllm-ascend is compiled for, and what recipes set in the container.
if [ -z "$SOC" ] && [ -x /usr/local/bin/npu-smi ]; then
    SOC="$(timeout 20 /usr/local/bin/npu-smi info | sed -n 's/.*910\(B[1-4]\)\b.*/ascend910\1/p' | head -n 1 || true)"
fi
SOC="${SOC,,}"
case "$SOC" in
ascend910b[1-4]) CANN_IMAGE=image_a2 FLAGS+=(--env=NPU_SERIES=a2) ;;
"" | ascend910_93*) CANN_IMAGE=image ;;
*) die "--soc $SOC: no chip of an Atlas A2 (ascend910b1 to ascend910b4) or A3 (ascend910_93xx)" ;;
esac

# engine ARGS...: run docker, or print the command.
engine() {
    if [ -n "$DRY_RUN" ]; then
        printf '%q ' "$ENGINE" "$@"
        echo
    else
        run "$ENGINE" "$@"
    fi
}

# NPUs.
shopt -s nullglob
found=()
for node in /dev/davinci[0-9]*; do found+=("${node#/dev/davinci}"); done
mapfile -t found < <(printf '%s\n' "${found[@]}" | sort -n)
[ -n "${found[*]}$BUILD" ] || die "no /dev/davinci* here: is the Ascend driver installed, and does 'npu-smi info' list the NPUs?"
if [ -n "${found[*]}" ]; then
    wanted=()
    [ -n "$DEVICES" ] || wanted=("${found[@]}")
    for part in ${DEVICES//,/ }; do
        [[ "$part" =~ ^([0-9]{1,4})(-([0-9]{1,4}))?$ ]] || die "--devices is a list like 0-7 or 0,2,4; '$part' is not"
        mapfile -t -O ${#wanted[@]} wanted < <(seq "${BASH_REMATCH[1]}" "${BASH_REMATCH[3]:-${BASH_REMATCH[1]}}")
    done
    [ ${#wanted[@]} -gt 0 ] || die "--devices '$DEVICES' selects no NPU"
    for number in "${wanted[@]}"; do
        [ -e "/dev/davinci$number" ] || die "/dev/davinci$number does not exist; this host has: ${found[*]}"
        FLAGS+=("--device=/dev/davinci$number")
    done
    for node in /dev/davinci_manager /dev/devmm_svm /dev/hisi_hdc; do
        [ -e "$node" ] || die "$node does not exist: the Ascend driver is not loaded; see: lsmod | grep drv_, dmesg"
        FLAGS+=("--device=$node")
    done

    # The driver must match the host's kernel, so it is mounted; the rest of CANN is in the image.
    for path in /usr/local/Ascend/driver /usr/local/dcmi /usr/local/bin/npu-smi /etc/ascend_install.info; do
        [ -e "$path" ] || die "$path does not exist: install the Ascend driver (HDK $(pin hdk)) on this host"
        FLAGS+=("--volume=$path:$path:ro")
    done
    [ -e /etc/hccn.conf ] || log "no /etc/hccn.conf: the NPUs have no network addresses, so runs stay on one node"
    for path in /etc/hccn.conf /usr/local/Ascend/add-ons /usr/local/sbin /etc/localtime; do
        [ ! -e "$path" ] || FLAGS+=("--volume=$path:$path:ro")
    done
fi
for path in "${MOUNTS[@]}"; do
    [[ "$path" = /* && -d "$path" ]] || die "--mount $path: not the absolute path of a directory on this host"
    FLAGS+=("--volume=$path:$path")
done

if [ -z "$DRY_RUN" ]; then
    need "$ENGINE" "install it, or set ENGINE=podman"
    "$ENGINE" info >/dev/null 2>&1 || die "'$ENGINE info' fails: is the daemon running, and is $(id -un) allowed to use it?"
    ! "$ENGINE" container inspect "$NAME" >/dev/null 2>&1 ||
        die "container '$NAME' exists already: enter it with '$ENGINE exec -it $NAME bash', or remove it with '$ENGINE rm -f $NAME'"
    [ -n "$BUILD" ] || "$ENGINE" image inspect "$IMAGE" >/dev/null 2>&1 ||
        die "this host has no image '$IMAGE': add --build, or pull it first"
fi
if [ -n "$BUILD" ]; then
    args=("--build-arg=CANN_IMAGE=$(pin "$CANN_IMAGE")")
    [ "$STACK" = cann8.5 ] || args+=("--build-arg=STACK=$STACK" "--build-arg=PINS=stacks/$STACK")
    grep -q '^triton-ascend==' "$STACK_DIR/requirements.txt" || args+=("--build-arg=TRITON_ASCEND=$(pin triton_ascend)")
    [ -z "$MOONCAKE" ] || args+=("--build-arg=MOONCAKE=$(pin mooncake)")
    [ -z "$SOC" ] || args+=("--build-arg=SOC_VERSION=$SOC")
    for name in REGISTRY DNF_MIRROR GIT_MIRROR PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST http_proxy https_proxy no_proxy; do
        [ -z "${!name:-}" ] || args+=("--build-arg=$name=${!name}")
    done
    engine build "${args[@]}" -t "$IMAGE" -f "$ROOT/Dockerfile.vllm_ascend.mindspeed.qwen3" "$ROOT"
fi
if [ -z "${found[*]}" ]; then
    log "this host has no NPUs (/dev/davinci*), so no container is started"
    exit 0
fi
# Pinned pages for RDMA need memlock; Ray opens many files and sockets.
engine run -dit --name "$NAME" --init --network=host "--shm-size=$SHM_SIZE" --ulimit=memlock=-1:-1 \
    --ulimit=nofile=65536:65536 "${FLAGS[@]}" "$IMAGE" "$@"
[ -n "$DRY_RUN" ] || log "enter it with: $ENGINE exec -it $NAME bash"

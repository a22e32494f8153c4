#!/usr/bin/env bash
# Make the patched frameworks and ascend_rl importable everywhere, including Ray workers.
#
# Usage:    bash build_project.sh --target cpu|npu [--soc CHIP]
# Example:  bash build_project.sh --target cpu
#           bash build_project.sh --target npu --soc ascend910_9391     # on a build server without NPUs
# Writes:   .venv/ or a .pth file in the image's Python; frameworks/
# Hardware: cpu: any Linux with Python 3.11 (STACK=cann9.1: 3.12); npu: the Ascend image.
# Duration: cpu: 1-3 minutes the first time (about 3 GB of packages, all compiled), seconds when nothing changed.
#           npu: as long as vllm-ascend takes to compile (not measured), seconds when nothing changed.
#
#   cpu  creates .venv from requirements-cpu.txt. Variables:
#          PYTHON           the Python 3.11 to build it with (default: python3; STACK=cann9.1: python3.12, which uv
#                           downloads where there is none)
#          TORCH_INDEX_URL  take torch from this package index instead, e.g. one with CPU-only wheels (5 GB less)
#          PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_TRUSTED_HOST  as for pip; the index may also be in pip's configuration
#   npu  uses the Python of the image (PYTHON, default: python3) and adds only a .pth file and metadata to it. Compiles
#        vllm-ascend for the chip that npu-smi shows, or for --soc (or SOC_VERSION): its wheel is for Atlas A2 only. Needs
#        CANN (its set_env.sh is sourced if it was not); MAX_JOBS limits the compilers (default: all cores). After an
#        interruption it continues.
#
# Downloads and patches the frameworks first if necessary. At the end it imports each of them from frameworks/ and compiles
# what is new, which would otherwise cost each process of a run ten seconds.
. "$(dirname "${BASH_SOURCE[0]}")/internal/common.sh"

TARGET='' SOC=()
while [ $# -gt 0 ]; do
    case "$1" in
    --target) TARGET="${2:-}"; shift 2 || die "--target needs a value: cpu or npu" ;;
    --soc) SOC=(--soc "${2:-}"); shift 2 || die "--soc needs a value, e.g. ascend910_9391" ;;
    -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;;
    *) die "unknown argument '$1'; see: bash build_project.sh -h" ;;
    esac
done
case "$TARGET" in cpu | npu) ;; *) die "say what to build for: --target cpu or --target npu" ;; esac

cd "$ROOT"
system="${PYTHON:-python3}"

# Debian packages, if we are allowed to install them.
missing=()
command -v git >/dev/null 2>&1 || missing+=(git)
if [ "$TARGET" = cpu ]; then
    command -v "$system" >/dev/null 2>&1 || missing+=(python3)
    "$system" -c 'import ensurepip, venv' >/dev/null 2>&1 || missing+=(python3-venv)
    # Only for tests: test_launcher.py, which also needs root, and the software NPU.
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        command -v ip >/dev/null 2>&1 || missing+=(iproute2)
        command -v g++ >/dev/null 2>&1 || missing+=(g++)
        "$system" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' >/dev/null 2>&1 ||
            missing+=(python3-dev)
    fi
fi
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        run apt-get update -qq
        run apt-get install -y -qq "${missing[@]}"
    else
        die "missing: ${missing[*]}; install them first, e.g.: sudo apt-get install ${missing[*]}"
    fi
fi
table="$([ "$TARGET" = cpu ] && echo cpu || echo ascend)"
wanted="$("$system" patches/sources.py get "$table" python 2>/dev/null || echo 3.11)"
PYTHON="${PYTHON:-$(python_of "$wanted")}"
"$PYTHON" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$wanted')" ||
    die "$PYTHON is $("$PYTHON" -V 2>&1), but the pinned wheels are for Python $wanted; set PYTHON=/path/to/python$wanted"

if [ "$TARGET" = cpu ]; then
    VENV_PYTHON="$VENV/bin/python" requirements="$STACK_DIR/requirements-cpu.txt"
    stamp="$(sha256sum "$requirements" | cut -d' ' -f1) ${TORCH_INDEX_URL:-}"
    if [ ! -x "$VENV_PYTHON" ] || [ "$(cat "$VENV/.requirements" 2>/dev/null)" != "$stamp" ]; then
        log "building $(basename "$VENV") (about 3 GB to download the first time)"
        "$VENV_PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv --clear "$VENV"
        "$VENV_PYTHON" -m pip install -q "$(grep '^uv==' "$requirements")"
        index_of_pip "$VENV_PYTHON"
        if [ -n "${TORCH_INDEX_URL:-}" ]; then
            mapfile -t torch < <(grep -E '^torch(vision)?==' "$requirements")
            "$VENV/bin/uv" pip install --python "$VENV_PYTHON" --index-url "$TORCH_INDEX_URL" "${torch[@]}"
            grep -vE '^(torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)==' "$requirements" >"$VENV/without-torch.txt"
            requirements="$VENV/without-torch.txt"
        fi
        "$VENV/bin/uv" pip install --python "$VENV_PYTHON" -r "$requirements"
        # TransferQueue's wheel installs its tests as a top-level package, in front of those of any repository.
        [ "$STACK" = cann8.5 ] || rm -rf "$VENV"/lib/python*/site-packages/tests
        # uv installs sources only. Tests, and the large parts of packages that no run imports, are a third of the work.
        log "compiling the modules in $(basename "$VENV")"
        models='auto|bloom|deepseek|encoder_decoder|gemma3|llama|mistral|mixtral|qwen|siglip|whisper'
        unused="ray/(data|llm|rllib|train|tune)|openai/resources|sympy/physics|transformers/models/(?!$models)[^/]+"
        "$VENV_PYTHON" -m compileall -qq -j 0 --invalidation-mode timestamp -x "/(tests?|$unused)/" "$VENV/lib" || true
        echo "$stamp" >"$VENV/.requirements"
    fi
    PYTHON="$VENV_PYTHON"
fi

if [ "$TARGET" = npu ] && [ -z "${ASCEND_TOOLKIT_HOME:-}${ASCEND_HOME_PATH:-}" ]; then
    for script in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
        # shellcheck disable=SC1090  # CANN's own, which reads unset variables
        [ ! -f "$script" ] || { set +u; . "$script"; set -u; }
    done
fi

bash download_frameworks_source_code.sh
bash apply_all_patches.sh
run "$PYTHON" patches/install.py --target "$TARGET" "${SOC[@]}"

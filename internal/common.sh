# shellcheck shell=bash
# Sourced by every script: messages, checks, and the Python to use.
set -euo pipefail
trap 'exit 130' INT # also if what runs just then answers a Ctrl-C by itself

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

die() {
    echo "ERROR: $*" >&2
    exit 1
}

log() {
    echo "[$(date +%H:%M:%S)] $*" >&2
}

# need COMMAND WHAT_TO_DO: stop early when a command is missing.
need() {
    command -v "$1" >/dev/null 2>&1 || die "'$1' is not installed; $2"
}

# run COMMAND...: show a command, then run it.
run() {
    log "+ $*"
    "$@"
}

# usage SCRIPT: print the comment header of a script (its help).
usage() {
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$1"
}

# importable MODULE...: whether Python can find all of them, without importing any.
importable() {
    python -c 'import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))' "$@" \
        2>/dev/null # of a Ctrl-C, or a parent package that cannot be imported
}

# index_of_pip PYTHON: let uv, which reads no setting of pip's, take packages from where this Python's pip takes them.
index_of_pip() {
    local index
    index="${PIP_INDEX_URL:-$("$1" -m pip config list | sed -n "s/^[a-z]*\.index-url='\(.*\)'$/\1/p" | tail -n 1)}"
    [ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
    [ -z "${PIP_TRUSTED_HOST:-}" ] || export UV_INSECURE_HOST="${UV_INSECURE_HOST:-$PIP_TRUSTED_HOST}"
    # pip takes a version from whichever index has it, uv from the first index that has the package.
    [ -z "${PIP_EXTRA_INDEX_URL:-}" ] ||
        export UV_EXTRA_INDEX_URL="${UV_EXTRA_INDEX_URL:-$PIP_EXTRA_INDEX_URL}" UV_INDEX_STRATEGY=unsafe-best-match
}

# The environment that build_project.sh created, or the Python of the Ascend image.
use_python() {
    local advice="run: bash build_project.sh --target cpu (or npu, in the Ascend image)"
    if [ -x "$ROOT/.venv/bin/python" ]; then
        export PATH="$ROOT/.venv/bin:$PATH"
    elif [ -L "$ROOT/.venv/bin/python" ]; then
        advice="the Python of $ROOT/.venv, in $(sed -n 's/^home = //p' "$ROOT/.venv/pyvenv.cfg"), is gone or closed to user \
$(id -u): build .venv from one that all may run, or build a checkout of your own"
    fi
    need python "$advice"
    importable ascend_rl verl || die "the patched frameworks cannot be imported; $advice"
}

# hydra_overrides ARGS...: OVERRIDES, the same as Hydra's grammar wants them. It knows a path such as /data/it's (new) only in
# quotes. Lists, maps, quoted values, functions and choices are what they are.
hydra_overrides() {
    local LC_ALL=C argument value quoted slashes i
    local plain='^[A-Za-z0-9_./:%@?|*+ $-]*$' grammar="^([[{'\"]|[A-Za-z_]+[(].*[)]\$)" choice='^[^/ ]*,[^/ ]*$'
    OVERRIDES=()
    for argument in "$@"; do
        value="${argument#*=}"
        if [[ "$argument" == [A-Za-z+~]*=* && ! "$value" =~ $plain && ! "$value" =~ $grammar ]] &&
            [[ ! "$value" =~ $choice || "$argument" == *experiment_name=* ]]; then
            quoted='' slashes=''  # before a quote, backslashes are doubled
            for ((i = 0; i < ${#value}; i++)); do
                case "${value:i:1}" in
                \\) slashes+=\\ ;;
                \') quoted+="$slashes$slashes\\'" slashes='' ;;
                *) quoted+="$slashes${value:i:1}" slashes='' ;;
                esac
            done
            argument="${argument%%=*}='$quoted$slashes$slashes'"
        fi
        OVERRIDES+=("$argument")
    done
}

# train MODULE ARGS...: replace the script by `python -m MODULE ARGS...`. With DRY_RUN=1 only print what would run, as
# JSON {"module", "args", "env"} without secrets: preflight and tests read it.
train() {
    hydra_overrides "$@"
    set -- "${OVERRIDES[@]}"
    [ "${DRY_RUN:-0}" != 1 ] || exec python3 -c "$(cat "$ROOT/ascend_rl/settings/hidden.py")" "$@"
    [ -z "${WARM_PYTHON:-}" ] || set -- "$@" "++ray_kwargs.ray_init.runtime_env.py_executable=$WARM_PYTHON"
    exec "${WARM_PYTHON:-python}" -m "$@"
}

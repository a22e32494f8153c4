# shellcheck shell=bash
# Sourced by every script: messages, checks, and the Python to use.
set -euo pipefail
trap 'exit 130' INT # also if what runs just then answers a Ctrl-C by itself

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

die() {
    echo "ERROR: $*" >&2
    exit 1
}

# A stack is what is pinned together (docs/stacks.md): frameworks.lock, requirements, patches/ and frameworks/. Those of the
# default one are at the root, those of another in stacks/NAME.
STACK="${STACK:-cann8.5}"
# shellcheck disable=SC2034 # for those who source this
if [ "$STACK" = cann8.5 ]; then
    STACK_DIR="$ROOT" VENV="$ROOT/.venv" STACK_DATA="$ROOT/data"
else
    STACK_DIR="$ROOT/stacks/$STACK" VENV="$ROOT/.venv-$STACK" STACK_DATA="$ROOT/data/$STACK"
    [ -f "$STACK_DIR/frameworks.lock" ] || die "STACK=$STACK: there is no such stack, only cann8.5 and $(ls "$ROOT/stacks")"
fi

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

# python_of VERSION: the command of a Python of this version (3.12): python3, python3.12, or one that uv manages or downloads.
python_of() {
    local python uv="$ROOT/data/uv"
    for python in python3 "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python3; do
        if "$python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    [ -x "$uv/bin/uv" ] || python3 -m pip install -q --target "$uv" uv >&2 || return 0
    "$uv/bin/uv" python find --managed-python "$1" 2>/dev/null ||
        { "$uv/bin/uv" python install -q "$1" >&2 && "$uv/bin/uv" python find --managed-python "$1"; } || echo "python$1"
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
    if [ -x "$VENV/bin/python" ]; then
        export PATH="$VENV/bin:$PATH"
    elif [ -L "$VENV/bin/python" ]; then
        advice="the Python of $VENV, in $(sed -n 's/^home = //p' "$VENV/pyvenv.cfg"), is gone or closed to user \
$(id -u): build $(basename "$VENV") from one that all may run, or build a checkout of your own"
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

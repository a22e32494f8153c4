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

# train MODULE ARGS...: replace the script by `python -m MODULE ARGS...`. With DRY_RUN=1 only print what would run, as
# JSON {"module", "args", "env"}: preflight and tests read it. Variables whose names tell of a secret are "(set)" there.
train() {
    [ "${DRY_RUN:-0}" != 1 ] || exec python3 -c '
import json, os, re, sys
secret = re.compile("TOKEN(?!S|IZERS|_FILE)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH(?!_MODE)", re.I)
env = {name: "(set)" if value and secret.search(name) else value for name, value in os.environ.items()}
print(json.dumps({"module": sys.argv[1], "args": sys.argv[2:], "env": env}))' "$@"
    [ -z "${WARM_PYTHON:-}" ] || set -- "$@" "++ray_kwargs.ray_init.runtime_env.py_executable=$WARM_PYTHON"
    exec "${WARM_PYTHON:-python}" -m "$@"
}

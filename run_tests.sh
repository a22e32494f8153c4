#!/usr/bin/env bash
# Set everything up on a CPU, then run the tests.
#
# Usage:    bash run_tests.sh [--all | --weekly] [--durations] [PYTEST_ARGUMENTS...]
# Example:  bash run_tests.sh                                  # enough for a change
#           bash run_tests.sh --all --durations                # what CI runs, with timings
#           bash run_tests.sh tests/test_gspo.py -x            # pytest with these arguments and no others
# Writes:   .venv/, frameworks/, data/
# Hardware: 2 cores, 12 GiB (--all: 20), 12 GB of disk (--all: 24), Linux with Python 3.11 (--all: also 3.12)
# Duration: about 15 minutes, with --all an hour; longer on slow machines
#
#   --all        also runs the tests marked long, proves again that a patch is needed where anything changed that the last
#                proof depended on (PYTEST_ADDOPTS=--prove: all of them), and then runs the tests of the second stack
#                (STACK=cann9.1 runs them alone; without those marked long where the first stack took over 50 minutes).
#                Without --all, proofs are repeated if data/proofs has earlier ones
#   --weekly     --all and the tests marked weekly, hours: every recipe on software NPUs, kills, every benchmark
#   --durations  print the time and processor time of each file, the slowest tests, and the total
#
# Four processes run tests at a time; one of them begins with the real runs, with --all two of them.
started=$SECONDS
. "$(dirname "${BASH_SOURCE[0]}")/internal/common.sh"

LEVEL="" MARKED="not long and not weekly" DURATIONS=0
while [ $# -gt 0 ]; do
    case "$1" in
    --all) LEVEL="$1" MARKED="not weekly" ;;
    --weekly) LEVEL="$1" MARKED="" ;;
    --durations) DURATIONS=1 ;;
    -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;;
    *) break ;;
    esac
    shift
done

cd "$ROOT"
bash build_project.sh --target cpu
both=0
if [ -n "$LEVEL" ] && [ "$STACK" = cann8.5 ]; then both=1; fi
# Beside the first tests, most of which wait for processes; the second stack's own run says what went wrong.
if [ "$both" = 1 ]; then STACK=cann9.1 bash build_project.sh --target cpu >/dev/null 2>&1 & fi
use_python
log "the tiny Qwen3"
# Most tests together need the software NPU; if it cannot be compiled, they say why.
[ $# -gt 0 ] || python -m software_npu.build >/dev/null &
npu=$!
python -m ascend_rl.tiny --out "$STACK_DATA/tiny"
wait "$npu" || true

results="$STACK_DATA/test-results"
rm -rf "$results"
if [ $# -gt 0 ]; then
    status=0
    python -m pytest --junitxml="$results/given.xml" "$@" || status=$?
    [ "$DURATIONS" = 0 ] || python tests/summary.py --durations --wall $((SECONDS - started)) "$results"/given.xml
    exit "$status"
fi

ARGS=(-m "$MARKED")
if [ -z "$LEVEL" ] && [ ! -d data/proofs ]; then ARGS+=(--ignore=tests/patched/test_left_out.py); fi
status=0
# A process that dies would be replaced, but then the others may wait forever.
python -m pytest -q -n 4 --max-worker-restart=0 --junitxml="$results/tests.xml" "${ARGS[@]}" || status=1
took=$((SECONDS - started))
ARGS=(--wall "$took")
[ "$DURATIONS" = 0 ] || ARGS+=(--durations)
python tests/summary.py "${ARGS[@]}" "$results/tests.xml" || status=1
if [ "$both" = 1 ]; then
    log "the stack CANN 9.1"
    wait
    again=("$LEVEL")
    if [ "$LEVEL" = --all ] && [ "$took" -gt 3000 ]; then # CI ends after 90 minutes
        log "this machine is slow: $((took / 60)) minutes so far; leaving out the tests marked long"
        again=()
    fi
    [ "$DURATIONS" = 0 ] || again+=(--durations)
    PATH="${PATH#"$VENV/bin:"}" STACK=cann9.1 bash run_tests.sh "${again[@]}" || status=1
    log "the default stack, once more"
    python tests/summary.py --wall "$took" "$results/tests.xml" || true
fi
exit "$status"

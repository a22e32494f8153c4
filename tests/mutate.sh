#!/usr/bin/env bash
# Change a module in many small ways, one at a time, and list the changes that its tests do not notice (mutmut).
#
# Usage:    bash tests/mutate.sh MODULE [TEST_FILE]
# Example:  bash tests/mutate.sh ascend_rl/loss/gspo.py
#           bash tests/mutate.sh ascend_rl/experts/eplb_search.py tests/test_eplb.py
# Writes:   nothing here: a copy of the repository in TMPDIR, where `mutmut show NAME` shows a change
# Hardware: 2 cores, 8 GiB
# Duration: 1 minute for 200 changes of gspo.py, 12 minutes for 900 of hdp.py
#
# TEST_FILE is tests/test_<module>.py unless given.
. "$(dirname "${BASH_SOURCE[0]}")/../internal/common.sh"
case "${1:--h}" in -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;; esac

cd "$ROOT"
use_python
module="$1" tests="${2:-tests/test_$(basename "$1")}"
[ -f "$module" ] || die "there is no $module below $ROOT"
[ -f "$tests" ] || die "there is no $tests below $ROOT; name the test file"
copy="$(mktemp -d)"
git ls-files -z | xargs -0 cp --parents -t "$copy"
cd "$copy"
sed -i '/^@njit/d' "$module" # plain Python: mutmut changes no function with a decorator
cat >setup.cfg <<EOF
[mutmut]
source_paths = ascend_rl
only_mutate = $module
pytest_add_cli_args_test_selection = $tests
also_copy =
$(printf '    %s\n' *)
EOF
ulimit -d $((8 << 20)) # KiB: a change may append forever
status=0
python -m mutmut run --max-children 2 || status=$?
python -m mutmut results
log "cd $copy/ for mutmut show NAME"
exit "$status"

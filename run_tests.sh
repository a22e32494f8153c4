#!/usr/bin/env bash
# Set everything up on a CPU, then run all tests.
#
# Usage:    bash run_tests.sh [PYTEST_ARGUMENTS...]
# Example:  bash run_tests.sh                                  # everything
#           bash run_tests.sh tests/test_gspo.py               # one file
#           bash run_tests.sh --ignore=tests/e2e               # without the real runs
# Hardware: 2 cores, 12 GiB, 12 GB of disk, Linux with Python 3.11; no accelerator
# Duration: about an hour
. "$(dirname "${BASH_SOURCE[0]}")/internal/common.sh"
case "${1:-}" in -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;; esac

cd "$ROOT"
bash build_project.sh --target cpu
use_python
python -m ascend_rl.tiny --out data/tiny
exec python -m pytest "$@"

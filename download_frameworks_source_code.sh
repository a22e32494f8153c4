#!/usr/bin/env bash
# Fetch the exact framework sources pinned in frameworks.lock into frameworks/.
#
# Usage:    ./download_frameworks_source_code.sh [--source auto|git|pypi] [--only NAME] [--deadline SECONDS]
#           ./download_frameworks_source_code.sh --only NAME --archive FILE
# Example:  ./download_frameworks_source_code.sh
#           ./download_frameworks_source_code.sh --source pypi --only vllm
# Sources:  auto (default) tries the git URL, its mirror, then the released wheel from PyPI. Git uses your
#           proxy, credentials and url.<mirror>.insteadOf settings; pip uses your index settings.
#           Everything is verified (commit, or sha256). Run it again after an interruption: finished
#           frameworks are kept. An archive (.tar.gz of the tag's files) is verified by the hash of the patched tree
#           when the patches are applied. MindSpeed is in git only; if unreachable, it is skipped with a message.
# Writes:   frameworks/
# Hardware: any Linux machine with git and Python 3.11; about 60 MB from PyPI, 150 MB from git.
# Duration: 5 seconds (PyPI, cached) to a few minutes.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case "${1:-}" in
  -h | --help)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
exec "${PYTHON:-python3}" "$here/patches/sources.py" download "$@"

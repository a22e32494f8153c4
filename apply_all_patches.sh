#!/usr/bin/env bash
# Apply patches/<framework>/*.patch to the pinned sources in frameworks/, all of them or none.
#
# Usage:    ./apply_all_patches.sh [--check] [--only NAME]
# Example:  ./apply_all_patches.sh
#           ./apply_all_patches.sh --check --only verl
# Effect:   runs `git am` on scratch copies first; the trees change only when every patch has applied and every
#           tree hash equals frameworks.lock. A second run says "already applied". Uncommitted work and
#           commits that are in no patch file are never overwritten: the script stops. If killed, run it again.
#           A tree that changes is replaced by a patched copy: shells that stand in it need `cd .` afterwards.
# --check   verifies the patch files (apply, export byte for byte, hashes, compile, trailers); changes nothing.
# Writes:   frameworks/
# Hardware: any Linux machine with git and Python 3.11; run ./download_frameworks_source_code.sh first.
# Duration: a second for each tree that changes, with a slow disk two; under half a second when already applied.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
action=apply
args=()
for arg in "$@"; do
  case "$arg" in
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --check) action=check ;;
    *) args+=("$arg") ;;
  esac
done
exec "${PYTHON:-python3}" "$here/patches/patchset.py" "$action" "${args[@]}"

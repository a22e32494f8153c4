#!/usr/bin/env bash
# Download a model's weights from ModelScope, or only what a run with random weights needs; run again to resume.
#
# Usage:    bash download_weights.sh MODEL --out DIR [--random-init]
# Example:  bash download_weights.sh Qwen/Qwen3-235B-A22B --out models/Qwen3-235B-A22B
#           bash download_weights.sh Qwen/Qwen3-32B --out models/Qwen3-32B --random-init
# Writes:   DIR
# Hardware: none; free disk: 440 GB for Qwen3-235B-A22B, 65 GB for Qwen3-32B
# Duration: 235B: an hour at 1 Gbit/s; with --random-init seconds
#
#   --out DIR       destination; with several nodes, storage shared by all of them
#   --random-init   configuration and tokenizer only
#
# Complete files are skipped, incomplete ones resume. At the end it checks that every file in the index is present.
. "$(dirname "${BASH_SOURCE[0]}")/internal/common.sh"

MODEL="" OUT="" RANDOM_INIT=0
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;;
    --out) OUT="${2:?--out needs a directory}"; shift ;;
    --random-init) RANDOM_INIT=1 ;;
    -*) die "unknown argument '$1'; see: bash download_weights.sh -h" ;;
    *) [ -z "$MODEL" ] || die "one model at a time, not '$MODEL' and '$1'"; MODEL="$1" ;;
    esac
    shift
done
[[ "$MODEL" == */* ]] || die "give a model as OWNER/NAME, for example Qwen/Qwen3-32B; it is '$MODEL'"
[ -n "$OUT" ] || die "give --out DIR"
need modelscope "pip install modelscope"

# Space needed for the weights alone, GB; files already downloaded count.
case "$MODEL" in
*235B-A22B*) needed=440 ;;
*32B*) needed=65 ;;
*30B-A3B*) needed=62 ;;
*3B*) needed=7 ;;
*) needed=0 ;;
esac
files=()
if [ "$RANDOM_INIT" = 1 ]; then
    needed=0
    files=(config.json generation_config.json tokenizer.json tokenizer_config.json vocab.json merges.txt)
fi
mkdir -p "$OUT"
have=$(($(du -s --block-size=1G "$OUT" | cut -f1)))
free=$(($(df --output=avail --block-size=1G "$OUT" | tail -n 1)))
[ $((have + free)) -ge "$needed" ] ||
    die "$MODEL needs $needed GB; $OUT has $have GB of it and $free GB free: free some space, or choose another --out"

run modelscope download --model "$MODEL" --local_dir "$OUT" "${files[@]}"

[ -s "$OUT/config.json" ] || die "$OUT has no config.json after the download; run the same command again"
index="$OUT/model.safetensors.index.json"
if [ "$RANDOM_INIT" = 0 ] && [ -e "$index" ]; then
    missing="$(grep -o '"[^"]*\.safetensors"' "$index" | tr -d '"' | sort -u | while read -r file; do
        [ -s "$OUT/$file" ] || echo "$file"
    done)"
    [ -z "$missing" ] || die "incomplete, run the same command again; missing: ${missing//$'\n'/ }"
fi
log "$MODEL is in $OUT"

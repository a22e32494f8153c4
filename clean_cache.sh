#!/usr/bin/env bash
# Show the caches that installs and runs have left on this machine, and remove the ones you confirm.
#
# Usage:    bash clean_cache.sh [--yes] [--dry-run] [GROUP...]
# Example:  bash clean_cache.sh                      # ask about each cache of the default groups
#           bash clean_cache.sh --dry-run            # only show locations and sizes
#           bash clean_cache.sh --yes operators      # after changing CANN
# Writes:   nothing; removes what you confirm
# Hardware: any
# Duration: seconds, longer if a cache is large
#
# Groups (default: pip compile vllm operators ray):
#   pip        downloaded packages of pip and uv
#   compile    torch.compile, Triton and torchair graphs
#   vllm       vLLM's compiled graphs
#   operators  operators that CANN and MindSpeed compiled: kernel_meta, atc_data, torch_extensions
#   ray        files of Ray sessions that have ended
#   hub        models and data sets downloaded from Hugging Face and ModelScope; only if named
#
# It looks only at the default cache locations of these tools. A location set by a variable (TRITON_CACHE_DIR, ...) is
# reported and left alone, as it may hold other things; so are links, other users' files, and caches in use by a running
# Ray.
. "$(dirname "${BASH_SOURCE[0]}")/internal/common.sh"

YES='' DRY_RUN='' GROUPS_WANTED=()
for arg in "$@"; do
    case "$arg" in
    -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;;
    --yes) YES=1 ;;
    --dry-run) DRY_RUN=1 ;;
    pip | compile | vllm | operators | ray | hub) GROUPS_WANTED+=("$arg") ;;
    *) die "unknown argument '$arg'; see: bash clean_cache.sh -h" ;;
    esac
done
[ ${#GROUPS_WANTED[@]} -gt 0 ] || GROUPS_WANTED=(pip compile vllm operators ray)
[ -d "${HOME:-}" ] && [ "$HOME" != / ] || die "HOME is '${HOME:-}', which is not a home directory"
[ -n "$YES$DRY_RUN" ] || [ -t 0 ] || die "no terminal to ask on: use --yes, or --dry-run to list the caches"

shopt -s nullglob
user="$(id -un)"
# Ray sessions in use: a running Ray's command lines and sockets contain the name of its session. The pattern does not match
# itself in grep's command line.
in_use="$(cat /proc/[0-9]*/cmdline /proc/net/unix 2>/dev/null | tr '\0' '\n' | grep -oE 'session_2[0-9]{3}-[0-9_-]+' | sort -u || true)"

# places GROUP: the default locations of a group, one per line.
places() {
    local cache="$HOME/.cache"
    case "$1" in
    pip) printf '%s\n' "$cache/pip" "$cache/uv" ;;
    compile) printf '%s\n' "/tmp/torchinductor_$user" "$HOME/.triton/cache" "$ROOT/.torchair_cache" ;;
    vllm) printf '%s\n' "$cache/vllm/torch_compile_cache" ;;
    operators)
        printf '%s\n' "$cache/torch_extensions" "$HOME/atc_data" /tmp/npu_cache
        printf '%s\n' "$HOME"/kernel_meta{,_temp_*} "$ROOT"/kernel_meta{,_temp_*}
        ;;
    ray) printf '%s\n' /tmp/ray/session_2* ;;
    hub) printf '%s\n' "$cache/huggingface/hub" "$cache/huggingface/datasets" "$cache/modelscope" ;;
    esac
}

# variables GROUP: what moves the caches of a group elsewhere.
variables() {
    case "$1" in
    pip) echo PIP_CACHE_DIR UV_CACHE_DIR XDG_CACHE_HOME ;;
    compile) echo TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR ;;
    vllm) echo VLLM_CACHE_ROOT XDG_CACHE_HOME ;;
    operators) echo TORCH_EXTENSIONS_DIR ACL_OP_COMPILER_CACHE_DIR ASCEND_CACHE_PATH ;;
    ray) echo RAY_TMPDIR ;;
    hub) echo HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE MODELSCOPE_CACHE XDG_CACHE_HOME ;;
    esac
}

# keep_reason GROUP PATH: why a location is left alone; nothing if it may be removed.
keep_reason() {
    if [ -L "$2" ]; then
        echo "a link"
    elif [ ! -O "$2" ]; then
        echo "belongs to $(stat -c %U "$2")"
    elif [ "$1" = ray ]; then
        if grep -qxF "${2##*/}" <<<"$in_use"; then echo "its Ray is running"; fi
    elif [[ "$1" != pip && "$1" != hub && -n "$in_use" ]]; then
        echo "a Ray is running, which may use it"
    fi
}

removed=0
for group in "${GROUPS_WANTED[@]}"; do
    for name in $(variables "$group"); do
        [ -z "${!name:-}" ] || log "$group: $name=${!name} is not looked at; clear it yourself if necessary"
    done
    while IFS= read -r path; do
        [ -e "$path" ] || [ -L "$path" ] || continue
        size="$(du -sh "$path" 2>/dev/null | cut -f1 || true)"
        reason="$(keep_reason "$group" "$path")"
        if [ -n "$reason" ]; then
            printf '%-10s %8s  %s (left alone: %s)\n' "$group" "$size" "$path" "$reason"
            continue
        fi
        printf '%-10s %8s  %s\n' "$group" "$size" "$path"
        [ -z "$DRY_RUN" ] || continue
        answer=y
        [ -n "$YES" ] || read -rp "           remove it? [y/N] " answer </dev/tty || answer=
        [[ "$answer" = [yY]* ]] || continue
        rm -rf --one-file-system -- "$path"
        removed=$((removed + 1))
    done < <(places "$group")
done
[ -n "$DRY_RUN" ] || log "removed: $removed"

#!/usr/bin/env bash
# train_gspo_qwen2_5_3b_8die_fsdp.sh without checkpoints: verl 0.7.1 has no server but the async one.
#
# verl 0.7.1 has no other server, so everything else is the same.
#
# Usage:    bash ray_start_npu.sh internal/train_gspo_qwen2_5_3b_8die_async_server.sh internal/qwen2_5_3b_env.sh \
#               [HYDRA_OVERRIDES...]
# Example:  NPU_SERIES=a2 bash ray_start_npu.sh internal/train_gspo_qwen2_5_3b_8die_async_server.sh \
#               internal/qwen2_5_3b_env.sh
#           SMOKE=1 bash ray_start_npu.sh internal/train_gspo_qwen2_5_3b_8die_async_server.sh internal/qwen2_5_3b_env.sh
# Writes:   OUTPUT_DIR (outputs/gspo_qwen2_5_3b_8die_async_server): train.log, metrics.jsonl, the report
# Hardware: one Atlas 800T A2 node of 8 NPUs with 64 GB
# Duration: not published
#
# Variables: as in train_gspo_qwen2_5_3b_8die_fsdp.sh, with the defaults below.
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
case "${1:-}" in -h | --help) . "$HERE/common.sh"; usage "${BASH_SOURCE[0]}"; exit 0 ;; esac
export SAVE_FREQ="${SAVE_FREQ:--1}"
export OUTPUT_DIR="${OUTPUT_DIR:-$HERE/../outputs/gspo_qwen2_5_3b_8die_async_server}"
exec bash "$HERE/train_gspo_qwen2_5_3b_8die_fsdp.sh" "$@"

#!/usr/bin/env bash
# train_gspo_qwen2_5_3b_8die_fsdp.sh with verl's engine workers, the successors of its legacy workers.
#
# Usage:    bash ray_start_npu.sh internal/train_gspo_qwen2_5_3b_8die_engine_workers.sh internal/qwen2_5_3b_env.sh \
#               [HYDRA_OVERRIDES...]
# Example:  NPU_SERIES=a2 bash ray_start_npu.sh internal/train_gspo_qwen2_5_3b_8die_engine_workers.sh \
#               internal/qwen2_5_3b_env.sh
#           SMOKE=1 bash ray_start_npu.sh internal/train_gspo_qwen2_5_3b_8die_engine_workers.sh internal/qwen2_5_3b_env.sh
# Writes:   OUTPUT_DIR (outputs/gspo_qwen2_5_3b_8die_engine_workers): train.log, metrics.jsonl, the report, checkpoints/
# Hardware: one Atlas 800T A2 node of 8 NPUs with 64 GB
# Duration: not published
#
# Variables: those of train_gspo_qwen2_5_3b_8die_fsdp.sh.
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

ARGS=(trainer.use_legacy_worker_impl=disable trainer.save_freq=-1)
recipe qwen2_5_3b gspo "$@"

#!/usr/bin/env bash
# GSPO on Qwen2.5-3B-Instruct with FSDP on one node: 2K prompts, 8K responses, GSM8K; Ulysses SP4, vLLM TP2.
#
# Usage:    bash ray_start_npu.sh internal/train_gspo_qwen2_5_3b_8die_fsdp.sh internal/qwen2_5_3b_env.sh [HYDRA_OVERRIDES...]
# Example:  NPU_SERIES=a2 bash ray_start_npu.sh internal/train_gspo_qwen2_5_3b_8die_fsdp.sh internal/qwen2_5_3b_env.sh
#           SMOKE=1 bash ray_start_npu.sh internal/train_gspo_qwen2_5_3b_8die_fsdp.sh internal/qwen2_5_3b_env.sh
# Writes:   OUTPUT_DIR (outputs/gspo_qwen2_5_3b_8die_fsdp): train.log, metrics.jsonl, the report, checkpoints/
# Hardware: one Atlas 800T A2 node of 8 NPUs with 64 GB (NPUS_PER_NODE=16: an A3 node)
# Duration: not published
#
# Variables: NNODES (1), NPUS_PER_NODE (8), MODEL_PATH, TRAIN_FILE and TEST_FILE (GSM8K), OUTPUT_DIR, WORKERS (enable: verl's
#            legacy workers; disable: its engine workers), SAVE_FREQ (10), OVERLONG (False: penalise responses near the
#            limit); SMOKE=1 runs it scaled down on a laptop (docs/rehearsal.md)
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

recipe qwen2_5_3b gspo "$@"

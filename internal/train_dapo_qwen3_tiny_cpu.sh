#!/usr/bin/env bash
# DAPO on the tiny Qwen3 of train_gspo_qwen3_tiny_cpu.sh: dynamic sampling, clip-higher, token-mean, overlong penalty.
#
# Usage:    bash ray_start_npu.sh internal/train_dapo_qwen3_tiny_cpu.sh internal/cpu_env.sh [HYDRA_OVERRIDES...]
# Example:  bash ray_start_npu.sh internal/train_dapo_qwen3_tiny_cpu.sh internal/cpu_env.sh trainer.total_training_steps=20
# Writes:   OUTPUT_DIR (outputs/dapo_qwen3_tiny_cpu): train.log, metrics.jsonl, the report
# Hardware: 2 cores, 8 GiB
# Duration: about 4 minutes, half of which is startup; later steps need more generation batches and take longer
#
# Variables: as in train_gspo_qwen3_tiny_cpu.sh, with the defaults below. algorithm.filter_groups.enable=False trains on all
#            groups.
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
case "${1:-}" in -h | --help) . "$HERE/common.sh"; usage "${BASH_SOURCE[0]}"; exit 0 ;; esac
export LOSS_MODE="${LOSS_MODE:-vanilla}" LOSS_AGG_MODE="${LOSS_AGG_MODE:-token-mean}"
export CLIP_RATIO_LOW="${CLIP_RATIO_LOW:-0.2}" CLIP_RATIO_HIGH="${CLIP_RATIO_HIGH:-0.28}"
export OUTPUT_DIR="${OUTPUT_DIR:-$HERE/../outputs/dapo_qwen3_tiny_cpu}"
ARGS=(
    # No limit except one pass over the data: at a reward of 0.97 only one group in nine varies.
    algorithm.filter_groups.enable=True
    algorithm.filter_groups.metric=acc
    algorithm.filter_groups.max_num_gen_batches=0
    actor_rollout_ref.actor.clip_ratio_c=10.0

    # Correct answers have 9 tokens; from 12 of the 16 on, up to half of the reward is deducted.
    reward.reward_manager.name=dapo
    +reward.reward_kwargs.max_resp_len=16
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True
    +reward.reward_kwargs.overlong_buffer_cfg.len=4
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5
    +reward.reward_kwargs.overlong_buffer_cfg.log=False
)
set -- "${ARGS[@]}" "$@"
exec bash "$HERE/train_gspo_qwen3_tiny_cpu.sh" "$@"

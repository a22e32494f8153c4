#!/usr/bin/env bash
# DAPO on the tiny Qwen3 of train_gspo_qwen3_tiny_cpu.sh: dynamic sampling, clip-higher, token-mean, overlong penalty.
#
# Usage:    bash ray_start_npu.sh internal/train_dapo_qwen3_tiny_cpu.sh internal/cpu_env.sh [HYDRA_OVERRIDES...]
# Example:  bash ray_start_npu.sh internal/train_dapo_qwen3_tiny_cpu.sh internal/cpu_env.sh trainer.total_training_steps=20
# Writes:   OUTPUT_DIR (outputs/dapo_qwen3_tiny_cpu): train.log, metrics.jsonl, the report
# Hardware: 2 cores, 8 GiB
# Duration: about 4 minutes, half of which is startup; later steps need more generation batches and take longer
#
# Variables: those of train_gspo_qwen3_tiny_cpu.sh, and OVERLONG (True: penalise responses near the limit).
#            algorithm.filter_groups.enable=False trains on all groups.
. "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

OVERLONG_LEN=4 OVERLONG_FACTOR=0.5   # correct answers have 9 tokens; from 12 of the 16 on, up to half of the reward is deducted
ARGS=(
    # No limit except one pass over the data: at a reward of 0.97 only one group in nine varies.
    algorithm.filter_groups.max_num_gen_batches=0
    algorithm.rollout_correction.rollout_is=null    # rollout and trainer agree in float32
    reward.reward_kwargs.overlong_buffer_cfg.enable=True
)
recipe qwen3_tiny dapo "$@"

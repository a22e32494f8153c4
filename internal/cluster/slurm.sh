#!/usr/bin/env bash
# A run under Slurm: ray_start_npu.sh once on each node of a job, submitted from a checkout that all nodes share.
#
# Usage:    sbatch [SBATCH_OPTIONS] internal/cluster/slurm.sh [FLAGS] TRAIN_SCRIPT [ENV_SCRIPT [HYDRA_OVERRIDES...]]
# Example:  sbatch --nodes=8 internal/cluster/slurm.sh --restarts 3 \
#               internal/train_gspo_qwen3_235b_128die_true_weight.sh internal/qwen3_235b_env.sh
#           sbatch --nodes=8 --time=30 internal/cluster/slurm.sh --check \
#               internal/train_gspo_qwen3_235b_128die_true_weight.sh internal/qwen3_235b_env.sh
# Writes:   what ray_start_npu.sh writes; slurm-JOB.out; a token in CLUSTER_TOKEN_DIR, removed at the end
# Hardware: see TRAIN_SCRIPT
# Duration: that of TRAIN_SCRIPT
#
# Slurm gives the nodes (SLURM_JOB_NODELIST, the first is the head) and each task's number (SLURM_NODEID, as RANK). A new
# token is made for each job unless CLUSTER_TOKEN_FILE names one. Three minutes before --time ends, the run has saved and
# ended (SAVE_BY), and the job goes back into the queue to continue; so it does after a lost node. What still runs a minute
# later gets SIGTERM from Slurm and stops.
#
# Variables: CLUSTER_TOKEN_DIR (HOME; all nodes must share it), CLUSTER_TOKEN_FILE, SRUN_ARGS (more arguments for srun,
#            such as those that choose a container image), REQUEUE=0 (end when the time is up), and those of
#            ray_start_npu.sh

#SBATCH --job-name=ascend_rl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=7-00:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
# Slurm runs a copy of this file.
# shellcheck source=internal/common.sh
. "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../..}/internal/common.sh"
case "${1:-}" in -h | --help) usage "${BASH_SOURCE[0]}" | grep -v ^SBATCH; exit 0 ;; esac
cd "$ROOT"
[ -n "${SLURM_JOB_NODELIST:-}" ] || die "this is no Slurm job; submit it: sbatch internal/cluster/slurm.sh TRAIN_SCRIPT"
need srun "it belongs to Slurm"

NNODES="$SLURM_JOB_NUM_NODES"
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
MASTER_ADDR="${hosts%%$'\n'*}"
export NNODES MASTER_ADDR
if [ -z "${CLUSTER_TOKEN_FILE:-}" ]; then
    CLUSTER_TOKEN_FILE="${CLUSTER_TOKEN_DIR:-$HOME}/.ascend_rl-$SLURM_JOB_ID.token"
    trap 'rm -f "$CLUSTER_TOKEN_FILE"' EXIT
    # One of this job may be left from before it was requeued; the token goes into no file or link of anybody else.
    rm -f "$CLUSTER_TOKEN_FILE"
    (umask 077; set -o noclobber; od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$CLUSTER_TOKEN_FILE")
fi
export CLUSTER_TOKEN_FILE

read -ra more <<<"${SRUN_ARGS:-}"
# The launchers end each other, and the head restarts without a node that is lost (RESTARTS): srun must not end all when
# one ends. As it starts all at the same time, a node that is not there soon will not come.
export NODES_DEADLINE_S="${NODES_DEADLINE_S:-300}"
# Slurm 22.05 and later say when the job ends. Processes need up to 45 s to end after the time for the last save.
if [ -n "${SLURM_JOB_END_TIME:-}" ]; then export SAVE_BY="${SAVE_BY:-@$((SLURM_JOB_END_TIME - 180))}"; fi
status=0
# shellcheck disable=SC2016
srun --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 "${more[@]}" \
    bash -c 'RANK="$SLURM_NODEID" exec bash ray_start_npu.sh "$@"' bash "$@" || status=$?
# 75: the time is up, and a step was saved since the start.
if [ "$status" = 75 ] && [ "${REQUEUE:-1}" = 1 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"

#!/usr/bin/env bash
# What a pod of internal/cluster/kubernetes.yaml runs: ray_start_npu.sh, once the head's name is known.
#
# Usage:    bash internal/cluster/kubernetes.sh [FLAGS] TRAIN_SCRIPT [ENV_SCRIPT [HYDRA_OVERRIDES...]]
# Example:  see internal/cluster/kubernetes.yaml
# Writes:   what ray_start_npu.sh writes
# Hardware: see TRAIN_SCRIPT
# Duration: that of TRAIN_SCRIPT
#
# Variables: JOB_COMPLETION_INDEX (Kubernetes sets it; RANK), MASTER_ADDR (the name of pod 0), NNODES, CLUSTER_TOKEN_FILE,
#            NODES_DEADLINE_S (1800: longest wait for that name), and those of ray_start_npu.sh
. "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
case "${1:-}" in -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;; esac
export RANK="${JOB_COMPLETION_INDEX:?Kubernetes sets it in the pods of an indexed Job}"
: "${MASTER_ADDR:?the name of pod 0, as in internal/cluster/kubernetes.yaml}"

# A pod has a name once it has an address; the others may be earlier.
until getent ahosts "$MASTER_ADDR" >/dev/null; do
    [ "$SECONDS" -lt "${NODES_DEADLINE_S:-1800}" ] ||
        die "after $SECONDS s there is no address for $MASTER_ADDR; see: kubectl get pods -o wide"
    sleep 1
done
exec bash "$ROOT/ray_start_npu.sh" "$@"

#!/usr/bin/env bash
# Start Ray on one node or many, run a training script on it, and stop everything that was started.
#
# Usage:    bash ray_start_npu.sh [FLAGS] TRAIN_SCRIPT [ENV_SCRIPT [HYDRA_OVERRIDES...]]      the same on each node
#           bash ray_start_npu.sh --status | --stop [--run-name RUN]
# Example:  bash ray_start_npu.sh internal/train_gspo_qwen3_tiny_cpu.sh internal/cpu_env.sh
#           bash ray_start_npu.sh --cluster cluster.env --dry-run internal/train_gspo_qwen3_tiny_cpu.sh
# Writes:   OUTPUT_DIR (train.log, metrics, checkpoints, the report) and LOG_DIR
# Hardware: see TRAIN_SCRIPT; a CPU is enough for internal/*_cpu.sh
# Duration: that of TRAIN_SCRIPT, plus 10 seconds; with several nodes 10 more once all have joined
#
#   --cluster FILE       settings as lines KEY=VALUE; the same file serves all nodes
#   --dry-run            print what this node would do, or what is wrong, and start nothing (also: DRY_RUN=1)
#   --check              start all as for the run, check nodes, dies and links instead of training, and stop
#   --status, --stop     this user's runs on this node; stopping any node ends the run on all
#
# Settings: a variable (NNODES=8), a flag (--nnodes 8) or a line of the cluster file. Flags override variables,
# and variables override the file. See docs/launch.md.
#   NODES                addresses of all nodes, the head's first: 10.0.0.1,10.0.0.2; gives NNODES and MASTER_ADDR
#   NNODES               number of nodes (default WORLD_SIZE, else 1); fewer than in NODES: the others are spare ones
#   MASTER_ADDR          the head's address; a node that has it, or has RANK=0, is the head, others are workers
#   SOCKET_IFNAME        this node's interface (eth0) or its subnet (10.0.0.0/24); default: that of NODES, MASTER_ADDR,
#                        or of the route to MASTER_ADDR
#   NPUS_PER_NODE        workers to run on each node, as Ray's resource "NPU" (default: /dev/davinci*, else 1)
#   CLUSTER_TOKEN_FILE   file with the secret of all nodes, mode 600 (or the variable CLUSTER_TOKEN); make one with
#                        (umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > FILE)
#   RAY_PORT             Ray's port on the head (default MASTER_PORT, else 6379; one node: a free one)
#   LAUNCH_PORT          port on which the launchers meet (default RAY_PORT + 1)
#   RUN_NAME, LOG_DIR    name of the run (default: that of OUTPUT_DIR) and logs of its nodes (default logs/RUN_NAME)
#   OUTPUT_DIR           train.log and metrics (default outputs/<name of TRAIN_SCRIPT without train_>)
#   DASHBOARD_PORT       start Ray's dashboard (default: none), on DASHBOARD_HOST (default 127.0.0.1)
#   RAY_NUM_CPUS         CPUs Ray may hand out on a node (default 8 + 8 for each NPU: its actors mostly wait)
#   RAY_OBJECT_STORE     bytes of Ray's object store (default: Ray's own on NPU nodes, else 200 MB)
#   RAY_START_ARGS       more arguments for `ray start`
#   NODES_DEADLINE_S, RAY_DEADLINE_S, LOST_DEADLINE_S
#                        longest wait for the other nodes and for Ray, longest silence of a node (1800, 900, 60)
#   RUN_DEADLINE_S, STALL_DEADLINE_S, START_DEADLINE_S
#                        longest run, time between steps, time to the first step; 0 means no limit (0, 600, 900;
#                        on NPU nodes 0, 14400, 14400)
#   RESTART_SERVERS=0    let the run end when a vLLM server dies (default 1: start that server again)
#   SERVER_DEADLINE_S    longest time of a vLLM server to its next token, 0 means no limit (600)
#   SAVE_BY              time by which the last step is saved and the run ends, with status 75: seconds from the start, or
#                        2026-11-27T18:00, or @SECONDS since 1970; the same command resumes
#   SAVE_GRACE_S         after SIGTERM, time to save the step that is being trained (0: stop at once); a second one stops
#   ALERT                shell command that is called with a JSON on stall, restart, nan, gap, die and end (docs/watching.md)
#   WATCH_DIES_S         time between two readings of npu-smi and hccn_tool on each node (60; 0: none; docs/watching.md)
#   RESTARTS             starts after a failure, each from the last checkpoint (0; docs/resilience.md)
#   VERBOSE=1, --verbose show all output instead of a line of progress; it is in OUTPUT_DIR/train.log either way
#   GAP_LIMIT            end the run if rollout and trainer probabilities differ by more in its first step (default
#                        0.05, in float32 0.0001; 0: never)
#   SKIP_PREFLIGHT=1     start without the checks
#   SKIP_REPORT=1        end without the table and the picture
#   SMOKE=1              rehearse TRAIN_SCRIPT on a tiny model, on this node, without NPUs (docs/rehearsal.md)
#
# Ctrl-C stops the run on all nodes. Only processes started by this script are stopped.
. "$(dirname "${BASH_SOURCE[0]}")/internal/common.sh" || exit 130 # a Ctrl-C ended dirname
case "${1:-}" in -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;; esac

# CANN's scripts read unset variables.
set +eu
for file in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
    # shellcheck disable=SC1090
    [ ! -f "$file" ] || . "$file"
done
set -eu
use_python
. "$ROOT/internal/smoke_env.sh"
if [[ "${SMOKE:-0}" =~ ^(1|[Tt]rue|TRUE)$ ]]; then smoke_environment "$@"; fi

# In long-lived actors glibc's malloc fragments memory and keeps it; jemalloc returns it.
for file in /usr/local/lib/libjemalloc.so.2 /usr/lib/*-linux-gnu/libjemalloc.so.2 /usr/lib64/libjemalloc.so.2; do
    if [ -f "$file" ] && [[ "${LD_PRELOAD:-}" != *jemalloc* ]]; then
        export LD_PRELOAD="$file${LD_PRELOAD:+:$LD_PRELOAD}"
    fi
done
# Ray and HCCL open thousands of sockets.
[ "$(ulimit -n)" = unlimited ] || [ "$(ulimit -n)" -ge 65536 ] || ulimit -Sn 65536 2>/dev/null || true

# A Ctrl-C while Python imports waits until the launcher can answer it.
wait=(env --block-signal=INT)
"${wait[@]}" true 2>/dev/null || wait=()
exec "${wait[@]}" python -m ascend_rl.launch.launch "$@"

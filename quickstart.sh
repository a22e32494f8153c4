#!/usr/bin/env bash
# Try the whole stack on a CPU: patched verl + vLLM + Ray train a tiny Qwen3 with GSPO until it can add.
#
# Usage:    bash quickstart.sh [--steps N] [--nproc N] [--evaluate]
# Example:  bash quickstart.sh
#           bash quickstart.sh --steps 20
# Writes:   .venv/, frameworks/, data/tiny/, OUTPUT_DIR (outputs/quickstart; new, empty, or an earlier quickstart's)
# Hardware: 2 cores, 8 GiB, 12 GB of disk, Linux with Python 3.11; no accelerator, no GPU driver
# Duration: on two idle cores 138 s the first time, downloads of 3 GB apart (2 minutes or more), 72 to 83 s again
#
#   --steps N   training steps (default 80)
#   --nproc N   trainer workers, each with its own vLLM server (default 1)
#   --evaluate  save, export and evaluate the model too, before and after: avg@4 and pass@4 (about 30 s more)
#
# STACK=cann9.1 bash quickstart.sh does the same with verl 0.9.1 and vLLM 0.23 (docs/stacks.md), with Python 3.12.
#
# Ends with a table, OUTPUT_DIR/report.json and OUTPUT_DIR/report.png. Ctrl-C stops everything.
# Succeeds if, after 80 steps or more, the reward is at least 0.8 in training and on held-out prompts, and rollout and
# trainer probabilities always agreed (within 5e-5; rounding alone can reach 1e-5 for single tokens).
started=$SECONDS
. "$(dirname "${BASH_SOURCE[0]}")/internal/common.sh" || exit 130 # a Ctrl-C ended dirname

STEPS=80 NPROC=1 EVALUATE=0
while [ $# -gt 0 ]; do
    case "$1" in
    --steps) STEPS="${2:-}"; shift 2 || die "--steps needs a number" ;;
    --nproc) NPROC="${2:-}"; shift 2 || die "--nproc needs a number" ;;
    --evaluate) EVALUATE=1; shift ;;
    -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;;
    *) die "unknown argument '$1'; see: bash quickstart.sh -h" ;;
    esac
done
for value in "$STEPS" "$NPROC"; do
    [[ "$value" =~ ^[1-9][0-9]*$ ]] || die "--steps and --nproc take a positive number, not '$value'"
done

cd "$ROOT"
log "1/3 sources, patches, environment"
bash build_project.sh --target cpu
use_python
adopt=()
if [ -z "${OUTPUT_DIR:-}" ]; then OUTPUT_DIR="$ROOT/outputs/quickstart" adopt=(--adopt); fi
export OUTPUT_DIR RUN_KIND=quickstart
python -m ascend_rl.settings.claim "$RUN_KIND" "$OUTPUT_DIR" "${adopt[@]}"
log "2/3 the tiny Qwen3 and its task"
python -m ascend_rl.tiny --out "$STACK_DATA/tiny"
export STEPS NPUS_PER_NODE="$NPROC" SKIP_REPORT=1 RUN_DEADLINE_S="${RUN_DEADLINE_S:-$((600 + 10 * STEPS))}"
export START_DEADLINE_S="${START_DEADLINE_S:-400}" STALL_DEADLINE_S="${STALL_DEADLINE_S:-120}"
log "3/3 GSPO, $STEPS steps on $NPROC worker(s); the log is $OUTPUT_DIR/train.log"
saving=()
if [ "$EVALUATE" = 1 ]; then
    rm -rf "$OUTPUT_DIR"/{checkpoints,evaluation,model}  # of an earlier quickstart
    saving=("trainer.save_freq=$STEPS")
fi
bash ray_start_npu.sh internal/train_gspo_qwen3_tiny_cpu.sh internal/cpu_env.sh "${saving[@]}"
if [ "$EVALUATE" = 1 ]; then
    log "export and evaluation"
    python -m ascend_rl.export "$OUTPUT_DIR" --out "$OUTPUT_DIR/model"
    . internal/cpu_env.sh
    for step in 0 "$STEPS"; do
        model="$([ "$step" = 0 ] && echo "$STACK_DATA/tiny/model" || echo "$OUTPUT_DIR/model")"
        python -m ascend_rl.evaluate "$model" --data "$STACK_DATA/tiny/val.parquet" --n 4 --temperature 1 --top-p 1 \
            --max-tokens 16 --out "$OUTPUT_DIR/evaluation/$step" -- --dtype float32 --max-model-len 64
    done
fi
python -m ascend_rl.report "$OUTPUT_DIR" --wall $((SECONDS - started)) --max-probs-diff 5e-5 \
    --min-reward "$([ "$STEPS" -ge 80 ] && echo 0.8 || echo 0)"

"""Report a rehearsal: what it replaced in the recipe, what ran how often, memory, rollout against trainer.

    python -m ascend_rl.rehearsal internal/train_gspo_qwen3_32b_64die_true_weight.sh outputs/gspo_qwen3_...

ray_start_npu.sh runs it at the end of a run with SMOKE=1. It counts what the processes recorded on the
software NPU (OUTPUT_DIR/record, one file for each process): calls of operators, replays of graphs,
collectives, memory that sleep took and wake-up brought back. On a real NPU there are no such files, and the
counts are left out. What was replaced is the difference between the recipe's arguments with and without
SMOKE=1. Also writes OUTPUT_DIR/rehearsal.json. See docs/rehearsal.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ascend_rl.recipe.report import read_metrics

# What counts as a sign of a feature: (what it is, where it is counted, names).
SIGNS = (
    ("decode graphs replayed", "graphs", ("replays",)),
    ("attention parameters updated in graphs", "graphs", ("updates",)),
    ("memory ranges woken after sleep", "woken", ()),
    ("attention over the paged cache", "calls", ("npu_fused_infer_attention_score", "_npu_paged_attention")),
    ("flash attention of the trainer", "calls", ("npu_fusion_attention",)),
    ("its backward, in rings", "calls", ("npu_fusion_attention_grad",)),
    ("fused updates of ring attention", "calls", ("npu_ring_attention_update",)),
    ("fused rotary embedding", "calls", ("npu_rotary_mul", "npu_rotary_position_embedding")),
    ("fused SwiGLU", "calls", ("npu_swiglu",)),
    ("fused AdamW of the swapped optimizer", "calls", ("npu_apply_fused_adamw_v2",)),
    (
        "gradients of weights added in place",
        "calls",
        ("npu_matmul_add_fp32", "_npu_matmul_add_fp32", "npu_groupmatmul_add_fp32"),
    ),
    ("products with reduce-scatter, FlashComm1", "calls", ("npu_mm_reduce_scatter_base",)),
    ("weights prefetched", "calls", ("npu_prefetch",)),
    ("grouped products of experts", "calls", ("npu_grouped_matmul", "npu_gmm")),
    ("tokens dispatched by MC2", "calls", ("npu_moe_distribute_dispatch_v2",)),
    ("all-to-all", "collectives", ("hccl::alltoall",)),
    ("sends of pipelines and rings", "collectives", ("hccl::send",)),
    ("all-reduces", "collectives", ("hccl::allreduce",)),
)
# Metrics by which features tell what they did.
METRICS = (
    "dapo/",
    "eplb/",
    "hdp/",
    "sam/",
    "spec_decode/",
    "rollout_rebalance/",
    "actor/gspo/",
    "data_rebalance/",
)
PROBS_DIFF = "training/rollout_probs_diff_"


def records(directory: Path) -> list[dict]:
    """What each process wrote; empty where none did, as on a real NPU."""
    return [json.loads(file.read_text()) for file in sorted(directory.glob("[0-9]*.json"))]


def count(found: Iterable[dict]) -> dict[str, int]:
    """How often each sign was seen, over all processes."""
    totals: dict[str, Counter] = {"graphs": Counter(), "calls": Counter(), "collectives": Counter()}
    woken = 0
    for record in found:
        woken += record["woken"]
        for part, total in totals.items():
            total.update(record[part])
    return {
        what: sum(totals[part][name] for name in names) if names else woken for what, part, names in SIGNS
    }


def peaks(found: Iterable[dict]) -> dict[str, float]:
    """Largest peak of a process, MB, by what the process is: "trainer", "rollout"."""
    most: dict[str, float] = {}
    for record in found:
        kind = "rollout" if "VLLM" in record["process"] else "trainer"
        most[kind] = max(most.get(kind, 0.0), *(peak / 1e6 for peak in record["peak_bytes"].values()), 0.0)
    return most


def arguments(script: str, smoke: bool) -> dict[str, str]:
    """A recipe's Hydra overrides, the last of each key; "" for one that was removed.

    Raises:
        SystemExit: the recipe refuses a dry run.
    """
    environment = os.environ | {"DRY_RUN": "1", "SMOKE": str(int(smoke))}
    for name in ("NNODES", "NPUS_PER_NODE"):
        environment.pop(name, None)
    ran = subprocess.run(["bash", script], env=environment, text=True, capture_output=True)
    if ran.returncode:
        sys.exit(f"{script}: {ran.stderr.strip()}")
    found: dict[str, str] = {}
    for argument in json.loads(ran.stdout)["args"]:
        key, _, value = argument.partition("=")
        found[key.lstrip("+~")] = "" if key.startswith("~") else value
    return found


def replaced(script: str) -> list[tuple[str, str, str]]:
    """(key, value of the recipe, value of the rehearsal) of what SMOKE=1 changes."""
    recipe, rehearsal = arguments(script, False), arguments(script, True)
    return [
        (key, recipe.get(key, "default"), rehearsal.get(key) or "left out")
        for key in rehearsal
        if rehearsal[key] != recipe.get(key)
    ]


def show(script: str, report: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=False)
    table = Table(
        "replaced", "recipe", "rehearsal", title=f"{Path(script).name}: sizes", title_justify="left"
    )
    for key, before, after in report["replaced"]:
        table.add_row(key.removeprefix("actor_rollout_ref."), before[-40:], after[-40:])
    console.print(table)
    if report["counts"]:
        table = Table("on the software NPU", "times", title="what ran", title_justify="left")
        for what, times in report["counts"].items():
            table.add_row(what, f"{times:,}" if times else "never")
        for kind, megabytes in report["peak_mb"].items():
            table.add_row(f"peak memory of a {kind} process", f"{megabytes:.1f} MB")
        console.print(table)
    table = Table("metric of the last step", "", title="what the features tell", title_justify="left")
    for key, value in report["metrics"].items():
        table.add_row(key, f"{value:.3g}" if isinstance(value, float) else str(value))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_rl.rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", help="the training script that was rehearsed")
    parser.add_argument("output_dir", type=Path, help="its OUTPUT_DIR")
    options = parser.parse_args()
    rows = read_metrics(options.output_dir / "metrics.jsonl")
    found = records(options.output_dir / "record")
    last = rows[-1]
    report = {
        "replaced": replaced(options.script),
        "counts": count(found) if found else {},
        "peak_mb": peaks(found),
        "metrics": {key: last[key] for key in last if key.startswith((PROBS_DIFF, *METRICS))},
    }
    (options.output_dir / "rehearsal.json").write_text(json.dumps(report, indent=1))
    show(options.script, report)


if __name__ == "__main__":
    main()

"""Report a rehearsal: what it replaced in the recipe, what ran how often, memory, rollout against trainer.

    python -m ascend_rl.rehearsal internal/train_X.sh outputs/X
    python -m ascend_rl.rehearsal internal/train_X.sh outputs/X --environment internal/qwen3_32b_env.sh

ray_start_npu.sh runs it at the end of a run with SMOKE=1. It counts what the processes recorded on the
software NPU (OUTPUT_DIR/record, one file for each process): calls of operators, replays of graphs,
collectives, memory that sleep took and wake-up brought back. On a real NPU there are no such files, and the
counts are left out. What was replaced is the difference between the recipe's arguments with and without
SMOKE=1. Memory is compared with memory_plan's plan of the sizes that ran, which Hydra's configuration tells.
Writes OUTPUT_DIR/rehearsal.json too. See docs/rehearsal.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path

from ascend_rl.planning.rollout_memory import BLOCK_TOKENS
from ascend_rl.preflight.dry_run import Run, dry_run
from ascend_rl.preflight.lint_engines import plan_of
from ascend_rl.preflight.lint_setup import ROLLOUT, VLLM, Setup
from ascend_rl.preflight.verl_config import Resolved
from ascend_rl.recipe.report import read_metrics

# What counts as a sign of a feature: (what it is, where it is counted, names).
SIGNS = (
    ("decode graphs replayed", "graphs", ("replays",)),
    ("attention parameters updated in graphs", "graphs", ("updates",)),
    ("memory ranges woken after sleep", "woken", ("ranges",)),
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
    "actor/gspo/",
    "dapo/",
    "hdp/",
    "timing_s/data_rebalance/",
    "timing_s/rollout_rebalance/",
)
PROBS_DIFF = "training/rollout_probs_diff_"


def records(directory: Path) -> list[dict]:
    """What each process wrote; empty where none did, as on a real NPU."""
    return [json.loads(file.read_text()) for file in sorted(directory.glob("[0-9]*.json"))]


def kind(record: dict) -> str:
    """What a process is: "rollout" (vLLM's workers and engine cores), or "trainer"."""
    return "rollout" if "VLLM" in record["process"] else "trainer"


def count(found: list[dict]) -> dict[str, dict[str, int]]:
    """How often each sign was seen, over all processes of each kind."""
    totals: dict[str, Counter] = {}
    for record in found:
        seen = totals.setdefault(kind(record), Counter())
        for part in ("graphs", "calls", "collectives"):
            seen.update({(part, name): times for name, times in record[part].items()})
        seen["woken", "ranges"] += record["woken"]
    return {
        what: {of: sum(seen[part, name] for name in names) for of, seen in sorted(totals.items())}
        for what, part, names in SIGNS
    }


def peaks(found: list[dict]) -> dict[str, float]:
    """Largest peak of a process, MB, by what the process is; of a "die": of all its processes together."""
    most: dict[str, float] = {}
    for record in found:
        for of, own in ((kind(record), record["peak_bytes"]), ("die", record["die_peak_bytes"])):
            most[of] = max(most.get(of, 0.0), max(own.values(), default=0) / 1e6)
    return most


def planned(output_dir: Path) -> dict[str, float]:
    """What memory_plan expects of each of `peaks`, MB, in numbers of 16 bits; empty for what it cannot plan.

    The KV cache has the blocks that the rehearsal gives it, and not the rest of the die. Weights go to the
    rollout in buckets, of which the trainer has one on the die where processes can share memory.
    """
    from omegaconf import OmegaConf

    file = output_dir / "hydra/.hydra/config.yaml"
    if not file.exists():
        return {}
    config = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    setup = Setup(Run(env=dict(os.environ)), Resolved(config), {})
    plan = plan_of(setup)
    if not plan or not plan.training or not plan.rollout:
        return {}
    blocks = setup.number(f"{VLLM}.num_gpu_blocks_override", 0)
    cache = blocks * BLOCK_TOKENS * plan.rollout.kv_bytes_per_token
    bucket = setup.number(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", 0) << 20
    trainer = max(plan.training.peak_bytes, plan.sync_bytes - plan.rollout.weights_bytes + bucket)
    rollout = plan.rollout.weights_bytes + plan.rollout.prefill_bytes + cache
    die = max(trainer, rollout + plan.rollout.training_bytes, plan.sync_bytes + bucket)
    return {"trainer": trainer / 1e6, "rollout": rollout / 1e6, "die": die / 1e6}


def arguments(script: str, environment_script: str, smoke: bool) -> dict[str, str]:
    """A recipe's Hydra overrides after an environment script ("": none), the last of each key.

    A key that was removed has the value "".

    Raises:
        SystemExit: the recipe refuses a dry run.
    """
    environ = os.environ | {"SMOKE": str(int(smoke))}
    for name in ("NNODES", "NPUS_PER_NODE"):
        environ.pop(name, None)
    run = dry_run(Path(script), Path(environment_script) if environment_script else None, environ=environ)
    if not run.module:
        sys.exit(f"{script}: {run.errors.strip()}")
    found: dict[str, str] = {}
    for argument in run.args:
        key, _, value = argument.partition("=")
        found[key.lstrip("+~")] = "" if key.startswith("~") else value
    return found


def replaced(script: str, environment_script: str) -> list[tuple[str, str, str]]:
    """(key, value of the recipe, value of the rehearsal) of what SMOKE=1 changes."""
    recipe, rehearsal = (arguments(script, environment_script, smoke) for smoke in (False, True))
    return [
        (key, recipe.get(key, "default"), rehearsal.get(key) or "left out")
        for key in rehearsal
        if rehearsal[key] != recipe.get(key)
    ]


def show(script: str, report: dict) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    def table(title: str, *columns: str) -> Table:
        folded = (Column(column, overflow="fold") for column in columns)
        return Table(*folded, title=title, title_justify="left")

    console = Console()
    sizes = table(f"{Path(script).name}: what was replaced", "key", "recipe", "rehearsal")
    for key, before, after in report["replaced"]:
        sizes.add_row(key.removeprefix("actor_rollout_ref."), Path(before).name, Path(after).name)
    console.print(sizes)
    if report["counts"]:
        kinds = [of for of in report["peak_mb"] if of != "die"]
        ran = table("what ran", "on the software NPU", *(f"times in the {of}" for of in kinds))
        for what, times in report["counts"].items():
            ran.add_row(what, *(f"{times[of]:,}" if times[of] else "never" for of in kinds))
        console.print(ran)
        memory = table("peak memory, MB", "of a", "measured", "by memory_plan, 16 bits")
        for of, most in report["peak_mb"].items():
            plan = report["planned_mb"].get(of)
            memory.add_row(of, f"{most:.2f}", "not planned" if plan is None else f"{plan:.2f}")
        console.print(memory)
    told = table("what the features tell", "metric of the last step", "")
    for key, value in report["metrics"].items():
        told.add_row(key, f"{value:.3g}" if isinstance(value, float) else str(value))
    console.print(told)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_rl.rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", help="the training script that was rehearsed")
    parser.add_argument("output_dir", type=Path, help="its OUTPUT_DIR")
    parser.add_argument("--environment", default="", help="its environment script")
    options = parser.parse_args()
    rows = read_metrics(options.output_dir / "metrics.jsonl")
    found = records(options.output_dir / "record")
    last = rows[-1]
    report = {
        "replaced": replaced(options.script, options.environment),
        "counts": count(found) if found else {},
        "peak_mb": peaks(found),
        "planned_mb": planned(options.output_dir),
        "metrics": {key: last[key] for key in last if key.startswith((PROBS_DIFF, *METRICS))},
    }
    (options.output_dir / "rehearsal.json").write_text(json.dumps(report, indent=1))
    show(options.script, report)


if __name__ == "__main__":
    main()

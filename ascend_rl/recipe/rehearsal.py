"""Report a rehearsal: what it replaced in the recipe, what ran how often, memory, rollout against trainer.

    python -m ascend_rl.rehearsal internal/train_X.sh outputs/X
    python -m ascend_rl.rehearsal internal/train_X.sh outputs/X --environment internal/qwen3_32b_env.sh
    python -m ascend_rl.rehearsal --table outputs/X outputs/Y      # of earlier rehearsals, in Markdown

ray_start_npu.sh runs it at the end of a run with SMOKE=1. It counts what the processes recorded on the
software NPU (OUTPUT_DIR/record, one file for each process): calls of operators, replays of graphs,
collectives, memory that sleep took and wake-up brought back. On a real NPU there are no such files, and the
counts are left out. What features did, they count in OUTPUT_DIR/record/counts. What was replaced is the
difference between the recipe's arguments with and without SMOKE=1. Memory is compared with memory_plan's
plan of the sizes that ran, which Hydra's configuration tells. The largest gap between rollout and trainer is
compared with GAP_BAR in float32, where the rollout samples from all tokens.
Writes OUTPUT_DIR/rehearsal.json too. See docs/rehearsal.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path

from ascend_rl.estimate.rollout_memory import BLOCK_TOKENS
from ascend_rl.lint.dry_run import Run, dry_run
from ascend_rl.lint.memory import plan_of
from ascend_rl.lint.setup import ROLLOUT, VLLM, Setup
from ascend_rl.lint.verl_config import Resolved
from ascend_rl.process.counts import COUNTED, counted
from ascend_rl.recipe.report_figures import read_metrics
from ascend_rl.settings.metrics import FRESH, GAP_MAX
from ascend_rl.settings.numbers import whole

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
    "training/off_policy/",
    "training/rollout_probs_diff_",
)
CORRECTION = "rollout_corr/"
GAP_BAR = 1e-5  # in float32, whose rounding gives about 1e-6


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


def configuration(output_dir: Path) -> dict:
    """Hydra's configuration of the run; empty if there is none."""
    from omegaconf import OmegaConf

    file = output_dir / "hydra/.hydra/config.yaml"
    return OmegaConf.to_container(OmegaConf.load(file), resolve=True) if file.exists() else {}


def gap(rows: list[dict], rollout: dict) -> dict:
    """The largest difference between rollout and trainer in any step, and whether it should be below GAP_BAR.

    Args:
        rows: verl's metrics of each step.
        rollout: actor_rollout_ref.rollout of the run.

    Returns:
        "probability", and "log_prob" where importance weights tell it, of a token; where the trainer computes
        no old log-probs, "mean_log_prob" of a response. "met": whether all are within the bar, or None,
        and "why" they are not compared with it. Of an asynchronous run, "probability" is of responses that
        the newest weights generated, and "of stale ones" that of all, which no bar holds.
    """

    def largest(*keys: str, of=abs) -> float | None:
        return max((of(row[key]) for row in rows for key in keys if row.get(key) is not None), default=None)

    asynchronous = any(FRESH in row for row in rows)
    found = {
        "probability": largest(FRESH if asynchronous else GAP_MAX),
        "log_prob": largest(
            f"{CORRECTION}rollout_is_max",
            f"{CORRECTION}rollout_is_min",
            of=lambda w: abs(math.log(w or 1e-45)),
        ),
    }
    if asynchronous:
        del found["log_prob"]
    if found["probability"] is None:
        found["mean_log_prob"] = largest(f"{CORRECTION}log_ppl_diff_max", f"{CORRECTION}log_ppl_diff_min")
    found = {what: value for what, value in found.items() if value is not None}
    cut = [
        f"{key} {rollout[key]}" for key, off in (("top_k", -1), ("top_p", 1)) if rollout.get(key, off) != off
    ]
    why = ""
    if not found:
        why = "nothing was compared"
    elif rollout.get("dtype") != "float32":
        why = f"it ran in {rollout.get('dtype', 'bfloat16')}; SMOKE_DTYPE=float32 compares"
    elif cut:
        why = f"{' and '.join(cut)}: the rollout's probabilities are of the tokens left, the trainer's of all"
    met = None if why else max(found.values()) <= GAP_BAR
    stale = {"of stale ones": largest(GAP_MAX)} if asynchronous else {}
    return found | stale | {"bar": GAP_BAR, "met": met, "why": why}


def planned(config: dict) -> dict[str, float]:
    """What memory_plan expects of each of `peaks`, MB, in numbers of 16 bits; empty for what it cannot plan.

    The KV cache has the blocks that the rehearsal gives it, and not the rest of the die. Weights go to the
    rollout in buckets, of which the trainer has one on the die where processes can share memory.
    """
    if not config:
        return {}
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
    if report["features"]:
        did = table("what the features did", "counted over all processes", "switch", "times")
        for name, times in report["features"].items():
            did.add_row(*COUNTED[name], f"{times:,}" if times else "never")
        console.print(did)
    told = table("what the features tell", "metric of the last step", "")
    for key, value in report["metrics"].items():
        told.add_row(key, f"{value:.3g}" if isinstance(value, float) else str(value))
    console.print(told)
    console.print(verdict(report["gap"]))


def gaps(found: dict) -> list[str]:
    """What `gap` measured, in words."""
    return [f"{what} {value:.2g}" for what, value in found.items() if what not in ("bar", "met", "why")]


def verdict(found: dict) -> str:
    """
    >>> verdict({"probability": 1.2e-6, "bar": 1e-5, "met": True, "why": ""})
    'rollout and trainer: probability 1.2e-06 apart at most, within 1e-05: the same model'
    """
    apart = ", ".join(gaps(found)) or "nothing"
    end = {
        True: f"within {found['bar']}: the same model",
        False: f"MORE than {found['bar']}: not the same model",
        None: f"not compared with {found['bar']}: {found['why']}",
    }
    return f"rollout and trainer: {apart} apart at most, {end[found['met']]}"


TRAINED = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "ulysses_sequence_parallel_size": "SP",
}
ROLLED_OUT = {"tensor_model_parallel_size": "TP", "data_parallel_size": "DP", "expert_parallel_size": "EP"}


def layout(config: dict) -> str:
    """The dies, and the parallel sizes above 1 of training and of rollout."""
    actor, rollout = (config["actor_rollout_ref"][of] for of in ("actor", "rollout"))
    trainer, strategy, apart = config["trainer"], actor["strategy"], bool(rollout.get("nnodes"))
    dies = (rollout if apart else trainer)["n_gpus_per_node"]
    servers = dies // (rollout["tensor_model_parallel_size"] * rollout["data_parallel_size"])

    def above_1(sizes: dict, names: dict[str, str]) -> list[str]:
        return [f"{name}{sizes[key]}" for key, name in names.items() if (sizes.get(key) or 1) > 1]

    trained = [strategy, *above_1(actor["megatron"] if strategy == "megatron" else actor, TRAINED)]
    rolled_out = [f"{servers} x", *above_1(rollout, ROLLED_OUT)]
    where = f"{trainer['n_gpus_per_node']} + {dies}" if apart else dies
    return f"{where} dies: {' '.join(trained)}; {' '.join(rolled_out)}"


def markdown(reports: list[dict]) -> str:
    """A row for each rehearsal: what docs/rehearsal.md shows."""
    rows = ["| rehearsal | dies: trained on; rolled out on | s | graphs replayed | gap | counted |"]
    rows += ["| --- | --- | --- | --- | --- | --- |"]
    for report in reports:
        found = report["gap"]
        judged = {True: "within the bar", False: "**MISSED**", None: "not compared"}[found["met"]]
        did = [f"`{name}` {times:,}" for name, times in report["features"].items() if times]
        replays = sum(report["counts"].get("decode graphs replayed", {}).values())
        cells = (
            f"{report['recipe']}, {report['dtype']}",
            report["layout"],
            str(report["seconds"] or "-"),
            f"{replays:,}",
            f"{'; '.join(gaps(found))}: {judged}",
            ", ".join(did),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_rl.rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", nargs="?", help="the training script that was rehearsed")
    parser.add_argument("output_dir", nargs="?", type=Path, help="its OUTPUT_DIR")
    parser.add_argument("--environment", default="", help="its environment script")
    parser.add_argument("--seconds", type=whole(0), help="how long it took, for the table")
    parser.add_argument("--table", nargs="+", type=Path, metavar="OUTPUT_DIR", help="of earlier rehearsals")
    options = parser.parse_args()
    if options.table:
        print(markdown([json.loads((run / "rehearsal.json").read_text()) for run in options.table]))
        return
    if not options.output_dir:
        parser.error("give a training script and its OUTPUT_DIR, or --table")
    rows = read_metrics(options.output_dir / "metrics.jsonl")
    found = records(options.output_dir / "record")
    last, config = rows[-1], configuration(options.output_dir)
    rollout = config.get("actor_rollout_ref", {}).get("rollout", {})
    report = {
        "recipe": Path(options.script).stem.removeprefix("train_"),
        "dtype": rollout.get("dtype"),
        "layout": layout(config) if config else "",
        "seconds": options.seconds,
        "replaced": replaced(options.script, options.environment),
        "counts": count(found) if found else {},
        "peak_mb": peaks(found),
        "planned_mb": planned(config),
        "features": counted(options.output_dir / "record/counts"),
        "gap": gap(rows, rollout),
        "metrics": {key: last[key] for key in last if key.startswith(METRICS)},
    }
    (options.output_dir / "rehearsal.json").write_text(json.dumps(report, indent=1))
    show(options.script, report)


if __name__ == "__main__":
    main()

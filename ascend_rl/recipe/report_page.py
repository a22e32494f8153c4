"""The report of a run as one HTML page that needs no other file: to send, to keep, to compare runs.

Pictures are PNGs inside the page. Differences to the recipe are read from what Hydra and the launcher wrote;
warnings are rules about measured figures, each with its page of docs/.
"""

from __future__ import annotations

import base64
import io
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from ascend_rl.process.logs import by_step
from ascend_rl.recipe import report_figures, report_plots
from ascend_rl.recipe.report_figures import FINAL_STEPS
from ascend_rl.rollout import generations, slow_ranks
from ascend_rl.settings.metrics import ENTROPY, GAP_MAX, GAP_MEAN, PREEMPTED, REWARD

STYLE = """body{font:15px/1.5 sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #ccc;padding:.25em .6em;text-align:left}
td{overflow-wrap:anywhere}img{max-width:100%}
.figures{display:block;overflow-x:auto}.figures td{overflow-wrap:normal;white-space:pre}
.figures td:first-child{white-space:pre-wrap;min-width:8em}
pre{white-space:pre-wrap;overflow-wrap:anywhere;border-left:.3em solid #8888;padding-left:.7em}
.warning{border-left:.3em solid #d80;padding-left:.7em}
@media(prefers-color-scheme:dark){body{background:#222;color:#ddd}img{background:#fff}}"""
MOST_OF_DIES = 20
REQUEST_MEAN, REQUEST_MAX = (f"timing_s/agent_loop/generate_sequences/{one}" for one in ("mean", "max"))


def overrides(run: Path) -> tuple[list[str], list[str]]:
    """Hydra's overrides of a run: those of its recipe, and those given on the command line after it."""
    from omegaconf import OmegaConf

    file, launched = run / "hydra/.hydra/overrides.yaml", run / "run.json"
    words = list(OmegaConf.load(file)) if file.exists() else []
    given = json.loads(launched.read_text())["overrides"] if launched.exists() else []
    count = len(given) if words[len(words) - len(given) :] == given else 0
    return words[: len(words) - count], words[len(words) - count :]


def difference(run: Path) -> list[tuple[str, str, str]]:
    """(key, value of the recipe, value of the run) of what the command line, or SMOKE=1, changed."""
    values: dict[str, list[str]] = {}
    recipe, given = overrides(run)
    for word in [*recipe, *given]:
        key, _, value = word.partition("=")
        values.setdefault(key.lstrip("+~"), []).append("removed" if word.startswith("~") else value)
    new = {word.partition("=")[0].lstrip("+~") for word in given}
    changed = []
    for key, each in values.items():
        before = each[0] if len(each) > 1 else "default"
        if (len(each) > 1 or key in new) and before != each[-1]:
            changed.append((key, before, each[-1]))
    return changed


def median(rows: Sequence[dict], key: str) -> float:
    """The median over the steps that have a finite value; NaN if none has."""
    values = [row[key] for row in rows if key in row and math.isfinite(row[key])]
    return statistics.median(values) if values else math.nan


def warnings(rows: Sequence[dict], settings: Sequence[str]) -> Iterator[str]:
    """What the figures of a run say should be changed.

    Args:
        rows: of read_metrics.
        settings: Hydra overrides, to suggest no switch that is on.
    """
    steps = [row for row in rows if REWARD in row]
    steps = steps[1:] or steps  # the first one warms up

    def ratio(part: str, whole: str) -> float:
        return median(steps, part) / (median(steps, whole) or math.nan)

    def share(phase: str) -> float:
        return ratio(f"timing_s/{phase}", "timing_s/step")

    def on(*words: str) -> bool:
        return any(word in setting for word in words for setting in settings)

    idle = 1 - ratio(REQUEST_MEAN, REQUEST_MAX)
    if share("gen") > 0.6 and idle > 0.2:
        switches = {
            "data_rebalance.md": "" if on("data_rebalance=True") else "rollout.data_rebalance=True",
            "rollout_rebalance.md": ""
            if on("rollout_rebalance.enable=True")
            else "ROLLOUT_REBALANCE_ENABLE=1",
            "sam_decoding.md": "" if on("speculative_config.method") else "ENABLE_SAM=1",
        }
        advice = [f"{switch} (docs/{page})" for page, switch in switches.items() if switch]
        wait = (
            f"the rollout is {share('gen'):.0%} of a step, of which the mean request is idle for {idle:.0%}"
        )
        yield f"{wait}: {'switch on ' + ', '.join(advice) if advice else 'see docs/rollout_rebalance.md'}"
    if share("update_weights") > 0.1:
        yield f"weight sync is {share('update_weights'):.0%} of a step: see docs/weights.md"
    if share("old_log_prob") > 0.15 and not on("compute_old_log_prob=False"):
        yield (
            f"old log-probs are {share('old_log_prob'):.0%} of a step; with one update per step they are not "
            "needed: actor.compute_old_log_prob=False (docs/old_log_prob.md)"
        )
    if (preempted := median(steps, PREEMPTED)) > 0:
        yield (
            f"{preempted:.0f} times in a step a request is preempted, and computed again: raise "
            "rollout.gpu_memory_utilization or lower rollout.max_num_seqs (docs/memory_plan.md)"
        )
    if (cut := median(steps[-FINAL_STEPS:], "response_length/clip_ratio")) > 0.1:
        yield f"{cut:.0%} of the last responses are cut at data.max_response_length, and mostly score 0"
    if (batches := median(steps, "dapo/num_gen_batches")) > 3:
        yield f"a step needs {batches:.0f} generation batches to fill its groups: see docs/dapo.md"
    early, late = steps[:FINAL_STEPS], steps[-FINAL_STEPS:]
    if len(steps) >= 4 * FINAL_STEPS:
        if median(late, ENTROPY) < 0.1 * median(early, ENTROPY):
            yield "entropy fell to less than a tenth: look at validation, the policy may have collapsed"
        if median(late, GAP_MEAN) > 3 * median(early, GAP_MEAN):
            yield "the rollout/trainer probability gap tripled: see docs/launch.md for likely causes"
    for key in ("actor/grad_norm", GAP_MAX, REWARD):
        if bad := [row["step"] for row in rows if key in row and math.isnan(row[key])]:
            yield f"{key} is not a number in step {', '.join(map(str, bad[:5]))}"


def picture(runs: list[tuple[str, list[dict]]], panels: Sequence, title: str) -> str:
    file = io.BytesIO()
    report_plots.plot(runs, file, panels)
    return f'<img alt="{title}" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'


def grid(kind: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f'<table class="{kind}">{line(head, "th")}{"".join(line(row, "td") for row in rows)}</table>'


def samples(run: Path, most: int = 40) -> Iterator[str]:
    """The responses that a run kept, of at most so many steps, evenly spaced, the last one first."""
    found = by_step(run / generations.FILE)
    steps = sorted(found)
    shown = {steps[round(i * (len(steps) - 1) / max(most - 1, 1))] for i in range(most)} if steps else set()
    for step in sorted(shown, reverse=True):
        yield f"<details><summary>step {step}</summary>"
        for each in found[step]:
            about = f"{', '.join(each['kinds'])}: score {each['score']:g}, {each['tokens']} tokens"
            yield f"<p>{escape(about)}</p>"
            yield from (f"<pre>{escape(each[name])}</pre>" for name in ("prompt", "response"))
        yield "</details>"


def of_dies(dies: dict) -> Iterator[str]:
    """What report_figures.dies found."""
    heat = [(node, f"{celsius:.0f}") for node, celsius in dies["highest_temperature_c"].items()]
    yield grid("dies", ["node", "highest temperature of a die (C)"], heat)
    yield from (f'<p class="warning">{escape(text)}</p>' for text in dies["warnings"][-MOST_OF_DIES:])
    if (more := len(dies["warnings"]) - MOST_OF_DIES) > 0:
        yield f"<p>and {more} earlier ones, in dies.jsonl</p>"


def page(
    directories: Sequence[Path],
    rows: Sequence[list[dict]],
    wall_s: float | None,
    prediction: dict[str, float] | None = None,
    dies: dict | None = None,
) -> str:
    """The page of the first run, compared with the others.

    Args:
        directories, rows: of each run, and what read_metrics gives for it.
        wall_s, prediction: seconds that the first run took, and what was predicted for a step of it.
        dies: of report_figures.dies for it.
    """
    names = [directory.resolve().name for directory in directories]
    runs = list(zip(names, rows, strict=True))
    walls = [(wall_s, prediction)] + [(None, None)] * (len(names) - 1)
    columns = [
        dict(report_figures.lines(report_figures.summarise(of, *more)))
        for of, more in zip(rows, walls, strict=True)
    ]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    found = list(warnings(rows[0], sum(overrides(directories[0]), [])))
    changed, engines = difference(directories[0]), report_plots.of_engines(rows[0])
    times = by_step(directories[0] / slow_ranks.FILE).values()
    slow = report_plots.heat_maps([line for of in times for line in of])
    lines = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',  # phones lay out for a desk otherwise
        f"<title>{escape(names[0])}</title>",
        f"<style>{STYLE}</style></head><body><h1>{escape(names[0])}</h1>",
        "<h2>Warnings</h2>",
        *(f'<p class="warning">{escape(text)}</p>' for text in found or ["none"]),
        "<h2>Figures</h2>",
        grid("figures", ["", *names], [[key, *(column.get(key, "-") for column in columns)] for key in keys]),
        picture(runs, report_plots.SUMMARY, "reward, response length, clipped share, step time"),
        picture(runs, report_plots.DETAILS, "probability gap, throughput, entropy, KL"),
        picture(runs, engines, "KV cache, preemptions, requests, MFU, drafts, graphs") if engines else "",
        picture(runs, slow, "which rank and which engine is slow") if slow else "",
        *(["<h2>Dies</h2>", *of_dies(dies)] if dies else ()),
        "<h2>Difference to the recipe</h2>",
        grid("changed", ["key", "recipe", "this run"], changed) if changed else "<p>none</p>",
        "<h2>Generations</h2>",
        *(list(samples(directories[0])) or ["<p>none</p>"]),
        "</body></html>\n",
    ]
    return "\n".join(lines)

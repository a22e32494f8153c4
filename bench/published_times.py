"""Every published time of a step, or of a part of it, next to what the model of step_time predicts.

A case is described by what was published about it: prompts, placement, graph sizes, switches, recipe. The
model sees only that. "fixed" rows gave a constant its value, so they show how well few constants fit many
figures; "held back" rows did not. Where the publication leaves something open, the case says what was
assumed (docs/step_time.md).

Invariant (tests/test_step_time.py): the document shows rows of this table, all those beyond BAR among them.
Cost: about 60 predictions, 20 s.

    python bench/published_times.py              # --lang zh: in Chinese
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import yaml
from published_recipes import setup

from ascend_rl.estimate import rollout_time, training_time
from ascend_rl.estimate.layouts import Training
from ascend_rl.estimate.rollout_time import Decoder, Engines, RolloutTime, draw_lengths
from ascend_rl.estimate.training_time import Trained
from ascend_rl.hdp import hdp
from ascend_rl.recipe import step_time
from ascend_rl.recipe.step_time import PROMPT, Step, predict, speculating, step_of

BAR = 0.15
GEARS = (4, 8, 16, 32, 64, 128, 256)
MEDIAN_32B = 5300.0  # response tokens of Qwen3-32B on DeepScaleR, fixed by 2444 s; none are published
# DeepSeek-V3 at TP2 with 128 servers, bf16: 37e9 of 671e9 parameters meet a token, 20.4e9 of them in 8 of 256
# experts, one or two on a die; KV of 576 values a layer. Its attention reads padded rows.
DSV3 = Decoder(
    61, rollout_time.MOE_LAYER_S, 21.8e9, 61 * 576 * 2, 2 * (16.6e9 / 2 + 20.4e9), 4 * 61 * 8 * 7168, 2, True
)
DSV3_ENGINES = Engines(128, True, GEARS[:5], 64, 1 << 40, placement="adjacent", attention=0.37)
DSV3_TRAINED = Trained(61, 37e9 / 61, 128 * (192 + 128) / 2, 2 * 576)


@dataclass(frozen=True)
class Row:
    """A published figure and the predicted one, in the same unit."""

    name: str
    published: float
    predicted: float
    fixed: bool = False

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def _rollout(step: Step, median: float = step_time.MEDIAN, **changes) -> RolloutTime:
    """The mean of SEEDS rollouts, of the fields that rows show."""
    engines = replace(step.engines, **changes)
    each = [
        rollout_time.rollout_time(step.lengths(seed, median), PROMPT, step.decoder, engines)
        for seed in range(step_time.SEEDS)
    ]
    mean = {
        name: float(np.mean([getattr(one, name) for one in each]))
        for name in ("seconds", "steps", "first_idle")
    }
    return replace(each[0], **mean)


def _placements(step: Step) -> list[Row]:
    """Of the first published stack: attention not balanced, collection on, no binding."""
    plain = {"attention": rollout_time.ATTENTION, "gears": GEARS}
    of = {n: replace(step, prompts=n) for n in (256, 384, 512)}
    adjacent, interleaved = plain | {"placement": "adjacent"}, plain | {"placement": "interleaved"}
    full = _rollout(of[512], **interleaved)
    balanced = _rollout(of[512], **interleaved | {"attention": rollout_time.BALANCED_ATTENTION})
    bound = _rollout(of[512], **interleaved, latency=rollout_time.GC_OFF_BOUND)
    one = _rollout(of[512], **adjacent | {"gears": GEARS[-1:]}).seconds
    gears = _rollout(of[512], **adjacent).seconds
    moves = _rollout(of[512], **adjacent, moves=True).seconds

    def seconds(n: int, how: dict, **more) -> float:
        return _rollout(of[n], **how | more).seconds

    return [
        Row("235B, 256 prompts, adjacent, s", 4698, seconds(256, adjacent), True),
        Row(
            "235B, 256 prompts, interleaved, s",
            3483,
            seconds(256, interleaved),
            True,
        ),
        Row("235B, 384 prompts, interleaved, s", 4200, seconds(384, interleaved)),
        Row("235B, 512 prompts, interleaved, s", 4914, full.seconds),
        Row("- its mean step, ms", 137.64, 1e3 * full.seconds / full.steps),
        Row(
            "235B, 256 prompts, 64 at a time, s",
            4952,
            seconds(256, adjacent, max_num_seqs=64),
        ),
        Row(
            "235B, 256 prompts, 24 at a time, s",
            8831,
            seconds(256, adjacent, max_num_seqs=24),
        ),
        Row(
            "235B, attention balanced, ratio",
            4153 / 4919,
            balanced.seconds / full.seconds,
            True,
        ),
        Row("235B, GC off and bound, s", 4192, bound.seconds),
        Row("- ratio", 4192 / 4852, bound.seconds / full.seconds),
        Row("235B, one graph, s", 10213, one),
        Row("235B, gears, s", 7841, gears),
        Row("- ratio", 1.30, one / gears),
        Row("235B, gears and moves, s", 6102, moves),
        Row("- ratio", 1.285, gears / moves),
    ]


def _deepseek() -> list[Row]:
    lengths = draw_lengths(512, 16, 0, 32768, 3000, 0.6, 0.6)
    one, gears, moves = (
        rollout_time.rollout_time(lengths, PROMPT, DSV3, replace(DSV3_ENGINES, **changes)).seconds
        for changes in ({"gears": GEARS[4:5]}, {}, {"moves": True})
    )
    row = (
        DSV3.row_flops / rollout_time.PEAK_FLOPS + DSV3.row_bytes / rollout_time.LINK_BYTES_S
    ) / rollout_time.ROW
    empty = 61 * DSV3.layer_s + DSV3.weights_bytes / (rollout_time.HBM_BYTES_S * rollout_time.STREAM)
    steps = [
        Row(
            f"DeepSeek-V3, a step of {n} rows, ms",
            ms,
            1e3 * (empty + n * row),
            n in (1, 64),
        )
        for n, ms in ((1, 54), (8, 57), (16, 61), (32, 67), (64, 76))
    ]
    return [
        *steps,
        Row("DeepSeek-V3, one graph, s", 6482, one, True),
        Row("DeepSeek-V3, gears, ratio", 2.27, one / gears, True),
        Row("DeepSeek-V3, moves, ratio", 1.25, gears / moves, True),
    ]


def _steps(grpo: Step) -> list[Row]:
    """Of the later published stack: collection off, attention balanced, a front end that admits 1000."""
    later = {"admitted": 1000, "placement": "least", "latency": rollout_time.GC_OFF}
    step = replace(grpo, engines=replace(grpo.engines, **later))
    found = predict(step)
    dapo = step_of(setup("dapo_qwen3_235b_128die_true_weight"))
    dapo = replace(dapo, engines=replace(dapo.engines, **later))
    return [
        Row("235B GRPO, rollout, s", 6638.49, found.phases["rollout"]),
        Row("235B GRPO, update, s", 797.93, found.phases["update"], True),
        Row("235B GRPO, step, s", 7833.16, found.seconds),
        Row("235B GRPO, tokens/s a card", 122, found.tokens_s_card),
        Row("235B DAPO, step, s", 6620, predict(dapo).seconds),
    ]


def _dense() -> list[Row]:
    rows, times = [], {"grpo": (2444, 2106, 1621), "dapo": (4562, 4109, 3261)}
    for name, (plain, sam, compiled) in times.items():
        step = replace(step_of(setup(f"{name}_qwen3_32b_32die_true_weight")), prompts=128)
        with_sam, title = speculating(step), name.upper()
        found = [
            step.generations * _rollout(one, MEDIAN_32B, **changes).seconds
            for one, changes in (
                (step, {}),
                (with_sam, {}),
                (with_sam, {"latency": rollout_time.NPUGRAPH_EX}),
            )
        ]
        first = name == "grpo"
        rows += [
            Row(f"32B {title}, rollout, s", plain, found[0], first),
            Row(f"32B {title}, SAM, s", sam, found[1]),
            Row("- ratio", sam / plain, found[1] / found[0]),
            Row(
                f"32B {title}, SAM and npugraph_ex, s",
                compiled,
                found[2],
            ),
            Row("- ratio to SAM", compiled / sam, found[2] / found[1], first),
        ]
    return rows


def _training(grpo: Step) -> list[Row]:
    """HDP's constants were fixed by the ratios, with another packer: the published one is not known."""
    lengths = grpo.lengths(0).reshape(-1) + round(PROMPT)
    trained = Trained.of(grpo.model, grpo.training.tp)
    eight, four = (
        training_time.update_seconds(
            trained, replace(grpo.training, cp=cp, max_token_len_per_gpu=34816 // cp), lengths
        )
        for cp in (8, 4)
    )
    rng = np.random.default_rng(0)
    short = np.exp(np.log(1400) + 0.62 * rng.standard_normal(1024)).astype(np.int64) + 74
    layout = Training(dies=256, tp=4, pp=8, cp=8, ep=32, max_token_len_per_gpu=4352)
    alone = training_time.update_seconds(DSV3_TRAINED, layout, short, dynamic=False)
    plans = [hdp.plan(short, 8, 1, 4352, hdp.DEEPSEEK_V3, rings=rings).makespan for rings in (False, True)]
    return [
        Row("235B, CP8 over CP4, ratio", 1654 / 1057, eight / four, True),
        Row("DeepSeek-V3, CP8, s", 178.2, alone),
        Row("DeepSeek-V3, HDP, gain over CP8", 1.39, plans[0] / plans[1], True),
        Row(
            "235B, HDP, gain over CP4",
            1.05,
            1 / step_time.hdp_share(grpo, lengths),
            True,
        ),
    ]


@cache
def rows() -> tuple[Row, ...]:
    grpo = step_of(setup("grpo_qwen3_235b_128die_true_weight"))
    return (*_placements(grpo), *_deepseek(), *_steps(grpo), *_dense(), *_training(grpo))


FILE = Path(__file__).with_suffix(".yaml")  # the words of the table, by language


def table(language: str = "en") -> str:
    """The comparison as a Markdown table."""
    words = yaml.safe_load(FILE.read_text(encoding="utf-8"))[language]
    fixed, held, beyond = words["kinds"]
    lines = [words["head"], "| --- | --- | --- | --- | --- |"]
    for row in rows():
        digits = 2 if row.published < 10 else 0
        name = words["names"].get(row.name, row.name)
        kind = (fixed if row.fixed else held) + (f", **{beyond}**" if abs(row.error) > BAR else "")
        lines.append(
            f"| {name} | {row.published:.{digits}f} | {row.predicted:.{digits}f} "
            f"| {row.error:+.1%} | {kind} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="print published times next to predicted ones")
    parser.add_argument("--lang", choices=("en", "zh"), default="en")
    print(table(parser.parse_args().lang), end="")

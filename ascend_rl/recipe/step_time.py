"""Predict where the time of a recipe's step goes, and what its switches would save.

The recipe is run dry with its environment script, its configuration is composed as Hydra would, and the sizes
in it go to the models of time, rollout_time and training_time. A switch is then a change
of these sizes, and its gain the difference of two predictions on the same lengths. How far to trust it:
docs/step_time.md, a table of all published times next to what is predicted for them
(bench/published_times.py).

A switch is listed only where the linter, asked about the recipe with it on, has nothing against it.

Cost: a dry run and about 0.4 s for each switch, and as much for the recipe.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import yaml

import ascend_rl.lint.lint  # noqa: F401  (it fills RULES)
from ascend_rl.estimate import rollout_time, training_time
from ascend_rl.estimate.layouts import Training
from ascend_rl.estimate.rollout_time import Decoder, Engines, RolloutTime, draw_lengths
from ascend_rl.estimate.training_time import Trained
from ascend_rl.hdp import hdp
from ascend_rl.lint import dry_run, verl_config
from ascend_rl.lint.memory import plan_of
from ascend_rl.lint.setup import ACTOR, ROLLOUT, RULES, VLLM, Setup
from ascend_rl.settings.model import Model
from ascend_rl.settings.numbers import real
from ascend_rl.settings.switch import CannotWork

# The lengths of DeepScaleR's responses by Qwen3-235B-A22B: median, and the deviation of log lengths between
# prompts and within the samples of one. Fitted together with ATTENTION to the published rollouts of 256
# prompts: times and idle shares, mean 7.2K tokens.
MEDIAN, BETWEEN, WITHIN = 5980.0, 0.59, 0.256
PROMPT = 73.7  # tokens on average, published
TOKENS_A_STEP = 1.3  # with SAM: GSM8K at 32k in docs/sam_decoding.md
SEEDS = 2
WITHOUT_EFFECT = ("options.idle", "parallel.rollout_servers")  # warnings that a switch does nothing


@dataclass(frozen=True)
class Step:
    """What the prediction of a recipe's step sees.

    Attributes:
        prompts, samples: in a batch of generation; ``generations``: how many batches a step generates.
        longest: tokens of a response.
        passes: log-prob passes of a step: reference, old log-probs.
    """

    model: Model
    training: Training
    decoder: Decoder
    engines: Engines
    prompts: int
    samples: int
    longest: int
    passes: tuple[str, ...] = ()
    generations: int = 1
    dynamic: bool = True
    hdp: bool = False

    def lengths(self, seed: int, median: float = MEDIAN) -> np.ndarray:
        return draw_lengths(self.prompts, self.samples, seed, self.longest, median, BETWEEN, WITHIN)


def step_of(s: Setup) -> Step:
    """The step of a resolved recipe.

    Raises:
        CannotWork: it trains with FSDP, or the memory planner does not know its model or layout.
    """
    plan = plan_of(s)
    if (
        plan is None
        or plan.rollout is None
        or not isinstance(plan.training and plan.training.layout, Training)
    ):
        raise CannotWork("only Megatron recipes of Qwen models on NPUs, in a legal layout, are modelled")
    rollout = plan.rollout.layout
    speculates = s.get(f"{VLLM}.speculative_config.method") is not None
    latency = 1.0
    if s.variable("ROLLOUT_DISABLE_GC"):
        latency = rollout_time.GC_OFF_BOUND if s.variable("CORE_BINDING") else rollout_time.GC_OFF
    if s.get(f"{VLLM}.additional_config.enable_npugraph_ex") and not plan.model.experts:
        latency *= rollout_time.NPUGRAPH_EX
    engines = Engines(
        servers=rollout.dp,
        lockstep=rollout.ep > 1,
        gears=tuple(s.graph_sizes),
        max_num_seqs=rollout.max_num_seqs,
        kv_tokens=plan.rollout.kv_tokens,
        placement="interleaved" if s.get(f"{ROLLOUT}.data_rebalance") else "least",
        moves=bool(s.variable("ROLLOUT_REBALANCE_ENABLE") or s.get(f"{ROLLOUT}.rollout_rebalance.enable")),
        attention=rollout_time.BALANCED_ATTENTION,  # of CANN 8.5
        latency=latency,
    )
    reference = s.get(f"{ACTOR}.use_kl_loss") or s.get("algorithm.use_kl_in_reward")
    old = s.get(f"{ACTOR}.compute_old_log_prob", True)
    step = Step(
        model=plan.model,
        training=plan.training.layout,
        decoder=Decoder.of(plan.model, rollout.tp, rollout.ep),
        engines=engines,
        prompts=s.number("data.gen_batch_size", 0) or s.number("data.train_batch_size"),
        samples=s.number(f"{ROLLOUT}.n"),
        longest=s.number("data.max_response_length"),
        passes=("reference log-prob",) * bool(reference) + ("old log-prob",) * bool(old),
        generations=2 if s.get("algorithm.filter_groups.enable") else 1,  # as published
        dynamic=s.dynamic,
        hdp=bool(s.variable("USE_HDP")),
    )
    return speculating(step, s.decode_tokens - 1) if speculates else step


def speculating(step: Step, drafted: int = 3) -> Step:
    """With SAM in batches of up to a quarter of max_num_seqs, as the recipes set it."""
    limit = step.engines.max_num_seqs // 4
    engines = replace(step.engines, tokens_a_step=TOKENS_A_STEP, drafted=drafted, speculation_rows=limit)
    return replace(step, engines=engines)


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step by phase, means over SEEDS draws of lengths, and the parts of the rollout."""

    phases: dict[str, float]
    rollout: dict[str, float]
    tokens_s_card: float

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


PARTS = ("layers", "weights", "rows", "attention", "prefill")


def hdp_share(step: Step, lengths: np.ndarray) -> float:
    """Time of an update by HDP's plan over that of plain CP."""
    layout, model = step.training, Trained.of(step.model, step.training.tp)
    token = 6 * model.parameters / layout.tp / (rollout_time.PEAK_FLOPS * training_time.TRAINING)
    cost = hdp.CostModel(
        token=token,
        pair=token * model.heads_width / model.parameters,
        ring_step=training_time.RING_STEP_S,
        ring_token=3 * model.kv_bytes / training_time.RING_BYTES_S,
        micro_batch=training_time.MICRO_BATCH_S,
    )
    sizes = (lengths, layout.cp, layout.dp, layout.max_token_len_per_gpu, cost)
    return hdp.plan(*sizes).makespan / hdp.plan(*sizes, rings=False).makespan


def predict(step: Step, median: float = MEDIAN) -> Prediction:
    """The step with responses of ``median`` tokens, half of them longer."""
    found: list[dict[str, float]] = []
    rollouts: list[RolloutTime] = []
    tokens = 0.0
    for seed in range(SEEDS):
        lengths = step.lengths(seed, median)
        rollout = rollout_time.rollout_time(lengths, PROMPT, step.decoder, step.engines)
        whole = lengths.reshape(-1) + round(PROMPT)
        trained = Trained.of(step.model, step.training.tp)
        update = training_time.update_seconds(trained, step.training, whole, step.dynamic)
        forward = training_time.log_prob_seconds(trained, step.training, whole, step.dynamic)
        if step.hdp and step.training.cp > 1:
            share = hdp_share(step, whole)
            update, forward = update * share, forward * share
        sync = training_time.sync_seconds(step.model, step.training, step.decoder.weights_bytes)
        found.append(
            {"rollout": step.generations * rollout.seconds}
            | dict.fromkeys(step.passes, forward)
            | {"update": update, "weight sync and offload": sync}
        )
        rollouts.append(rollout)
        tokens += whole.sum() / SEEDS
    phases = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    parts = {
        name: step.generations * float(np.mean([getattr(one, name) for one in rollouts]))
        for name in (*PARTS, "tail_s", "dropped_tokens")
    } | {"steps": float(np.mean([one.steps for one in rollouts]))}
    cards = step.training.dies / 2
    return Prediction(phases, parts, tokens / sum(phases.values()) / cards)


def _engines(**changes) -> Callable[[Step], Step]:
    return lambda step: replace(step, engines=replace(step.engines, **changes))


def smaller(step: Step) -> tuple[int, ...]:
    """The graph sizes, the smallest halved down to a multiple of TP, as recipes with moves have them."""
    gears = step.engines.gears
    while gears[0] > 4 and gears[0] % (2 * step.decoder.tp) == 0:
        gears = (gears[0] // 2, *gears)
    return gears


# What can be switched: how it is written, whether a recipe could have it and has it not, what changes.
SWITCHES: tuple[tuple[str, Callable[[Step], bool], Callable[[Step], Step]], ...] = (
    (
        "ROLLOUT_REBALANCE_ENABLE=1, with smaller graphs",
        lambda step: step.engines.lockstep and not step.engines.moves,
        lambda step: _engines(gears=smaller(step), moves=True)(step),
    ),
    (
        "rollout.data_rebalance=True",
        lambda step: step.engines.lockstep and step.engines.placement != "interleaved",
        _engines(placement="interleaved"),
    ),
    (
        "smaller graphs",
        lambda step: smaller(step) != step.engines.gears,
        lambda step: _engines(gears=smaller(step))(step),
    ),
    ("ENABLE_SAM=1", lambda step: not step.engines.speculation_rows, speculating),
    (
        "ROLLOUT_DISABLE_GC=1 CORE_BINDING=1",
        lambda step: step.engines.latency == 1,
        _engines(latency=rollout_time.GC_OFF_BOUND),
    ),
    (
        "ENABLE_NPUGRAPH_EX=1",
        lambda step: not step.model.experts and step.engines.latency > rollout_time.NPUGRAPH_EX,
        lambda step: _engines(latency=step.engines.latency * rollout_time.NPUGRAPH_EX)(step),
    ),
    ("USE_HDP=1", lambda step: step.training.cp > 1 and not step.hdp, lambda step: replace(step, hdp=True)),
    (
        "actor.compute_old_log_prob=False",
        lambda step: "old log-prob" in step.passes,
        lambda step: replace(step, passes=tuple(one for one in step.passes if one != "old log-prob")),
    ),
    ("actor.use_dynamic_bsz=True", lambda step: not step.dynamic, lambda step: replace(step, dynamic=True)),
)


def switched(name: str, recipe: Path, env: Path | None, overrides: Sequence[str]) -> Setup:
    """The recipe with the switch of SWITCHES on, nothing started; as it is where the name sets nothing."""
    words = [word.rstrip(",") for word in name.split() if "=" in word]
    variables = dict(word.split("=", 1) for word in words if word[0].isupper())
    keys = [f"actor_rollout_ref.{word}" for word in words if not word[0].isupper()]
    run = dry_run.dry_run(recipe, env, [*overrides, *keys], os.environ | variables)
    with mock.patch.dict(os.environ, run.env):  # for ${oc.env:...}
        return Setup(run, verl_config.resolve(run.module, run.args), {})


def objections(s: Setup) -> set[tuple[str, str]]:
    """What the linter has against a run: errors, and switches that do nothing in it."""
    found = [finding for rule in RULES for finding in rule(s)] if s.config else []
    unfit = [one for one in found if one.severity == "error" or one.check in WITHOUT_EFFECT]
    return {(one.check, one.where) for one in unfit}


def usable(recipe: Path, env: Path | None, overrides: Sequence[str]) -> Callable[[str], bool]:
    """Whether a switch of SWITCHES works in a recipe, by the linter's rules, which know the switch on."""
    plain = switched("", recipe, env, overrides)
    before = objections(plain)

    def works(name: str) -> bool:
        s = switched(name, recipe, env, overrides)
        return bool(s.run.module) and objections(s) <= before

    return works


def gains(
    step: Step, median: float = MEDIAN, works: Callable[[str], bool] = lambda name: True
) -> list[tuple[str, float]]:
    """(switch, seconds it saves alone) of those that work in the recipe, the largest first."""
    before = predict(step, median).seconds
    changed = [(name, change(step)) for name, could, change in SWITCHES if could(step) and works(name)]
    saved = [(name, before - predict(one, median).seconds) for name, one in changed]
    return sorted(saved, key=lambda pair: -pair[1])


def median_for(step: Step, mean: float) -> float:
    """The median of responses of ``mean`` tokens, by bisection; ``longest`` cuts off what would be longer."""
    low, high = 1.0, 8.0 * step.longest
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step.lengths(0, middle).mean() < mean else (low, middle)
    return low


def given(words: Sequence[str]) -> set[str]:
    """Overrides of a run, without paths, which depend on where it ran."""
    return {word for word in words if "/" not in word and not word.startswith("hydra.")}


def of_run(run: Path, mean: float) -> Prediction | None:
    """What is predicted for a run that the launcher started, with responses of ``mean`` tokens.

    Its recipe is run dry once more, in this environment. None unless that gives the overrides that the run
    had: it was a rehearsal, or variables or the recipe have changed. None too for what is not modelled, as on
    a CPU.

    Args:
        run: OUTPUT_DIR.
    """
    try:
        started = json.loads((run / "run.json").read_text())
        had = given(yaml.safe_load((run / "hydra/.hydra/overrides.yaml").read_text()))
        if {"trainer.device=cpu", "+trainer.device=cpu"} & had:
            return None
        env = Path(started["env_script"]) if started["env_script"] else None
        environ = os.environ | {"OUTPUT_DIR": str(run)}
        dry = dry_run.dry_run(Path(started["script"]), env, started["overrides"], environ)
        if given(verl_config.split_arguments(dry.args)[1]) != had:
            return None
        step = step_of(Setup(dry, verl_config.resolve(dry.module, dry.args), {}))
        return predict(step, median_for(step, mean))
    except (ValueError, OSError, ImportError, KeyError, TypeError):  # a report does without
        return None


def text(step: Step, found: Prediction, saved: list[tuple[str, float]]) -> list[str]:
    steps = found.rollout["steps"]
    lines = [f"step {found.seconds:.0f} s, {found.tokens_s_card:.0f} tokens/s a card of two dies"]
    lines += [
        f"  {name:26s} {value:7.0f} s {value / found.seconds:5.0%}" for name, value in found.phases.items()
    ]
    each = 1e3 * found.phases["rollout"] / step.generations / steps
    lines.append(f"rollout: {steps:.0f} decode steps of {each:.0f} ms, {step.generations} batch(es)")
    share = found.phases["rollout"]
    names = dict(
        zip(PARTS, ("layer latency", "reading weights", "rows", "attention", "prefill"), strict=True)
    )
    lines += [
        f"  {names[name]:26s} {found.rollout[name]:7.0f} s {found.rollout[name] / share:5.0%}"
        for name in PARTS
    ]
    lines.append(f"  half of the requests done   {found.rollout['tail_s']:6.0f} s before the end")
    dropped = found.rollout["dropped_tokens"]
    advice = "; fewer with LENGTH_SCHEDULER=1 (docs/length_scheduler.md)" if dropped else ""
    lines.append(f"  dropped by preemptions     {dropped / 1e6:6.1f} M tokens{advice}")
    lines.append("what a switch alone would save:")
    lines += [f"  {name:50s} {value:7.0f} s {value / found.seconds:6.1%}" for name, value in saved]
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_rl.step_time",
        description="Predict where the time of a step goes and what switches would save.",
        epilog="""Examples:
  R=internal/train_grpo_qwen3_235b_128die_true_weight.sh E=internal/qwen3_235b_env.sh
  python -m ascend_rl.step_time $R $E
  python -m ascend_rl.step_time $R $E data.train_batch_size=256 --median 5000

Starts nothing and writes nothing but the prediction. See docs/step_time.md.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a training script")
    parser.add_argument("env_script", nargs="?", metavar="ENV_SCRIPT", help="environment of the run")
    parser.add_argument("overrides", nargs="*", metavar="HYDRA_OVERRIDE", help="as given to ray_start_npu.sh")
    parser.add_argument(
        "--median", type=real(1), default=MEDIAN, help=f"response tokens; default {MEDIAN:.0f}"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_intermixed_args(argv)
    try:
        env = Path(arguments.env_script) if arguments.env_script else None
        run = dry_run.dry_run(Path(arguments.recipe), env, arguments.overrides, os.environ)
        if not run.module.startswith("verl"):
            raise CannotWork(f"{arguments.recipe} starts no training of verl")
        step = step_of(Setup(run, verl_config.resolve(run.module, run.args), {}))
        works = usable(Path(arguments.recipe), env, arguments.overrides)
        found, saved = predict(step, arguments.median), gains(step, arguments.median, works)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps({"phases": found.phases, "rollout": found.rollout, "saves": dict(saved)}, indent=1))
    else:
        print("\n".join(text(step, found, saved)))
    return 0

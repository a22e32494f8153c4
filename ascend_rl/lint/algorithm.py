"""Rules about the loss, the samples it is computed on, and the reward: what trains something else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ascend_rl.lint.setup import ACTOR, Setup, rule
from ascend_rl.loss import old_log_prob
from ascend_rl.rollout import dapo

GSPO_LOSSES = ("gspo", "gspo_token")


@rule(
    "algorithm.gspo_aggregation_unset",
    "error",
    "GSPO runs set loss_agg_mode explicitly",
    why="the patched verl honours loss_agg_mode, and its default is token-mean: long responses weigh more "
    "than in GSPO",
    fix=f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
)
def gspo_aggregation_unset(s):
    if s.get(f"{ACTOR}.policy_loss.loss_mode") in GSPO_LOSSES and f"{ACTOR}.loss_agg_mode" not in s.given:
        yield f"{ACTOR}.loss_agg_mode", "not set"


@rule(
    "algorithm.gspo_aggregation",
    "warning",
    "GSPO averages over responses: seq-mean-token-mean",
    why="it used to be ignored, now it is honoured: not the paper's objective",
    fix=f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
)
def gspo_aggregation(s):
    mode = s.get(f"{ACTOR}.loss_agg_mode")
    if (
        s.get(f"{ACTOR}.policy_loss.loss_mode") in GSPO_LOSSES
        and f"{ACTOR}.loss_agg_mode" in s.given
        and mode != "seq-mean-token-mean"
    ):
        yield f"{ACTOR}.loss_agg_mode", f"{mode} with GSPO"


@rule(
    "algorithm.clip_range",
    "warning",
    "clip bounds suit the ratio: about 3e-4 for GSPO, 0.2 for tokens",
    why="sequence ratios stay so close to 1 that bounds made for tokens never clip, and the other way round",
    fix="GSPO: clip_ratio_low=3e-4 clip_ratio_high=4e-4; token ratios: 0.2",
)
def clip_range(s):
    loss = s.get(f"{ACTOR}.policy_loss.loss_mode")
    for key in (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"):
        bound = s.get(key, 0.2)
        if isinstance(bound, int | float) and (
            bound > 0.02 if loss in GSPO_LOSSES else loss == "vanilla" and bound < 0.02
        ):
            yield key, f"{bound} with {loss}"


@rule(
    "algorithm.gspo_on_policy",
    "info",
    "GSPO makes several updates per step",
    why="with one, every sequence ratio is 1 and nothing is ever clipped",
    fix="lower ppo_mini_batch_size",
)
def gspo_on_policy(s):
    mini, train = s.number(f"{ACTOR}.ppo_mini_batch_size"), s.number("data.train_batch_size")
    if s.get(f"{ACTOR}.policy_loss.loss_mode") in GSPO_LOSSES and mini >= train:
        yield f"{ACTOR}.ppo_mini_batch_size", f"{mini} of {train}: one update"


@rule(
    "algorithm.filter_groups",
    "error",
    "filter_groups is used with settings that let groups vary and can fill a batch",
    why="otherwise dynamic sampling stops the run, at its start or after its last generation batch",
    fix="see docs/dapo.md",
)
def filter_groups(s):
    from omegaconf import OmegaConf

    if s.get("algorithm.filter_groups.enable"):
        yield from dapo.problems(OmegaConf.create(s.config))


def _overlong(s: Setup) -> tuple[str, dict, Any, str]:
    """(node, the overlong buffer, max_resp_len, the reward manager) as verl reads them: old keys win."""
    old = s.get("reward_model.reward_kwargs")
    node = "reward_model.reward_kwargs" if old is not None else "reward.reward_kwargs"
    manager = s.get("reward_model.reward_manager") or s.get("reward.reward_manager.name")
    buffer = s.mapping(f"{node}.overlong_buffer_cfg")
    return f"{node}.overlong_buffer_cfg", buffer, s.get(f"{node}.max_resp_len"), str(manager)


@rule(
    "algorithm.overlong",
    "error",
    "the overlong penalty has max_resp_len, and a buffer that is positive and within it, even if it is off",
    why="verl 0.7.1 asserts it when the reward workers start, although enable=False",
    fix="give +reward.reward_kwargs.max_resp_len=..., or leave overlong_buffer_cfg out",
)
def algorithm_overlong(s):
    where, buffer, most, manager = _overlong(s)
    if not buffer or manager != "dapo":
        return
    response, length = s.number("data.max_response_length"), buffer.get("len")
    whole = where.rpartition(".")[0] + ".max_resp_len"
    missing = [name for name in ("enable", "len") if buffer.get(name) is None]
    if buffer.get("enable"):
        missing += [name for name in ("penalty_factor", "log") if buffer.get(name) is None]
    for name in missing:
        example = {"len": 4096, "penalty_factor": 1.0}.get(name, False)
        yield f"{where}.{name}", "not set, and verl reads it", f"+{where}.{name}={example}"
    if most is None:
        yield (
            whole,
            f"not set, with {where.rpartition('.')[2]}",
            f"give +{whole}={response}",
            f"+{whole}={response}",
        )
    elif isinstance(most, bool) or not isinstance(most, int | float):
        yield whole, f"'{most}' is not a number"
    if not isinstance(length, int | float):
        return
    limit = min([response, *([most] if isinstance(most, int | float) else [])])
    if buffer.get("enable") and length <= 0:
        yield f"{where}.len", f"{length}, and the penalty is on", f"{where}.enable=False, or a length"
    elif length > limit and (buffer.get("enable") or most is not None and length > most):
        detail = f"{length}, and responses end at {limit}"
        yield (
            f"{where}.len",
            detail,
            f"at most {limit}, such as {limit // 2}",
            s.override(f"{where}.len", limit // 2),
        )


@rule(
    "algorithm.overlong_length",
    "warning",
    "the overlong penalty counts from the length at which responses end, and its reward manager reads it",
    why="the penalty is never paid, paid in full too early, or ignored",
    fix="reward.reward_kwargs.max_resp_len=data.max_response_length with reward.reward_manager.name=dapo",
)
def overlong_length(s):
    where, buffer, most, manager = _overlong(s)
    if not buffer.get("enable"):
        return
    whole, response = where.rpartition(".")[0] + ".max_resp_len", s.number("data.max_response_length")
    if manager != "dapo" and s.get("reward.reward_manager.source", "register") == "register":
        yield where, f"enable=True with the reward manager {manager}"
    elif isinstance(most, int | float) and most != response:
        yield (
            whole,
            f"{most}, and responses end at {response}",
            f"{whole}={response}",
            s.override(whole, response),
        )


@rule(
    "algorithm.old_log_prob",
    "error",
    "old log-probs are skipped only where they equal the new ones",
    why="with a second update, or a correction that compares them, old and new differ: ratios become wrong",
    fix="one mini-batch a step, ppo_epochs=1 and no rollout correction; or compute_old_log_prob=True",
)
def algorithm_old_log_prob(s):
    from omegaconf import OmegaConf

    if s.get(old_log_prob.SWITCH) is False:
        yield from old_log_prob.problems(OmegaConf.create(s.config))


def _substring_tests(source: str) -> Iterator[int]:
    """Lines of `truth in answer` where both sides are plain strings by their names."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # paths.function says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.In) for op in node.ops):
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            if re.search(r"truth|gold|label|target|expected", left) and re.search(
                r"solution|response|answer|output|text|completion|pred", right
            ):
                yield node.lineno


@rule(
    "algorithm.substring_reward",
    "error",
    "the reward compares answers instead of searching for them",
    why="'1' is in almost every response: the model is paid for writing digits",
    fix="extract the final answer and compare it as a number or an expression",
)
def substring_reward(s):
    for key in ("reward.custom_reward_function.path", "custom_reward_function.path"):
        file = Path(str(s.get(key, ""))).expanduser()
        if file.is_file() and file.suffix == ".py":
            for number in _substring_tests(file.read_text()):
                yield f"{file}:{number}", "the ground truth is looked for anywhere in the response"

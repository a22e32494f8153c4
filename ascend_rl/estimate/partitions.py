"""The search: every legal layout of training and of rollout, and the best of those that fit.

The order is a rule of thumb about memory and traffic, not a model of time. Cost: O(partitions * stages).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ascend_rl.estimate.die import DIES_PER_NODE, GIB, HBM_GIB, RESERVE_GIB
from ascend_rl.estimate.fsdp_memory import FsdpPlan, plan_fsdp
from ascend_rl.estimate.layouts import (
    Fsdp,
    Rollout,
    Training,
    fsdp_problems,
    rollout_problems,
    training_problems,
)
from ascend_rl.estimate.megatron_memory import TrainingPlan, plan_training, training_stages
from ascend_rl.estimate.rollout_memory import RolloutPlan, plan_rollout
from ascend_rl.estimate.tensors import worst_imbalance
from ascend_rl.settings.model import Model


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def training_layouts(model: Model, base: Training) -> Iterator[Training]:
    """Every legal layout of ``base.dies``: TP inside a node, ETP 1 or TP. A micro-batch stays as long: tokens
    times CP of ``base`` are shared by the new CP.
    """
    sequence, dies = base.max_token_len_per_gpu * base.cp, base.dies
    for tp in (n for n in _divisors(dies) if n <= DIES_PER_NODE):
        for pp in _divisors(dies // tp):
            for cp in _divisors(dies // tp // pp):
                for ep in _divisors(model.experts or 1):
                    for etp in {1, tp} if model.experts else {1}:
                        layout = replace(
                            base,
                            tp=tp,
                            pp=pp,
                            cp=cp,
                            ep=ep,
                            etp=etp,
                            layer_split=(),
                            max_token_len_per_gpu=math.ceil(sequence / cp),
                        )
                        if not training_problems(model, layout):
                            yield layout


def suggest_training(
    model: Model, base: Training, hbm_gib: float = HBM_GIB, reserve_gib: float = RESERVE_GIB, count: int = 5
) -> list[TrainingPlan]:
    """The ``count`` best legal layouts that fit, best first, one for each TP, PP and CP; empty if none fits.

    Rule, in this order: fits at the worst expert imbalance; small TP * PP * CP (more data parallelism); small
    CP (ring traffic in every layer), PP (bubble), ETP, EP (alltoall over fewer dies); low peak. A rule of
    thumb about memory and traffic, not a model of time.
    """
    budget = (hbm_gib - reserve_gib) * GIB
    ranked = {}
    for layout in training_layouts(model, base):
        peak = max(stage.peak for stage in training_stages(model, layout))
        if peak <= budget:
            worst = replace(layout, imbalance=worst_imbalance(model, layout.ep))
            fits_worst = max(stage.peak for stage in training_stages(model, worst)) <= budget
            size = layout.tp * layout.pp * layout.cp
            key = (not fits_worst, size, layout.cp, layout.pp, layout.etp, layout.ep, peak)
            group = (layout.tp, layout.pp, layout.cp)
            ranked[group] = min(ranked.get(group, (key, layout)), (key, layout), key=lambda pair: pair[0])
    best = sorted(ranked.values(), key=lambda pair: pair[0])[:count]
    return [plan_training(model, layout, hbm_gib, reserve_gib) for _, layout in best]


def suggest_fsdp(
    model: Model, base: Fsdp, hbm_gib: float = HBM_GIB, reserve_gib: float = RESERVE_GIB, count: int = 5
) -> list[FsdpPlan]:
    """The ``count`` best legal layouts that fit; a micro-batch stays as long as tokens times SP of ``base``.
    Rule: small SP (more data parallelism), then few dies that share the states (less traffic), at least a
    node of them.
    """
    tokens, node = base.max_token_len_per_gpu * base.sp, min(base.dies, DIES_PER_NODE)
    layouts = [
        replace(base, sp=sp, size=size, max_token_len_per_gpu=math.ceil(tokens / sp))
        for sp in _divisors(node)
        for size in _divisors(base.dies)
        if size >= node
    ]
    plans = (plan_fsdp(model, one, hbm_gib, reserve_gib) for one in layouts if not fsdp_problems(model, one))
    return [one for one in plans if one.fits][:count]


def suggest_rollout(
    model: Model,
    base: Rollout,
    training_bytes: int = 0,
    hbm_gib: float = HBM_GIB,
    reserve_gib: float = RESERVE_GIB,
    count: int = 5,
) -> list[RolloutPlan]:
    """The ``count`` best legal layouts that fit. Rule: most sequences of max_model_len at once on all dies;
    of equals, small TP, then small EP.
    """
    plans = []
    for tp in (n for n in _divisors(base.dies) if n <= DIES_PER_NODE):
        for ep in _divisors(model.experts or 1):
            layout = replace(base, tp=tp, ep=ep)
            if not rollout_problems(model, layout):
                plans.append(plan_rollout(model, layout, training_bytes, hbm_gib, reserve_gib))
    plans = [one for one in plans if one.fits]
    return sorted(plans, key=lambda one: (-one.max_num_seqs * one.dp, one.layout.tp, one.layout.ep))[:count]

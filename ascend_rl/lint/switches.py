"""Whether a switch that is on changes anything in a run, and what each recipe does with it.

A switch does nothing, silently, where the script does not read it, or where its feature needs experts,
Megatron, speculation or an NPU that the run does not have. A predicate says why, or "" where the switch
works. What frameworks refuse has rules of its own (rollout.options, rollout.eplb, train.hdp and others).

Invariant (tests/test_switches.py): every switch that patches, environment scripts, recipes and pages document
is in the table, or has such a rule, or belongs to the launcher. Cost: a lookup each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ascend_rl.lint.setup import ACTOR, ROLLOUT, VLLM, Setup
from ascend_rl.rollout.known_lengths import SCHEDULER
from ascend_rl.settings.switch import OFF
from ascend_rl.settings.switches import Switch, table

EXTRA, SPECULATION = f"{VLLM}.additional_config", f"{VLLM}.speculative_config"
EPLB, HDP, OVERLAP, RESHARD = "VLLM_ENABLE_EPLB", "USE_HDP", "USE_ALLTOALL_OVERLAP", "ALL_TO_ALL_RESHARD"


def _same(key: str) -> Callable[[Setup, str], str]:
    """For a variable that a recipe passes on as ``key``."""

    def why(s: Setup, value: str) -> str:
        given = str(s.get(key))
        same = given == value or (value.lower() in ("1", "true") and given in ("True", "sam", SCHEDULER))
        return "" if same else f"the script does not pass it on: {key} is {s.get(key, 'not set')}"

    return why


def _npu(s: Setup, value: str = "") -> str:
    return "" if s.npu else "the run is on CPUs"


def _experts(s: Setup, value: str) -> str:
    """Of the rollout; a model that is not known may have experts."""
    return _npu(s) or ("the model has no experts" if s.model and not s.model.experts else "")


def _trained_experts(s: Setup, value: str) -> str:
    if not s.megatron:
        return f"only Megatron reads it, and {ACTOR}.strategy is {s.get(f'{ACTOR}.strategy')}"
    return "the model has no experts" if s.model and not s.model.experts else ""


def _speculates(s: Setup, value: str) -> str:
    return "" if s.mapping(SPECULATION) else "nothing is drafted (speculative_config, ENABLE_SAM=1)"


def _sam(s: Setup, value: str) -> str:
    drafts = s.mapping(SPECULATION).get("method") == "sam"
    return "" if drafts else "SAM does not draft: +...speculative_config.method=sam, in recipes ENABLE_SAM=1"


def _graphs(s: Setup, value: str) -> str:
    if not s.vllm or s.graphs:
        return ""
    return _npu(s) or "no graphs are captured: rollout.enforce_eager=False"


def _a2(s: Setup, value: str) -> str:
    return _npu(s) or (
        "" if s.env.get("NPU_SERIES", "").lower() == "a2" else "for an Atlas A2 (NPU_SERIES=a2)"
    )


def _several_ranks(s: Setup, value: str) -> str:
    return _graphs(s, value) or ("" if s.rollout_dp > 1 else "rollout.data_parallel_size is 1: no other rank")


def _rebalances(s: Setup, value: str) -> str:
    return "" if s.get(f"{ROLLOUT}.rollout_rebalance.enable") else "rollout_rebalance.enable is off"


def _eplb(s: Setup, value: str) -> str:
    on = s.variable(EPLB) == 1 or s.get(f"{EXTRA}.dynamic_eplb")
    return "" if on else f"experts are not balanced: {EPLB}=1"


def _hdp(s: Setup, value: str) -> str:
    return "" if s.variable(HDP) == 1 else f"{HDP} is off"


WORKS_WITH: dict[str, Callable[[Setup, str], str]] = {  # {word of the table: why a value does nothing}
    "npu": _npu,
    "experts": _experts,
    "trained_experts": _trained_experts,
    "speculates": _speculates,
    "sam": _sam,
    "graphs": _graphs,
    "a2": _a2,
    "several_ranks": _several_ranks,
    "rebalances": _rebalances,
    "eplb": _eplb,
    "hdp": _hdp,
    "megatron": lambda s, value: "" if s.megatron else f"{ACTOR}.strategy is not megatron",
}


def why_idle(s: Setup, switch: Switch, value: str) -> str:
    """Why a switch with this value changes nothing in a run; "" where it works."""
    for word in filter(None, switch.works_with.split("+")):
        if why := _same(switch.key)(s, value) if word == "same" else WORKS_WITH[word](s, value):
            return why
    return ""


def idle(s: Setup) -> Iterator[tuple[str, str]]:
    """(switch, what it is set to and why that does nothing) of the switches of a run that are on."""
    for switch in table():
        if switch.variable:
            value: Any = s.env.get(switch.variable, "").strip()
        else:
            node, _, leaf = switch.key.rpartition(".")
            value = s.mapping(node).get(leaf)
        # As the environment scripts have it, whatever script follows.
        if str(value or "").lower() in OFF or value in (switch.default, s.defaults.get(switch.key)):
            continue
        if why := why_idle(s, switch, str(value)):
            yield f"${switch.variable}" if switch.variable else switch.key, f"{value}: {why}"

"""Whether a switch that is on changes anything in a run, and what each recipe does with it.

A switch does nothing, silently, where the script does not read it, or where its feature needs experts,
Megatron, speculation or an NPU that the run does not have. A predicate says why, or "" where the switch
works. What frameworks refuse has rules of its own (rollout.options, rollout.eplb, train.hdp and others).

Invariant (tests/test_switches.py): every switch that patches, environment scripts, recipes and pages document
is in the table, or has such a rule, or belongs to the launcher. Cost: a lookup each; a dry run per recipe.

    python -m ascend_rl.lint.switches        # each switch: which recipes take it, refuse it, or gain nothing
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ascend_rl.lint.dry_run import Run, dry_run
from ascend_rl.lint.setup import ACTOR, ROLLOUT, RULES, VLLM, Setup
from ascend_rl.lint.verl_config import Resolved, resolve
from ascend_rl.settings.switch import OFF
from ascend_rl.settings.switches import Switch, table

EXTRA, SPECULATION = f"{VLLM}.additional_config", f"{VLLM}.speculative_config"
EPLB, HDP, OVERLAP, RESHARD = "VLLM_ENABLE_EPLB", "USE_HDP", "USE_ALLTOALL_OVERLAP", "ALL_TO_ALL_RESHARD"


def _same(key: str) -> Callable[[Setup, str], str]:
    """For a variable that a recipe passes on as ``key``."""

    def why(s: Setup, value: str) -> str:
        given = str(s.get(key))
        same = given == value or (value.lower() in ("1", "true") and given in ("True", "sam"))
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


def fate(run: Run, resolved: Resolved, switch: Switch) -> str:
    """What becomes of a variable in a recipe: "taken", "refused", or why its value changes nothing."""
    s = Setup(run, resolved, {})
    if switch.taken == "own" and switch.key not in s.given:
        return "refused"
    if switch.variable in ("PROFILE", "SMOKE", "SMOKE_DTYPE") and not s.npu:
        return "refused"
    on = Setup(replace(run, env=run.env | {switch.variable: switch.on}), resolved, {})
    if switch.taken == "run" and any(
        one.severity == "error" and switch.variable in one.where for rule in RULES for one in rule(on)
    ):
        return "refused"
    words = [word for word in switch.works_with.split("+") if word not in ("", "same", "rebalances")]
    return next(filter(None, (WORKS_WITH[word](s, switch.on) for word in words)), "taken")


def environment(recipe: Path) -> Path:
    """The environment script that a recipe of internal/ is made for."""
    kinds = {"_moe_tiny_": "cpu_megatron", "_tiny_": "cpu", "_235b_": "qwen3_235b", "_32b_": "qwen3_32b"}
    kinds |= {"_30b_": "qwen3_30b_a3b", "_3b_": "qwen2_5_3b"}
    return recipe.parent / next(f"{kind}_env.sh" for part, kind in kinds.items() if part in recipe.stem)


def matrix() -> dict[str, dict[str, str]]:
    """{variable: {recipe: its fate}}: each recipe started once, dry."""
    from ascend_rl.lint import lint  # noqa: F401  fills RULES; its rules use this module

    internal = Path(__file__).resolve().parents[2] / "internal"
    found: dict[str, dict[str, str]] = {switch.variable: {} for switch in table() if switch.variable}
    for recipe in sorted(internal.glob("train_*.sh")):
        env = {"PATH": os.environ["PATH"]} | ({"NPUS_PER_NODE": "2"} if "_tiny_" in recipe.stem else {})
        run = dry_run(recipe, environment(recipe), environ=env)
        resolved = resolve(run.module, run.args)
        for switch in table():
            if switch.variable:
                found[switch.variable][recipe.stem.removeprefix("train_")] = fate(run, resolved, switch)
    return found


HEADS = {
    "": ("variable", "key", "environment scripts", "such as", "read by", "page"),
    "zh": (
        "\u53d8\u91cf",
        "\u952e",
        "\u73af\u5883\u811a\u672c",
        "\u4f8b\u5982",
        "\u7531\u8c01\u8bfb\u53d6",
        "\u9875\u9762",
    ),
}


def markdown(language: str) -> str:
    """The variables of the table, as docs/recipes.md has them."""
    rows = [HEADS[language], ["---"] * 6]
    for one in table():
        if one.variable:
            page = f"{one.page}.zh.md" if language else f"{one.page}.md"
            cells = (one.variable, one.key, one.default, one.on, one.reader)
            rows.append([*(f"`{cell}`" if cell else "-" for cell in cells), f"[{one.page}]({page})"])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="print which recipe takes which switch")
    parser.add_argument("--markdown", action="store_true", help="the list in docs/recipes.md instead")
    parser.add_argument("--lang", choices=["en", "zh"], default="en")
    arguments = parser.parse_args()
    if arguments.markdown:
        print(markdown(arguments.lang.replace("en", "")), end="")
        return
    for name, fates in matrix().items():
        print(name)
        for fate_ in dict.fromkeys(fates.values()):
            recipes = [recipe for recipe, one in fates.items() if one == fate_]
            print(f"    {fate_}: {'all' if len(recipes) == len(fates) else ', '.join(recipes)}")


if __name__ == "__main__":
    main()

"""Which recipes take a switch, refuse it, or gain nothing from it, by the linter's rules.

python -m ascend_rl.lint.switch_table
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

import ascend_rl.lint.lint  # noqa: F401  (it fills RULES)
from ascend_rl.lint.dry_run import Run, dry_run, environment_script
from ascend_rl.lint.setup import ACTOR, RULES, Setup
from ascend_rl.lint.switches import WORKS_WITH
from ascend_rl.lint.verl_config import Resolved, resolve
from ascend_rl.settings import stack
from ascend_rl.settings.switches import Switch, table


def fate(run: Run, resolved: Resolved, switch: Switch) -> str:
    """What becomes of a variable in a recipe: "taken", "refused", or why its value changes nothing."""
    s = Setup(run, resolved, {})
    if switch.taken == "own" and switch.key not in s.given:
        return "refused"
    if switch.variable in ("PROFILE", "SMOKE", "SMOKE_DTYPE") and not s.npu:
        return "refused"
    if switch.variable == "ROUTER_REPLAY" and (
        stack.NAME == stack.DEFAULT or f"{ACTOR}.megatron.expert_model_parallel_size" not in s.given
    ):
        return "refused"
    on = Setup(replace(run, env=run.env | {switch.variable: switch.on}), resolved, {})
    if switch.taken == "run" and any(
        one.severity == "error" and switch.variable in one.where for rule in RULES for one in rule(on)
    ):
        return "refused"
    words = [word for word in switch.works_with.split("+") if word not in ("", "same", "rebalances")]
    return next(filter(None, (WORKS_WITH[word](s, switch.on) for word in words)), "taken")


def matrix() -> dict[str, dict[str, str]]:
    """{variable: {recipe: its fate}}: each recipe started once, dry."""
    found: dict[str, dict[str, str]] = {switch.variable: {} for switch in table() if switch.variable}
    for recipe in stack.recipes():
        env = {"PATH": os.environ["PATH"]} | ({"NPUS_PER_NODE": "2"} if "_tiny_" in recipe.stem else {})
        run = dry_run(recipe, environment_script(recipe), environ=env)
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

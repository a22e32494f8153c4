"""The recipes next to what was published for them: a table made from resolved configurations.

Problem: "as published" in a document is true on the day it is written. Idea: published_recipes.yaml has what
was published; each recipe is run dry with its environment script, its configuration is composed as Hydra
would, and every published value is compared with it. Where they differ the table shows both, and why.
Invariant (tests/test_recipes.py): the documents hold this table; a difference without a reason is an error.
Cost: a dry run and a composed configuration for each recipe, 5 s.

    python bench/published_recipes.py              # --lang zh: as in docs/recipes.zh.md
"""

from __future__ import annotations

import argparse
import os
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ascend_rl.lint import dry_run, verl_config
from ascend_rl.lint.setup import Setup

FILE = Path(__file__).with_suffix(".yaml")
INTERNAL = Path(__file__).resolve().parents[1] / "internal"
SHORT = ("rollout.", "actor.")  # below actor_rollout_ref


@cache
def setup(name: str) -> Setup:
    """The recipe ``train_<name>.sh`` with its environment script, nothing started."""
    bare = {"PATH": os.environ["PATH"]}  # no switches of the caller
    script = INTERNAL / f"train_{name}.sh"
    run = dry_run.dry_run(script, dry_run.environment_script(script), environ=bare)
    return Setup(run, verl_config.resolve(run.module, run.args), {})


def resolved(name: str, key: str) -> Any:
    """What the recipe has: "$NAME" of the environment, else a key of the configuration; None if not set."""
    of = setup(name)
    if key.startswith("$"):
        return of.env.get(key[1:])
    return of.get(f"actor_rollout_ref.{key}" if key.startswith(SHORT) else key)


def shown(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "")


def table(language: str) -> str:
    """The comparison as a Markdown table.

    Raises:
        ValueError: a recipe differs from what was published, and no reason is given; or a reason for nothing.
    """
    document = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    names = [recipe["name"] for recipe in document["recipes"]]
    first, last = document["columns"][language]
    rows = [[first, *(recipe["title"] for recipe in document["recipes"]), last], ["---"] * (len(names) + 2)]
    for setting in document["settings"]:
        published = setting["value"]
        if not isinstance(published, list):
            published = [published] * len(names)
        cells, why = [], setting.get("why", {}).get(language, "")
        for name, theirs in zip(names, published, strict=True):
            ours = resolved(name, setting["key"])
            same = ours == theirs
            cells.append(
                shown(ours)
                if same
                else f"**{shown(ours)}** ({document['published'][language]} {shown(theirs)})"
            )
        if bool(why) != any(cell.startswith("**") for cell in cells):
            raise ValueError(f"{setting['key']}: {cells}; a difference needs a reason, and only a difference")
        rows.append([f"`{setting['key']}`", *cells, why])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="print the recipes next to what was published")
    parser.add_argument("--lang", choices=("en", "zh"), default="en")
    print(table(parser.parse_args().lang), end="")


if __name__ == "__main__":
    main()

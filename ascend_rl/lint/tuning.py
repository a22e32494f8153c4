"""The tuning table: every variable and key in use, what it does, and what it conflicts with.

One table, tuning.yaml, serves people and the linter: this module prints it as the tuning guide, and lint
reads from it which values exist, which are required and which variables nothing reads any more. So the guide
cannot promise what the linter contradicts.

    python -m ascend_rl.lint.tuning --markdown > docs/tuning.md
    python -m ascend_rl.lint.tuning --markdown --lang zh > docs/tuning.zh.md
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

FILE = Path(__file__).with_suffix(".yaml")
LANGUAGES = ("en", "zh")
Text = dict[str, str]  # language -> text


@dataclass(frozen=True)
class Entry:
    """One variable or key; see the top of tuning.yaml."""

    group: Text
    name: str
    value: str
    when: Text
    what: Text
    why: Text
    conflicts: Text
    source: str
    values: tuple[str, ...] = ()
    require: str | None = None
    advise: str | None = None
    unread: str | None = None

    @property
    def variable(self) -> bool:
        return self.name.isupper()


@cache
def _document() -> dict:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


@cache
def table() -> tuple[Entry, ...]:
    return tuple(
        Entry(group=group["group"], **{**entry, "values": tuple(entry.get("values", ()))})
        for group in _document()["groups"]
        for entry in group["entries"]
    )


def markdown(language: str) -> str:
    """The guide: the introduction, then one Markdown table for each group."""
    columns = _document()["columns"][language]
    parts, groups = [_document()["head"][language].rstrip()], []
    for entry in table():
        if entry.group not in groups:
            groups.append(entry.group)
            parts.append(
                f"\n## {entry.group[language]}\n\n| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|"
            )
        cells = (
            f"`{entry.name}`",
            entry.value,
            entry.when[language],
            entry.what[language],
            entry.why[language],
            entry.conflicts[language],
            entry.source,
        )
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="print the tuning guide")
    parser.add_argument("--markdown", action="store_true", required=True, help="as docs/tuning.md")
    parser.add_argument("--lang", choices=LANGUAGES, default="en")
    print(markdown(parser.parse_args().lang), end="")


if __name__ == "__main__":
    main()

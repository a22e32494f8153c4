"""The findings of the checks before a run, printed as a table or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}  # in this order


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, doubtful or not checked."""

    severity: Literal["error", "warning", "info"]
    check: str  # "area.what", stable: scripts may look for it
    where: str  # the node, die, file or key
    why: str  # what was found, and what it leads to
    fix: str  # what to do, as a command where there is one


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Findings sorted by severity, errors first, and otherwise in their order."""
    return sorted(findings, key=lambda finding: list(STYLES).index(finding.severity))


def render(findings: Sequence[Finding], console: Console) -> None:
    """Print a table and a count; texts are printed as they are, not read as markup."""
    if findings:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name, share in (("", 0), ("check", 0), ("where", 1), ("why", 3), ("fix", 3)):
            table.add_column(name, ratio=share or None, no_wrap=not share, overflow="fold")
        for finding in ordered(findings):
            texts = (finding.check, finding.where, finding.why, finding.fix)
            table.add_row(Text(finding.severity, style=STYLES[finding.severity]), *map(Text, texts))
        console.print(table)
    counts = Counter(finding.severity for finding in findings)
    console.print(
        ", ".join(f"{counts[name]} {name}{'s' * (counts[name] != 1 and name != 'info')}" for name in STYLES),
        highlight=False,
    )


def as_json(findings: Sequence[Finding]) -> str:
    """A JSON array of {"severity", "check", "where", "why", "fix"}, errors first."""
    return json.dumps([dataclasses.asdict(finding) for finding in ordered(findings)], indent=1)

"""The findings of the checks before a run, printed for people, as corrections to paste, or as JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}  # in this order
READABLE = 120  # columns


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, doubtful or not checked."""

    severity: Literal["error", "warning", "info"]
    check: str  # "area.what", stable: scripts may look for it
    where: str  # the node, die, file or key
    why: str  # what was found, and what it leads to
    fix: str  # what to do, as a command where there is one
    override: str = ""  # the corrected override, or an export, ready to paste; empty if a person must decide


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Findings sorted by severity, errors first, and otherwise in their order."""
    return sorted(findings, key=lambda finding: list(STYLES).index(finding.severity))


def paste(finding: Finding) -> str:
    """The correction as one word for the command line or one export; empty if a person must decide.

    >>> paste(Finding("error", "x", "$A", "", "export A=1"))
    'export A=1'
    """
    if finding.override:
        return finding.override
    found = re.fullmatch(r"(?:set |[^:]*: )?((?:export \w+|\+?[a-z]\w*(?:\.\w+)+)=[^\s,;]+)", finding.fix)
    return found[1] if found and "..." not in found[1] else ""


def _paragraph(label: str, text: str, width: int) -> str:
    """`text` behind a label of six columns, wrapped between words only: keys and paths stay whole."""
    return textwrap.fill(
        text,
        width,
        initial_indent=f"    {label:<6}",
        subsequent_indent=" " * 10,
        break_long_words=False,
        break_on_hyphens=False,
    )


def render(findings: Sequence[Finding], console: Console) -> None:
    """Print findings in groups of one check, errors last, and a count: where, why, and what to do.

    Lines are as wide as the console, and at most READABLE columns: the same text in a terminal of 80 or 200
    columns, and in a log file. Texts are printed as they are, not read as markup.
    """
    width = min(console.width, READABLE)
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: -list(STYLES).index(finding.severity)):
        groups.setdefault((finding.severity, finding.check), []).append(finding)
    for (severity, check), members in groups.items():
        console.print(Text(severity, style=STYLES[severity]), Text(check, style="bold"))
        same: dict[tuple[str, str, str], list[str]] = {}
        for one in members:
            same.setdefault((one.why, one.fix, paste(one)), []).append(one.where)
        for (why, fix, override), places in same.items():
            lines = [_paragraph("", ", ".join(places), width).replace(" " * 6, "", 1)]
            lines += [_paragraph(name, text, width) for name, text in (("why", why), ("fix", fix)) if text]
            lines += [f"    paste {override}"] if override and override != fix else []
            console.print(Text("\n".join(lines)), soft_wrap=True)
    counts = Counter(finding.severity for finding in findings)
    console.print(
        ", ".join(f"{counts[name]} {name}{'s' * (counts[name] != 1 and name != 'info')}" for name in STYLES),
        highlight=False,
    )


def corrections(findings: Iterable[Finding]) -> str:
    """Exports, then overrides, one on a line, to paste; what a person must decide follows as comments."""
    found = [finding for finding in ordered(findings) if finding.severity != "info"]
    words = list(dict.fromkeys(word for finding in found if (word := paste(finding))))
    exports = [word for word in words if word.startswith("export ")]
    overrides = [shlex.quote(word) for word in words if not word.startswith("export ")]
    by_hand = [f"# {finding.where}: {finding.fix}" for finding in found if not paste(finding)]
    return "\n".join([*exports, *(" \\\n".join(overrides).splitlines()), *dict.fromkeys(by_hand)])


def as_json(findings: Sequence[Finding]) -> str:
    """A JSON array of {"severity", "check", "where", "why", "fix", "override"}, errors first."""
    return json.dumps([dataclasses.asdict(finding) for finding in ordered(findings)], indent=1)

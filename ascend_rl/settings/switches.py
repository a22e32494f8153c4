"""The switches of a run in one table, switches.txt: variable, Hydra key, reader and page.

A switch is a Hydra key, and its variable the value that scripts give the key; a process that has no
configuration reads the variable itself. Columns: the variable or "-"; the key or "-", with the "+" that Hydra
wants of a new one; how recipes take it (TAKEN); what environment scripts set, or "-"; a value that switches
it on; what it works with (lint/switches.py); the file that reads it; its page of docs/.

Invariants (tests/test_switches.py): every variable that scripts read has a line here or in lint/tuning.yaml,
every line a reader and a page, and every recipe takes or refuses every switch. Cost: a read of 40 lines.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_suffix(".txt")
TAKEN = {
    "value": "every recipe gives the key this value",
    "flag": "every recipe gives the key True",
    "code": "a function of internal/recipe.sh sets the key, and others",
    "own": "recipes that have the key give it this value; others refuse",
    "with": "read together with another switch",
    "run": "processes of the run read the variable",
    "key": "a key without a variable",
}


class Switch(NamedTuple):
    """A line of the table."""

    variable: str
    key: str
    taken: str
    default: str
    on: str
    works_with: str
    reader: str
    page: str

    @property
    def name(self) -> str:
        return self.variable or self.key


@cache
def table() -> tuple[Switch, ...]:
    """All switches.

    >>> next(one.key for one in table() if one.variable == "SAVE_FREQ")
    'trainer.save_freq'
    """
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    cells = ([cell.strip() for cell in line.split("|")] for line in lines)
    return tuple(Switch(*("" if cell == "-" else cell.lstrip("+") for cell in row)) for row in cells)

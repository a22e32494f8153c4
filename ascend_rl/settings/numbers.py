"""Types of numeric options. argparse's own int and float take -1, nan and 1e30, and the command fails later.

Invariant: what passes is finite and within the bounds; anything else ends with one line of argparse's, which
names the option, the value and the bounds. A test finds every numeric option of another type.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole(low: int = 1, high: int = 10**9) -> Callable[[str], int]:
    """The type of an option that is a whole number from ``low`` to ``high``.

    >>> whole()("12")
    12
    >>> whole()("0")
    Traceback (most recent call last):
        ...
    argparse.ArgumentTypeError: '0' is not a whole number from 1 to 1000000000
    """

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return parse


def real(low: float = 0.0, high: float = 1e12) -> Callable[[str], float]:
    """The type of an option that is a number from ``low`` to ``high``; nan is not one.

    >>> real()("0.5")
    0.5
    >>> real(high=1)("nan")
    Traceback (most recent call last):
        ...
    argparse.ArgumentTypeError: 'nan' is not a number from 0 to 1
    """

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return value

    return parse

"""One way to read a switch from the environment, and one way to refuse incompatible settings.

Invariants: a switch is on for 1 and true, off for 0, false, nothing and absence, and an error for anything
else; a refusal names all reasons together, each with what to change.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace

ON, OFF = ("1", "true"), ("", "0", "false")


class CannotWork(ValueError):
    """Settings or input that are incompatible; says every reason and what to change."""


def switched_on(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the variable ``name`` switches its feature on.

    Args:
        environ: in place of os.environ, which is looked up at each call (datasets.map replaces it).

    Raises:
        CannotWork: the value is not one of 1, true, 0, false.

    >>> switched_on("USE_HDP", {"USE_HDP": "1"}), switched_on("USE_HDP", {})
    (True, False)
    """
    text = (os.environ if environ is None else environ).get(name, "").strip().lower()
    if text not in ON + OFF:
        raise CannotWork(f"{name}={text}: give 1 or 0")
    return text in ON


def refuse(what: str, reasons: Iterable[str]) -> None:
    """Raise if there is a reason.

    Args:
        what: the switch or setting that is refused, as the user gave it, such as ``USE_HDP=1``.
        reasons: what stands against it, each with what to change.

    Raises:
        CannotWork: with all reasons, one per line.

    >>> refuse("USE_HDP=1", [])
    >>> refuse("USE_HDP=1", ["CP is 1: set it to 2 or more"])
    Traceback (most recent call last):
        ...
    ascend_rl.settings.switch.CannotWork: USE_HDP=1 is incompatible with this configuration:
      CP is 1: set it to 2 or more
    """
    if lines := "".join(f"\n  {reason}" for reason in reasons):
        raise CannotWork(f"{what} is incompatible with this configuration:{lines}")


@contextlib.contextmanager
def ending() -> Iterator[SimpleNamespace]:
    """The end of a command that can continue where it was stopped; yields what has its exit status as
    ``code``.

    >>> with ending() as status:
    ...     raise KeyboardInterrupt
    >>> status.code
    130
    """
    status = SimpleNamespace(code=0)
    try:
        yield status
    except CannotWork as error:
        print(f"ERROR: {error}", file=sys.stderr)
        status.code = 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        status.code = 130

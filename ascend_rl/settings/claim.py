"""Whose a directory of results is: a mark in it, so that nothing is deleted or overwritten anywhere else.

A run, a rehearsal, a check and a quickstart take the same variable OUTPUT_DIR, and some of them delete what
an earlier one left: with the OUTPUT_DIR of a real run that is its checkpoints. So each writes its kind into a
file of the directory before anything else, and ends if the mark of another kind is there.

- A directory without a mark is taken if it is new or empty. Else only a run takes it: it deletes nothing, and
  sets aside whatever has the name of a file of its own (process/logs.py).
- The mark is a regular file: a link, or a file that cannot be read, is nobody's mark.

    python -m ascend_rl.settings.claim quickstart DIRECTORY     exit status 1 and a sentence if it cannot be
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from pathlib import Path

from ascend_rl.settings.switch import CannotWork

MARK = ".ascend_rl"
RUN, REHEARSAL, CHECK, QUICKSTART = KINDS = ("run", "rehearsal", "check", "quickstart")
ADOPTS = (RUN, CHECK)  # delete nothing


def kind_of(directory: Path) -> str:
    """The kind that a directory is marked as; "" for none."""
    try:
        mark = os.open(directory / MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        text = os.read(mark, 100).decode(errors="replace") if stat.S_ISREG(os.fstat(mark).st_mode) else ""
    finally:
        os.close(mark)
    return text.strip() if text.strip() in KINDS else ""


def refusal(directory: Path, kind: str, adopt: bool = False) -> str:
    """Why a directory cannot be that of a ``kind``; "" if it can. Nothing is written.

    Args:
        adopt: take a directory without a mark although files are in it.
    """
    if marked := kind_of(directory):
        return "" if marked == kind else f"{directory} is that of a {marked}, and this is a {kind}"
    try:
        found = sorted(path.name for path in directory.iterdir())
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{directory} cannot be read: {error.strerror}"
    if MARK in found:
        return f"{directory / MARK} is not a mark of this repository"
    if not found or adopt or kind in ADOPTS:
        return ""
    more = f" and {len(found) - 3} more" * (len(found) > 3)
    return f"{directory} has files that are no {kind}'s: {', '.join(found[:3])}{more}"


def claim(directory: Path, kind: str, adopt: bool = False) -> bool:
    """Mark a directory, made if it is not there; returns whether it had a mark already.

    Raises:
        CannotWork: it is another's, see `refusal`.
        OSError: it cannot be written.
    """
    if why := refusal(directory, kind, adopt):
        raise CannotWork(f"{why}; set OUTPUT_DIR to another directory, or remove it yourself")
    directory.mkdir(parents=True, exist_ok=True)
    if kind_of(directory):
        return True
    with (directory / MARK).open("x") as file:
        file.write(f"{kind}\n")
    return False


def main(arguments: list[str]) -> int:
    name = "python -m ascend_rl.settings.claim"
    parser = argparse.ArgumentParser(prog=name, description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--adopt", action="store_true", help="also if it has files and no mark")
    given = parser.parse_args(arguments)
    try:
        claim(given.directory, given.kind, given.adopt)
    except CannotWork as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"ERROR: {given.directory} cannot be written: {error.strerror}; set OUTPUT_DIR", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Summarise several pytest runs from their JUnit files: python tests/summary.py --wall S FILE...

Fails if a run failed or left no file.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as xml
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    file: str
    name: str
    outcome: str  # passed, failed, error or skipped
    seconds: float
    reason: str


def cases(path: Path) -> list[Case]:
    """What a JUnit file of pytest tells of each test; a test with an error at its end counts once."""
    found = []
    for case in xml.parse(path).iter("testcase"):
        outcome, reason = "passed", ""
        for kind, named in (("skipped", "skipped"), ("error", "error"), ("failure", "failed")):
            if (element := case.find(kind)) is not None:
                outcome, reason = named, element.get("message", "")
        file = case.get("classname", "").replace(".", "/") + ".py"
        found.append(Case(file, case.get("name", ""), outcome, float(case.get("time", 0)), reason))
    return found


def durations(found: list[Case], shown: int = 25) -> list[str]:
    """The files by their time, then the slowest tests."""
    files: dict[str, float] = defaultdict(float)
    for case in found:
        files[case.file] += case.seconds
    lines = ["", "seconds, by file"]
    lines += [
        f"{files[file]:8.1f}  {file}"
        for file in sorted(files, key=files.get, reverse=True)
        if files[file] >= 1
    ]
    lines += ["", f"seconds, the {shown} slowest tests"]
    slowest = sorted(found, key=lambda case: -case.seconds)[:shown]
    return lines + [f"{case.seconds:8.1f}  {case.file}::{case.name}" for case in slowest]


def summary(paths: list[Path], wall_s: float, with_durations: bool) -> tuple[bool, str]:
    """Whether all is well, and the text."""
    found, lines = [case for path in paths if path.exists() for case in cases(path)], []
    if with_durations:
        lines += durations(found)
    reasons = Counter(case.reason for case in found if case.outcome == "skipped")
    lines += ["", *(f"SKIPPED {count}: {reason}" for reason, count in reasons.items())]
    bad = [case for case in found if case.outcome in ("failed", "error")]
    lines += [f"{case.outcome.upper()} {case.file}::{case.name}" for case in bad]
    missing = [path for path in paths if not path.exists()]
    lines += [f"FAILED {path.stem}: pytest has written no {path}" for path in missing]
    count = Counter(case.outcome for case in found)
    figures = ", ".join(
        f"{count[what]} {what}" for what in ("passed", "failed", "error", "skipped") if count[what]
    )
    lines.append(f"{figures or 'no tests'} in {wall_s // 60:.0f} min {wall_s % 60:.0f} s")
    return not bad and not missing, "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wall", type=float, required=True, metavar="S", help="seconds that all took")
    parser.add_argument(
        "--durations", action="store_true", help="the time of each file, and the slowest tests"
    )
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    well, text = summary(args.files, args.wall, args.durations)
    print(text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())

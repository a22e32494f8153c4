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
    cpu_s: float
    reason: str


def cases(path: Path) -> list[Case]:
    """What a JUnit file of pytest tells of each test; a test with an error at its end counts once."""
    found = []
    for case in xml.parse(path).iter("testcase"):
        outcome, reason = "passed", ""
        for kind, named in (("skipped", "skipped"), ("error", "error"), ("failure", "failed")):
            if (element := case.find(kind)) is not None:
                outcome, reason = named, element.get("message", "").strip()
        file = case.get("classname", "").replace(".", "/") + ".py"
        noted = {each.get("name"): each.get("value") for each in case.iter("property")}
        times = float(case.get("time", 0)), float(noted.get("cpu_s", 0))
        found.append(Case(file, case.get("name", ""), outcome, *times, reason))
    return found


def durations(found: list[Case], shown: int = 25) -> list[str]:
    """The files by their time, then the slowest tests; with their processor time, as far as it was noted."""
    files: dict[str, list[Case]] = defaultdict(list)
    for case in found:
        files[case.file].append(case)

    def line(cases: list[Case], name: str) -> tuple[float, str]:
        seconds, cpu_s = sum(case.seconds for case in cases), sum(case.cpu_s for case in cases)
        return seconds, f"{seconds:8.1f}{cpu_s:8.1f}  {name}"

    by_file = sorted((line(cases, file) for file, cases in files.items()), reverse=True)
    by_test = sorted((line([case], f"{case.file}::{case.name}") for case in found), reverse=True)
    cpu_min = sum(case.cpu_s for case in found) / 60
    return [
        "", f"seconds and processor seconds, by file; {cpu_min:.0f} processor minutes in all",
        *(text for seconds, text in by_file if seconds >= 1),
        "", f"seconds and processor seconds, the {shown} slowest tests",
        *(text for _, text in by_test[:shown]),
    ]  # fmt: skip


def in_short(reason: str) -> str:
    """The first line, and the last: of an error in another process, what happened there."""
    lines = reason.splitlines() or ["no message"]
    return " ... ".join(line[:200] for line in dict.fromkeys((lines[0], lines[-1])))


def summary(paths: list[Path], wall_s: float, with_durations: bool) -> tuple[bool, str]:
    """Whether all is well, and the text."""
    found, lines = [case for path in paths if path.exists() for case in cases(path)], []
    if with_durations:
        lines += durations(found)
    reasons = Counter(case.reason for case in found if case.outcome == "skipped")
    lines += ["", *(f"SKIPPED {count}: {reason}" for reason, count in reasons.items())]
    bad = [case for case in found if case.outcome in ("failed", "error")]
    lines += [f"{case.outcome.upper()} {case.file}::{case.name}: {in_short(case.reason)}" for case in bad]
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

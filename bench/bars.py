"""What all benchmarks share: their paths, options, bars and pictures, and how they end."""

from __future__ import annotations

import argparse
import datetime
import json
import operator
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
COMPARE = {"<": operator.lt, "<=": operator.le, "=": operator.eq, ">=": operator.ge, ">": operator.gt}
Bar = tuple[str, float, str, str, bool]
"""name, value, unit, the bar in words, whether it is met."""
paths = [str(ROOT / name) for name in (".", "tests", "tests/patched", "tests/e2e")]
sys.path[:0] = [path for path in paths if path not in sys.path]


def parser_of(description: str, quick: str) -> argparse.ArgumentParser:
    """A parser whose help is the benchmark's docstring, with --quick, which does what ``quick`` says."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def bar(name: str, value: float, unit: str, bound: str) -> Bar:
    """A value and what it is compared with.

    >>> bar("planner", 9.5, "ms", "< 10")
    ('planner', 9.5, 'ms', '< 10', True)
    """
    sign, limit, *_ = bound.split()
    return name, value, unit, bound, bool(COMPARE[sign](value, float(limit)))


def canvas(*shape: int, **how):
    """matplotlib's figure and its axes, without a display; see `save`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*shape, layout="constrained", **how)


def save(figure, name: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / f"{name}.png", dpi=110)


def environment_of(script: str) -> dict[str, str]:
    """All variables after a script of internal/ was sourced."""
    command = ["bash", "-c", f". {ROOT}/internal/{script} && env -0"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(entry.split("=", 1) for entry in printed.split("\0") if "=" in entry)


def tiny_model() -> Path:
    """data/tiny/model of the stack, made if it is not there."""
    from ascend_rl.settings.stack import DATA

    data = DATA / "tiny"
    subprocess.run([sys.executable, "-m", "ascend_rl.tiny", "--out", data], cwd=ROOT, check=True)
    return data / "model"


def finish(name: str, bars: list[Bar], **data) -> int:
    """Print ``bars`` and write bench/results/``name``.json with them, the machine and ``data``.

    Returns:
        The exit status: 0 if all bars are met, 1 if not.
    """
    print()
    width = max(len(each[0]) for each in bars)
    for what, value, unit, bound, ok in bars:
        print(f"{'ok  ' if ok else 'MISS'} {what:<{width}} {value:.4g} {unit} (bar: {bound})")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    report = {
        "bars": [dict(zip(("name", "value", "unit", "bar", "ok"), each, strict=True)) for each in bars],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {memory / 1e9:.0f} GB",
        "load_average": os.getloadavg(),
        "date": datetime.date.today().isoformat(),
        **data,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1, default=lambda number: number.item()))
    return 0 if all(ok for *_, ok in bars) else 1

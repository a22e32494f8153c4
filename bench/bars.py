"""How a benchmark ends: print its bars, store them with the data, and exit with 1 if one is missed."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
Bar = tuple[str, float, str, str, bool]
"""name, value, unit, the bar in words, whether it is met."""


def tiny_model() -> Path:
    """data/tiny/model, made if it is not there."""
    data = ROOT / "data/tiny"
    subprocess.run([sys.executable, "-m", "ascend_rl.tiny", "--out", data], cwd=ROOT, check=True)
    return data / "model"


def finish(name: str, bars: list[Bar], **data) -> int:
    """Print ``bars`` and write bench/results/``name``.json with them, the machine and ``data``.

    Returns:
        The exit status: 0 if all bars are met, 1 if not.
    """
    print()
    width = max(len(bar[0]) for bar in bars)
    for what, value, unit, bar, ok in bars:
        print(f"{'ok  ' if ok else 'MISS'} {what:<{width}} {value:.4g} {unit} (bar: {bar})")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    report = {
        "bars": [dict(zip(("name", "value", "unit", "bar", "ok"), bar, strict=True)) for bar in bars],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {memory / 1e9:.0f} GB",
        "load_average": os.getloadavg(),
        "date": datetime.date.today().isoformat(),
        **data,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1, default=lambda number: number.item()))
    return 0 if all(ok for *_, ok in bars) else 1

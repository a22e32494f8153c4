"""Which stack this process uses (docs/stacks.md): the variable STACK, as internal/common.sh reads it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = "cann8.5"  # its frameworks.lock, patches/ and frameworks/ are at the root
NAME = os.environ.get("STACK") or DEFAULT
DIRECTORY = ROOT if NAME == DEFAULT else ROOT / "stacks" / NAME
DATA = ROOT / "data" / ("" if NAME == DEFAULT else NAME)


def recipes() -> list[Path]:
    """The training scripts that this stack can run: asynchronous ones need verl 0.9.1."""
    found = sorted((ROOT / "internal").glob("train_*.sh"))
    return [path for path in found if NAME != DEFAULT or not path.stem.endswith("_async")]

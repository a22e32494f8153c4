"""Which stack this process uses (docs/stacks.md): the variable STACK, as internal/common.sh reads it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = "cann8.5"  # its frameworks.lock, patches/ and frameworks/ are at the root
NAME = os.environ.get("STACK") or DEFAULT
DIRECTORY = ROOT if NAME == DEFAULT else ROOT / "stacks" / NAME
DATA = ROOT / "data" / ("" if NAME == DEFAULT else NAME)

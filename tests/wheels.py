"""patches/npu_wheels.py for tests, also in processes that conftest.py did not prepare."""

from __future__ import annotations

import sys
from pathlib import Path

# On the path for this import alone, as in conftest.py.
PATCHES = str(Path(__file__).resolve().parents[1] / "patches")
sys.path.append(PATCHES)
from npu_wheels import CHIPS, pinned, sites, wheels_file  # noqa: E402

sys.path.remove(PATCHES)

__all__ = ["CHIPS", "pinned", "sites", "wheels_file"]

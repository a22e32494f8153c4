"""Where MindSpeed's sources are, and the mark of tests that need them: they are published in git only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ascend_rl.settings.stack import DIRECTORY

PLACES = [Path(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
MINDSPEED = next(
    (p for p in PLACES if (p / "mindspeed/op_builder").is_dir()), DIRECTORY / "frameworks/mindspeed"
)
needs_mindspeed = pytest.mark.skipif(
    not (MINDSPEED / "mindspeed").is_dir(),
    reason="frameworks/mindspeed is absent: ./download_frameworks_source_code.sh --only mindspeed",
)

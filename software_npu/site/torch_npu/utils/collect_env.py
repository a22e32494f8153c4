from __future__ import annotations

import os
import platform
from pathlib import Path

NODE = Path(__file__).resolve().parents[3] / "node/cann"


def get_cann_version() -> str:
    """That of ASCEND_HOME_PATH, without one that of node/; "not known" where CANN is not there."""
    home = Path(os.environ.get("ASCEND_HOME_PATH") or NODE)
    file = home / f"{platform.machine()}-linux/ascend_toolkit_install.info"
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition("=")[2] for line in lines if line.startswith("version=")), "not known")

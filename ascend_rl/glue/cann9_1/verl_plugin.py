"""What verl loads in each of its processes (entry point group `verl.plugins`)."""

from __future__ import annotations

import os

from ascend_rl.glue.cann9_1.hooks import or_stop, version_is


@or_stop
def load() -> None:
    if os.environ.get("VERL_PLATFORM") == "cpu":
        from ascend_rl.glue.cann9_1 import cpu_platform

        cpu_platform.hooks.install()


if version_is("verl", "0.9"):
    load()

"""Run a ROLL recipe of internal/roll/conf: compose it, check it, join or start Ray, train.

ROLL's own start scripts take no overrides, find configurations only beside themselves, and check nothing
before the models are loaded. This does what they do, with overrides and with the linter in front: errors end
it before Ray is touched. It runs in two ways, as ROLL does:

- in a Ray that is there (RAY_ADDRESS, as ray_start_npu.sh exports it): on the head only;
- without one, on every node with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: ROLL starts Ray, rank 0
  trains, and the other ranks end once they joined. Their Ray stays; `ray stop` ends it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys

from rich.console import Console

from ascend_rl.lint.findings import render
from ascend_rl.lint.roll import compose, lint

PIPELINES = {
    "rlvr": ("roll.pipeline.rlvr.rlvr_config:RLVRConfig", "roll.pipeline.rlvr.rlvr_pipeline:RLVRPipeline"),
    "agentic": (
        "roll.pipeline.agentic.agentic_config:AgenticConfig",
        "roll.pipeline.agentic.agentic_pipeline:AgenticPipeline",
    ),
}


def load(name: str) -> type:
    """The class "module:class"."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if importlib.util.find_spec("roll") is None:
        sys.exit(
            "ERROR: ROLL is not installed; run: ./download_frameworks_source_code.sh --only roll, then "
            "bash build_project.sh --target npu"
        )
    config = compose(args.config, args.overrides)
    shown = os.environ.get("NPUS_PER_NODE")
    kind, pipeline = PIPELINES[config["pipeline"]]
    findings = lint(config, int(shown) if shown else None, starting=load(kind))
    if findings:
        render(findings, Console(stderr=True))
    if any(finding.severity == "error" for finding in findings):
        return 1
    address = os.environ.get("RAY_ADDRESS")
    if address and subprocess.run(["ray", "status"], capture_output=True).returncode:
        sys.exit(
            f"ERROR: no Ray answers at RAY_ADDRESS={address}; ROLL would start a second one. "
            "Unset it, or start the run with ray_start_npu.sh"
        )

    from dacite import from_dict

    settings = from_dict(data_class=load(kind), data=config)
    load("roll.distributed.scheduler.initialize:init")()
    load(pipeline)(pipeline_config=settings).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

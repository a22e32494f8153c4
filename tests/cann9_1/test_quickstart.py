"""The quickstart on this stack, from the outside."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest
from runs import PATIENCE_S

from ascend_rl.process.logs import by_step
from ascend_rl.rollout.generations import FILE, KINDS


@pytest.mark.timeout(2 * PATIENCE_S)
def test_the_tiny_qwen3_learns_addition(root, tmp_path):
    """Half the steps of the default, so a looser reward."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VERL", "VLLM"))}
    environment |= {"STACK": "cann9.1", "OUTPUT_DIR": str(tmp_path / "run")}
    result = subprocess.run(
        ["bash", "quickstart.sh", "--steps", "40"], cwd=root, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["val_reward"] >= max(0.75, report["val_reward_before"] + 0.3)
    assert report["max_rollout_probs_diff"] <= 1e-5
    samples = by_step(tmp_path / "run" / FILE)
    assert len(samples) == report["steps"]
    every = [sample for step in samples.values() for sample in step]
    assert all(re.search(r"\d+\+\d+", sample["prompt"]) for sample in every), every
    assert {kind for sample in samples[report["steps"]] for kind in sample["kinds"]} >= set(KINDS[:4])

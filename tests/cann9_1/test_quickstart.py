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

pytestmark = [pytest.mark.timeout(2 * PATIENCE_S)]


@pytest.fixture(scope="module")
def quickstart(root, tmp_path_factory, request):
    """With half the steps: its OUTPUT_DIR and how it ended. It evaluates where a test of that is to run."""
    output, wanted = tmp_path_factory.mktemp("quickstart"), {item.name for item in request.session.items}
    evaluate = ["--evaluate"] * (test_its_model_is_exported_and_evaluated.__name__ in wanted)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VERL", "VLLM"))}
    result = subprocess.run(
        ["bash", "quickstart.sh", "--steps", "40", *evaluate],
        cwd=root,
        env=environment | {"STACK": "cann9.1", "OUTPUT_DIR": str(output)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    return output, result


def test_the_tiny_qwen3_learns_addition(quickstart):
    """Half the steps of the default, so a looser reward."""
    output, _ = quickstart
    report = json.loads((output / "report.json").read_text())
    assert report["val_reward"] >= max(0.75, report["val_reward_before"] + 0.3)
    assert report["max_rollout_probs_diff"] <= 1e-5
    samples = by_step(output / FILE)
    assert len(samples) == report["steps"]
    every = [sample for step in samples.values() for sample in step]
    assert all(re.search(r"\d+\+\d+", sample["prompt"]) for sample in every), every
    assert {kind for sample in samples[report["steps"]] for kind in sample["kinds"]} >= set(KINDS[:4])


@pytest.mark.weekly
def test_its_model_is_exported_and_evaluated(quickstart):
    output, result = quickstart
    before, after = (
        json.loads((output / f"evaluation/{step}/report.json").read_text())["results"]["val"]["avg@4"]
        for step in (0, 40)
    )
    assert after > before + 0.1
    assert re.search(rf"evaluated: val avg@4 +{before:.3f} to {after:.3f}\n", result.stdout)

"""A recipe of a large model on its own path: verl 0.9.1, FSDP2 and vllm-ascend 0.23 on the software NPU."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

RECIPE = "gspo_qwen3_32b_64die_true_weight"
# Signs that are counted: see ascend_rl/recipe/rehearsal.py.
ROLLOUT = {
    "decode graphs replayed", "attention parameters updated in graphs", "memory ranges woken after sleep",
    "attention over the paged cache", "products with reduce-scatter, FlashComm1", "weights prefetched",
}  # fmt: skip
TRAINER = {"flash attention of the trainer", "all-to-all", "all-reduces"}


@pytest.mark.long
def test_two_steps_of_gspo_with_fsdp2(root, tmp_path):
    """Rollout and trainer run the same model, with graphs, sleep and two ranks each."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VERL", "VLLM"))}
    environment |= {"SMOKE": "1", "SMOKE_DTYPE": "float32", "OUTPUT_DIR": str(tmp_path / "run")}
    command = ["bash", "ray_start_npu.sh", f"internal/train_{RECIPE}.sh", "internal/qwen3_32b_env.sh"]
    result = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    report = json.loads((tmp_path / "run/rehearsal.json").read_text())
    assert report["gap"]["met"] is True, report["gap"]
    counts = report["counts"]
    assert all(counts[sign].get("rollout") for sign in ROLLOUT), counts
    assert all(counts[sign].get("trainer") for sign in TRAINER), counts
    tracker = tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "2"

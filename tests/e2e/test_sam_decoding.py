"""GSPO with drafts from a suffix automaton learns as without; log-probs are the trainer's."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess

import pytest

SPECULATIVE = "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"
ACCURACY = "val-core/tiny/addition/acc/mean@1"


@pytest.mark.timeout(500)
def test_gspo_learns_with_sam_decoding(root, tmp_path, nothing_left_behind, same_probabilities):
    """The bounds are those of test_quickstart.py for as many steps without speculation."""
    output = tmp_path / "run"
    run = subprocess.run(
        ["bash", "ray_start_npu.sh", "internal/train_gspo_qwen3_tiny_cpu.sh", "internal/cpu_env.sh",
         f"{SPECULATIVE}.method=sam", f"{SPECULATIVE}.num_speculative_tokens=4",
         "actor_rollout_ref.rollout.disable_log_stats=False"],
        cwd=root, capture_output=True, text=True, timeout=480,
        env=os.environ | {"STEPS": "40", "OUTPUT_DIR": str(output), "RUN_DEADLINE_S": "400",
                          "STALL_DEADLINE_S": "60", "VLLM_LOGGING_LEVEL": "INFO"},
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    rows = [json.loads(line)["data"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    training = [row for row in rows if "actor/pg_loss" in row]
    assert len(training) == 40
    assert statistics.mean(row["critic/rewards/mean"] for row in training[-5:]) >= 0.65
    assert [row[ACCURACY] for row in rows if ACCURACY in row][-1] >= 0.75
    same_probabilities(training)
    drafts = re.findall(r"Accepted: (\d+) tokens, Drafted: (\d+) tokens", run.stdout + run.stderr)
    accepted, drafted = (sum(int(pair[i]) for pair in drafts) for i in (0, 1))
    assert drafted > accepted > 100

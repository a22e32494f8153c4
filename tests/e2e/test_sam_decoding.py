"""GSPO with drafts from a suffix automaton learns, and log-probs are the trainer's."""

from __future__ import annotations

import re

import pytest
from runs import PATIENCE_S, finish, launch, metrics, training

SPECULATIVE = "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"
ACCURACY = "val-core/tiny/addition/acc/mean@1"
pytestmark = [pytest.mark.weekly, pytest.mark.timeout(2 * PATIENCE_S)]


def test_gspo_learns_with_sam_decoding(tmp_path, nothing_left_behind, same_probabilities):
    output = tmp_path / "run"
    process = launch(
        "train_gspo_qwen3_tiny_cpu.sh",
        output,
        f"{SPECULATIVE}.method=sam",
        f"{SPECULATIVE}.num_speculative_tokens=4",
        "actor_rollout_ref.rollout.disable_log_stats=False",
        STEPS=16,
        VLLM_LOGGING_LEVEL="INFO",
    )
    text = finish(process, output)
    assert process.returncode == 0, text[-3000:]
    steps = training(output)
    assert len(steps) == 16
    before, *_, after = (row[ACCURACY] for row in metrics(output) if ACCURACY in row)
    assert after >= before + 0.1
    same_probabilities(steps)
    drafts = re.findall(r"Accepted: (\d+) tokens, Drafted: (\d+) tokens", text)
    accepted, drafted = (sum(int(pair[i]) for pair in drafts) for i in (0, 1))
    assert drafted > accepted > 100

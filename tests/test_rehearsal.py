"""The report of a rehearsal: counts of all processes by what they are, and what SMOKE=1 replaced."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ascend_rl.preflight import rehearsal

RECIPE, ENVIRONMENT = "internal/train_grpo_qwen3_235b_128die_true_weight.sh", "internal/qwen3_235b_env.sh"
NONE = {"graphs": {}, "calls": {}, "collectives": {}, "woken": 0, "peak_bytes": {}}
RECORDS = [
    {"process": "VLLM::Worker_TP0", **NONE, "graphs": {"replays": 3}, "woken": 2, "peak_bytes": {"0": 5e6}},
    {"process": "VLLM::Worker_TP1", **NONE, "graphs": {"replays": 4}, "peak_bytes": {"1": 7e6, "0": 1e6}},
    {"process": "ray::WorkerDict", **NONE, "calls": {"npu_swiglu": 5, "npu_rotary_mul": 1, "other": 9},
     "collectives": {"hccl::send": 6}},
    {"process": "ray::WorkerDict", **NONE, "calls": {"npu_rotary_position_embedding": 2}},
]  # fmt: skip


def test_counts_add_up_by_kind_of_process():
    counts = rehearsal.count(RECORDS)
    assert counts["decode graphs replayed"] == {"rollout": 7, "trainer": 0}
    assert counts["memory ranges woken after sleep"] == {"rollout": 2, "trainer": 0}
    assert counts["fused SwiGLU"] == {"rollout": 0, "trainer": 5}
    assert counts["fused rotary embedding"] == {"rollout": 0, "trainer": 3}
    assert counts["sends of pipelines and rings"]["trainer"] == 6
    assert rehearsal.peaks(RECORDS) == {"rollout": 7.0, "trainer": 0.0}


@pytest.mark.parametrize("columns", [80, 200])
def test_the_report_says_what_was_replaced_and_what_never_ran(root, tmp_path, columns):
    (tmp_path / "record").mkdir()
    for number, record in enumerate(RECORDS):
        (tmp_path / f"record/{number}.json").write_text(json.dumps(record))
    told = {"hdp/balance": 0.9, "timing_s/rollout_rebalance/moves": 3.0}  # as verl names what a rollout tells
    data = {"critic/rewards/mean": 0.5, "training/rollout_probs_diff_max": 0.01} | told
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": data}) + "\n")
    command = [sys.executable, "-m", "ascend_rl.rehearsal", RECIPE, tmp_path, "--environment", ENVIRONMENT]
    # As the launcher leaves the environment.
    environment = {"PATH": f"{root}/.venv/bin:/usr/bin:/bin", "COLUMNS": str(columns), "SMOKE": "1"}
    ran = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert max(map(len, ran.stdout.splitlines())) <= columns
    assert "never" in ran.stdout and "hdp/balance" in ran.stdout
    report = json.loads((tmp_path / "rehearsal.json").read_text())
    assert report["metrics"].items() >= told.items()
    changed = {key: (before, after) for key, before, after in report["replaced"]}
    sizes = "actor_rollout_ref.actor.megatron."
    assert changed[f"{sizes}tensor_model_parallel_size"] == ("4", "2")
    assert changed[f"{sizes}override_transformer_config.num_layers_in_first_pipeline_stage"][1] == "left out"
    assert changed[f"{sizes}dist_checkpointing_path"][1].endswith(
        "_overlap"
    )  # the environment script's layout
    assert changed["data.max_response_length"] == ("32768", "16")
    assert "trainer.device" not in changed and "actor_rollout_ref.actor.whole_batch_loss" not in changed


def test_without_records_there_are_no_counts():
    """As on a real NPU."""
    assert rehearsal.count([])["decode graphs replayed"] == {} and rehearsal.peaks([]) == {}

"""The report of a rehearsal: counts of all processes by what they are, and what SMOKE=1 replaced."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ascend_rl.preflight import rehearsal

RECIPE, ENVIRONMENT = "internal/train_grpo_qwen3_235b_128die_true_weight.sh", "internal/qwen3_235b_env.sh"
NONE = {"graphs": {}, "calls": {}, "collectives": {}, "woken": 0, "peak_bytes": {}, "die_peak_bytes": {}}
RECORDS = [
    {"process": "VLLM::Worker_TP0", **NONE, "graphs": {"replays": 3}, "woken": 2, "peak_bytes": {"0": 5e6}},
    {"process": "VLLM::Worker_TP1", **NONE, "graphs": {"replays": 4}, "peak_bytes": {"1": 7e6, "0": 1e6},
     "die_peak_bytes": {"5": 9e6, "4": 8e6}},
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
    assert rehearsal.peaks(RECORDS) == {"rollout": 7.0, "trainer": 0.0, "die": 9.0}


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
    assert report["planned_mb"] == {} and "not planned" in ran.stdout  # nothing says what ran
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


def hydra_wrote(output_dir, config: dict) -> None:
    (output_dir / "hydra/.hydra").mkdir(parents=True)
    (output_dir / "hydra/.hydra/config.yaml").write_text(json.dumps(config))  # which is YAML


@pytest.mark.parametrize(("blocks", "bucket"), [(64, 16), (128, 16), (64, 8192)])
def test_the_plan_is_of_the_sizes_that_ran(tmp_path, blocks, bucket):
    """A published model on two dies, so that another way of counting can be compared: the command's."""
    dies = {"nnodes": 1, "n_gpus_per_node": 2, "device": "npu", "share": 0.5}
    kwargs = {"vllm": {"num_gpu_blocks_override": blocks}}
    rollout = {"tensor_model_parallel_size": 2, "expert_parallel_size": 1, "max_model_len": 2048, "n": 1}
    rollout |= {"checkpoint_engine": {"update_weights_bucket_megabytes": bucket}}
    rollout |= {"max_num_seqs": 8, "max_num_batched_tokens": 2048, "engine_kwargs": kwargs}
    rollout |= {"gpu_memory_utilization": "${trainer.share}"}  # as a configuration may refer to others
    sizes = {"tensor_model_parallel_size": 2, "param_offload": True, "optimizer_offload": True}
    actor = {
        "strategy": "megatron",
        "megatron": sizes,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": 2048,
    }
    model = {"path": "Qwen3-0.6B"}
    hydra_wrote(
        tmp_path, {"trainer": dies, "actor_rollout_ref": {"model": model, "actor": actor, "rollout": rollout}}
    )
    command = [
        sys.executable,
        "-m",
        "ascend_rl.memory_plan",
        "--model",
        "qwen3-0.6b",
        "--dies",
        "2",
        "--tp",
        "2",
    ]
    command += "--optimizer offload --rollout-tp 2 --prompt 1024 --response 1024 --json".split()
    command += "--max-num-seqs 8 --gpu-memory-utilization 0.5 --moe-zero-memory disable".split()
    plan = json.loads(subprocess.run(command, text=True, capture_output=True, check=False).stdout)
    cache = blocks * 128 * 28 * 2 * 4 * 128 * 2  # tokens, layers, K and V, heads of a die, channels, bytes
    wanted = plan["rollout"]["weights_bytes"] + plan["rollout"]["prefill_bytes"] + cache
    found = rehearsal.planned(tmp_path)
    assert found["rollout"] * 1e6 == pytest.approx(wanted)
    if bucket > 1000:
        assert found["die"] * 1e6 == pytest.approx(plan["sync_bytes"] + (bucket << 20))
        assert found["trainer"] == pytest.approx(found["die"] - plan["rollout"]["weights_bytes"] / 1e6)
    else:
        assert found["trainer"] * 1e6 == pytest.approx(plan["training"]["peak_bytes"])
        assert found["die"] == max(found["trainer"], found["rollout"])


def test_what_cannot_be_planned_is_not(tmp_path):
    hydra_wrote(
        tmp_path, {"trainer": {"device": "npu"}, "actor_rollout_ref": {"model": {"path": "/nowhere/own"}}}
    )
    assert rehearsal.planned(tmp_path) == {}

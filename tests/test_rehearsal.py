"""The report of a rehearsal: counts of all processes by what they are, and what SMOKE=1 replaced."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ascend_rl.recipe import rehearsal
from ascend_rl.settings.metrics import FRESH

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
    (tmp_path / "record/counts").write_text("eplb 3\nsam_drafted 1000\neplb 4\n")
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
    features = report["features"]
    assert (features["eplb"], features["sam_drafted"], features["hdp_rings"]) == (7, 1000, 0)
    assert "VLLM_ENABLE_EPLB=1" in ran.stdout and "1,000" in ran.stdout
    assert "probability 0.01 apart at most" in " ".join(ran.stdout.split())
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


STEP = {"training/rollout_probs_diff_max": 2e-6}
WEIGHTS = {"rollout_corr/rollout_is_max": 1 + 2e-6, "rollout_corr/rollout_is_min": 1 - 4e-5}
RESPONSES = {"rollout_corr/log_ppl_diff_max": 1e-6, "rollout_corr/log_ppl_diff_min": -3e-6}
FRESH_STEP = STEP | WEIGHTS | {FRESH: 2e-6}
STALE_STEP = {
    "training/rollout_probs_diff_max": 3e-3,
    "rollout_corr/rollout_is_max": 1.1,
}  # no fresh response
FLOAT32 = {"dtype": "float32", "top_k": -1, "top_p": 1.0, "temperature": 0.9}


@pytest.mark.parametrize(
    ("rows", "rollout", "what", "largest", "met"),
    [
        ([STEP, {}], FLOAT32, "probability", 2e-6, True),
        ([{}, STEP | {"training/rollout_probs_diff_max": 2e-5}, STEP], FLOAT32, "probability", 2e-5, False),
        ([STEP | WEIGHTS | RESPONSES], FLOAT32, "log_prob", 4e-5, False),
        ([RESPONSES], FLOAT32, "mean_log_prob", 3e-6, True),
        ([STEP], FLOAT32 | {"dtype": "bfloat16"}, "probability", 2e-6, None),
        ([STEP], FLOAT32 | {"top_k": 50}, "probability", 2e-6, None),
        ([STEP], FLOAT32 | {"top_p": 0.9}, "probability", 2e-6, None),
        ([FRESH_STEP, STALE_STEP], FLOAT32, "probability", 2e-6, True),
        ([FRESH_STEP, STALE_STEP], FLOAT32, "of stale ones", 3e-3, True),
        ([FRESH_STEP | {FRESH: 3e-5}, STALE_STEP], FLOAT32, "probability", 3e-5, False),
    ],
)
def test_in_float32_the_worst_token_of_all_steps_is_within_the_bar(rows, rollout, what, largest, met):
    found = rehearsal.gap(rows, rollout)
    assert found[what] == pytest.approx(largest, rel=1e-3) and found["met"] is met
    assert bool(found["why"]) == (met is None)
    assert ("MORE than" in rehearsal.verdict(found)) == (met is False)
    assert "mean_log_prob" not in found or STEP.items().isdisjoint(rows[0].items())


def test_steps_that_compare_nothing_are_not_within_the_bar():
    found = rehearsal.gap([{"actor/pg_loss": 0.1}], FLOAT32)
    assert found["met"] is None and found["why"] == "nothing was compared"


def test_the_table_of_docs_is_made_from_the_reports(root, tmp_path):
    runs = []
    for name, met in (("a", True), ("b", False)):
        runs.append(tmp_path / name)
        runs[-1].mkdir()
        report = {
            "recipe": f"gspo_{name}", "dtype": "float32",
            "layout": "2 dies: fsdp2 SP2; 1 x TP2", "seconds": 98,
            "counts": {"decode graphs replayed": {"trainer": 0, "rollout": 1046}},
            "features": {"eplb": 7, "hdp_rings": 0, "hdp_alone": 0},
            "gap": {"probability": 1.2e-6, "bar": 1e-5, "met": met, "why": ""},
        }  # fmt: skip
        (runs[-1] / "rehearsal.json").write_text(json.dumps(report))
    command = [sys.executable, "-m", "ascend_rl.rehearsal", "--table", *runs]
    told = subprocess.run(command, cwd=root, text=True, capture_output=True, check=True).stdout.splitlines()
    assert told[2:] == [
        "| gspo_a, float32 | 2 dies: fsdp2 SP2; 1 x TP2 | 98 | 1,046 | probability 1.2e-06: within the bar "
        "| `eplb` 7 |",
        "| gspo_b, float32 | 2 dies: fsdp2 SP2; 1 x TP2 | 98 | 1,046 | probability 1.2e-06: **MISSED** "
        "| `eplb` 7 |",
    ]


def test_the_layout_is_that_of_the_run():
    rollout = {"tensor_model_parallel_size": 2, "data_parallel_size": 2, "expert_parallel_size": 4}
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 1, "expert_model_parallel_size": 2}
    actor = {"strategy": "megatron", "megatron": sizes}
    config = {"actor_rollout_ref": {"actor": actor, "rollout": rollout}, "trainer": {"n_gpus_per_node": 8}}
    assert rehearsal.layout(config) == "8 dies: megatron TP2 EP2; 2 x TP2 DP2 EP4"
    actor.update(strategy="fsdp2", ulysses_sequence_parallel_size=2)
    assert rehearsal.layout(config) == "8 dies: fsdp2 SP2; 2 x TP2 DP2 EP4"
    rollout.update(nnodes=1, n_gpus_per_node=4)
    assert rehearsal.layout(config) == "8 + 4 dies: fsdp2 SP2; 1 x TP2 DP2 EP4"


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
    found = rehearsal.planned(rehearsal.configuration(tmp_path))
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
    assert rehearsal.planned(rehearsal.configuration(tmp_path)) == {}

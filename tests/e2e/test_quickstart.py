"""Real runs of the main job: Ray + vLLM + FSDP on CPU, started as a user starts them.

Each takes a minute or two, has a deadline, and must leave nothing behind.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from runs import BRIEF, PATIENCE_S, finish, launch, metrics, named, nothing_left_of, run_benchmark, training

from ascend_rl.launch.supervise import descendants
from ascend_rl.process.logs import by_step
from ascend_rl.rollout import generations, slow_ranks
from ascend_rl.settings.claim import QUICKSTART, claim

pytestmark = [pytest.mark.timeout(2 * PATIENCE_S)]


@pytest.fixture(scope="module")
def quickstart(root, tmp_path_factory, request):
    """quickstart.sh itself, with 40 steps: its OUTPUT_DIR, where an earlier run was, and how it ended.

    It exports and evaluates only where a test of that is to run.
    """
    outputs, wanted = tmp_path_factory.mktemp("quickstart"), {item.name for item in request.session.items}
    evaluate = ["--evaluate"] * (test_its_model_is_exported_and_evaluated.__name__ in wanted)
    output = outputs / "run"
    claim(output, QUICKSTART)
    for stale in ("checkpoints/global_step_9", "evaluation/9", "model/earlier"):
        (output / stale).mkdir(parents=True)
    with nothing_left_of(outputs):
        run = subprocess.run(
            ["bash", "quickstart.sh", "--steps", "40", *evaluate],
            cwd=root,
            text=True,
            capture_output=True,
            env=os.environ | {"OUTPUT_DIR": str(output)},
        )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return output, run


def test_gspo_learns_addition(quickstart, same_probabilities):
    """Half the steps of the default, so a looser reward than its own 0.8."""
    output, run = quickstart
    report = json.loads((output / "report.json").read_text())
    assert report["steps"] == 40
    assert report["final_reward"] >= 0.65 and report["val_reward"] >= 0.75
    assert report["val_reward"] >= report["val_reward_before"] + 0.3
    assert 0 < report["max_rollout_probs_diff"]
    assert (output / "report.png").stat().st_size > 10_000
    assert "held-out reward, greedy, after" in run.stdout and "40/40" in run.stderr
    steps = training(output)
    assert len(steps) == 40
    same_probabilities(steps)
    assert any(row["actor/pg_clipfrac"] > 0 for row in steps)  # the second update of a step is off-policy
    assert all(row["actor/gspo/seq_ratio/p05"] <= row["actor/gspo/seq_ratio/p95"] for row in steps)
    assert list((output / "tensorboard").glob("events*"))
    assert len(by_step(output / generations.FILE)) == 40


@pytest.mark.weekly
def test_its_model_is_exported_and_evaluated(quickstart):
    """What was evaluated is what was trained, and the picture shows it; nothing of an earlier run is."""
    output, run = quickstart
    assert not (output / "model/earlier").exists()
    evaluations = {
        step: json.loads((output / f"evaluation/{step}/report.json").read_text()) for step in (0, 40)
    }
    assert evaluations[40]["model"].startswith(f"{output}/model ")
    before, after = (evaluations[step]["results"]["val"] for step in (0, 40))
    assert after["avg@4"] > before["avg@4"] + 0.1 and after["pass@4"] > after["avg@4"]
    said = rf"evaluated: val avg@4 +{before['avg@4']:.3f} to {after['avg@4']:.3f}\n"
    assert re.search(said, run.stdout), run.stdout[-3000:]


@pytest.mark.weekly
def test_two_workers_share_the_steps_of_dapo(tmp_path, nothing_left_behind, same_probabilities):
    """Two FSDP ranks, two vLLM servers; samples placed, requests that move, batches of groups that vary.

    With the rollout's progress bar, which nobody sees unless it is asked for. One rank is slow.
    """
    output, rollout = tmp_path / "run", "actor_rollout_ref.rollout"
    process = launch(
        "train_dapo_qwen3_tiny_cpu.sh",
        output,
        f"{rollout}.rollout_rebalance.check_interval_s=0.01",
        f"{rollout}.max_num_seqs=2",
        f"{rollout}.data_rebalance=True",
        f"{rollout}.use_tqdm=True",
        "trainer.test_freq=7",
        "actor_rollout_ref.model.external_lib=slow_rank",
        NPUS_PER_NODE=2,
        STEPS=7,
        PYTHONPATH=Path(__file__).parent,
        ROLLOUT_REBALANCE_ENABLE=1,
    )
    most: Counter = Counter()
    while process.poll() is None:
        most |= Counter(descendants(process.pid).values())
        time.sleep(1)
    text = finish(process, output)
    assert process.returncode == 0, text[-3000:]
    assert most["ray::WorkerDict"] == most["VLLM::EngineCor"] == 2
    steps = training(output)
    assert len(steps) == 7
    same_probabilities(steps)
    did = {
        what: sum(row[f"timing_s/rollout_rebalance/{what}"] for row in steps)
        for what in ("moves", "moves_running", "failed", "unanswered")
    }
    assert did["moves"] > 0 == did["failed"] == did["unanswered"]
    assert all(row["timing_s/data_rebalance/known_share"] == 0 for row in steps)  # each prompt comes once
    for row in steps:
        assert 0.25 - 0.5 / 4 <= row["critic/score/mean"] <= 0.75  # of 4, 1 to 3 are right; a penalty is 0.5
        assert row["dapo/generated_prompts"] * row["dapo/kept_share"] == pytest.approx(
            16 + row["dapo/surplus_groups"]
        )
        assert row["actor/grad_norm"] > 0
    assert max(row["dapo/num_gen_batches"] for row in steps) >= 2
    accuracy = "val-core/tiny/addition/acc/mean@1"
    before, after = (row[accuracy] for row in metrics(output) if accuracy in row)
    assert after > before
    slow = re.findall(r"rank (\d+) \(\S+, device \d*\) computes (\S+) times as long as the median", text)
    assert [rank for rank, _ in slow] == ["1"] and 1.15 < float(slow[0][1]) < 1.35
    times = [line for of in by_step(output / slow_ranks.FILE).values() for line in of]
    assert [line["step"] for line in times if line["ranks"]] == list(range(2, 8))
    for line in times[1:]:
        of_ranks = line["ranks"]
        assert all(rank["backward_s"] > 0 and rank["forward_s"] > 3 * 0.5 for rank in of_ranks), line
        assert of_ranks[1]["collectives_s"] > 0
        # 64 responses, once for log-probs and once in an update, each padded to 32 tokens.
        assert sum(rank["tokens"] for rank in of_ranks) == 2 * 64 * 32, line
        assert line["engines"].keys() == {"0", "1"}
        assert all(of["tokens"] >= of["steps"] > 0 < of["seconds"] for of in line["engines"].values())
    waited = [sum(line["ranks"][rank]["collectives_s"] for line in times[1:]) for rank in (0, 1)]
    assert waited[0] > waited[1]  # the fast one
    drawn = re.findall(r"rollout 7: (\d+) tokens/s, 0 running, 0 waiting, longest (\d+):", text)
    assert drawn and all(int(speed) > 0 and 0 < int(longest) <= 16 for speed, longest in drawn)
    run_benchmark("slow_ranks", "--run", output)
    run_benchmark("dapo", "--runs", output, output)


def wait_for(condition, process, output) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, (output / "train.log").read_text()[
            -3000:
        ]
        time.sleep(0.5)


@pytest.mark.weekly
def test_a_dead_engine_ends_the_run_with_a_clear_error(tmp_path, nothing_left_behind):
    output = tmp_path / "run"
    process = launch(
        "train_gspo_qwen3_tiny_cpu.sh",
        output,
        "trainer.val_before_train=False",
        **BRIEF | {"STEPS": 5000, "RESTART_SERVERS": 0},
    )
    log = output / "train.log"
    written = output / "metrics.jsonl"
    wait_for(lambda: written.exists() and written.stat().st_size, process, output)
    pid = named(process, "VLLM::EngineCor")[0]
    assert "ascend_rl.launch.warm_start" in psutil.Process(pid).parent().cmdline()
    os.kill(pid, signal.SIGKILL)
    at = time.monotonic()
    text = finish(process, output)
    assert process.returncode not in (0, None)
    assert "ERROR:" in text and str(log) in text
    assert time.monotonic() - at < 300  # before the stall deadline, 600 s


@pytest.mark.long
def test_ctrl_c_stops_everything(tmp_path, nothing_left_behind):
    output = tmp_path / "run"
    process = launch("train_gspo_qwen3_tiny_cpu.sh", output, STEPS=5000, **BRIEF)
    wait_for(lambda: named(process, "ray::WorkerDict"), process, output)
    process.send_signal(signal.SIGINT)
    text = finish(process, output)
    assert process.returncode == 128 + signal.SIGINT
    assert "stopped by SIGINT" in text


@pytest.mark.weekly
def test_switched_off_the_patches_change_nothing(root, tmp_path, tree_without, nothing_left_behind):
    """Three steps of a stock algorithm: all patches give, bit for bit, what those that a CPU needs give."""
    enabling = {"cpu_device", "vllm_cpu_rollout"}
    others = [p.stem.split("-")[-1] for p in sorted((root / "patches/verl").glob("*.patch"))]
    variant = tree_without("verl", [name for name in others if name not in enabling])
    # Requests race to the server. Alone in a step, without cached prefixes and with one token to choose from,
    # each has its answer whatever came before; sampled answers would change places, and sums over them their
    # last digits. The second epoch is off-policy, so that ratios and clipping count.
    stock = [
        "data.shuffle=False",
        "data.train_batch_size=8",
        "algorithm.adv_estimator=reinforce_plus_plus",  # equal answers have no advantage in GRPO
        "actor_rollout_ref.rollout.n=1",
        "actor_rollout_ref.rollout.top_k=1",
        "actor_rollout_ref.rollout.enable_prefix_caching=False",
        "actor_rollout_ref.rollout.max_num_seqs=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
    ]
    # The preflight would refuse a verl that is not the lock's.
    trees = {"patched": BRIEF, "stock": BRIEF | {"PYTHONPATH": str(variant)}}
    losses = {}
    for name, variables in trees.items():
        process = launch("train_grpo_qwen3_tiny_cpu.sh", tmp_path / name, *stock, STEPS=3, **variables)
        text = finish(process, tmp_path / name)
        assert process.returncode == 0, text[-3000:]
        keys = (
            "actor/pg_loss",
            "actor/grad_norm",
            "actor/ppo_kl",
            "actor/pg_clipfrac",
            "critic/rewards/mean",
            "response_length/mean",
            "actor/entropy",
        )
        losses[name] = [[row[key] for key in keys] for row in metrics(tmp_path / name)]
    assert len(losses["patched"]) == len(losses["stock"]) == 3
    assert losses["patched"] == losses["stock"]
    assert all(row[1] > 0 for row in losses["patched"]) and any(row[3] > 0 for row in losses["patched"])


def test_bad_arguments_are_explained(root):
    for arguments, message in (
        (["ray_start_npu.sh"], "no training script given"),
        (["ray_start_npu.sh", "internal/train_nothing.sh"], "not found; there are:"),
        (
            ["ray_start_npu.sh", "internal/train_gspo_qwen3_tiny_cpu.sh", "nothing_env.sh"],
            "environment script",
        ),
        (["quickstart.sh", "--steps", "many"], "positive number"),
        (["quickstart.sh", "--fast"], "unknown argument"),
        (["build_project.sh", "--target", "gpu"], "--target cpu or --target npu"),
    ):
        run = subprocess.run(["bash", *arguments], cwd=root, capture_output=True, text=True)
        assert run.returncode == 1 and message in run.stderr, (arguments, run.stderr)

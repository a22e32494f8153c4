"""A run that is killed in the middle goes on from its last checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from runs import PATIENCE_S, finish, launch, named

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(2 * PATIENCE_S)]

# Greedy responses, one a prompt, one request at a time: all that is random is the order of the prompts. The
# advantages are relative to the batch. The rollout's probabilities are 1 then and the trainer's are not, so
# the gate at the first step is off.
REPEATABLE = [
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.top_k=1",
    "actor_rollout_ref.rollout.max_num_seqs=1",
    "algorithm.adv_estimator=reinforce_plus_plus",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
]
SAVING = ["trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=1", "trainer.resume_mode=auto"]
TRAINERS = {
    "fsdp2": ("train_gspo_qwen3_tiny_cpu.sh", ["actor_rollout_ref.actor.strategy=fsdp2"], {}),
    "megatron": (
        "train_gspo_qwen3_moe_tiny_cpu.sh",
        [],
        {"environment": "cpu_megatron_env.sh", "NPUS_PER_NODE": 2},
    ),
}
MEGATRON = "actor_rollout_ref.actor.megatron"
if os.environ.get("ALL_RECIPES") == "1":
    # A recipe's own path: the device npu, MindSpeed and its swapped optimizer.
    TRAINERS["rehearsal"] = (
        "train_gspo_qwen3_30b_a3b_16die_true_weight.sh",
        [
            f"+{MEGATRON}.override_transformer_config.swap_optimizer=True",
            f"{MEGATRON}.optimizer_offload=False",
            "data.train_batch_size=8",  # two updates: the second is after what the checkpoint's moments made
            "actor_rollout_ref.actor.optim.lr=3e-4",
        ],
        {"environment": "qwen3_30b_a3b_env.sh", "SMOKE": 1},
    )
SAME = ("actor/pg_loss", "actor/grad_norm", "actor/lr", "critic/rewards/mean", "response_length/mean")


def steps(path) -> dict[int, list[float]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: [row["data"][key] for key in SAME] for row in rows if "actor/pg_loss" in row["data"]}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_killed_and_resumed(tmp_path, nothing_left_behind, trainer):
    """SIGKILL of a training worker after step 3; the restart goes on from step 2, and does the same again."""
    output = tmp_path / "run"
    script, overrides, variables = TRAINERS[trainer]
    process = launch(
        script, output, *REPEATABLE, *SAVING, *overrides, STEPS=5, RESTARTS=1, GAP_LIMIT=0, **variables
    )
    metrics = output / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while not (metrics.exists() and 3 in steps(metrics)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(named(process, "ray::WorkerDict")[0], signal.SIGKILL)
    text = finish(process, output)
    assert process.returncode == 0, text[-3000:]
    assert "start 2 of at most 2 follows and goes on from the last checkpoint" in text
    before, after = steps(output / "metrics.1.jsonl"), steps(metrics)
    again = sorted(before.keys() & after.keys())
    assert min(after) == 3 and max(after) == 5 and again, (sorted(before), sorted(after))
    for step in again:
        assert after[step] == pytest.approx(before[step], rel=1e-5, abs=1e-7), step
    if trainer == "megatron":  # its learning rate decays, in the steps after the lost ones too
        rates = [values[2] for _, values in sorted((before | after).items())]
        assert rates == sorted(rates, reverse=True), rates
    assert len({tuple(values) for values in before.values()}) == len(before), "the steps do not differ"

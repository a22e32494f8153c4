"""A killed run continues from its last checkpoint as if nothing had happened; bench_faults.py tests FSDP2."""

from __future__ import annotations

import os
import signal
import time

import pytest
from runs import (
    BRIEF,
    MEGATRON,
    PATIENCE_S,
    REPEATABLE,
    SAME,
    console,
    finish,
    launch,
    losses,
    named,
    stopped_and_resumed,
)

pytestmark = [pytest.mark.weekly, pytest.mark.timeout(2 * PATIENCE_S)]

SHORT = BRIEF | {"STEPS": 5, "GAP_LIMIT": 0}
SAVING = [
    "trainer.save_freq=2",
    "trainer.max_actor_ckpt_to_keep=1",
    "trainer.resume_mode=auto",
    "trainer.test_freq=-1",
]
TRAINERS = {
    "megatron": ("train_gspo_qwen3_moe_tiny_cpu.sh", [], MEGATRON),
    "rehearsal swapped": (
        "train_gspo_qwen3_30b_a3b_16die_true_weight.sh",
        [
            "+actor_rollout_ref.actor.megatron.override_transformer_config.swap_optimizer=True",
            "actor_rollout_ref.actor.megatron.optimizer_offload=False",
            "data.train_batch_size=8",  # two updates: the second is after what the checkpoint's moments made
            "actor_rollout_ref.actor.optim.lr=3e-4",
        ],
        {"environment": "qwen3_30b_a3b_env.sh", "SMOKE": 1},
    ),
}
# A recipe's own path: device npu, MindSpeed. 235B has rings, and its weights in Megatron's checkpoint;
# 30B also runs with the swapped optimizer, as on a cluster, for which weights have 16 bits.
for size in ("30b_a3b_16die", "235b_128die"):
    TRAINERS[f"rehearsal {size}"] = (
        f"train_gspo_qwen3_{size}_true_weight.sh",
        ["data.train_batch_size=8", "actor_rollout_ref.actor.optim.lr=3e-4"],
        {"environment": f"qwen3_{size.rpartition('_')[0]}_env.sh", "SMOKE": 1, "SMOKE_DTYPE": "float32"},
    )


def test_stopped_and_resumed(tmp_path, nothing_left_behind):
    """With the losses of a run that was not stopped, which a limit far away does not change.

    Megatron saves while it trains on: the run ends when that is done.
    """
    script, whole = "train_gspo_qwen3_moe_tiny_cpu.sh", tmp_path / "whole"
    found = stopped_and_resumed(
        tmp_path, script, "actor_rollout_ref.actor.checkpoint.async_save=True", **MEGATRON
    )
    assert "when async_save is True" in console(tmp_path / "run").read_text()
    run = launch(
        script, whole, *REPEATABLE, "trainer.save_freq=100", "trainer.test_freq=-1",
        **SHORT | MEGATRON | {"STEPS": 9, "SAVE_BY": 10 * PATIENCE_S},
    )  # fmt: skip
    assert finish(run, whole) and run.returncode == 0
    for step, values in losses(whole / "metrics.jsonl").items():
        assert found[step] == pytest.approx(values, rel=1e-5, abs=1e-7), step


@pytest.mark.parametrize("trainer", TRAINERS)
def test_killed_and_resumed(tmp_path, nothing_left_behind, trainer):
    """SIGKILL of a training worker after step 3; the restart repeats it from step 2, with the same result."""
    output = tmp_path / "run"
    script, overrides, variables = TRAINERS[trainer]
    process = launch(script, output, *REPEATABLE, *SAVING, *overrides, **SHORT | variables, RESTARTS=1)
    metrics = output / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while 3 not in losses(metrics):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(named(process, "ray::WorkerDict")[0], signal.SIGKILL)
    text = finish(process, output)
    assert process.returncode == 0, text[-3000:]
    assert "start 2 of at most 2 follows and continues from the last checkpoint" in text
    before, after = losses(output / "metrics.1.jsonl"), losses(metrics)
    again = sorted(before.keys() & after.keys())
    assert min(after) == 3 and max(after) == 5 and again, (sorted(before), sorted(after))
    for step in again:
        assert after[step] == pytest.approx(before[step], rel=1e-5, abs=1e-7), step
    # The schedule of the learning rate continues, after the lost steps too: from step 2 on it never rises.
    rates = [values[SAME.index("actor/lr")] for _, values in sorted((before | after).items())][1:]
    assert rates == sorted(rates, reverse=True), rates
    assert len({tuple(values) for values in before.values()}) == len(before), "the steps do not differ"

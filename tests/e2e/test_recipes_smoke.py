"""Recipes of large models, each with its own overrides, run for two steps on a CPU by SMOKE=1.

One recipe of each code path; tests/test_recipes.py lists how the others differ from these. A run takes almost
two minutes, most of it imports, so that one stands for all unless ALL_RECIPES=1.
"""

from __future__ import annotations

import math
import os

import pytest
from runs import PATIENCE_S, finish, launch, training

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(2 * PATIENCE_S)]

MEGATRON, FSDP = "cpu_megatron_env.sh", "cpu_env.sh"
# Sampling from the whole distribution: the rollout's probabilities are the trainer's.
RECIPES = {
    "grpo_qwen3_235b_128die_true_weight": (MEGATRON, False),  # a Megatron checkpoint, a reference
    "dapo_qwen3_235b_128die_true_weight": (MEGATRON, False),  # importance sampling
    "gspo_qwen3_30b_a3b_16die_true_weight": (MEGATRON, True),  # mbridge, 8 updates a step
    "grpo_qwen3_32b_32die_true_weight": (MEGATRON, True),  # dense, recomputed activations
    "gspo_qwen3_32b_64die_true_weight": (FSDP, True),  # FSDP2
    "gspo_qwen2_5_3b_8die_async_server": (FSDP, True),  # FSDP, legacy workers
    "gspo_qwen2_5_3b_8die_engine_workers": (FSDP, True),
    # No code path of their own.
    "grpo_qwen3_235b_128die_random_init": (MEGATRON, False),
    "gspo_qwen3_235b_128die_true_weight": (MEGATRON, False),
    "dapo_qwen3_32b_32die_true_weight": (MEGATRON, True),
    "grpo_qwen3_30b_a3b_16die_true_weight": (MEGATRON, True),
    "gspo_qwen2_5_3b_8die_fsdp": (FSDP, True),
}
IN_BRIEF = ["grpo_qwen3_235b_128die_true_weight"]  # FSDP: test_quickstart.py


@pytest.mark.parametrize("name", RECIPES if os.environ.get("ALL_RECIPES") == "1" else IN_BRIEF)
def test_two_steps(tmp_path, nothing_left_behind, same_probabilities, name):
    (environment, whole_distribution), output = RECIPES[name], tmp_path / "run"
    process = launch(
        f"train_{name}.sh",
        output,
        environment=environment,
        SMOKE=1,
        NPUS_PER_NODE=1,
    )
    text = finish(process, output)
    assert process.returncode == 0, text[-3000:]
    rows = training(output)
    assert len(rows) == 2
    for row in rows:
        assert math.isfinite(row["actor/pg_loss"])
    if whole_distribution:
        same_probabilities(rows)
    if "random_init" not in name:  # such a model never adds right
        assert max(row["critic/rewards/max"] for row in rows) > 0
        assert max(row["actor/grad_norm"] for row in rows) > 0  # a step whose groups are all alike has none
    if "actor/kl_loss" in rows[0] and "random_init" not in name:
        assert abs(rows[0]["actor/kl_loss"]) <= 1e-6  # the reference has the same weights at the start
    if name.startswith("dapo"):
        assert all(row["dapo/num_gen_batches"] >= 1 and 0 < row["critic/score/mean"] < 1 for row in rows)
        assert rows[0]["rollout_corr/rollout_is_max"] <= 2.0
    if name.startswith("gspo"):
        assert "actor/gspo/seq_ratio/p05" in rows[0]

"""Recipes on their own path: verl 0.9.1, FSDP2 or Megatron, vllm-ascend 0.23, software NPU."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from runs import PATIENCE_S

from ascend_rl.process.logs import records
from ascend_rl.rollout import slow_ranks
from ascend_rl.settings import stack

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * PATIENCE_S)]

# Signs that are counted: see ascend_rl/recipe/rehearsal.py.
ROLLOUT = {
    "decode graphs replayed", "attention parameters updated in graphs", "memory ranges woken after sleep",
    "attention over the paged cache",
}  # fmt: skip
DENSE = ROLLOUT | {"products with reduce-scatter, FlashComm1", "weights prefetched"}
EXPERTS = ROLLOUT | {"tokens dispatched by MC2", "grouped products of experts", "all-to-all"}
FLASH = {"flash attention of the trainer", "all-reduces"}
MEGATRON = FLASH | {"sends of pipelines and rings"}
RINGS = MEGATRON | {
    "its backward, in rings", "fused updates of ring attention", "fused rotary embedding", "fused SwiGLU"
}  # fmt: skip
MOE = {"grouped products of experts", "all-to-all"}
RECIPES = {  # name: (environment, signs in the rollout, signs in the trainer, variables)
    "gspo_qwen3_32b_64die_true_weight": (  # FSDP2, Ulysses
        "qwen3_32b",
        DENSE,
        FLASH | {"all-to-all"},
        {"LENGTH_SCHEDULER": "1"},
    ),
    "grpo_qwen3_235b_128die_true_weight": ("qwen3_235b", EXPERTS, RINGS | MOE, {}),
    "gspo_qwen3_30b_a3b_16die_true_weight": (
        "qwen3_30b_a3b",
        EXPERTS,
        MEGATRON | MOE,
        {
            "ROUTER_REPLAY": "R3",
            "VLLM_ENABLE_EPLB": "1",
            "VLLM_FUSED_MOE_CHUNK_SIZE": "64",
            "ENABLE_SAM": "1",
        },
    ),
    "gspo_qwen3_235b_128die_true_weight": ("qwen3_235b", EXPERTS, RINGS | MOE, {}),
    "grpo_qwen3_235b_128die_random_init": ("qwen3_235b", EXPERTS, RINGS | MOE, {}),
    "grpo_qwen3_32b_32die_true_weight": ("qwen3_32b", DENSE, RINGS, {}),
    "dapo_qwen3_32b_32die_true_weight": ("qwen3_32b", DENSE, RINGS, {}),
}
LARGEST = "grpo_qwen3_235b_128die_true_weight"  # stands for all without --weekly
CASES = [pytest.param(name, marks=[pytest.mark.weekly] * (name != LARGEST)) for name in RECIPES]
EPLB = [
    f"+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.{key}"
    for key in ("num_iterations_eplb_update=8", "num_wait_worker_iterations=4")
]
# The second step has the prompts of the first one again, 16 with 4 samples each.
AGAIN, SAMPLES = ["data.train_max_samples=16"], 64
MEASURED = ("forward_s", "backward_s", "collectives_s", "micro_batches", "tokens")
# The trainer knows no truncation.
FROM_ALL_TOKENS = ["actor_rollout_ref.rollout.top_k=-1", "actor_rollout_ref.rollout.top_p=1"]


@pytest.mark.parametrize("recipe", CASES)
def test_two_steps(root, tmp_path, recipe):
    """Rollout and trainer run the same model, with graphs, sleep and several ranks; R3 replays its routes."""
    script, rollout, trainer, variables = RECIPES[recipe]
    if "sends of pipelines and rings" in trainer and not (stack.DIRECTORY / "frameworks/mindspeed").is_dir():
        pytest.skip("bash download_frameworks_source_code.sh --only mindspeed fetches what is missing")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VERL", "VLLM"))}
    environment |= {"SMOKE": "1", "SMOKE_DTYPE": "float32", "OUTPUT_DIR": str(tmp_path / "run"), **variables}
    command = ["bash", "ray_start_npu.sh", f"internal/train_{recipe}.sh", f"internal/{script}_env.sh"]
    command += FROM_ALL_TOKENS
    balanced = [name for name in ("eplb", "chunked_moe") if "VLLM_ENABLE_EPLB" in variables]
    by_length = "LENGTH_SCHEDULER" in variables
    command += [*(EPLB if balanced else []), *(AGAIN if by_length else [])]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    report = json.loads((tmp_path / "run/rehearsal.json").read_text())
    assert report["gap"]["met"] is True, report["gap"]
    counts = report["counts"]
    assert all(counts[sign].get("rollout") for sign in rollout), counts
    assert all(counts[sign].get("trainer") for sign in trainer), counts
    assert bool(report["features"].get("moe_alltoallv")) == ("235b" in recipe)
    assert all(report["features"].get(name) for name in balanced), report
    assert bool(report["features"].get("router_replay")) == ("ROUTER_REPLAY" in variables)
    assert report["features"].get("scheduled_lengths", 0) == SAMPLES * by_length, report
    [ranks] = filter(None, (line["ranks"] for line in records(tmp_path / "run" / slow_ranks.FILE)))
    assert len(ranks) > 1 and min(rank[of] for rank in ranks for of in MEASURED) > 0, ranks
    tracker = tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt"
    if "random_init" in recipe:  # it saves nothing
        assert not tracker.parent.exists()
        return
    assert tracker.read_text() == "2"

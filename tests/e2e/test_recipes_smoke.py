"""Recipes of large models, each on its own path, rehearsed for two steps on the software NPU by SMOKE=1.

In float32 and sampling from all tokens, so that the rollout must agree with its trainer to 1e-5. The first
are one recipe of each code path; tests/test_recipes.py lists how the others differ from these. SWITCHED are
three with switches on that are off in the recipes; each switch must count what it did. IN_BFLOAT16 are as on
the cluster, with the swapped optimizer, which knows 16 bits only, and their own sampling. What a recipe saves
must be complete. Without --weekly the largest, in bfloat16, stands for all.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import psutil
import pytest
from runs import PATIENCE_S, finish, launch, named, training

from ascend_rl.process import logs
from ascend_rl.rollout import slow_ranks
from ascend_rl.weights.checkpoints import TRACKER
from ascend_rl.weights.export import find, open_weights
from ascend_rl.weights.qwen3 import read_model
from ascend_rl.weights.torch_dist import Checkpoint

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * PATIENCE_S)]

# Signs that are counted in each: see ascend_rl/recipe/rehearsal.py.
ROLLOUT = {"decode graphs replayed", "memory ranges woken after sleep", "attention over the paged cache"}
MINDSPEED = {"flash attention of the trainer", "sends of pipelines and rings"}
RINGS = MINDSPEED | {"its backward, in rings", "fused updates of ring attention"}
SWAPPED = {"fused AdamW of the swapped optimizer"}
DENSE = {"products with reduce-scatter, FlashComm1", "weights prefetched"}
MOE = {"tokens dispatched by MC2", "grouped products of experts", "all-to-all"}
B235 = ROLLOUT | RINGS | MOE
RECIPES = {  # name: (environment, signs)
    "gspo_qwen3_32b_64die_true_weight": ("qwen3_32b", ROLLOUT | DENSE),  # FSDP2, Ulysses
    "grpo_qwen3_235b_128die_true_weight": ("qwen3_235b", B235),  # a Megatron checkpoint, a reference
    "dapo_qwen3_235b_128die_true_weight": ("qwen3_235b", B235),  # importance sampling
    "gspo_qwen3_30b_a3b_16die_true_weight": ("qwen3_30b_a3b", ROLLOUT | MINDSPEED | MOE),  # mbridge
    "grpo_qwen3_32b_32die_true_weight": ("qwen3_32b", ROLLOUT | RINGS | DENSE),  # two servers
    "gspo_qwen2_5_3b_8die_fsdp": ("qwen2_5_3b", set()),  # FSDP, legacy workers
    "gspo_qwen2_5_3b_8die_engine_workers": ("qwen2_5_3b", set()),
    # No code path of their own.
    "grpo_qwen3_235b_128die_random_init": ("qwen3_235b", B235),
    "gspo_qwen3_235b_128die_true_weight": ("qwen3_235b", B235),
    "dapo_qwen3_32b_32die_true_weight": ("qwen3_32b", ROLLOUT | RINGS | DENSE),
    "grpo_qwen3_30b_a3b_16die_true_weight": ("qwen3_30b_a3b", ROLLOUT | MINDSPEED | MOE),
}
SAVE_NOTHING = {
    "gspo_qwen2_5_3b_8die_engine_workers",
    "grpo_qwen3_235b_128die_random_init",
}
# The trainer knows no truncation.
FROM_ALL_TOKENS = ["actor_rollout_ref.rollout.top_k=-1", "actor_rollout_ref.rollout.top_p=1"]
VLLM = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
SWITCHED = {  # name: (recipe, variables, overrides, what counts)
    "rollout switches": (
        "gspo_qwen3_32b_64die_true_weight",
        {"ROLLOUT_REBALANCE_ENABLE": 1, "ROLLOUT_DISABLE_GC": 1},
        [
            "trainer.n_gpus_per_node=4",  # two servers
            "actor_rollout_ref.rollout.rollout_rebalance.check_interval_s=0.02",
            # As soon as one server has two requests more than the other, one moves.
            f"actor_rollout_ref.rollout.rollout_rebalance.gears={[*range(1, 33)]}".replace(" ", ""),
            "actor_rollout_ref.rollout.data_rebalance=True",
            "data.train_max_samples=16",  # of one step: the second knows their lengths
            f"{VLLM}.speculative_config.method=sam",
            f"{VLLM}.speculative_config.num_speculative_tokens=3",
            f"{VLLM}.additional_config.bs_threshold_for_spec_decode=32",
        ],
        {"data_rebalance", "known_lengths", "rollout_rebalance", "sam_drafted", "sam_accepted", "gc_between"},
    ),
    "expert switches": (
        "gspo_qwen3_30b_a3b_16die_true_weight",
        {"VLLM_ENABLE_EPLB": 1, "VLLM_FUSED_MOE_CHUNK_SIZE": 64},
        [
            f"{VLLM}.additional_config.num_iterations_eplb_update=8",
            f"{VLLM}.additional_config.num_wait_worker_iterations=4",
        ],
        {"eplb", "chunked_moe"},
    ),
    "rings": (
        "gspo_qwen3_235b_128die_true_weight",
        {"USE_HDP": 1},
        [
            # A rank has 16 tokens, so a prompt of 8 with an answer of 9 needs two; one with 5 or 7 does not.
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16",
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16",
        ],
        {"hdp_rings", "hdp_alone", "moe_alltoallv", "data_rebalance"},
    ),
}
UNPLANNED_MB = (
    36  # of a process; transformers makes its mask from 2048 x 2048 numbers of 32 bits, and their copy
)
BFLOAT16 = ", bfloat16"
IN_BFLOAT16 = [
    "grpo_qwen3_235b_128die_true_weight" + BFLOAT16,  # saved by Megatron
    "grpo_qwen3_32b_32die_true_weight" + BFLOAT16,  # and by mbridge
]
MEASURED = ("forward_s", "backward_s", "collectives_s", "micro_batches", "tokens")
ADAMW = ("exp_avg", "exp_avg_sq", "fp32_param")  # of each weight
CASES = [
    pytest.param(name, marks=[pytest.mark.weekly] * (name != IN_BFLOAT16[0]))
    for name in (*RECIPES, *SWITCHED, *IN_BFLOAT16)
]


def check_checkpoint(directory: Path) -> None:
    """One of the last step: all weights of the model, and for each what AdamW needs."""
    assert (directory / TRACKER).read_text() == "2"
    assert [path.name for path in directory.iterdir() if path.is_dir()] == ["global_step_2"]
    assert all(path.stat().st_size > 0 for path in directory.rglob("*") if path.is_file())
    actor = find(directory)
    source, kind = open_weights(actor, read_model(actor / "huggingface"))  # by their names and shapes
    source.close()
    if "FSDP" in kind:
        ranks = source.world_size
        for part in ("model", "optim", "extra_state"):
            assert len([*actor.glob(f"{part}_world_size_{ranks}_rank_*.pt")]) == ranks > 1
        return
    checkpoint = Checkpoint(actor / "dist_ckpt")
    states = [key.partition("optimizer.state.")[2] for key in checkpoint.tensors]
    weights = {key for key, state in zip(checkpoint.tensors, states, strict=True) if not state}
    moments = {state.removeprefix("exp_avg.") for state in states if state.startswith("exp_avg.")}
    assert {*states} - {""} == {f"{kept}.{name}" for kept in ADAMW for name in moments}
    assert moments == weights if "Megatron" in kind else moments and not weights  # mbridge has them elsewhere


@pytest.mark.parametrize("case", CASES)
def test_two_steps(tmp_path, nothing_left_behind, case):
    exact, output = not case.endswith(BFLOAT16), tmp_path / "run"
    name, switches, overrides, _ = SWITCHED.get(case, (case.removesuffix(BFLOAT16), {}, [], set()))
    if exact:
        overrides = FROM_ALL_TOKENS + overrides
    variables = {"SMOKE": 1, "SMOKE_DTYPE": "float32" if exact else "bfloat16", **switches}
    environment = f"{RECIPES[name][0]}_env.sh"
    process = launch(f"train_{name}.sh", output, *overrides, environment=environment, **variables)
    while not (workers := named(process, "ray::WorkerDict")) and process.poll() is None:
        time.sleep(1)
    assert {"ascend_rl.launch.warm_start" in psutil.Process(pid).parent().cmdline() for pid in workers} == {
        True
    }
    text = finish(process, output)
    assert process.returncode == 0, text[-3000:]
    check(case, output, text)


def check(case: str, output: Path, text: str) -> None:
    """What a rehearsal left in its OUTPUT_DIR, and printed."""
    exact = not case.endswith(BFLOAT16)
    name, _, _, features = SWITCHED.get(case, (case.removesuffix(BFLOAT16), {}, [], set()))
    environment, signs = RECIPES[name]
    if not exact:
        signs = signs | SWAPPED
    rows = training(output)
    assert len(rows) == 2
    for row in rows:
        assert math.isfinite(row["actor/pg_loss"])
    report = json.loads((output / "rehearsal.json").read_text())
    assert {sign for sign, times in report["counts"].items() if any(times.values())} >= signs
    counted = {feature for feature, times in report["features"].items() if times}
    own = {"moe_alltoallv", "data_rebalance"} if environment == "qwen3_235b" else set()  # on in the recipes
    assert counted >= features | own
    if "gc_between" in features:
        assert "gc_within" not in counted
    [ranks] = filter(None, (line["ranks"] for line in logs.records(output / slow_ranks.FILE)))
    assert len(ranks) > 1 and min(rank[of] for rank in ranks for of in MEASURED) > 0, ranks
    peak, planned = report["peak_mb"], report["planned_mb"]
    # The plan counts numbers of 16 bits, and not masks [2048, 2048] and small buffers (docs/rehearsal.md).
    for of, processes in (("trainer", 1), ("rollout", 1), ("die", 2)):
        assert planned[of] / 2 < peak[of] < planned[of] * (2 if exact else 1) + UNPLANNED_MB * processes, of
    assert peak["die"] >= max(peak["trainer"], peak["rollout"])  # both processes of a die together
    records = [json.loads(file.read_text()) for file in (output / "record").glob("*.json")]
    allocators = [record["allocator"] for record in records]  # also of trainers, after their weight syncs
    assert (
        allocators.count({"garbage_collection_threshold": "0.6", "max_split_size_mb": "24"})
        == len(records)
        > 1
    )
    keys = {key for key, _, _ in report["replaced"]}
    assert "actor_rollout_ref.model.path" in keys and "trainer.device" not in keys
    assert "what ran" in text and "never" in text.partition("what ran")[2]  # the table, which hides nothing
    assert report["gap"]["met"] is (True if exact else None), report["gap"]
    if "random_init" not in name:  # such a model never adds right
        assert max(row["critic/rewards/max"] for row in rows) > 0
        assert max(row["actor/grad_norm"] for row in rows) > 0  # a step whose groups are all alike has none
    if name.startswith("dapo"):
        assert all(row["dapo/num_gen_batches"] >= 1 and 0 < row["critic/score/mean"] < 1 for row in rows)
        assert rows[0]["rollout_corr/rollout_is_max"] <= 2.0
    if name.startswith("gspo"):
        assert "actor/gspo/seq_ratio/p05" in rows[0]
    if name in SAVE_NOTHING:
        assert not (output / "checkpoints").exists()
    else:
        check_checkpoint(output / "checkpoints")

"""Engines that share an Atlas A2 with a trainer run no fused collectives; others run them."""

from __future__ import annotations

import pytest
from npu_ground import on_ranks, save_random_model
from test_npu_runner import greedy

from ascend_rl.rollout.a2_shared_card import SWITCH

RANKS, NEW_TOKENS = 2, 3
FUSED = "npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2", "npu_mm_reduce_scatter_base"
MANY = 1200  # tokens; of dense models, vllm-ascend fuses above 1000


def prompts_of(kind: str) -> list[list[int]]:
    return [[(7 * i + 3 * j) % 13 for j in range(6 if kind == "moe" else MANY // 4)] for i in range(4)]


def generate(path: str, kind: str, sleeps: bool) -> dict:
    """Ids, and the calls of fused operators, on ranks that vllm-ascend takes for those of two nodes."""
    from npu_ground import make_llm

    from software_npu.kernels.training import calls
    from vllm import SamplingParams

    llm = make_llm(
        path, distributed_executor_backend="external_launcher", tensor_parallel_size=RANKS,
        enable_expert_parallel=kind == "moe", enable_sleep_mode=sleeps, max_num_batched_tokens=2 * MANY,
        enable_prefix_caching=False, num_gpu_blocks_override=128,
    )  # fmt: skip
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    runner.vllm_config.parallel_config.world_size = 16  # read for the choice of the exchange alone
    calls.clear()
    requests = [{"prompt_token_ids": prompt} for prompt in prompts_of(kind)]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    fused = {name: calls[name] for name in FUSED if calls[name]}
    return {"ids": [list(output.outputs[0].token_ids) for output in outputs], "fused": fused}


def run(path: str, kind: str, chip: str, sleeps: bool, variable: str) -> dict:
    import os

    os.environ |= {SWITCH: variable} if variable else {}
    os.environ["VLLM_ASCEND_ENABLE_FLASHCOMM1"] = "1" if kind == "dense" else "0"
    return on_ranks(chip, RANKS, generate, path, kind, sleeps)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {kind: save_random_model(directory / kind, moe=kind == "moe") for kind in ("dense", "moe")}


@pytest.mark.parametrize("chip, sleeps, variable, fuses", [
    ("A2", True, "", False), ("A2", True, "0", True),
    pytest.param("A2", False, "", True, marks=pytest.mark.long),
    pytest.param("A3", True, "", True, marks=pytest.mark.long),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_fused_collectives(npu_ground, models, kind, chip, sleeps, variable, fuses):
    found = npu_ground.run(run, str(models[kind]), kind, chip, sleeps, variable)
    assert found["ids"] == greedy(models[kind], prompts_of(kind), NEW_TOKENS)
    assert set(found["fused"]) == (set(FUSED[2:] if kind == "dense" else FUSED[:2]) if fuses else set())

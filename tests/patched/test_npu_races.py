"""What vllm-ascend lets race between streams, on a software NPU that refuses it (SOFTWARE_NPU_RACES=1)."""

from __future__ import annotations

import os

import pytest
from npu_ground import save_random_model

LENGTHS = [12] * 4
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
}
SAMPLED = {"temperature": 1.0, "seed": None}


def refuse_races() -> None:
    os.environ["SOFTWARE_NPU_RACES"] = "1"
    from torch_npu.npu.streams import carry_clocks

    carry_clocks()


def sample_twice() -> list[int]:
    """Two steps of vllm-ascend's sampling, with nothing between them that the host waits for."""
    refuse_races()
    import torch

    from vllm_ascend.sample.sampler import random_sample

    probs = torch.tensor([[0.0, 1.0, 0.0]] * 2, device="npu")
    return torch.cat([random_sample(probs.clone(), {}) for _ in range(2)]).tolist()


def test_random_numbers_outlive_the_division_by_them(npu_ground):
    assert npu_ground.run(sample_twice) == [1] * 4


def decode_without_races(path: str, ahead: bool, sampling: dict, **options) -> int:
    refuse_races()
    from test_npu_async_scheduling import decode

    found = decode(path, ahead, sampling, LENGTHS, max_num_batched_tokens=512, **options)
    assert [len(ids) for ids in found["ids"]] == LENGTHS
    return found["ahead"]


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.long)], ids=["dense", "moe"]
)
def model(request, tmp_path_factory) -> str:
    return str(save_random_model(tmp_path_factory.mktemp("races") / "model", moe=request.param))


LONG = [pytest.param(*one, marks=pytest.mark.long) for one in ((True, GRAPHS), (False, {}), (False, GRAPHS))]


@pytest.mark.parametrize("ahead, options", [(True, {}), *LONG])
def test_an_engine_runs_without_races(npu_ground, model, ahead, options):
    for sampling in (SAMPLED, SAMPLED | {"seed": 7, "top_p": 0.9, "top_k": 5}):
        assert bool(npu_ground.run(decode_without_races, model, ahead, sampling, **options)) == ahead

"""On vllm-ascend's runner (npu_ground.py) too, running requests move with their KV between engines."""

from __future__ import annotations

import shutil

import pytest
from moving_engines import LENGTHS, check, go_on, hugging_face, move, prompts_of, stay, worst
from npu_ground import save_random_model


def spoil(directory):
    """One of the requests comes without its files."""
    if directory.name == "movable-1-0":
        shutil.rmtree(directory)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"moe": True}, marks=pytest.mark.long),
        {"async_scheduling": True},  # a step is under way when a request is given up
    ],
    ids=str,
)
def test_the_target_computes_one_token(npu_ground, tmp_path, options):
    options = dict(options)
    model = save_random_model(tmp_path / "model", moe=options.pop("moe", False))
    stayed = npu_ground.run(stay, str(model), prompts_of(LENGTHS))
    found = move(npu_ground.run, model, tmp_path / "kv", spoil=spoil, **options)
    check(found, stayed, model)
    assert found.computed == [1, found.lengths[1], 1, 1, 1]


def lose(directory):
    """Of two requests the KV goes missing after the target has taken it: the first and the longest."""
    if "-0-" in directory.name:
        (directory / "0.kv").unlink()
    if "-4-" in directory.name:
        shutil.rmtree(directory)


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=str)
def test_kv_that_goes_missing_is_recomputed(npu_ground, tmp_path, options):
    """The engine has counted its tokens as computed, and sampled one from blocks without KV."""
    model = save_random_model(tmp_path / "model")
    stayed = npu_ground.run(stay, str(model), prompts_of(LENGTHS))
    found = move(npu_ground.run, model, tmp_path / "kv", lose=lose, **options)
    check(found, stayed, model)
    assert found.sent == 5 and found.preempted == 2


def go_on_in_graphs(*args, **options) -> dict:
    import torch

    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
    found = go_on(*args, enforce_eager=False, compilation_config=graphs, **options)
    return found | {"replays": torch.npu.graphs.counts()["replays"]}


@pytest.mark.parametrize("spoilt", [None, spoil], ids=["with_kv", "one_replay"])
def test_a_step_that_admits_requests_with_kv_replays_a_decode_graph(npu_ground, tmp_path, spoilt):
    """With one request that is recomputed, the step of all of them does not."""
    model = save_random_model(tmp_path / "model")
    found = move(npu_ground.run, model, tmp_path / "kv", spoil=spoilt, second=go_on_in_graphs, known=0)
    assert worst(found.log_probs, hugging_face(model, found.prompts, found.tokens)) < 1e-5
    assert found.replays == found.steps - bool(spoilt)

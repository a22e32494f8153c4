"""VLLM_ENABLE_EPLB=1 brings vllm-ascend's EPLB from the training script into verl's server."""

from __future__ import annotations

import os

import pytest
from npu_ground import save_random_model

from ascend_rl.experts.support_eplb import grouped
from ascend_rl.settings.stack import DEFAULT, NAME

ROLLOUT = "actor_rollout_ref.rollout"
EP = [f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.expert_parallel_size=2"]
EXTRA = f"+{ROLLOUT}.engine_kwargs.vllm.additional_config"


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("moe"), moe=True)


def test_eplb_reaches_the_engine(launch, moe, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_EPLB", "1")
    monkeypatch.delenv("DYNAMIC_EPLB", raising=False)
    settings = [f"{EXTRA}.init_redundancy_expert=2", f"{EXTRA}.num_iterations_eplb_update=50"]
    args = launch(*EP, *settings, model=moe, dies=2)
    asked = {
        "dynamic_eplb": True,
        "eplb_policy_type": 4,
        "init_redundancy_expert": 2,
        "num_iterations_eplb_update": 50,
    }
    assert args.additional_config == (asked if NAME == DEFAULT else grouped(asked))
    assert args.enable_expert_parallel and os.environ["DYNAMIC_EPLB"] == "true"


def test_a_dense_model_ends_the_start(launch, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_EPLB", "1")
    with pytest.raises(ValueError, match="model: qwen3 has no experts"):
        launch(dies=1)


def test_off_nothing_changes(launch, moe):
    assert launch(*EP, f"{EXTRA}.a=1", model=moe, dies=2).additional_config == {"a": 1}
    assert not launch(*EP, model=moe, dies=2).additional_config

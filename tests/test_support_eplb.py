"""Which settings of EPLB reach the engine, and which stop the start; the engine itself: test_npu_eplb.py."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch

from ascend_rl.experts.support_eplb import CurrentExperts, engine_args, in_slots
from ascend_rl.settings.switch import CannotWork

MODEL = SimpleNamespace(model_type="qwen3_moe", num_experts=8)
ARGS = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True, "seed": 1}


def resolved(extra=None, model=MODEL, device="npu", environ=None, **args):
    environ = {"VLLM_ENABLE_EPLB": "1"} | (environ or {})
    found = engine_args(ARGS | {"additional_config": extra} | args, model, device, environ)
    return found["additional_config"], environ


def test_a_switch_with_another_value_is_refused():
    with pytest.raises(CannotWork, match="VLLM_ENABLE_EPLB=yes: give 1 or 0"):
        engine_args(ARGS, MODEL, "npu", {"VLLM_ENABLE_EPLB": "yes"})


def test_settings_at_their_limits_work():
    extra, environ = resolved({"init_redundancy_expert": 24}, environ={"ALL_TO_ALL_RESHARD": "0"})
    assert extra["init_redundancy_expert"] == 24 and environ["ALL_TO_ALL_RESHARD"] == "0"
    assert resolved({"num_iterations_eplb_update": 1, "eplb_policy_type": 0})


@pytest.mark.parametrize("size, other", [
    ("tensor_parallel_size", "data_parallel_size"), ("data_parallel_size", "tensor_parallel_size"),
])  # fmt: skip
def test_a_size_that_is_not_given_is_1(size, other):
    extra, _ = resolved({"init_redundancy_expert": 1}, **{size: 3, other: None})
    assert extra["init_redundancy_expert"] == 1  # 9 experts on 3 ranks


def test_two_ranks_are_enough():
    assert resolved(tensor_parallel_size=2, data_parallel_size=1)[0]["dynamic_eplb"]


def test_slots_of_a_rank():
    slots = torch.tensor([[0, 3], [4, 5], [6, 7]])
    assert in_slots(slots, rank=1, each=3, redundant=0).tolist() == [
        [False, True],
        [True, True],
        [False, False],
    ]
    with pytest.raises(CannotWork, match="2 redundant experts is(.|\n)*init_redundancy_expert=0"):
        in_slots(slots, rank=1, each=3, redundant=2)


def test_experts_are_those_of_now():
    """A weight sync replaces parameters; slots are those of the new ones. Buffers are memory of their own."""
    w13, w2 = torch.arange(24.0).view(3, 4, 2), torch.arange(12.0).view(3, 2, 2)
    held = SimpleNamespace(w13_weight=torch.nn.Parameter(w13), w2_weight=torch.nn.Parameter(w2))
    layers = [None, SimpleNamespace(mlp=SimpleNamespace(experts=held))]
    experts = CurrentExperts(SimpleNamespace(model=SimpleNamespace(layers=layers)))
    assert torch.equal(experts[1][2][0], w13[2]) and torch.equal(experts[1][2][1], w2[2])
    held.w2_weight = torch.nn.Parameter(w2 + 1)
    assert torch.equal(experts[1][2][1], w2[2] + 1)
    experts[1][0][0].zero_()
    assert not held.w13_weight[0].any() and held.w13_weight[1:].all()
    buffers = experts.buffers()
    assert [[weight.shape for weight in slot] for slot in buffers] == [[(4, 2), (2, 2)]] * 3
    buffers[1][0].zero_()
    assert held.w13_weight[1].all()


@pytest.mark.parametrize("environ", [{}, {"VLLM_ENABLE_EPLB": "0"}])
def test_off_nothing_changes(environ):
    before = dict(environ)
    assert engine_args(ARGS, MODEL, "npu", environ) == ARGS
    assert environ == before


def test_our_policy_is_the_default():
    extra, environ = resolved()
    assert extra == {"dynamic_eplb": True, "eplb_policy_type": 4}
    assert environ["DYNAMIC_EPLB"] == "true"  # vllm-ascend refuses dynamic_eplb without it


def test_variables_are_those_of_the_call(monkeypatch):
    """datasets.map, with which verl reads prompts, leaves a copy of os.environ in its place."""
    monkeypatch.setattr(os, "environ", {"VLLM_ENABLE_EPLB": "1"})
    assert "additional_config" in engine_args(ARGS, MODEL, "npu")
    assert os.environ["DYNAMIC_EPLB"] == "true"


@pytest.mark.parametrize("wrap", [dict, json.dumps])
def test_given_settings_win(wrap):
    given = {"eplb_policy_type": 1, "num_iterations_eplb_update": 7, "init_redundancy_expert": 4, "other": 1}
    extra, _ = resolved(wrap(given))
    assert extra == given | {"dynamic_eplb": True}


def test_the_names_of_eplb_config():
    group = {"num_redundant_experts": 4, "expert_heat_collection_interval": 9}
    extra, _ = resolved({"eplb_config": group, "other": 1})
    assert extra == {"eplb_config": group | {"dynamic_eplb": True, "eplb_policy_type": 4}, "other": 1}
    assert resolved({"eplb_config": None})[0]["dynamic_eplb"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"device": "cuda"}, "VLLM_ENABLE_EPLB: it needs vllm-ascend"),
        ({"model": SimpleNamespace(model_type="qwen3")}, "model: qwen3 has no experts"),
        ({"enable_expert_parallel": False}, "rollout.expert_parallel_size: without"),
        ({"tensor_parallel_size": 1, "data_parallel_size": 1}, "rollout.expert_parallel_size: without"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: each stage"),
        ({"quantization": "fp8"}, "vllm.quantization: fp8"),
        ({"enable_eplb": True}, "vllm.enable_eplb: True"),
        ({"environ": {"ALL_TO_ALL_RESHARD": "1"}}, "ALL_TO_ALL_RESHARD: it sends"),
        ({"environ": {"ALL_TO_ALL_RESHARD": "true"}}, "ALL_TO_ALL_RESHARD: it sends"),
        ({"extra": {"dynamic_eplb": False}}, "additional_config.dynamic_eplb: it is False"),
        ({"extra": {"eplb_policy_type": 5}}, "eplb_policy_type: vllm-ascend would use its random"),
        ({"extra": {"num_iterations_eplb_update": 0}}, "num_iterations_eplb_update: 0 is not a valid number"),
        ({"extra": {"num_wait_worker_iterations": 2.5}}, "num_wait_worker_iterations: 2.5 is not a"),
        ({"extra": {"expert_map_path": "a.json"}}, "expert_map_path: a static"),
        ({"extra": {"expert_map_record_path": "a.json"}}, "expert_map_record_path: a static"),
        ({"extra": {"init_redundancy_expert": -1}}, "init_redundancy_expert: -1 is not a valid number"),
        ({"extra": {"init_redundancy_expert": 3}}, "8 [+] 3 experts do not(.*)4 ranks; set it to 4"),
        ({"extra": {"init_redundancy_expert": 28}}, "hold two copies of an expert; set it to 24 or less"),
        ({"extra": {"eplb_config": {"num_redundant_experts": 3}}}, "eplb_config.num_redundant_experts: 8"),
        ({"extra": {"eplb_config": {"algorithm_execution_interval": 0}}}, "algorithm_execution_interval: 0"),
        ({"extra": {"eplb_config": {}, "dynamic_eplb": True}}, "vllm-ascend ignores it when eplb_config"),
    ],
)  # fmt: skip
def test_incompatible_settings_end_the_start(change, message):
    with pytest.raises(ValueError, match=f"VLLM_ENABLE_EPLB=1 is incompatible(.|\n)*{message}"):
        resolved(**change)

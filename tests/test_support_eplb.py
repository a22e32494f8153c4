"""Which settings of EPLB reach the engine, and which end the start; the engine itself: test_npu_eplb.py."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from ascend_rl.support_eplb import engine_args

MODEL = SimpleNamespace(model_type="qwen3_moe", num_experts=8)
ARGS = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True, "seed": 1}


def resolved(extra=None, model=MODEL, device="npu", environ=None, **args):
    environ = {"VLLM_ENABLE_EPLB": "1"} | (environ or {})
    found = engine_args(ARGS | {"additional_config": extra} | args, model, device, environ)
    return found["additional_config"], environ


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
        ({"device": "cuda"}, "VLLM_ENABLE_EPLB: it is vllm-ascend's"),
        ({"model": SimpleNamespace(model_type="qwen3")}, "model: qwen3 has no experts"),
        ({"enable_expert_parallel": False}, "rollout.expert_parallel_size: without"),
        ({"tensor_parallel_size": 1, "data_parallel_size": 1}, "rollout.expert_parallel_size: without"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: each stage"),
        ({"quantization": "fp8"}, "vllm.quantization: fp8"),
        ({"enable_eplb": True}, "vllm.enable_eplb: True"),
        ({"environ": {"ALL_TO_ALL_RESHARD": "1"}}, "ALL_TO_ALL_RESHARD: it sends"),
        ({"extra": {"dynamic_eplb": False}}, "additional_config.dynamic_eplb: it is False"),
        ({"extra": {"eplb_policy_type": 5}}, "eplb_policy_type: vllm-ascend takes 5 for the random policy"),
        ({"extra": {"num_iterations_eplb_update": 0}}, "num_iterations_eplb_update: 0 is no number"),
        ({"extra": {"num_wait_worker_iterations": 2.5}}, "num_wait_worker_iterations: 2.5 is no number"),
        ({"extra": {"expert_map_path": "a.json"}}, "expert_map_path: a static"),
        ({"extra": {"expert_map_record_path": "a.json"}}, "expert_map_record_path: a static"),
        ({"extra": {"init_redundancy_expert": -1}}, "init_redundancy_expert: -1 is no number"),
        ({"extra": {"init_redundancy_expert": 3}}, "8 [+] 3 experts do not divide by 4 ranks; for example 4"),
        ({"extra": {"init_redundancy_expert": 28}}, "hold an expert twice; at most 24"),
        ({"extra": {"eplb_config": {"num_redundant_experts": 3}}}, "eplb_config.num_redundant_experts: 8"),
        ({"extra": {"eplb_config": {"algorithm_execution_interval": 0}}}, "algorithm_execution_interval: 0"),
        ({"extra": {"eplb_config": {}, "dynamic_eplb": True}}, "vllm-ascend ignores it next to eplb_config"),
    ],
)  # fmt: skip
def test_what_cannot_work_ends_the_start(change, message):
    with pytest.raises(ValueError, match=f"VLLM_ENABLE_EPLB=1 cannot work(.|\n)*{message}"):
        resolved(**change)

"""Which options of the rollout engine contradict each other, and which the engine receives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ascend_rl.rollout.npu_options import (
    DOMAINS,
    EXPANSION_MODES,
    HIERARCHICAL,
    conflicts,
    engine_options,
    expansion_mode,
    graph_mode,
)
from ascend_rl.settings.switch import CannotWork

SAM = {"method": "sam", "num_speculative_tokens": 3}


def rollout(eager=False, tp=1, mtp=False, mtp_model=False):
    return SimpleNamespace(
        enforce_eager=eager,
        tensor_model_parallel_size=tp,
        mtp=SimpleNamespace(enable=mtp or mtp_model, enable_rollout=mtp),
    )


@pytest.mark.parametrize(("options", "device", "eager", "mode"), [
    ({}, "npu", False, "FULL_DECODE_ONLY"),
    ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, "npu", False, "PIECEWISE"),
    ({"compilation_config": '{"cudagraph_mode": "FULL"}'}, "npu", False, "FULL"),
    ({}, "npu", True, "FULL_AND_PIECEWISE"),  # verl's own; there are no graphs
    ({"decode_context_parallel_size": 2}, "npu", False, "FULL_AND_PIECEWISE"),  # verl makes it PIECEWISE
    ({}, "cpu", False, None),
    ({}, "cuda", False, None),
])  # fmt: skip
def test_the_default_is_filled_in_on_npus_only(options, device, eager, mode):
    given = engine_options(options, rollout(eager), device, {})
    assert (given.get("compilation_config") or {}).get("cudagraph_mode") == mode


def test_everything_else_is_passed_on():
    options = {
        "speculative_config": SAM,
        "additional_config": '{"enable_npugraph_ex": true, "enable_static_kernel": true}',
        "compilation_config": {"cudagraph_capture_sizes": [8]},
        "num_gpu_blocks_override": 128,
    }
    assert engine_options(options, rollout(), "npu", {}) == {
        "speculative_config": SAM,
        "additional_config": {"enable_npugraph_ex": True, "enable_static_kernel": True},
        "compilation_config": {"cudagraph_capture_sizes": [8], "cudagraph_mode": "FULL_DECODE_ONLY"},
        "num_gpu_blocks_override": 128,
    }
    assert options["compilation_config"] == {"cudagraph_capture_sizes": [8]}  # the caller's is left alone


EX, FULL = {"enable_npugraph_ex": True}, {"cudagraph_mode": "FULL"}


def extra(**options):
    return {"additional_config": options}


def drafts(count, **options):
    return {"speculative_config": {"method": "sam", "num_speculative_tokens": count}, **options}


CONFLICTS = {
    "npugraph_ex without graphs": (extra(**EX), {"eager": True}, "enforce_eager=False"),
    "npugraph_ex with PIECEWISE": (
        extra(**EX) | {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, {}, "FULL_DECODE_ONLY",
    ),
    "static kernels alone": (extra(enable_static_kernel=True), {}, "enable_npugraph_ex=True"),
    "a later name": (extra(npugraph_ex_config={"enable": True}), {}, "config.enable_npugraph_ex"),
    "another later name": (
        extra(ascend_compilation_config={"enable_static_kernel": True}), {}, "0.13.0 ignores it",
    ),
    "two drafters": (drafts(3), {"mtp": True}, "rollout.mtp"),
    "no draft": (drafts(0), {}, "above 0"),
    "no number": (drafts("3"), {}, "above 0"),
    "too long for the operator": (drafts(16), {}, "at most 15"),
    "FULL with drafts": (drafts(3, compilation_config=FULL), {}, "FULL_DECODE_ONLY"),
    "no common stride": (drafts(4), {"shared_by": 8}, "FLASHCOMM1"),
    "no common stride with two": (drafts(2), {"shared_by": 2}, "FLASHCOMM1"),
    "an unknown domain": (extra(hccl_op_expansion_mode={"mc2": "AIV"}), {}, "one of world"),
    "an unknown mode": (extra(hccl_op_expansion_mode={"tp": "AICPU"}), {}, "AI_CPU"),
    "drafts and scheduling ahead": (drafts(3, async_scheduling=True), {}, "EAGLE and MTP"),
    "stages and scheduling ahead": (
        {"async_scheduling": True, "pipeline_parallel_size": 2}, {}, "pipeline_parallel_size=1",
    ),
    "Ray and scheduling ahead": (
        {"async_scheduling": True, "distributed_executor_backend": "ray"}, {}, "one of mp, uni",
    ),
    "a draft model and graphs by rank": (
        extra(graphs_by_rank=True) | {"speculative_config": {"method": "eagle3", "model": "drafter"}},
        {}, "sam",
    ),
    "MTP and graphs by rank": (extra(graphs_by_rank=True), {"mtp": True}, "draft models"),
    "layers of several ranks and graphs by rank": (
        extra(graphs_by_rank=True, finegrained_tp_config={"lmhead_tensor_parallel_size": 2}), {}, "leave one",
    ),
    "the hierarchical exchange and graphs by rank": (
        extra(graphs_by_rank=True), {"environ": HIERARCHICAL},
        "HCCL_INTRA_PCIE_ENABLE=1 HCCL_INTRA_ROCE_ENABLE=0",
    ),
    "no domain": (extra(hccl_op_expansion_mode="AIV"), {}, "tp=AI_CPU"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFLICTS)
def test_what_contradicts_is_refused(name):
    options, facts, said = CONFLICTS[name]
    found = conflicts(options, npu=True, **facts)
    assert len(found) == 1 and said in " ".join(found[0])
    facts = {"tp": facts.pop("shared_by", 1)} | facts
    variables = {"VLLM_ASCEND_ENABLE_FLASHCOMM1": "1"} | facts.pop("environ", {})
    with pytest.raises(
        CannotWork, match="engine_kwargs.vllm is incompatible with this configuration"
    ) as error:
        engine_options(options, rollout(**facts), "npu", variables)
    assert str(error.value).splitlines()[1:] == ["  {}: {}; {}".format(*found[0])]


@pytest.mark.parametrize("options", [
    {},
    {"speculative_config": SAM},
    {"speculative_config": {"method": "eagle3", "model": "drafter"}},  # its config.json says how many
    {"async_scheduling": True},
    {"async_scheduling": True, "speculative_config": {"method": "eagle3", "model": "drafter"}},
    drafts(3, async_scheduling=False),
    extra(**EX, enable_static_kernel=False),
    extra(**EX) | {"compilation_config": FULL},
    extra(hccl_op_expansion_mode=dict.fromkeys(DOMAINS, "HOST")),
    extra(ascend_compilation_config={"fuse_norm_quant": False}),
    extra(graphs_by_rank=True),
    extra(graphs_by_rank=True) | {"speculative_config": SAM},
])  # fmt: skip
@pytest.mark.parametrize("shared_by", [1, 4, 8])
def test_what_fits_is_not_refused(options, shared_by):
    assert conflicts(options, npu=True, shared_by=shared_by) == []


@pytest.mark.parametrize("count", [1, 15])
def test_as_many_drafts_as_the_operator_takes_fit(count):
    assert conflicts(drafts(count), npu=True) == []


def test_ranks_share_a_batch_with_flashcomm_only():
    for environ in ({}, {"VLLM_ASCEND_ENABLE_FLASHCOMM1": "0"}):
        engine_options(drafts(4), rollout(tp=8), "npu", environ)
    with pytest.raises(CannotWork, match="give 1 or 0"):
        engine_options({}, rollout(), "npu", {"VLLM_ASCEND_ENABLE_FLASHCOMM1": "on"})


def test_mtp_that_is_trained_but_not_used_by_the_rollout_contradicts_nothing():
    assert engine_options(drafts(3), rollout(mtp_model=True), "cpu", {}) == drafts(3)


def test_graphs_are_full_unless_eager():
    assert graph_mode({}, npu=True) == "FULL_DECODE_ONLY"
    assert graph_mode({}, npu=True, eager=True) == graph_mode({}, npu=False) == "FULL_AND_PIECEWISE"


def test_settings_of_npus_are_not_judged_elsewhere():
    options = extra(enable_static_kernel=True) | drafts(3, compilation_config=FULL)
    assert conflicts(options, npu=False, shared_by=8) == []
    assert conflicts(options, npu=False, mtp=True)  # verl's, on any device


@pytest.mark.parametrize("mode", EXPANSION_MODES)
def test_a_domain_gets_its_mode_and_the_others_follow_the_variable(mode):
    modes = {"tp": mode}
    for domain in DOMAINS:
        config = expansion_mode({"hccl_buffer_size": 200}, domain, modes)
        assert config.get("hccl_op_expansion_mode") == (EXPANSION_MODES[mode] if domain == "tp" else None)
        assert expansion_mode({"hccl_buffer_size": 200}, domain, None) == {"hccl_buffer_size": 200}

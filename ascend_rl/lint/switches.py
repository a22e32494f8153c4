"""Whether a switch that is on changes anything in a run: one predicate each, for the linter and step_time.

A switch does nothing, silently, where the script does not read it, or where its feature needs experts,
Megatron, speculation or an NPU that the run does not have. A predicate says why, or "" where the switch
works. What frameworks refuse has rules of its own (rollout.options, rollout.eplb, train.hdp and others).

Invariant (tests/test_switches.py): every switch that patches, environment scripts, recipes and pages document
is here, or has such a rule, or belongs to the launcher. Cost: a lookup each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ascend_rl.lint.setup import ACTOR, MEGATRON, ROLLOUT, VLLM, Setup
from ascend_rl.settings.switch import OFF

EXTRA, SPECULATION = f"{VLLM}.additional_config", f"{VLLM}.speculative_config"
EPLB, HDP, OVERLAP, RESHARD = "VLLM_ENABLE_EPLB", "USE_HDP", "USE_ALLTOALL_OVERLAP", "ALL_TO_ALL_RESHARD"


def _same(key: str) -> Callable[[Setup, str], str]:
    """For a variable that a recipe passes on as ``key``."""

    def why(s: Setup, value: str) -> str:
        given = str(s.get(key))
        same = given == value or (value.lower() in ("1", "true") and given in ("True", "sam"))
        return "" if same else f"the script does not pass it on: {key} is {s.get(key, 'not set')}"

    return why


def _npu(s: Setup, value: str = "") -> str:
    return "" if s.npu else "the run is on CPUs"


def _experts(s: Setup, value: str) -> str:
    """Of the rollout; a model that is not known may have experts."""
    return _npu(s) or ("the model has no experts" if s.model and not s.model.experts else "")


def _trained_experts(s: Setup, value: str) -> str:
    if not s.megatron:
        return f"only Megatron reads it, and {ACTOR}.strategy is {s.get(f'{ACTOR}.strategy')}"
    return "the model has no experts" if s.model and not s.model.experts else ""


def _speculates(s: Setup, value: str) -> str:
    return "" if s.mapping(SPECULATION) else "nothing is drafted (speculative_config, ENABLE_SAM=1)"


def _sam(s: Setup, value: str) -> str:
    drafts = s.mapping(SPECULATION).get("method") == "sam"
    return "" if drafts else "SAM does not draft: +...speculative_config.method=sam, in recipes ENABLE_SAM=1"


def _graphs(s: Setup, value: str) -> str:
    if not s.vllm or s.graphs:
        return ""
    return _npu(s) or "no graphs are captured: rollout.enforce_eager=False"


def _a2(s: Setup, value: str) -> str:
    return _npu(s) or (
        "" if s.env.get("NPU_SERIES", "").lower() == "a2" else "for an Atlas A2 (NPU_SERIES=a2)"
    )


def _several_ranks(s: Setup, value: str) -> str:
    return _graphs(s, value) or ("" if s.rollout_dp > 1 else "rollout.data_parallel_size is 1: no other rank")


def _rebalances(s: Setup, value: str) -> str:
    return "" if s.get(f"{ROLLOUT}.rollout_rebalance.enable") else "rollout_rebalance.enable is off"


def _eplb(s: Setup, value: str) -> str:
    on = s.variable(EPLB) == 1 or s.get(f"{EXTRA}.dynamic_eplb")
    return "" if on else f"experts are not balanced: {EPLB}=1"


def _hdp(s: Setup, value: str) -> str:
    return "" if s.variable(HDP) == 1 else f"{HDP} is off"


IDLE: dict[str, Callable[[Setup, str], str]] = {  # {variable, or key: why its value does nothing}
    "ENABLE_SAM": _same(f"{SPECULATION}.method"),
    "NUM_SPECULATIVE_TOKENS": _same(f"{SPECULATION}.num_speculative_tokens"),
    "ENABLE_NPUGRAPH_EX": lambda s, value: _npu(s) or _same(f"{EXTRA}.enable_npugraph_ex")(s, value),
    "ENABLE_STATIC_KERNEL": lambda s, value: _npu(s) or _same(f"{EXTRA}.enable_static_kernel")(s, value),
    "HCCL_TP_EXPANSION_MODE": lambda s, value: (
        "" if value == "AIV" else _npu(s) or _same(f"{EXTRA}.hccl_op_expansion_mode.tp")(s, value)
    ),  # AIV: the default of npu_env.sh, whatever script follows
    "ROLLOUT_REBALANCE_ENABLE": _rebalances,
    "VLLM_SPECULATIVE_BATCH_SIZE_THRE": _speculates,
    "VLLM_FUSED_MOE_CHUNK_SIZE": _experts,
    "CORE_BINDING": _npu,
    "VERL_NPU_ENABLE_A2_PATCH_VLLM_ASCEND_MC2": _a2,
    OVERLAP: _trained_experts,
    RESHARD: _trained_experts,
    "HDP_COST_MODEL": _hdp,
    f"{EXTRA}.enable_npugraph_ex": _npu,
    f"{EXTRA}.enable_static_kernel": _npu,
    f"{EXTRA}.hccl_op_expansion_mode": _npu,
    f"{EXTRA}.graphs_by_rank": _several_ranks,
    f"{EXTRA}.eplb_policy_type": _eplb,
    f"{EXTRA}.sam_decoding": _sam,
    f"{EXTRA}.bs_threshold_for_spec_decode": _speculates,
    f"{ROLLOUT}.cudagraph_capture_sizes": _graphs,
    f"{ROLLOUT}.rollout_rebalance.send_kv_tokens": _rebalances,
    f"{MEGATRON}.dtype": lambda s, value: "" if s.megatron else f"{ACTOR}.strategy is not megatron",
}


def idle(s: Setup) -> Iterator[tuple[str, str]]:
    """(switch, what it is set to and why that does nothing) of the switches of a run that are on."""
    for name, why_idle in IDLE.items():
        if variable := name.isupper():
            value: Any = s.env.get(name, "").strip()
        else:
            node, _, leaf = name.rpartition(".")
            value = s.mapping(node).get(leaf)
        if str(value or "").lower() in OFF or value == s.defaults.get(name):
            continue
        if why := why_idle(s, str(value)):
            yield f"${name}" if variable else name, f"{value}: {why}"

"""Dynamic expert balance (EPLB) of vllm-ascend in verl's rollout: settings, and weights that follow experts.

Problem: verl has no setting that switches EPLB on, and EPLB in vllm-ascend 0.13.0 assumes a quantised model
that is loaded once. With unquantised experts it fails at the start. Past that, it would move rows of one
expert instead of whole experts, and tokens and synchronised weights would both go by the first expert map.
Idea: complete and check the settings before the engine starts. In the engine, look up maps and weights at the
moment they are used: the weight loader the current map, the mover of experts the current weights.
Invariants (tests/test_support_eplb.py, tests/patched/test_npu_eplb.py): without VLLM_ENABLE_EPLB=1 nothing
changes; settings of the user win over defaults; a slot holds the newest weights of the expert the maps name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from ascend_rl.settings.switch import OFF, refuse, switched_on

SWITCH = "VLLM_ENABLE_EPLB"
OURS = 4  # eplb_policy_type of eplb_policy.VllmAscendPolicy
POLICIES = range(OURS + 1)
MODELS = ("qwen3_moe", "deepseek_v2", "deepseek_v3")  # for which vllm-ascend collects loads
# additional_config of vllm-ascend 0.13.0: flat keys, or all below eplb_config under other names.
REDUNDANT = "init_redundancy_expert"
COLLECT, WAIT = "num_iterations_eplb_update", "num_wait_worker_iterations"  # steps
GROUP = "eplb_config"
GROUP_NAMES = {
    REDUNDANT: "num_redundant_experts",
    COLLECT: "expert_heat_collection_interval",
    WAIT: "algorithm_execution_interval",
}
SAME_NAMES = ("dynamic_eplb", "eplb_policy_type", "expert_map_path", "expert_map_record_path")
Conflict = tuple[str, str, str]  # key, what is wrong, what to do


def engine_args(
    args: Mapping[str, Any], model: Any, device: str, environ: MutableMapping[str, str] | None = None
) -> dict[str, Any]:
    """Arguments of vLLM's server with dynamic EPLB on and our policy, if VLLM_ENABLE_EPLB=1.

    Args:
        args: the arguments so far; additional_config in them as dict or as JSON.
        model: Hugging Face's configuration.
        device: "npu", "cuda" or "cpu".
        environ: default os.environ. DYNAMIC_EPLB, without which vllm-ascend refuses its options, is set in it
            for the engine.

    Raises:
        CannotWork: EPLB is incompatible with these arguments.
    """
    environ = os.environ if environ is None else environ  # looked up now: datasets.map replaces it
    if not switched_on(SWITCH, environ):
        return dict(args)
    found = conflicts(args, model, device, environ)
    refuse(f"{SWITCH}=1", (f"{key}: {why}; {fix}" for key, why, fix in found))
    extra = _extra(args)
    settings = {"dynamic_eplb": True, "eplb_policy_type": OURS}
    if extra.get(GROUP) is not None:
        extra[GROUP] = settings | dict(extra[GROUP])
    else:
        extra = settings | extra
    environ["DYNAMIC_EPLB"] = "true"
    return {**args, "additional_config": extra}


def conflicts(
    args: Mapping[str, Any], model: Any, device: str, environ: Mapping[str, str]
) -> Iterator[Conflict]:
    """Why EPLB is incompatible with these arguments; see `engine_args`."""
    rollout = "actor_rollout_ref.rollout"
    below = f"{rollout}.engine_kwargs.vllm"
    if device != "npu":
        yield SWITCH, f"it needs vllm-ascend, but the rollout runs on {device}", "unset it"
        return
    if model.model_type not in MODELS:
        yield "model", f"{model.model_type} has no experts that vllm-ascend balances", f"unset {SWITCH}"
        return
    for key in ("quantization", "enable_eplb"):
        if args.get(key):
            yield (
                f"{below}.{key}",
                f"{args[key]} is not supported together with vllm-ascend's EPLB",
                "leave it out",
            )
    if environ.get("ALL_TO_ALL_RESHARD", "").strip().lower() not in OFF:
        yield "ALL_TO_ALL_RESHARD", "it sends experts to the ranks that held them at the start", "set it to 0"
    ranks = (args.get("tensor_parallel_size") or 1) * (args.get("data_parallel_size") or 1)
    if not args.get("enable_expert_parallel") or ranks < 2:
        yield (
            f"{rollout}.expert_parallel_size",
            "without expert parallelism every rank holds all experts",
            "set it to tensor_model_parallel_size x data_parallel_size, 2 or more",
        )
    if (args.get("pipeline_parallel_size") or 1) > 1:
        yield (
            f"{below}.pipeline_parallel_size",
            "each stage would wait for the layers of other stages",
            "set it to 1",
        )

    extra = _extra(args)
    grouped, where, names = extra.get(GROUP), f"{below}.additional_config", {}
    if grouped is not None:
        for key in (*GROUP_NAMES, *SAME_NAMES):
            if key in extra:
                yield f"{where}.{key}", f"vllm-ascend ignores it when {GROUP} is set", f"move it into {GROUP}"
        where, names = f"{where}.{GROUP}", GROUP_NAMES
    given = extra if grouped is None else grouped
    if given.get("dynamic_eplb") not in (None, True):
        yield f"{where}.dynamic_eplb", f"it is {given['dynamic_eplb']!r}", f"leave it out, or unset {SWITCH}"
    policy = given.get("eplb_policy_type", OURS)
    if policy not in POLICIES:
        fix = f"one of {', '.join(map(str, POLICIES))}"
        yield (
            f"{where}.eplb_policy_type",
            f"vllm-ascend would use its random policy for {policy!r}",
            f"set it to {fix}",
        )
    for key in (COLLECT, WAIT):
        key = names.get(key, key)
        if not _is_count(given.get(key, 1), 1):
            yield (
                f"{where}.{key}",
                f"{given[key]!r} is not a valid number of steps",
                "give an integer above 0",
            )
    for key in ("expert_map_path", "expert_map_record_path"):
        if given.get(key):
            yield f"{where}.{key}", "a static or recorded map is not dynamic EPLB", "leave it out"
    key = names.get(REDUNDANT, REDUNDANT)
    redundant = redundant_experts(args)
    experts = getattr(model, "num_experts", None) or model.n_routed_experts
    if not _is_count(redundant, 0):
        yield (
            f"{where}.{key}",
            f"{redundant!r} is not a valid number of experts",
            "give an integer, 0 or more",
        )
    elif (experts + redundant) % ranks:
        fix = f"set it to {-experts % ranks + ranks}, for example"
        yield (
            f"{where}.{key}",
            f"{experts} + {redundant} experts do not divide evenly among {ranks} ranks",
            fix,
        )
    elif (experts + redundant) // ranks > experts:
        fix = f"set it to {experts * (ranks - 1)} or less"
        yield f"{where}.{key}", "a rank would hold two copies of an expert", fix


def grouped(extra: Mapping[str, Any]) -> dict[str, Any]:
    """additional_config as vllm-ascend 0.23 wants it, which ignores flat keys.

    >>> grouped({"dynamic_eplb": True, "init_redundancy_expert": 8, "a": 1})
    {'a': 1, 'eplb_config': {'dynamic_eplb': True, 'num_redundant_experts': 8}}
    """
    flat = {key: value for key, value in extra.items() if key in (*GROUP_NAMES, *SAME_NAMES)}
    rest = {key: value for key, value in extra.items() if key not in flat}
    if flat:
        rest[GROUP] = {GROUP_NAMES.get(key, key): value for key, value in flat.items()}
    return rest


def redundant_experts(args: Mapping[str, Any]) -> Any:
    """How many copies of experts these arguments ask for, as given; 0 if they say nothing.

    >>> redundant_experts({"additional_config": {"eplb_config": {"num_redundant_experts": 8}}})
    8
    """
    extra = _extra(args)
    return (
        extra.get(REDUNDANT, 0) if extra.get(GROUP) is None else extra[GROUP].get(GROUP_NAMES[REDUNDANT], 0)
    )


def _extra(args: Mapping[str, Any]) -> dict[str, Any]:
    extra = args.get("additional_config") or {}
    return json.loads(extra) if isinstance(extra, str) else dict(extra)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# In vllm-ascend (patch support_eplb).


class CurrentExperts:
    """The current unquantised expert weights of vLLM's model, by layer: [slot][w13, w2].

    They are looked up on every access, because a weight sync replaces the parameters.
    """

    def __init__(self, model: Any):
        self.layers = model.model.layers

    def __getitem__(self, layer: int) -> list[list[Any]]:
        experts = self.layers[layer].mlp.experts
        return [list(slot) for slot in zip(experts.w13_weight.data, experts.w2_weight.data, strict=True)]

    def buffers(self) -> list[list[Any]]:
        """Buffers for the experts that a rank receives at a time: at most all slots of a layer."""
        return [[weight.new_empty(weight.shape) for weight in slot] for slot in self[len(self.layers) - 1]]


def in_slots(slots: Any, rank: int, each: int, redundant: int) -> Any:
    """[tokens, experts of a token] whether a slot belongs to ``rank``, for AllGather; each rank has ``each``.

    Raises:
        CannotWork: there are copies. With AllGather every rank sees all tokens and chooses among copies by
            its own map, so that some tokens would be counted twice.
    """
    if redundant:
        refuse(
            f"EPLB with {redundant} redundant experts",
            ["vllm-ascend chose AllGather (Atlas A2): set init_redundancy_expert=0 to reorder experts only"],
        )
    return (slots >= rank * each) & (slots < (rank + 1) * each)

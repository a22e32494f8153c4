"""Options of the rollout engine on Ascend: one default filled in, contradictions refused.

Problem: the options come from rollout.*, from engine_kwargs.vllm and from environment variables, and
vllm-ascend 0.13.0 settles contradictions by switching one side off with a line in a log: npugraph_ex next to
PIECEWISE graphs, options under the names of later releases, verl's MTP next to a speculative_config.
Idea: everything is compared before the engine starts, in verl's server and in the linter alike; each
contradiction names the key and what to do. What vLLM itself refuses with a clear message is left to it; but
of asynchronous scheduling the linter should tell before a cluster starts.
Invariants: nothing is changed but compilation_config.cudagraph_mode, and that only on an NPU where none is
given; without a contradiction all other options reach the engine as given. Cost: O(number of options).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ascend_rl.settings.switch import refuse, switched_on

# Values of hccl_op_expansion_mode in ProcessGroupHCCL.Options.hccl_config (HCCL's CommConfigOpExpansion).
# A group without one follows the environment variable HCCL_OP_EXPANSION_MODE.
EXPANSION_MODES = {"HOST": 1, "AI_CPU": 2, "AIV": 3}
DOMAINS = ("world", "tp", "pcp", "dcp", "pp", "dp", "ep")  # vLLM's groups; mc2 takes no options
ENGINE_OPTIONS = "actor_rollout_ref.rollout.engine_kwargs.vllm"
CONFIGS = ("compilation_config", "speculative_config", "additional_config")
FULL_GRAPHS = ("FULL_DECODE_ONLY", "FULL")
AHEAD_EXECUTORS = ("mp", "uni", "external_launcher")  # of asynchronous scheduling; verl's is mp
OWN_DRAFTS = ("sam", "custom_class", "ngram", "suffix")  # no models: nothing to compute together
MAX_DECODE_TOKENS = 16  # tokens of a request that the attention operator takes in layout TND
HIERARCHICAL = {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "0"}  # MC2 in two stages, by node
# Names of later releases of vllm-ascend, ignored by 0.13.0, and its own, which 0.23 ignores.
LATER = {
    ("npugraph_ex_config", "enable"): "enable_npugraph_ex",
    ("npugraph_ex_config", "enable_static_kernel"): "enable_static_kernel",
    ("ascend_compilation_config", "enable_npugraph_ex"): "enable_npugraph_ex",
    ("ascend_compilation_config", "enable_static_kernel"): "enable_static_kernel",
}
Conflict = tuple[str, str, str]  # key below engine_kwargs.vllm, what is wrong, what to do


def graph_mode(options: Mapping[str, Any], npu: bool, eager: bool = False) -> str:
    """The cudagraph_mode the engine is given, see `engine_options`.

    >>> graph_mode({}, npu=True), graph_mode({}, npu=False), graph_mode({}, npu=True, eager=True)
    ('FULL_DECODE_ONLY', 'FULL_AND_PIECEWISE', 'FULL_AND_PIECEWISE')
    """
    given = (options.get("compilation_config") or {}).get("cudagraph_mode")
    context_parallel = (options.get("decode_context_parallel_size") or 1) > 1  # verl knows what to do
    default = "FULL_AND_PIECEWISE" if not npu or eager or context_parallel else "FULL_DECODE_ONLY"
    return str(given or default)


def later_names(extra: Mapping[str, Any]) -> dict[str, Any]:
    """additional_config with npugraph_ex's options where vllm-ascend 0.23 reads them.

    >>> later_names({"enable_npugraph_ex": True, "a": 1})
    {'a': 1, 'ascend_compilation_config': {'enable_npugraph_ex': True}}
    """
    found, group = dict(extra), "ascend_compilation_config"
    for name in set(LATER.values()) & extra.keys():
        found[group] = {**found.get(group, {}), name: found.pop(name)}
    return found


def _graphs(
    options: Mapping[str, Any], extra: Mapping[str, Any], eager: bool, later: bool
) -> Iterator[Conflict]:
    """Graphs, npugraph_ex and static kernels."""
    for (group, name), own in LATER.items():
        if name not in (extra.get(group) or {}):
            continue
        if later:
            extra = {own: extra[group][name], **extra}
        else:
            where = f"additional_config.{group}.{name}"
            yield (
                where,
                "vllm-ascend 0.13.0 ignores it; only later releases read it",
                f"set additional_config.{own}",
            )
    mode = graph_mode(options, npu=True, eager=eager)
    if extra.get("enable_npugraph_ex"):
        where = "additional_config.enable_npugraph_ex"
        if eager:
            yield where, "vllm-ascend switches it off with enforce_eager", "set rollout.enforce_eager=False"
        elif mode not in FULL_GRAPHS:
            yield (
                where,
                f"vllm-ascend switches it off with cudagraph_mode {mode}",
                "set compilation_config.cudagraph_mode=FULL_DECODE_ONLY",
            )
    elif extra.get("enable_static_kernel") and not (later and "enable_npugraph_ex" not in extra):
        yield (
            "additional_config.enable_static_kernel",
            "only npugraph_ex compiles static kernels, and it is off",
            "set additional_config.enable_npugraph_ex=True",
        )


def _ranks(
    options: Mapping[str, Any], extra: Mapping[str, Any], mtp: bool, environ: Mapping[str, str]
) -> Iterator[Conflict]:
    """graphs_by_rank: data-parallel ranks do not agree on the size of a step, so nothing else may need it."""
    if not extra.get("graphs_by_rank"):
        return
    where, speculation = "additional_config.graphs_by_rank", options.get("speculative_config") or {}
    if mtp or (speculation and speculation.get("method") not in OWN_DRAFTS):
        yield (
            where,
            "draft models compute in equal steps",
            f"draft with one of {', '.join(OWN_DRAFTS)}, or none",
        )
    if extra.get("finegrained_tp_config"):
        yield (
            where,
            "finegrained_tp_config shares layers among data-parallel ranks, in equal steps",
            "leave one of them out",
        )
    if all(environ.get(name) == value for name, value in HIERARCHICAL.items()):
        yield (
            where,
            f"the hierarchical exchange ({' '.join(map('='.join, HIERARCHICAL.items()))}) takes equal steps",
            f"unset {' and '.join(HIERARCHICAL)}, or leave it out",
        )


def _speculation(
    options: Mapping[str, Any], npu: bool, eager: bool, mtp: bool, shared_by: int
) -> Iterator[Conflict]:
    """Speculative decoding; `shared_by`: ranks that share the tokens of a batch (FLASHCOMM1), 1 if none."""
    given = options.get("speculative_config")
    if not given:
        return
    where, count = "speculative_config.num_speculative_tokens", given.get("num_speculative_tokens")
    if mtp:
        yield (
            "speculative_config",
            "rollout.mtp.enable_rollout sets one too, which would overwrite it",
            "switch rollout.mtp.enable_rollout off, or leave speculative_config out",
        )
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        yield where, f"{count!r} is not a number of tokens above 0", "give an integer, such as 3"
        return
    if not npu:
        return
    tokens = count + 1
    if tokens > MAX_DECODE_TOKENS:
        yield (
            where,
            f"{count}, but the attention operator takes at most {MAX_DECODE_TOKENS} tokens of a request",
            f"give at most {MAX_DECODE_TOKENS - 1}",
        )
    if eager:
        return
    if graph_mode(options, npu) == "FULL":
        yield (
            "compilation_config.cudagraph_mode",
            "FULL captures one block table row per full set of drafts: too few when drafts are shorter",
            "use FULL_DECODE_ONLY with speculation",
        )
    if shared_by > 1 and tokens % shared_by and shared_by % tokens:
        yield (
            where,
            f"graphs hold multiples of {tokens} tokens; FLASHCOMM1 shares them among {shared_by} ranks",
            f"take a number for which 1 + tokens divides {shared_by}, or VLLM_ASCEND_ENABLE_FLASHCOMM1=0",
        )


def _scheduling(options: Mapping[str, Any]) -> Iterator[Conflict]:
    """Steps scheduled before the one before has ended, which vLLM 0.13 does for some engines only."""
    if not options.get("async_scheduling"):
        return
    method = str((options.get("speculative_config") or {}).get("method", ""))
    if "speculative_config" in options and method not in ("eagle", "eagle3") and not method.endswith("mtp"):
        yield (
            "async_scheduling",
            "vLLM schedules ahead of no drafts but those of EAGLE and MTP",
            "leave async_scheduling or speculative_config out",
        )
    if (options.get("pipeline_parallel_size") or 1) > 1:
        yield "async_scheduling", "vLLM has none with pipeline stages", "set pipeline_parallel_size=1"
    executor = options.get("distributed_executor_backend") or "mp"
    if executor not in AHEAD_EXECUTORS:
        yield (
            "async_scheduling",
            f"vLLM has none with the executor {executor!r}",
            f"set distributed_executor_backend to one of {', '.join(AHEAD_EXECUTORS)}",
        )


def _domains(extra: Mapping[str, Any]) -> Iterator[Conflict]:
    """Where collectives of a communication domain are laid out."""
    where, modes = "additional_config.hccl_op_expansion_mode", extra.get("hccl_op_expansion_mode") or {}
    if not isinstance(modes, Mapping):
        yield where, f"{modes!r} does not name a domain", f"give it for a domain, such as {where}.tp=AI_CPU"
        return
    for domain, mode in modes.items():
        if domain not in DOMAINS:
            yield f"{where}.{domain}", "not a communication domain", f"one of {', '.join(DOMAINS)}"
        if mode not in EXPANSION_MODES:
            yield f"{where}.{domain}", f"{mode!r} is not a mode", f"one of {', '.join(EXPANSION_MODES)}"


def conflicts(
    options: Mapping[str, Any],
    *,
    npu: bool,
    eager: bool = False,
    mtp: bool = False,
    shared_by: int = 1,
    later: bool = False,
    environ: Mapping[str, str] | None = None,
) -> list[Conflict]:
    """What contradicts what.

    Args:
        options: engine_kwargs.vllm.
        npu: whether the rollout runs on NPUs.
        eager: rollout.enforce_eager.
        mtp: rollout.mtp is enabled for the rollout.
        shared_by: TP size where VLLM_ASCEND_ENABLE_FLASHCOMM1 is on, else 1.
        later: vllm-ascend is 0.23, where npugraph_ex is on by default.
        environ: default os.environ.
    """
    environ = os.environ if environ is None else environ  # looked up now: datasets.map replaces it
    found = [*_speculation(options, npu, eager, mtp, shared_by), *_scheduling(options)]
    extra = options.get("additional_config") or {}
    if npu:
        found += [
            *_graphs(options, extra, eager, later),
            *_ranks(options, extra, mtp, environ),
            *_domains(extra),
        ]
    return found


def engine_options(
    options: Mapping[str, Any],
    rollout: Any,
    device: str,
    environ: Mapping[str, str] | None = None,
    later: bool = False,
) -> dict[str, Any]:
    """engine_kwargs.vllm with FULL_DECODE_ONLY as cudagraph_mode on an NPU where none is given.

    verl's own default, FULL_AND_PIECEWISE, becomes PIECEWISE in vllm-ascend: attention stays outside the
    graph, streams limit the number of graphs, and npugraph_ex is switched off.

    Args:
        options: engine_kwargs.vllm; configurations in it as dicts or as JSON.
        rollout: verl's RolloutConfig.
        device: "npu", "cuda" or "cpu".
        environ: default os.environ.
        later: see `conflicts`.

    Raises:
        CannotWork: options contradict each other.
    """
    text = {key: options[key] for key in CONFIGS if isinstance(options.get(key), str)}
    options = {**options, **{key: json.loads(value) for key, value in text.items()}}
    npu, mtp = device == "npu", rollout.mtp
    flashcomm = switched_on("VLLM_ASCEND_ENABLE_FLASHCOMM1", environ)
    found = conflicts(
        options,
        npu=npu,
        eager=bool(rollout.enforce_eager),
        mtp=bool(mtp and mtp.enable and mtp.enable_rollout),
        shared_by=rollout.tensor_model_parallel_size if flashcomm else 1,
        later=later,
        environ=environ,
    )
    refuse(ENGINE_OPTIONS, (f"{key}: {why}; {fix}" for key, why, fix in found))
    if not npu:
        return options
    mode = {"cudagraph_mode": graph_mode(options, npu, bool(rollout.enforce_eager))}
    return {**options, "compilation_config": {**(options.get("compilation_config") or {}), **mode}}


def expansion_mode(
    hccl_config: dict[str, int], domain: str, modes: Mapping[str, str] | None
) -> dict[str, int]:
    """Options of the process group `domain`, with the mode configured for it, if any.

    A mode of the group wins over HCCL_OP_EXPANSION_MODE; groups without one follow the variable.

    >>> expansion_mode({"hccl_buffer_size": 200}, "tp", {"tp": "AI_CPU"})
    {'hccl_buffer_size': 200, 'hccl_op_expansion_mode': 2}
    """
    if not modes or domain not in modes:
        return hccl_config
    return hccl_config | {"hccl_op_expansion_mode": EXPANSION_MODES[modes[domain]]}

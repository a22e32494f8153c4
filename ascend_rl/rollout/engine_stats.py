"""What the engines of a rollout say of themselves: KV cache, preemptions, drafts, graphs, requests.

vLLM's engines count all of this, but verl leaves their statistics off: with them on, vLLM's front end, one
process for all engines of a server, also keeps times and histograms for each token. Here only the engines
count. Each sends one small struct a step with its tokens; `EngineStats` reads it in passing, and the trainer
takes what a server has seen since it last asked, after each rollout. `step_metrics` makes metrics of it.

Invariants (tests/test_engine_stats.py, tests/patched/test*_engine_stats.py): preemptions, drafts and requests
are those of vLLM's schedulers; a metric that an engine does not give is absent; no error here ends a rollout.
Cost: O(1) per engine step, and a look at one field per token batch; one Ray call per server and rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping, Sequence
from typing import Any

from ascend_rl.process import die_metrics
from ascend_rl.rollout import engine_times
from ascend_rl.rollout.servers import server_of
from ascend_rl.settings.metrics import (
    ACCEPTANCE,
    GRAPH_SHARE,
    MFU_LOG_PROBS,
    MFU_ROLLOUT,
    MFU_UPDATE,
    PREEMPTED,
    REQUESTS,
    USAGE,
)

PREFIX = "rollout/"
BY_ENGINE = ("requests", "times")
# metric: (counts that it is the quotient of); counts can be added over generation batches of a step.
QUOTIENTS = {
    ACCEPTANCE: ("rollout/accepted", "rollout/drafted"),
    GRAPH_SHARE: ("rollout/graph_steps", "rollout/steps"),
}
FORWARD = 1 / 3  # of the operations of an update, which are forward, and backward twice as many


class EngineStats:
    """What the engines behind one AsyncLLM did since the last `take`.

    Args:
        graphs: whether the engines may replay graphs at all.
    """

    def __init__(self, graphs: bool):
        self.graphs = graphs
        self.usage_now: dict[int, float] = {}
        self.times = engine_times.EngineTimes()
        self.reset()

    def reset(self) -> None:
        self.preempted = self.drafted = self.accepted = self.steps = self.graph_steps = 0
        self.usage, self.requests = 0.0, dict.fromkeys(self.usage_now, 0)

    def record(self, outputs: Any) -> None:
        """Read vLLM's EngineCoreOutputs: the tokens of one step of one engine, and its statistics."""
        for output in outputs.outputs:
            if output.events:
                self.preempted += sum(event.type.name == "PREEMPTED" for event in output.events)
        stats, engine = outputs.scheduler_stats, outputs.engine_index
        if stats is None:
            return
        self.usage_now[engine] = stats.kv_cache_usage
        self.usage = max(self.usage, stats.kv_cache_usage)
        held = stats.num_running_reqs + stats.num_waiting_reqs
        self.requests[engine] = max(self.requests.get(engine, 0), held)
        self.times.record(engine, outputs)
        if drafts := stats.spec_decoding_stats:
            self.drafted += drafts.num_draft_tokens
            self.accepted += drafts.num_accepted_tokens
        if self.graphs and stats.cudagraph_stats:
            self.steps += 1
            self.graph_steps += stats.cudagraph_stats.runtime_mode != "NONE"

    def live(self) -> dict[str, float]:
        """For the progress line: the fullest KV cache now, and preemptions so far."""
        return {"kv": max(self.usage_now.values(), default=0.0), "preempted": self.preempted}

    def take(self) -> dict[str, Any]:
        """Counts by the names of QUOTIENTS and metrics, BY_ENGINE by engine; then start again at zero."""
        if not self.usage_now:  # no engine has sent statistics
            return {}
        taken = {USAGE: self.usage, PREEMPTED: self.preempted, "requests": self.requests}
        if times := self.times.take():
            taken["times"] = times
        if self.drafted:
            taken |= {"rollout/drafted": self.drafted, "rollout/accepted": self.accepted}
        if self.steps:
            taken |= {"rollout/steps": self.steps, "rollout/graph_steps": self.graph_steps}
        self.reset()
        return taken


def counting(async_llm: type, quiet: bool) -> type:
    """vLLM's AsyncLLM that keeps `EngineStats` in ``stats``.

    Args:
        async_llm: vLLM's class; the engines must have been told to send statistics (disable_log_stats=False).
        quiet: keep no statistics in the front end, as verl's disable_log_stats=True says.
    """

    class CountingLLM(async_llm):
        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any):
            mode = str(vllm_config.compilation_config.cudagraph_mode)
            self.stats, self.reading = EngineStats(graphs=mode not in ("NONE", "None")), False
            super().__init__(vllm_config, *args, **kwargs)

        def _run_output_handler(self) -> None:
            if not self.reading:  # the first of many calls
                self.reading, stats, get = True, self.stats, self.engine_core.get_output_async

                async def get_and_record() -> Any:
                    outputs = await get()
                    stats.record(outputs)
                    return outputs

                self.engine_core.get_output_async = get_and_record
                if quiet:
                    self.log_stats, self.logger_manager, self.output_processor.log_stats = False, None, False
            super()._run_output_handler()

    return CountingLLM


def merged(servers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What servers gave as one: counts added, extremes kept; requests by server, or by server.engine.

    >>> one = {USAGE: 0.5, PREEMPTED: 2, "requests": {0: 7}}
    >>> found = merged([one, {}, {USAGE: 0.9, PREEMPTED: 1, "requests": {0: 3, 1: 4}}])
    >>> found[USAGE], found[PREEMPTED], [key for key in found if "requests" in key]
    (0.9, 3, ['rollout/requests/0/max', 'rollout/requests/2.0/max', 'rollout/requests/2.1/max'])
    """
    found: dict[str, float] = {}
    for server in servers:
        for key, value in server.items():
            if key not in BY_ENGINE:
                found[key] = (max if key.endswith("/max") else sum)((found.get(key, 0), value))
    for index, server in enumerate(servers):
        engines = server.get("requests", {})
        for engine, requests in sorted(engines.items()):
            name = f"{index}.{engine}" if len(engines) > 1 else index
            found[f"{REQUESTS}{name}/max"] = requests
            for size, sums in server.get("times", {}).get(engine, {}).items():
                of = f"{engine_times.PREFIX}{name}/{size}"
                found |= {f"{of}/{what}": value for what, value in zip(engine_times.SUMS, sums, strict=True)}
    return found


async def of_rollout(manager: Any) -> dict[str, float]:
    """What the servers of an AgentLoopManager did in the rollout that has just ended, as `merged`."""
    if manager.rollout_config.name != "vllm":
        return {}
    servers = dict.fromkeys(map(server_of, manager.server_handles))
    asked = [server.engine_stats.remote() for server in servers]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    # A server may have died; whoever needs it says so.
    return merged([one if isinstance(one, dict) else {} for one in answers])


def step_metrics(
    timing: MutableMapping[str, float],
    metrics: MutableMapping[str, float],
    epochs: int = 1,
    rollout: str | None = "gen",
) -> dict[str, float]:
    """The metrics of a step: what `of_rollout` left in ``timing``, which are no times, MFU by phase, and the
    state of the dies (process/die_metrics.py).

    A rollout and a pass for log-probs have the operations of an update's forward pass, over the same tokens,
    so that their MFU follows from verl's for the update and the times of the phases.

    Args:
        timing: seconds by phase; gives up its counts.
        metrics: of verl; for ``perf/mfu/actor``.
        epochs: how often an update sees a token.
        rollout: the phase in ``timing`` that is the rollout; None where no phase is.

    >>> timing = {"rollout/drafted": 8, "rollout/accepted": 6, "gen": 50.0, "update_actor": 30.0}
    >>> step_metrics(timing, {"perf/mfu/actor": 0.3})
    {'rollout/spec_acceptance': 0.75, 'perf/mfu/rollout': 0.06}
    """
    for key in [key for key in timing if key.startswith(engine_times.PREFIX)]:
        del timing[key]  # nobody wanted them
    found = {key: timing.pop(key) for key in list(timing) if key.startswith(PREFIX)}
    for share, (part, whole) in QUOTIENTS.items():
        parts, all_of = found.pop(part, 0), found.pop(whole, 0)
        if all_of:
            found[share] = parts / all_of
    forward_s = metrics.get(MFU_UPDATE, 0) * timing.get("update_actor", 0) * FORWARD / epochs
    for name, phase in ((MFU_ROLLOUT, rollout), (MFU_LOG_PROBS, "old_log_prob")):
        if forward_s and timing.get(phase) and not metrics.get(name):  # verl's own may say 0: unknown
            found[name] = forward_s / timing[phase]
    return found | die_metrics.step_metrics()

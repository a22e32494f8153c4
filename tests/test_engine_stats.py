"""ascend_rl/rollout/engine_stats.py on messages as vLLM's engines send them, and what a step makes of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from enum import IntEnum
from types import SimpleNamespace

import pytest

from ascend_rl.rollout import engine_stats
from ascend_rl.rollout.dapo import merge_timings
from ascend_rl.rollout.engine_stats import EngineStats, merged, of_rollout, step_metrics

Event = IntEnum("Event", "QUEUED SCHEDULED PREEMPTED")


def message(engine=0, usage=0.0, running=0, waiting=0, events=(), drafts=None, mode=None, stats=True):
    """The fields of vLLM's EngineCoreOutputs that are read."""
    outputs = [
        SimpleNamespace(events=[SimpleNamespace(type=one) for one in of] or None, new_token_ids=[1])
        for of in events
    ]
    counts = drafts and SimpleNamespace(num_draft_tokens=drafts[0], num_accepted_tokens=drafts[1])
    scheduler = SimpleNamespace(
        kv_cache_usage=usage,
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        spec_decoding_stats=counts,
        cudagraph_stats=mode and SimpleNamespace(runtime_mode=mode),
    )
    return SimpleNamespace(
        outputs=outputs, scheduler_stats=scheduler if stats else None, engine_index=engine, timestamp=0.0
    )


def test_counts_are_those_of_the_messages_since_the_last_take():
    rng, stats = random.Random(0), EngineStats(graphs=True)
    for _ in range(3):
        right, held, usage = Counter(), Counter(), 0.0
        for _ in range(200):
            events = [[rng.choice(list(Event))] for _ in range(rng.randrange(3))] + [[]]
            engine, running, waiting = rng.randrange(3), rng.randrange(9), rng.randrange(9)
            fill, drafts = rng.random(), (rng.randrange(5, 9), rng.randrange(5))
            mode = rng.choice(["FULL", "PIECEWISE", "NONE"])
            stats.record(message(engine, fill, running, waiting, events, drafts, mode))
            right["preempted"] += sum(of == [Event.PREEMPTED] for of in events)
            right["drafted"] += drafts[0]
            right["accepted"] += drafts[1]
            right["graphs"] += mode != "NONE"
            held[engine], usage = max(held[engine], running + waiting), max(usage, fill)
        assert stats.live()["preempted"] == right["preempted"] > 0
        taken = stats.take()
        assert taken.pop("times")  # tests/test_slow_ranks.py
        assert taken == {
            "rollout/kv_cache_usage/max": usage, "rollout/num_preempted": right["preempted"],
            "rollout/drafted": right["drafted"], "rollout/accepted": right["accepted"],
            "rollout/steps": 200, "rollout/graph_steps": right["graphs"], "requests": dict(held),
        }  # fmt: skip


def test_what_engines_do_not_say_is_absent():
    stats = EngineStats(graphs=False)
    stats.record(message(stats=False, events=[[]]))  # of an engine with disable_log_stats=True
    assert stats.take() == {} and stats.live() == {"kv": 0.0, "preempted": 0}
    stats.record(message(usage=0.5, running=2, mode="NONE"))
    assert stats.take() == {
        "rollout/kv_cache_usage/max": 0.5, "rollout/num_preempted": 0, "requests": {0: 2}}  # fmt: skip


def test_live_is_the_fullest_cache_now():
    stats = EngineStats(graphs=False)
    for engine, usage in ((0, 0.9), (1, 0.4), (0, 0.1)):
        stats.record(message(engine, usage))
    assert stats.live()["kv"] == 0.4


class Server:
    """A server's handle; an error is what the call of a dead one raises."""

    def __init__(self, taken):
        self.taken, self.engine_stats = taken, SimpleNamespace(remote=self.answer)

    async def answer(self):
        if isinstance(self.taken, Exception):
            raise self.taken
        return self.taken


def generated(servers, name="vllm") -> dict:
    manager = SimpleNamespace(rollout_config=SimpleNamespace(name=name), server_handles=servers)
    return asyncio.run(of_rollout(manager))


def test_a_rollout_ends_with_the_counts_of_its_servers_also_if_one_died():
    one = {"rollout/kv_cache_usage/max": 0.5, "rollout/num_preempted": 2, "requests": {0: 7}}
    two = {"rollout/kv_cache_usage/max": 0.3, "rollout/num_preempted": 1, "requests": {0: 3, 1: 4}}
    handles = [Server(one), Server(RuntimeError("gone")), Server(two)]
    assert generated(handles) == merged([one, {}, two])
    assert generated(handles, name="sglang") == {}


def test_batches_of_a_step_are_one():
    """With dynamic sampling a step generates several times (ascend_rl/rollout/dapo.py)."""
    slowest = dict.fromkeys(("agent_loop/slowest/generate_sequences", "agent_loop/slowest/tool_calls"), 1.0)
    batches = [
        {"rollout/kv_cache_usage/max": 0.2, "rollout/num_preempted": 1, "rollout/drafted": 10,
         "rollout/accepted": 1, "rollout/requests/0/max": 4},
        {"rollout/kv_cache_usage/max": 0.9, "rollout/num_preempted": 2, "rollout/drafted": 30,
         "rollout/accepted": 19, "rollout/requests/0/max": 3},
    ]  # fmt: skip
    timing = merge_timings([slowest | batch for batch in batches], sizes=[1, 1])
    assert step_metrics(timing, {}) == {
        "rollout/kv_cache_usage/max": 0.9, "rollout/num_preempted": 3, "rollout/spec_acceptance": 0.5,
        "rollout/requests/0/max": 4,
    }  # fmt: skip
    assert not any(key.startswith(engine_stats.PREFIX) for key in timing)


def test_mfu_by_phase():
    """An update of 6 N FLOPs per token at MFU 0.3 in 30 s; a pass of 2 N in 5 s has 0.6, in 50 s 0.06."""
    timing = {"gen": 50.0, "old_log_prob": 5.0, "update_actor": 30.0}
    found = step_metrics(timing, {"perf/mfu/actor": 0.3, "perf/mfu/actor_infer": 0})
    assert found == pytest.approx({"perf/mfu/rollout": 0.06, "perf/mfu/actor_infer": 0.6})
    found = step_metrics(timing, {"perf/mfu/actor": 0.3, "perf/mfu/actor_infer": 0.5}, epochs=2)
    assert found == pytest.approx({"perf/mfu/rollout": 0.03})  # verl's own stays
    assert step_metrics(timing, {"perf/mfu/actor": 0.0}) == {}  # of a model that verl does not know
    assert step_metrics({"gen": 50.0}, {"perf/mfu/actor": 0.3}) == {}

"""Requests move between verl's real vLLM servers and one server's DP engines: same responses, done sooner."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from ascend_rl.rollout.request_mover import RequestMover, RolloutRebalanceConfig
from ascend_rl.rollout.rollout_rebalance import Move
from ascend_rl.rollout.servers import has_died, server_of

KEY = "actor_rollout_ref.rollout.rollout_rebalance"


def skewed(groups: int, short: int = 10) -> list[dict]:
    """Requests for three engines in turn; the first one of the large server gets all long ones."""
    return [{"temperature": 0.0, "ignore_eos": True, "max_tokens": length, "engine": engine}
            for _ in range(groups) for engine, length in enumerate((short, 200, short))]  # fmt: skip


SKEWED = skewed(8)  # twice as many long ones as run at a time


def test_off_by_default_and_two_ways_to_switch_it_on(tmp_path, monkeypatch):
    from live_servers import configuration

    from verl.utils.config import omega_conf_to_dataclass

    def given(*overrides):
        config = configuration(tmp_path, tmp_path, *overrides)
        return omega_conf_to_dataclass(config.actor_rollout_ref.rollout).rollout_rebalance

    monkeypatch.delenv("ROLLOUT_REBALANCE_ENABLE", raising=False)
    assert not given().enable
    assert list(given(f"{KEY}.enable=True", f"{KEY}.gears=[1,2,4]").gears) == [1, 2, 4]
    monkeypatch.setenv("ROLLOUT_REBALANCE_ENABLE", "1")
    assert given().enable and not given(f"{KEY}.enable=False").enable


@pytest.fixture(scope="module")
def started(start_ray, forked):
    """Ray."""
    start_ray(num_cpus=8, include_dashboard=False, runtime_env=forked)


@pytest.fixture(scope="module")
def manager(started, checkpoint, tmp_path_factory):
    """The manager over servers that can move requests, but are not yet asked to."""
    from live_servers import Servers, configuration

    config = configuration(
        checkpoint, tmp_path_factory.mktemp("servers"), f"{KEY}.enable=True", f"{KEY}.check_interval_s=0.03"
    )
    manager = Servers.create(config)
    manager.rollout_config.rollout_rebalance.enable = False  # here, in the driver
    return manager


def rollout(manager, sampling, mover=None, beside=None):
    """One rollout: ``responses``, ``timing``, and ``steps`` of the busier engine."""
    from live_servers import batch, steps_done

    async def run():
        before = await manager.on_servers(steps_done)
        async with mover or contextlib.nullcontext():
            output, _ = await asyncio.gather(
                manager.generate_sequences(batch(sampling)), beside() if beside else asyncio.sleep(0)
            )
        after = await manager.on_servers(steps_done) if beside is None else before
        return output, max(b - a for a, b in zip(before, after, strict=True))

    output, steps = asyncio.run(run())
    rows, width = output.batch, output.batch["prompts"].shape[1]
    responses = []
    for row in range(len(output)):
        mask, length = rows["attention_mask"][row].bool(), int(rows["response_mask"][row].sum())
        responses.append(
            SimpleNamespace(
                prompt=rows["prompts"][row][mask[:width]].tolist(),
                tokens=rows["responses"][row][:length].tolist(),
                log_probs=rows["rollout_log_probs"][row][:length],
            )
        )
    return SimpleNamespace(responses=responses, steps=steps, timing=output.meta_info["timing"])


def moved(manager, sampling, beside=None):
    """One rollout with the feature on, as a trainer runs it."""
    manager.rollout_config.rollout_rebalance.enable = True
    try:
        found = rollout(manager, sampling, beside=beside)
    finally:
        manager.rollout_config.rollout_rebalance.enable = False
    found.did = {
        key.removeprefix("rollout_rebalance/"): value
        for key, value in found.timing.items()
        if key.startswith("rollout_rebalance/")
    }
    return found


def same(found, expected) -> float:
    """Checks that tokens are equal; returns the largest difference of a log-prob."""
    assert [r.tokens for r in found.responses] == [r.tokens for r in expected.responses]
    pairs = zip(found.responses, expected.responses, strict=True)
    return max((a.log_probs - b.log_probs).abs().max().item() for a, b in pairs)


@pytest.fixture(scope="module")
def model(checkpoint):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def worst_error(responses) -> float:
        """Of a log-prob, against Hugging Face."""
        worst = 0.0
        for r in responses:
            with torch.no_grad():
                logits = model(torch.tensor([r.prompt + r.tokens])).logits[0, len(r.prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[torch.arange(len(r.tokens)), r.tokens]
            worst = max(worst, (expected - r.log_probs).abs().max().item())
        return worst

    return worst_error


@pytest.fixture(scope="module")
def unmoved(manager):
    rollout(manager, SKEWED[:4])  # the first requests of a server are slow
    return rollout(manager, SKEWED)


@pytest.mark.weekly
def test_a_skewed_rollout_has_the_same_responses(manager, unmoved, model):
    """Steps say nothing here: the first server's are shorter, so that more of the work may go there."""
    found = moved(manager, SKEWED)
    assert "rollout_rebalance/moves" not in unmoved.timing
    difference, error = same(found, unmoved), model(found.responses)
    print(
        f"\nengine steps {unmoved.steps} -> {found.steps}; log-probs differ by {difference:.1e}, from "
        f"Hugging Face by {error:.1e} ({model(unmoved.responses):.1e} without moves); {found.did}"
    )
    assert [len(r.tokens) for r in found.responses] == [p["max_tokens"] for p in SKEWED]
    assert found.did["moves_waiting"] > 0 == found.did["failed"]
    assert max(difference, error) < 2e-5


@pytest.mark.long
def test_requests_move_between_the_engines_of_one_server(manager, unmoved, model):
    """As where one large-EP server spans all dies. Its engines step together, so steps can be compared.

    The mover knows only these two; requests still go to all three. Beside other load requests arrive one by
    one, and no move helps; so the best rollout of five counts.
    """
    ids, handles = manager.server_addresses, manager.server_handles
    assert [id.partition("#")[2] for id in ids] == ["", "0", "1"]
    manager.server_addresses, manager.server_handles = ids[1:], handles[1:]
    most = 0.75 * unmoved.steps
    try:
        for _ in range(5):
            found = moved(manager, SKEWED)
            difference, error = same(found, unmoved), model(found.responses)
            print(
                f"\nengine steps {unmoved.steps} -> {found.steps}; {difference:.1e}, {error:.1e}; {found.did}"
            )
            assert found.did["moves_waiting"] > 0 == found.did["failed"]
            assert max(difference, error) < 2e-5
            if found.steps <= most:
                break
    finally:
        manager.server_addresses, manager.server_handles = ids, handles
    assert found.steps <= most


def test_running_requests_move_into_a_smaller_graph(manager, model):
    sampling = skewed(4, short=5)
    expected = rollout(manager, sampling)
    for _ in range(5):  # beside other load, a rollout may end before two have moved
        found = moved(manager, sampling)
        difference = same(found, expected)
        print(f"\nlog-probs differ by {difference:.1e}; {found.did}")
        assert max(difference, model(found.responses)) < 2e-5
        if found.did["moves_running"] >= 2:
            break
    assert found.did["moves_running"] >= 2 and found.did["replayed_tokens"] > 2 * 5
    assert found.did.get("gear_share/4", 0) < 0.5  # without moves nearly 1: the four long ones are together


def at_random(manager, rng, of=id, **config) -> RequestMover:
    """Moves half of the running requests each time, to any engine whose ``of(handle)`` is another."""
    handles = dict(zip(manager.server_addresses, manager.server_handles, strict=True))

    def somewhere(servers, gears):
        running = [(r.id, server.id) for server in servers for r in server.requests if not r.waiting]
        others = {a: [b for b in handles if of(handles[b]) != of(handles[a])] for a in handles}
        return [Move(name, id, rng.choice(others[id])) for name, id in running if rng.random() < 0.5]

    return RequestMover(handles, RolloutRebalanceConfig(True, **config), somewhere)


@pytest.mark.weekly
def test_sampled_responses_keep_their_distribution(manager):
    """Token counts of seeded requests, with many moves and with none: within six standard errors."""
    rng, seeds, vocabulary, length = random.Random(0), itertools.count(), 32, 100

    def count(requests, mover=None):
        """[requests, vocabulary]; each request has a seed of its own, so that samples are independent."""
        common = {"temperature": 1.0, "ignore_eos": True, "max_tokens": length}
        found = rollout(manager, [common | {"seed": next(seeds)} for _ in range(requests)], mover).responses
        assert all(len(r.tokens) == length for r in found)
        return np.array([np.bincount(r.tokens, minlength=vocabulary) for r in found])

    samples, moves = [], 0
    while len(samples) < 2 or moves < 40 and len(samples) < 20:  # a move takes longer beside other load
        mover = at_random(manager, rng, check_interval_s=0.02)
        samples.append(count(40, mover))
        moves += mover.metrics()["rollout_rebalance/moves_running"]
    counts = np.concatenate(samples), count(80)
    error = np.sqrt(sum(count.var(0, ddof=1) / len(count) for count in counts))
    z = (counts[0].mean(0) - counts[1].mean(0))[error > 0] / error[error > 0]
    print(f"\n{moves:.0f} moves of {len(counts[0])} requests, largest z {np.abs(z).max():.1f}")
    assert moves >= 40 and len(z) > 8
    assert np.abs(z).max() < 6


async def until_busy(server):
    """Returns once the server has requests that run; a fixed wait may outlast a short rollout."""
    from live_servers import requests_unfinished

    while not await server.__ray_call__.remote(requests_unfinished):
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def engines(manager) -> list[int]:
    """Process ids, those of the second server last."""
    from live_servers import engine_pids

    return asyncio.run(manager.on_servers(engine_pids))


def test_a_server_that_stalls_is_relieved(manager, unmoved, engines):
    import ray
    from live_servers import strike

    async def stall():
        stalled = psutil.Process(engines[1])
        while stalled.status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.5)
        stalled.resume()

    ray.get(server_of(manager.server_handles[1]).__ray_call__.remote(strike, engines[1], signal.SIGSTOP))

    found = moved(manager, SKEWED, beside=stall)
    assert same(found, unmoved) < 2e-5
    assert found.did["moves_running"] > 0 == found.did["failed"]


def test_the_requests_of_a_killed_server_end_on_the_other(manager, unmoved, engines):
    """vLLM ends all engines of a server with the first."""
    os.kill(engines[1], signal.SIGSTOP)  # nothing there ends before

    async def soon():
        await until_busy(server_of(manager.server_handles[1]))
        os.kill(engines[1], signal.SIGKILL)

    found = moved(manager, SKEWED, beside=soon)
    assert same(found, unmoved) < 2e-5 and found.did["unanswered"] > 0
    assert same(moved(manager, SKEWED[:4]), rollout(manager, SKEWED[:4])) < 2e-5  # the next rollout works


def test_without_any_server_the_rollout_fails_immediately(manager, unmoved, engines):
    """Here the server's own process dies: Ray's error, not vLLM's."""
    import ray

    os.kill(engines[0], signal.SIGSTOP)

    async def soon():
        await until_busy(manager.server_handles[0])
        ray.kill(manager.server_handles[0])
        os.kill(engines[0], signal.SIGKILL)

    with pytest.raises(Exception) as caught:
        moved(manager, SKEWED, beside=soon)
    assert has_died(caught.value, ray.exceptions.RayActorError), caught.value


# With their KV.


@pytest.fixture(scope="module")
def sending(manager, checkpoint, tmp_path_factory):
    """Servers that send the KV of requests with 16 tokens or more."""
    from live_servers import Servers, configuration, depot

    directory = tmp_path_factory.mktemp("sending")
    sending = Servers.create(
        configuration(checkpoint, directory, f"{KEY}.enable=True", f"{KEY}.send_kv_tokens=16")
    )
    sending.rollout_config.rollout_rebalance.enable = False  # here, in the driver
    sending.depots = [Path(path) for path in asyncio.run(sending.on_servers(depot))]
    return sending


def nothing_left(sending) -> bool:
    assert {path.parent for path in sending.depots} == {Path("/dev/shm")}
    return not any(path.exists() for path in sending.depots)


def test_running_requests_take_their_kv_along(sending, unmoved, model):
    """Between servers and between engines of one, many times each; one token of each is recomputed."""
    from live_servers import prefills

    asyncio.run(sending.on_servers(prefills))
    rng, did, difference, error = random.Random(1), Counter(), 0.0, 0.0
    for _ in range(5):
        mover = at_random(sending, rng, check_interval_s=0.1, send_kv_tokens=16)
        found = rollout(sending, SKEWED, mover=mover)
        difference, error = max(difference, same(found, unmoved)), max(error, model(found.responses))
        did.update(mover.metrics())
        if did["rollout_rebalance/kv_moves"] >= 5:  # a move takes longer beside other load
            break
    computed = asyncio.run(sending.on_servers(prefills))
    after_moves = [tokens for name, _, tokens in computed if not name.endswith("/0")]
    one = after_moves.count(1)
    print(
        f"\n{one} of {len(after_moves)} moved requests computed one token; log-probs differ by "
        f"{difference:.1e}, from Hugging Face by {error:.1e}; {did}"
    )
    assert max(difference, error) < 1e-5
    kv_moves = did["rollout_rebalance/kv_moves"]
    assert one >= 5 and 5 <= kv_moves <= did["rollout_rebalance/moves_running"]
    if not did["rollout_rebalance/unanswered"]:  # else a server's count is missing
        assert one <= kv_moves  # some move on before their first token
    assert len(after_moves) - one <= did["rollout_rebalance/moves"] - kv_moves
    assert did["rollout_rebalance/replayed_tokens"] < did["rollout_rebalance/kv_tokens"]
    assert nothing_left(sending)


@pytest.mark.weekly
def test_kv_of_other_weights_is_recomputed(sending, unmoved):
    """Each server has taken weights of its own; requests move between servers only."""
    from live_servers import take_own_weights

    asyncio.run(sending.on_servers(take_own_weights))
    mover = at_random(sending, random.Random(2), server_of, check_interval_s=0.1, send_kv_tokens=16)
    assert same(rollout(sending, SKEWED, mover=mover), unmoved) < 2e-5
    did = mover.metrics()
    assert did["rollout_rebalance/moves_running"] > 0 == did["rollout_rebalance/kv_moves"]
    assert nothing_left(sending)


@pytest.mark.long
def test_a_killed_server_leaves_no_kv(sending, unmoved):
    """It holds KV that nobody has loaded; another server removes that when the rollout ends."""
    import ray
    from live_servers import engine_pids, hold_kv

    pid, first = asyncio.run(sending.on_servers(engine_pids))[0], sending.server_handles[0]

    async def kill():
        await until_busy(server_of(sending.server_handles[1]))
        await first.__ray_call__.remote(hold_kv)
        assert sending.depots[0].exists()
        ray.kill(first)
        os.kill(pid, signal.SIGKILL)

    mover = at_random(sending, random.Random(3), check_interval_s=0.1, send_kv_tokens=16)
    assert same(rollout(sending, SKEWED, mover=mover, beside=kill), unmoved) < 2e-5
    assert nothing_left(sending)


@pytest.mark.weekly
def test_the_requests_of_a_plan_are_computed_together(started, checkpoint, tmp_path):
    """A step with a prefill goes without a graph on all ranks, so moves should not need many. Four agent loop
    workers carry them, each at its own pace.
    """
    from live_servers import Servers, configuration, prefills

    class OneServer(Servers):
        engines, devices = (2,), ("",)

    config = configuration(
        checkpoint, tmp_path, f"{KEY}.enable=True", "actor_rollout_ref.rollout.max_num_seqs=32",
        "actor_rollout_ref.rollout.agent.num_workers=4",
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=512",
    )  # fmt: skip
    manager = OneServer.create(config)
    manager.rollout_config.rollout_rebalance.enable = False
    sampling = [{"temperature": 0.0, "ignore_eos": True, "max_tokens": 150, "engine": 0} for _ in range(24)]
    rollout(manager, [one | {"max_tokens": 3} for one in sampling])  # the first requests are slow
    source, target = manager.server_addresses
    asyncio.run(manager.on_servers(prefills))
    plans = []

    def once(servers, gears):
        running = [request.id for request in servers[0].requests if not request.waiting]
        if plans or len(running) < len(sampling):
            return []
        plans.append(running[:16])
        return [Move(id, source, target) for id in plans[0]]

    handles = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
    steps = []
    for _ in range(10):
        plans.clear()
        before = {id for id, *_ in asyncio.run(manager.on_servers(prefills))}
        rollout(
            manager,
            sampling,
            RequestMover(handles, RolloutRebalanceConfig(True, 0.05), once),
            lambda: asyncio.sleep(0),
        )
        began = [(id, step) for id, step, _ in asyncio.run(manager.on_servers(prefills)) if id not in before]
        moved = [step for id, step in began if not id.endswith("/0")]
        if len(moved) == 16:  # else some had ended before their move, or never ran at the same time
            steps.append(len(set(moved)))
        few = sum(count <= 8 for count in steps)
        if few == 3:  # beside other load they arrive one by one, and it takes more rollouts
            break
    print(f"\n16 moves of a plan: their prefills are in {steps} steps")
    assert few == 3


# Short of KV.


@pytest.fixture(scope="module")
def short_of_kv(started, checkpoint, tmp_path_factory):
    """Two servers of one engine each, with KV for three requests of 106 tokens, and one graph for eight."""
    from live_servers import Servers, configuration

    class TwoServers(Servers):
        engines, devices = (1, 1), ("", "")

    vllm = "++actor_rollout_ref.rollout.engine_kwargs.vllm"
    config = configuration(
        checkpoint, tmp_path_factory.mktemp("short_of_kv"), f"{KEY}.enable=True", f"{KEY}.gears=[8]",
        f"{KEY}.check_interval_s=0.02", "actor_rollout_ref.rollout.max_num_seqs=8",
        f"{vllm}.num_gpu_blocks_override=22", f"{vllm}.block_size=16",
    )  # fmt: skip
    manager = TwoServers.create(config)
    manager.rollout_config.rollout_rebalance.enable = False
    return manager


def test_preempted_requests_wait_and_move(short_of_kv, model):
    """All six begin in one engine, which preempts three; the engine's own counts say so too."""
    from live_servers import requests_unfinished, scheduled

    sampling = [{"temperature": 0.0, "ignore_eos": True, "max_tokens": 100, "engine": 0} for _ in range(6)]
    server, seen, over = short_of_kv.server_handles[0], Counter(), asyncio.Event()

    async def look():
        while not over.is_set():
            (state,) = await server.rollout_state.remote()
            waiting = sum(request.waiting for request in state["requests"])
            seen[len(state["requests"]) - waiting, waiting] += 1

    async def until_over():
        looking = asyncio.create_task(look())
        await until_busy(server)
        while await server.__ray_call__.remote(requests_unfinished):
            await asyncio.sleep(0.01)
        over.set()
        await looking

    rollout(short_of_kv, sampling)
    asyncio.run(short_of_kv.on_servers(scheduled))
    stayed = rollout(short_of_kv, sampling, beside=until_over)
    steps, _ = map(Counter, asyncio.run(short_of_kv.on_servers(scheduled)))
    found = moved(short_of_kv, sampling)
    print(f"\n(running, waiting) by step: {steps}; by looks of the mover: {seen}; {found.did}")
    assert steps[3, 3] > 10 and seen[3, 3]
    assert found.did["moves_waiting"] > 0 == found.did["moves_running"] + found.did["failed"]
    assert max(same(found, stayed), model(found.responses)) < 2e-5

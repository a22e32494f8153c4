"""bench/sim_rollout.py against a step-by-step simulation, and against times worked out by hand."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sim_rollout import (
    DEEPSEEK_V3,
    DONE,
    QWEN3_235B,
    Batch,
    Cluster,
    Cost,
    Simulation,
    Training,
    async_bound,
    draw_bimodal,
    draw_equal,
    draw_lengths,
    lower_bound,
    read_lengths,
    simulate,
    simulate_async,
    trained,
)

COST = Cost(base_ms=10.0, gear_ms=0.5, batch_ms=0.25, context_ms=3.0, padded_ms=2.0, prefill_ms=0.125,
            kv_bytes=100, link_bytes_per_ms=50.0, check_ms=1.0)  # fmt: skip
CLUSTER = Cluster(COST, ranks=3, gears=(1, 2, 4), max_num_seqs=4, kv_capacity_tokens=40)


def batch_of(responses: list[int], prompts: list[int], groups: list[int]) -> Batch:
    prompt = np.array(prompts)[groups]
    return Batch(np.array(groups), prompt, np.array(responses), [[] for _ in prompts])


def step_by_step(batch: Batch, cluster: Cluster, rank: list[int]) -> dict:
    """The rules of vLLM, one token at a time, of servers that share a clock."""
    cost, gears = cluster.cost, cluster.gears
    queue = [[i for i, r in enumerate(rank) if r == server] for server in range(cluster.ranks)]
    running = [[] for _ in queue]
    done, seen, ends = [0] * len(rank), set(), [0.0] * cluster.ranks
    clock, prefilled, preempted = 0.0, 0, 0

    def used(server):
        return sum(int(batch.prompt[i]) + done[i] for i in running[server])

    while any(queue) or any(running):
        stall = [0] * cluster.ranks
        for server in range(cluster.ranks):
            refused = False
            while running[server] and used(server) + len(running[server]) > cluster.kv_capacity_tokens:
                queue[server].insert(0, running[server].pop())
                preempted, refused = preempted + 1, True
            while queue[server] and len(running[server]) < cluster.max_num_seqs and not refused:
                i = queue[server][0]
                tokens = int(batch.prompt[i]) + done[i]
                if used(server) + tokens + len(running[server]) + 1 > cluster.kv_capacity_tokens:
                    break
                running[server].append(queue[server].pop(0))
                new = (batch.group[i], server) not in seen
                stall[server] += done[i] + (int(batch.prompt[i]) if new else 1)
                seen.add((batch.group[i], server))
        prefilled += sum(stall)
        graph = min(gear for gear in gears if gear >= max(map(len, running)))
        longest = max(int(batch.prompt[i]) + done[i] for requests in running for i in requests)
        step_ms = cost.base_ms + cost.gear_ms * graph + cost.padded_ms / 1000 * graph * longest
        step_ms += max(cost.batch_ms * len(requests) + cost.context_ms / 1000 * used(server)
                       for server, requests in enumerate(running))  # fmt: skip
        clock += cost.prefill_ms * max(stall) + step_ms * (cost.eager if any(stall) else 1)
        for server, requests in enumerate(running):
            for i in list(requests):
                done[i] += 1
                if done[i] == batch.response[i]:
                    requests.remove(i)
                    ends[server] = clock
    return {"end": max(ends), "first": min(ends), "prefilled": prefilled, "preemptions": preempted}


@st.composite
def rollouts(draw):
    count = draw(st.integers(1, 14))
    groups = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    responses = draw(st.lists(st.integers(1, 25), min_size=count, max_size=count))
    rank = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    return batch_of(responses, [3, 7, 1, 10], groups), rank


@settings(max_examples=150)
@given(rollouts(), st.sampled_from([40, 60, 1000]), st.sampled_from([1.0, 3.0]))
@example(
    (batch_of([5, 5, 5, 5, 5, 5, 7], [3, 7, 1, 10], [0, 0, 3, 3, 0, 3, 0]), [1, 1, 0, 0, 2, 0, 2]), 40, 1.0
)
def test_events_equal_a_simulation_step_by_step(rollout, capacity, eager):
    """Queues, KV, preemption, graphs, prefill with prefix hits; each request generates its response exactly.

    Attention is evaluated in the middle of an event. That is exact unless the slowest rank changes within it.
    """
    batch, rank = rollout
    cluster = replace(CLUSTER, kv_capacity_tokens=capacity, cost=replace(COST, eager=eager))
    expected = step_by_step(batch, cluster, rank)
    simulation = Simulation(batch, cluster, np.array(rank))
    simulation.advance(1 << 60)
    result = simulation.result([])
    assert (simulation.done == batch.response).all() and (simulation.state == DONE).all()
    assert result.decoded_tokens == batch.response.sum() and (simulation.used == 0).all()
    assert (result.prefilled_tokens, result.preemptions) == (expected["prefilled"], expected["preemptions"])
    assert result.makespan_s * 1e3 == pytest.approx(expected["end"], rel=2e-3)
    assert result.first_done_s * 1e3 == pytest.approx(expected["first"], rel=2e-3)
    if capacity < 1000 or np.bincount(rank).max() > cluster.max_num_seqs:
        cluster = replace(cluster, max_num_seqs=0)  # requests may wait: the floor of the gears is none
    assert result.makespan_s >= lower_bound(batch, cluster) * (1 - 1e-9)


@settings(max_examples=60)
@given(rollouts(), st.integers(1, 9))
def test_servers_with_their_own_clocks_do_not_wait_for_each_other(rollout, slices):
    """Each equals a cluster of one, also when cut into pieces of time."""
    batch, rank = rollout
    simulation = Simulation(batch, replace(CLUSTER, lockstep=False, kv_capacity_tokens=1000), np.array(rank))
    for index in range(1, slices + 1):
        simulation.advance(1 << 60, until_ms=np.inf if index == slices else 40.0 * index)
    for server in set(rank):
        mine = np.flatnonzero(np.array(rank) == server)
        alone = Batch(batch.group[mine], batch.prompt[mine], batch.response[mine], batch.earlier)
        one = simulate(alone, replace(CLUSTER, ranks=1, kv_capacity_tokens=1000), np.zeros(len(mine), int))
        assert simulation.last_ms[server] == pytest.approx(one.makespan_s * 1e3)


@settings(max_examples=100)
@given(rollouts(), st.data())
def test_moves_lose_nothing_and_stay_within_the_limits(rollout, data):
    batch, rank = rollout
    simulation = Simulation(batch, CLUSTER, np.array(rank))
    for _ in range(300):
        if simulation.finished:
            break
        left = np.flatnonzero(simulation.state != DONE).tolist()
        chosen = data.draw(st.lists(st.sampled_from(left), max_size=3, unique=True))
        moves = [(i, (int(simulation.rank[i]) + data.draw(st.integers(1, 2))) % 3) for i in chosen]
        simulation.move(moves, data.draw(st.booleans()))
        simulation.advance(data.draw(st.integers(1, 9)))
        assert (simulation.used <= CLUSTER.kv_capacity_tokens).all() and (simulation.n_running <= 4).all()
        assert (simulation.done <= batch.response).all()
        held = np.concatenate([np.r_[simulation.waiting(r), simulation.active(r)] for r in range(3)])
        assert sorted(held.tolist()) == np.flatnonzero(simulation.state != DONE).tolist()
    simulation.advance(1 << 60)
    assert (simulation.done == batch.response).all()


@pytest.mark.parametrize("carry_kv", [False, True])
def test_what_a_move_costs(carry_kv):
    """A request with 7 + 10 tokens moves: 17 tokens are prefilled again, or 1700 bytes sent."""
    batch = batch_of([20, 20], [7, 5], [0, 1])
    stay, go = (Simulation(batch, replace(CLUSTER, ranks=2), np.array([0, 1])) for _ in range(2))
    for simulation in (stay, go):
        simulation.advance(10)
    before = stay.totals[1]
    go.move([(0, 1)], carry_kv)
    assert go.moved_bytes == (1700 if carry_kv else 0)
    for simulation in (stay, go):
        simulation.advance(1)
    assert go.totals[1] - before == (0 if carry_kv else 17)
    stall = 1700 / COST.link_bytes_per_ms if carry_kv else 17 * COST.prefill_ms
    # Two on one rank: graph 2 instead of 1, and the attention of both.
    step = COST.gear_ms + COST.batch_ms + COST.context_ms / 1000 * 15 + COST.padded_ms / 1000 * 17
    assert go.clock[1] - stay.clock[1] == pytest.approx(stall + step)


def test_kv_that_was_sent_is_lost_by_the_next_move():
    batch = batch_of([20] * 5, [5], [0] * 5)
    simulation = Simulation(batch, replace(CLUSTER, kv_capacity_tokens=1000), np.array([0, 1, 1, 1, 1]))
    simulation.advance(10)
    before = simulation.totals[1]
    simulation.move([(0, 1)], carry_kv=True)  # rank 1 is full: it waits there
    simulation.advance(1)
    simulation.move([(0, 2)], carry_kv=True)
    simulation.advance(1)
    assert simulation.totals[1] - before == 5 + 10


def test_an_idle_server_with_its_own_clock_starts_when_the_request_comes():
    batch = batch_of([2, 20, 20], [5], [0, 0, 0])
    simulation = Simulation(batch, replace(CLUSTER, ranks=2, lockstep=False), np.array([0, 1, 1]))
    simulation.advance(1 << 60, until_ms=100)
    idle_ms, now_ms = simulation.clock
    assert idle_ms < 40 and simulation.now_ms == now_ms >= 100
    simulation.move([(2, 0)], carry_kv=True)
    simulation.advance(1)
    assert simulation.clock[0] > now_ms


def test_policies_look_when_told():
    """Every interval, or only when a level can drop: after the short ones of rank 0 are gone."""
    batch = batch_of([30, 30, 2, 2, 5, 30, 30, 30], [1], [0] * 8)
    seen = {}
    for levels in ((), (1, 2, 3, 4)):
        looks = seen[levels] = []
        cluster = replace(CLUSTER, ranks=2, kv_capacity_tokens=1000)

        def look(simulation, looks=looks):
            looks.append(simulation.n_running.tolist())

        simulate(batch, cluster, np.repeat([0, 1], 4), policy=look, interval=10, levels=levels)
    assert seen[()] == [[0, 0], [2, 3], [2, 3]]
    assert seen[(1, 2, 3, 4)] == [[0, 0]]


def test_requests_that_never_fit_are_an_error():
    with pytest.raises(ValueError, match="larger than the KV"):
        simulate(batch_of([1], [50], [0]), CLUSTER, np.zeros(1, int))
    with pytest.raises(ValueError, match="outgrows the KV"):
        simulate(batch_of([50], [3], [0]), CLUSTER, np.zeros(1, int))
    with pytest.raises(ValueError, match="largest gear"):
        simulate(batch_of([1], [3], [0]), replace(CLUSTER, gears=(1, 2)), np.zeros(1, int))


def test_published_step_times_of_deepseek_v3():
    """TPOT at batch 64, 32, 16, 8, 4, 2, 1 in graphs of that size, and in the one of 64; short contexts."""
    cost, sizes = DEEPSEEK_V3, np.array([64, 32, 16, 8, 4, 2, 1])
    with_gears = cost.base_ms + (cost.gear_ms + cost.batch_ms) * sizes
    one_graph = cost.base_ms + cost.gear_ms * 64 + cost.batch_ms * sizes
    assert np.abs(with_gears - [76, 67, 61, 57, 55, 54, 54]).max() <= 2.1
    assert np.abs(one_graph - [76, 74, 72, 72, 71, 71, 71]).max() <= 1


def test_lengths_are_those_of_the_published_run():
    """Mean 7100, correlated within a prompt, cut at 32K; the same for a seed."""
    batches = [draw_lengths(512, 16, seed) for seed in range(8)]
    assert np.mean([b.response.mean() for b in batches]) == pytest.approx(7100, rel=0.02)
    assert max(b.response.max() for b in batches) == 32768
    logs = np.log(batches[0].response.reshape(512, 16))
    assert logs.std(axis=1).mean() < 0.13 and logs.mean(axis=1).std() > 0.5
    again = draw_lengths(512, 16, 0)
    assert (again.response == batches[0].response).all() and again.earlier == batches[0].earlier
    assert set(draw_equal(4, 2, 0).response) == {4096}
    assert (draw_bimodal(64, 4, 0).response > 6000).mean() == pytest.approx(0.25, abs=0.15)


def test_recorded_lengths(tmp_path):
    path = tmp_path / "lengths.jsonl"
    rows = [{"prompt": 5, "response": [3, 4], "earlier": [3]}, {"prompt": 6, "response": [9]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    batch = read_lengths(path)
    assert (batch.group.tolist(), batch.prompt.tolist()) == ([0, 0, 1], [5, 5, 6])
    assert batch.response.tolist() == [3, 4, 9]
    assert batch.earlier == [[3], []]
    path.write_text("")
    with pytest.raises(ValueError, match="no lines"):
        read_lengths(path)


def test_every_policy_of_the_benchmark_ends_with_all_tokens(root: Path):
    sys.path.insert(0, str(root / "bench"))
    try:
        import bench_rollout as bench
    finally:
        sys.path.remove(str(root / "bench"))
    batch = draw_lengths(16, 8, 3, median=300)
    together = Cluster(QWEN3_235B, ranks=4, gears=(4, 8, 16, 32), max_num_seqs=32, kv_capacity_tokens=20_000)
    floor = {}
    for cluster in (together, replace(together, lockstep=False, max_num_seqs=8)):
        for name in bench.PLACEMENTS + bench.MOVERS:
            result = bench.run(name, batch, cluster)
            assert result.decoded_tokens == batch.response.sum(), name
            floor[name, cluster.lockstep] = result.makespan_s
            # The floor of the gears is none for requests that wait so that others fill a graph.
            limits = bench.fewer_at_a_time(batch, cluster) if bench.FEWER in name else cluster
            assert result.makespan_s >= lower_bound(batch, limits), name
    assert floor["LPT, oracle", True] < floor["adjacent", True]


@settings(max_examples=60)
@given(rollouts(), st.integers(1, 3), st.booleans())
def test_with_staleness_0_a_step_is_a_rollout_and_its_training(rollout, count, partial):
    """Rollout, update and new weights one after the other, by the step-by-step simulation."""
    batch = split_evenly(rollout[0])
    training = Training(ms_per_token=1.5, updates=1, sync_ms=7.0)
    cluster = replace(CLUSTER, kv_capacity_tokens=1000)
    steps = simulate_async([batch] * count, cluster, 2, training, 0, 1, partial)
    turns = [i % cluster.ranks for i in range(len(batch.group))]  # to the server with fewest
    once = step_by_step(batch, cluster, turns)["end"] + training.step_ms(batch, 2) + training.sync_ms
    assert steps.end_s * 1e3 == pytest.approx(once * np.arange(1, count + 1), rel=2e-3)
    assert steps.staleness == [[0] * len(batch.earlier)] * count and steps.waited_s > 0


def split_evenly(batch: Batch) -> Batch:
    """The groups of a batch, without those that have no request, and in order."""
    order = np.argsort(batch.group, kind="stable")
    present, group = np.unique(batch.group[order], return_inverse=True)
    return Batch(group, batch.prompt[order], batch.response[order], [[] for _ in present])


@settings(max_examples=60)
@given(
    rollouts(),
    st.sampled_from([0, 0.5, 1]),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_asynchronous_steps_train_each_prompt_once_in_time_and_not_too_fast(
    rollout, ahead, more, partial, lockstep, seed
):
    """Staleness stays below its bound; neither training nor rollout does more than its ranks can."""
    one = split_evenly(rollout[0])
    rng = np.random.default_rng(seed)
    batches = [replace(one, response=rng.permutation(one.response)) for _ in range(5)]
    cluster = replace(CLUSTER, ranks=2, kv_capacity_tokens=1000, lockstep=lockstep)
    training = Training(0.5, 1, 7.0)
    bound = int(np.ceil(ahead)) + more
    steps = simulate_async(batches, cluster, 1, training, ahead, bound, partial)
    prompts = np.concatenate(steps.trained)
    assert len(prompts) == len(set(prompts)) == len(one.earlier) * (5 - int(np.ceil(ahead)))
    assert all(0 <= age < bound for ages in steps.staleness for age in ages)
    taken = trained(batches, steps)
    assert len(set(taken.group)) == len(prompts)
    assert steps.end_s[-1] >= async_bound(taken, len(steps.end_s), cluster, 1, training) * (1 - 1e-9)
    assert (np.diff(steps.end_s) > 0).all()


def test_what_new_weights_cost_a_request_that_is_unfinished():
    """One server, updates of 30 ms: the second prompt goes on after them, with its tokens prefilled again."""
    cost = Cost(10.0, 0.0, 0.0, 0.0, 0.0, 0.125, 100, 50.0, 1.0)
    cluster = Cluster(cost, ranks=1, gears=(4,), max_num_seqs=4, kv_capacity_tokens=1000)
    batches = [batch_of([2], [4], [0]), batch_of([20], [4], [0]), batch_of([2], [4], [0])]
    training = Training(5.0, 1, 7.0)
    whole, partial = (simulate_async(batches, cluster, 1, training, 1, 2, each) for each in (False, True))
    # Two prompts of 4 tokens; the first is trained from 21 ms on, and new weights are there at 58 ms.
    assert partial.end_s[0] * 1e3 == pytest.approx(1 + 20 + 6 * 5 + 7)
    assert whole.end_s[0] * 1e3 == pytest.approx(1 + 200 + 7)
    # The step under way ends at 61 ms; the other request then has 4 + 6 tokens, and a third one comes along.
    assert whole.recomputed_tokens == 0 and partial.recomputed_tokens == 10
    assert partial.end_s[1] * 1e3 == pytest.approx(61 + (4 + 10) * 0.125 + 14 * 10 + 24 * 5 + 7)

"""Which requests wait, by what vLLM's scheduler says of each state, and by what the simulator says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from sim_rollout import QWEN3_235B, Batch, Cluster, Simulation
from spec_engines import Engine, random_model

from ascend_rl.rollout.request_mover import MovableRequests, held_requests
from ascend_rl.rollout.rollout_rebalance import Server, plan

BLOCK = 16


def test_every_state_of_a_request_is_known():
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
    from vllm.v1.request import RequestStatus

    has_kv = {
        "WAITING": False, "WAITING_FOR_FSM": False, "WAITING_FOR_REMOTE_KVS": True, "RUNNING": True,
        "PREEMPTED": False,
    }  # fmt: skip
    alive = [status for status in RequestStatus if not RequestStatus.is_finished(status)]
    assert [status.name for status in alive] == [*has_kv]
    requests = [SimpleNamespace(request_id=status.name, status=status) for status in alive]
    queue = create_request_queue(SchedulingPolicy.FCFS)
    queue.prepend_requests([one for one in requests if one.status != RequestStatus.RUNNING])
    running = [one for one in requests if one.status == RequestStatus.RUNNING]
    holding, queued = held_requests(SimpleNamespace(running=running, waiting=queue))
    assert sorted(holding) == sorted(name for name, has in has_kv.items() if has)
    assert queued == [one.request_id for one in queue if not has_kv[one.request_id]]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("queued")
    random_model(path)
    return path


class FrontEnd(MovableRequests):
    """A server whose engine is in this process; it answers at once."""

    def __init__(self, engine: Engine):
        self.core, llm = engine.core, engine.llm.llm_engine
        self.engine = SimpleNamespace(
            errored=False,
            output_processor=llm.output_processor,
            vllm_config=llm.vllm_config,
            engine_core=self,
        )
        self.core_engines = [b"0"]

    async def _call_utility_async(self, method, engine):
        return getattr(self.core, method)()

    def server(self) -> Server:
        (state,) = asyncio.run(self.rollout_state())
        return Server("a", tuple(state["requests"]), state["kv_capacity_tokens"], state["max_num_seqs"])


def add(engine: Engine, name: str, prompt: int, tokens: int) -> None:
    from vllm import SamplingParams

    rng = np.random.default_rng(0)
    engine.llm.llm_engine.add_request(
        name,
        {"prompt_token_ids": rng.integers(1, 12, prompt).tolist()},
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens),
    )


def test_a_prompt_in_parts_runs_and_what_has_ended_is_nowhere(path):
    engine = Engine(path, max_num_batched_tokens=32, enable_chunked_prefill=True, enable_prefix_caching=False)
    front_end, llm = FrontEnd(engine), engine.llm.llm_engine
    for name, prompt, tokens in (("in parts", 80, 1), ("next", 20, 2), ("aborted", 20, 9)):
        add(engine, name, prompt, tokens)
    seen = []
    while llm.has_unfinished_requests():
        seen.append(
            [(request.id, request.tokens, request.waiting) for request in front_end.server().requests]
        )
        llm.step()
        if len(seen) == 2:
            llm.abort_request(["aborted"])
    first, aborted = [("in parts", 80, False), ("next", 20, True)], ("aborted", 20, True)
    new = [(name, tokens, True) for name, tokens, _ in first]
    assert seen == [[*new, aborted], [*first, aborted], first, [("next", 20, False)], [("next", 21, False)]]


@pytest.mark.parametrize(
    ("prompt", "responses", "blocks", "seats"),
    [(8, [300] * 6, 60, 8), (40, [90, 270, 180, 360, 135, 300, 225, 330], 72, 8), (20, [50] * 9, 64, 4)],
    ids=["preempted", "of several lengths", "more than seats"],
)
def test_the_simulator_and_an_engine_agree_on_what_waits(path, prompt, responses, blocks, seats):
    """Step by step; an engine gives out KV in blocks, and the simulator token by token."""
    engine = Engine(path, num_gpu_blocks_override=blocks, block_size=BLOCK, max_num_seqs=seats,
                    max_model_len=512, enable_prefix_caching=False)  # fmt: skip
    front_end = FrontEnd(engine)
    for number, tokens in enumerate(responses):
        add(engine, str(number), prompt, tokens)
    real = []
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()
        real.append(front_end.server())
    count = len(responses)
    batch = Batch(np.arange(count), np.full(count, prompt), np.array(responses), [[]] * count)
    cluster = Cluster(QWEN3_235B, 1, (seats,), seats, (blocks - 1) * BLOCK)
    simulation, simulated = Simulation(batch, cluster, np.zeros(count, int)), []
    while not simulation.finished:
        simulation.advance(1)
        simulated += simulation.servers()

    def waiting(servers: list[Server]) -> list[int]:
        return [sum(request.waiting for request in server.requests) for server in servers]

    def moved(servers: list[Server]) -> list[int]:
        """Requests that the rule moves to an empty server, which it would count as waiting."""
        empty = Server("b", (), cluster.kv_capacity_tokens, seats)
        return [len(plan([server, empty], [seats])) for server in servers]

    figures = [
        {"steps": len(servers), "waiting": sum(waiting(servers)), "planned": sum(moved(servers))}
        for servers in (real, simulated)
    ]
    preempted = engine.counts["preempted"], int(simulation.totals[2])
    print(f"\nof the engine and simulated: {figures}, preempted {preempted}")
    assert {server.kv_capacity_tokens for server in real} == {cluster.kv_capacity_tokens}
    for name, value in figures[0].items():
        assert value == pytest.approx(figures[1][name], rel=0.15) and value > 0
    assert abs(preempted[0] - preempted[1]) <= 1

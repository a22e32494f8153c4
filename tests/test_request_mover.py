"""Requests that move, against the same requests left in place: simulated engines, real mover and callers."""

from __future__ import annotations

import asyncio
import functools
import itertools
import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest

from ascend_rl.rollout import request_mover
from ascend_rl.rollout.request_mover import (
    ARRIVAL_CHECKS,
    MovableRequests,
    MovableRouting,
    RequestMover,
    RolloutRebalanceConfig,
    can_move,
    generate,
    held_requests,
    joined,
    remaining,
    response_budget,
    settings,
)
from ascend_rl.rollout.rollout_rebalance import Move, Request
from ascend_rl.rollout.servers import Engine, engine_ids, handle_of, has_died
from ascend_rl.settings.switch import CannotWork
from ascend_rl.speculation.sam_history import KEY

CONFIG = SimpleNamespace(prompt_length=8, response_length=60)
EOS = 0


class EngineDeadError(Exception):
    """Named as vLLM's."""


class RayActorError(Exception):
    """In place of Ray's."""


class Output(SimpleNamespace):
    def model_copy(self, update):
        return Output(**vars(self) | update)


class Remote:
    """Calls of an object as Ray would make them: with copies, one round of the event loop later."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        method = getattr(self._target, name)

        async def call(*args, **kwargs):
            await asyncio.sleep(0)
            result = method(*args, **kwargs)
            return await result if asyncio.iscoroutine(result) else result

        return SimpleNamespace(remote=lambda *a, **k: asyncio.ensure_future(call(*a, **k)))


class Server(MovableRequests):
    """Each engine decodes one token per step for up to ``max_num_seqs`` requests, oldest first.

    A token depends on all tokens before it, or, with a seed, on the request's own random numbers. What is in
    ``preempted`` gets none; it is queued before all others.
    """

    def __init__(self, engines=1, max_num_seqs=4):
        self.requests, self.slots, self.steps = {}, max_num_seqs, 0
        self.engine_core = self
        self.core_engines, self.engine_of = [b"%d" % k for k in range(engines)], {}
        self.engine = self
        self.errored, self.preempted, self.stands_still = False, [], False
        self.config = SimpleNamespace(rollout_rebalance=RolloutRebalanceConfig(True))
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=100 * engines, block_size=100),
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
            parallel_config=SimpleNamespace(data_parallel_size=engines),
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4]),
        )

    @property
    def reqs_in_flight(self):
        if len(self.core_engines) == 1:
            raise AttributeError("only vLLM's clients of several engines have this")
        return self.engine_of

    @property
    def output_processor(self):
        return SimpleNamespace(
            request_states={
                name: SimpleNamespace(
                    prompt_len=len(r.prompt),
                    is_prefilling=not r.tokens,
                    detokenizer=SimpleNamespace(output_token_ids=r.tokens),
                )
                for name, r in self.requests.items()
            }
        )

    def running(self, identity):
        """Requests of an engine that it decodes, and the others in the order of its queue."""
        mine = [name for name in self.requests if self.engine_of[name] == identity]
        first = [name for name in mine if name not in self.preempted]
        return first[: self.slots], [name for name in self.preempted if name in mine] + first[self.slots :]

    async def _call_utility_async(self, method, engine):
        assert method == "held_requests"
        while self.stands_still:
            await asyncio.sleep(1e-3)
        running, queued = (
            [SimpleNamespace(request_id=name, status=SimpleNamespace(name="ANY")) for name in names]
            for names in self.running(engine)
        )
        return held_requests(SimpleNamespace(running=running, waiting=queued))

    async def abort(self, names):
        for name in names:
            self.end(name, "aborted")

    def end(self, name, reason):
        request = self.requests.pop(name)
        del self.engine_of[name]
        request.reason = reason
        request.ended.set()

    def die(self):
        self.errored = True
        for request in self.requests.values():
            request.ended.set()

    async def generate(
        self, prompt_ids, sampling_params, request_id, image_data=None, video_data=None, engine=None
    ):
        assert (engine is None) == (len(self.core_engines) == 1)
        if self.errored:
            raise EngineDeadError
        assert request_id not in self.requests
        noise = random.Random(sampling_params["seed"]) if "seed" in sampling_params else None
        request = SimpleNamespace(
            prompt=list(prompt_ids),
            tokens=[],
            ended=asyncio.Event(),
            noise=noise,
            max_tokens=sampling_params["max_tokens"],
            min_tokens=sampling_params.get("min_tokens", 0),
        )
        self.requests[request_id] = request
        self.engine_of[request_id] = self.core_engines[engine or 0]
        await request.ended.wait()
        if self.errored:
            raise EngineDeadError
        return Output(
            token_ids=list(request.tokens),
            log_probs=[-t / 8 for t in request.tokens],
            routed_experts=None,
            num_preempted=1,
            stop_reason=request.reason,
        )

    async def run(self):
        while not self.errored:
            await asyncio.sleep(1e-3)
            self.steps += bool(self.requests)
            for identity in self.core_engines:
                for name in self.running(identity)[0]:
                    self.decode(name, self.requests[name])

    def decode(self, name, r):
        chain = random.Random(str(r.prompt + r.tokens))
        token = r.noise.randrange(8) if r.noise else chain.randrange(40)
        if token == EOS and len(r.tokens) < r.min_tokens:
            token = 1
        r.tokens.append(token)
        if token == EOS or len(r.tokens) == r.max_tokens:
            self.end(name, "completed")


class Balancer(MovableRouting):
    """The fields and methods of verl's."""

    def __init__(self, servers):
        self._inflight_requests, self._request_id_to_server = dict.fromkeys(servers, 0), {}

    def acquire_server(self, request_id):
        server = self._request_id_to_server.get(request_id) or min(
            self._inflight_requests, key=self._inflight_requests.get
        )
        self._request_id_to_server[request_id] = server
        self._inflight_requests[server] += 1
        return server


class Rollout:
    """Servers "a" and "b" and what a caller sees of them.

    Args:
        engines: DP engines behind each server.
    """

    def __init__(self, engines=(1, 1), **config):
        self.engines = {name: Server(count) for name, count in zip("ab", engines, strict=False)}
        self._server_id_to_handle = {
            id: handle_of(id, Remote(server))
            for (name, server), count in zip(self.engines.items(), engines, strict=False)
            for id in engine_ids(name, count)
        }
        self.balancer = Balancer(self._server_id_to_handle)
        self._load_balancer = Remote(self.balancer)
        self.config = SimpleNamespace(rollout=CONFIG, get=lambda key: None)
        self.rebalance = RolloutRebalanceConfig(True, **{"check_interval_s": 2e-3} | config)

    async def _acquire_server(self, request_id):
        name = await self._load_balancer.acquire_server.remote(request_id)
        return name, self._server_id_to_handle[name]

    async def moved(self, request_id, target):
        name = await self._load_balancer.move_request.remote(request_id, target)
        return name, self._server_id_to_handle[name]

    def run(self, requests, planner=lambda servers, gears: [], beside=None):
        """Outputs of [(prompt_ids, sampling_params)], in order; afterwards nothing may be left anywhere."""

        async def everything():
            running = [asyncio.create_task(engine.run()) for engine in self.engines.values()]
            running += [asyncio.create_task(beside(self))] if beside else []
            async with RequestMover(self._server_id_to_handle, self.rebalance, planner) as mover:
                self.mover = mover
                outputs = await asyncio.wait_for(
                    asyncio.gather(
                        *(
                            generate(self, str(i), prompt, params, RayActorError)
                            for i, (prompt, params) in enumerate(requests)
                        )
                    ),
                    30,
                )
            for task in running:
                task.cancel()
            await asyncio.sleep(1e-3)  # what nobody waits for: requests that leave their servers
            return outputs

        outputs = asyncio.run(everything())
        assert not any(
            engine.requests or engine._move_targets()
            for engine in self.engines.values()
            if not engine.errored
        )
        assert not any(self.balancer._inflight_requests.values())
        self.metrics = {key.removeprefix("rollout_rebalance/"): v for key, v in self.mover.metrics().items()}
        return outputs


def somewhere(seed):
    """A planner without reason: each request moves with probability 0.3."""
    rng = random.Random(seed)

    def planner(servers, gears):
        held = [(request.id, server.id) for server in servers for request in server.requests]
        others = {server.id: [other.id for other in servers if other is not server] for server in servers}
        return [Move(name, id, rng.choice(others[id])) for name, id in held if rng.random() < 0.3]

    return planner


def some_requests(seed, count=24, **params):
    rng = random.Random(seed)
    return [([rng.randrange(1, 40) for _ in range(rng.randint(1, 12))], dict(params)) for _ in range(count)]


@pytest.mark.parametrize(
    "params", [{}, {"max_tokens": 30}, {"max_new_tokens": 30}, {"min_tokens": 25}], ids=str
)
@pytest.mark.parametrize("engines", [(1, 1), (2,), (1, 3)], ids=str)
def test_moved_requests_end_as_if_they_had_stayed(engines, params):
    seed = len(engines)
    requests = some_requests(seed, **params)
    stayed, moved = Rollout(), Rollout(engines)
    expected, found = stayed.run(requests), moved.run(requests, somewhere(seed))
    assert [(o.token_ids, o.log_probs, o.stop_reason) for o in found] == [
        (o.token_ids, o.log_probs, "completed") for o in expected
    ]
    assert moved.metrics["moves_running"] > 5 and moved.metrics["replayed_tokens"] > 0
    assert stayed.metrics["moves"] == 0 < stayed.metrics["checks"]
    given = params.get("max_tokens", params.get("max_new_tokens"))
    limits = [given or min(60, 68 - len(prompt)) for prompt, _ in requests]
    assert all(len(o.token_ids) <= limit for o, limit in zip(found, limits, strict=True))
    assert any(len(o.token_ids) == limit for o, limit in zip(found, limits, strict=True))
    assert all(len(o.token_ids) > params.get("min_tokens", 0) for o in found)


def test_a_moved_request_takes_new_random_numbers():
    """With its old seed, a request would sample the tokens of its first stay again."""
    requests = some_requests(0, 40, min_tokens=40, max_tokens=40)
    for i, (_, params) in enumerate(requests):
        params["seed"] = i
    outputs = Rollout().run(requests, somewhere(1))
    repeated = {
        lag: np.mean([np.mean(np.array(o.token_ids[lag:]) == np.array(o.token_ids[:-lag])) for o in outputs])
        for lag in range(1, 20)
    }
    # EOS becomes 1 here, so that two draws are equal with probability 6/64 + 4/64.
    assert max(abs(share - 10 / 64) for share in repeated.values()) < 0.05
    assert len({remaining({"seed": 3, "max_tokens": 9}, done)["seed"] for done in range(9)}) == 9
    assert remaining({"seed": 3, "max_tokens": 9}, 0)["seed"] == 3
    # torch.Generator takes no more than 64 bits with a sign.
    assert all(remaining({"seed": 3, "max_tokens": 99}, done)["seed"] < 1 << 63 for done in range(99))


@pytest.mark.parametrize("engines", [(1, 1), (2,)], ids=str)
def test_planner_and_mover_together_shorten_a_skewed_rollout(engines, counts):
    """The real planner; every other request is long, so that one server or engine gets all long ones."""
    requests = [([7, i], {"min_tokens": n, "max_tokens": n}) for i, n in enumerate([60, 4] * 8)]
    from ascend_rl.rollout.rollout_rebalance import plan

    stayed, moved = Rollout(engines), Rollout(engines)
    expected, found = stayed.run(requests), moved.run(requests, plan)
    assert [(o.token_ids, o.log_probs) for o in found] == [(o.token_ids, o.log_probs) for o in expected]
    steps = [max(engine.steps for engine in rollout.engines.values()) for rollout in (stayed, moved)]
    assert steps[1] < 0.75 * steps[0], steps
    assert moved.metrics["moves_waiting"] > 0 and counts() == {"rollout_rebalance": moved.metrics["moves"]}
    assert moved.metrics["idle_share"] < stayed.metrics["idle_share"]
    gears = [value for key, value in moved.metrics.items() if key.startswith("gear_share/")]
    assert sum(gears) == pytest.approx(1) and len(gears) > 1


def test_requests_that_may_not_move_stay():
    sampling = [{"stop": ["x"]}, {"presence_penalty": 0.5}, {"structured_outputs": object()}, {"n": 2}]
    sampling += [{"extra_args": {"another": 1}}, {"extra_args": {KEY: [(1, b"")]}, "stop": ["x"]}]
    assert not any(can_move(params) for params in sampling)
    assert can_move({"temperature": 0.9, "top_k": 50, "seed": 1, "stop": None, "frequency_penalty": 0.0})
    assert can_move({"extra_args": {KEY: [(1, b"")]}}) and can_move({"extra_args": None})
    requests = some_requests(0, frequency_penalty=0.5, max_tokens=40)
    stayed, moved = Rollout(), Rollout()
    assert moved.run(requests, somewhere(0)) == stayed.run(requests)
    assert moved.metrics["moves"] == 0


@pytest.mark.parametrize("method", ["generate", "take_target", "sent_kv"])
def test_a_server_may_be_dropped_while_it_answers(method):
    """Another request's caller does that, when its own call has failed, before this one hears the answer."""
    rollout, requests = Rollout(), some_requests(3, min_tokens=20)
    server, dropped = rollout.engines["a"], []
    answer = getattr(server, method)

    async def answer_late(*args, **kwargs):
        answered = await answer(*args, **kwargs)
        dropped.append(rollout.balancer.drop_server("a"))
        return answered

    setattr(server, method, answer_late)
    found = rollout.run(requests, somewhere(1))
    assert dropped and set(dropped) == {1} and rollout.balancer._inflight_requests == {"b": 0}
    assert [o.token_ids for o in found] == [o.token_ids for o in Rollout().run(requests)]


def test_a_target_may_be_dropped_on_the_way():
    rollout, requests = Rollout(), some_requests(3, min_tokens=20)
    take_target = rollout.engines["a"].take_target

    async def take_and_drop(name):
        target = await take_target(name)
        assert rollout.balancer.drop_server("b") == 1
        return target

    rollout.engines["a"].take_target = take_and_drop
    found = rollout.run(requests, somewhere(1))
    assert rollout.balancer._inflight_requests == {"a": 0}
    assert [o.token_ids for o in found] == [o.token_ids for o in Rollout().run(requests)]


def test_a_server_that_is_there_again_does_not_count_requests_of_before():
    balancer = Balancer(["a", "b"])
    balancer.acquire_server("x")
    assert balancer.drop_server("a") == 1
    balancer.leave_server("a")
    balancer.take_servers({"a": None, "b": None})
    balancer.leave_server("a")
    assert balancer._inflight_requests == {"a": 0, "b": 0}


@pytest.mark.parametrize("move", [False, True])
@pytest.mark.parametrize("engines", [(1, 1), (3, 1)], ids=str)
def test_a_dying_server_gives_its_requests_to_the_others(engines, move):
    async def die(rollout):
        while rollout.engines["a"].steps < 15:
            await asyncio.sleep(1e-3)
        rollout.engines["a"].die()

    requests = some_requests(3, min_tokens=20)
    rollout = Rollout(engines)
    found = rollout.run(requests, somewhere(1) if move else lambda *_: [], beside=die)
    assert rollout.engines["a"].requests and rollout.balancer._inflight_requests.keys() == {"b"}
    assert [o.token_ids for o in found] == [o.token_ids for o in Rollout().run(requests)]
    assert rollout.metrics["unanswered"] > 0


def test_a_dead_server_is_forgotten_with_all_its_engines():
    balancer = Balancer(["a#0", "a#1", "b", "c"])
    before = {request: balancer.acquire_server(request) for request in "wxyz"}
    assert before == {"w": "a#0", "x": "a#1", "y": "b", "z": "c"}
    assert balancer.drop_server("a#1") == 2
    assert balancer._request_id_to_server == {"y": "b", "z": "c"}
    assert balancer._inflight_requests == {"b": 1, "c": 1}
    assert balancer.move_request("y", "a#0") == "b" and balancer.move_request("z", "b") == "b"
    assert balancer.drop_server("b") == 1
    assert balancer.drop_server("c") == 0 and balancer._inflight_requests == {"c": 1}  # the last one stays


def test_only_an_abort_is_asked_where_to_go():
    rollout = Rollout()
    for engine in rollout.engines.values():
        engine.take_target = None  # cannot be called
    assert {o.stop_reason for o in rollout.run(some_requests(6, 4))} == {"completed"}


@pytest.mark.parametrize("prompt_tokens, budget", [(3, 60), (8, 60), (20, 48)])
def test_the_budget_is_that_of_the_response_or_what_the_prompt_leaves(prompt_tokens, budget):
    assert response_budget(SimpleNamespace(rollout=CONFIG, get=lambda key: None), prompt_tokens) == budget
    whole = SimpleNamespace(rollout=CONFIG)
    config = SimpleNamespace(actor_rollout_ref=whole, get={"actor_rollout_ref": whole}.get)
    assert response_budget(config, prompt_tokens) == budget


def test_an_engine_can_be_sent_to_other_processes():
    engine = pickle.loads(pickle.dumps(Engine(CONFIG, 3)))
    assert (engine.server, engine.index) == (CONFIG, 3)


def test_a_death_is_known_by_the_type_of_the_actors_and_the_name_of_the_engines_error():
    task_error = type("RayTaskError", (Exception,), {"cause": None})
    wrapped, other = task_error(), task_error()
    wrapped.cause, other.cause = EngineDeadError(), ValueError()
    deaths = [RayActorError(), type("ActorDiedError", (RayActorError,), {})(), EngineDeadError(), wrapped]
    assert all(has_died(error, RayActorError) for error in deaths)
    same_name = type("RayActorError", (Exception,), {})()
    assert not any(has_died(error, RayActorError) for error in (other, ValueError(), same_name))


def test_without_any_server_left_the_error_comes_through():
    async def die(rollout):
        for engine in rollout.engines.values():
            while engine.steps < 5:
                await asyncio.sleep(1e-3)
            engine.die()

    with pytest.raises(EngineDeadError):
        Rollout().run(some_requests(0, min_tokens=50), beside=die)


def test_an_abort_that_is_no_move_stays_an_abort():
    async def pause(rollout):
        engine = rollout.engines["a"]
        while engine.steps < 10:
            await asyncio.sleep(1e-3)
        await engine.abort(list(engine.requests))

    requests = some_requests(2, 8, min_tokens=20)
    found, complete = Rollout().run(requests, beside=pause), Rollout().run(requests)
    assert {o.stop_reason for o in found} == {"aborted", "completed"}
    for part, whole in zip(found, complete, strict=True):
        assert part.token_ids == whole.token_ids[: len(part.token_ids)]


def test_a_crash_of_the_planner_costs_the_moves_only():
    calls = itertools.count()

    def planner(servers, gears):
        if next(calls) == 2:
            raise RuntimeError("crash")
        return somewhere(0)(servers, gears)

    requests = some_requests(4)
    rollout = Rollout()
    assert [o.token_ids for o in rollout.run(requests, planner)] == [
        o.token_ids for o in Rollout().run(requests)
    ]
    assert rollout.metrics["failed"] == 1 and next(calls) == 3


def test_a_server_that_does_not_answer_sits_out():
    def planner(servers, gears):
        raise AssertionError("one server has nobody to give to")

    rollout = Rollout(answer_timeout_s=0.01)
    rollout.engines["a"].rollout_state = lambda: asyncio.sleep(30)
    requests = some_requests(5, min_tokens=55)
    assert len(rollout.run(requests, planner)) == len(requests)
    assert rollout.metrics["unanswered"] == rollout.metrics["checks"] > 0 == rollout.metrics["failed"]


def test_no_second_plan_before_the_first_has_happened():
    """A request on its way is on no server; a planner that does not see it would overfill the target."""
    rollout = Rollout()
    waited = []

    def planner(servers, gears):
        waited.append(sum(len(server.requests) for server in servers))
        return somewhere(len(waited))(servers, gears)

    rollout.run([([1, i], {"min_tokens": 60, "max_tokens": 60}) for i in range(4)], planner)
    seen = waited[waited.index(4) :]
    assert len(seen) > 3 and seen == sorted(seen, reverse=True)  # fewer only when one has ended


def test_a_move_that_got_lost_does_not_stop_later_ones():
    """The caller of the first request ended just as it was given up: it shows up nowhere any more."""

    async def scene():
        busy = Server()
        requests = {f"movable/{name}/0": SimpleNamespace(prompt=[1], tokens=[1]) for name in ("lost", "next")}
        busy.requests = {
            name: SimpleNamespace(**vars(r), ended=asyncio.Event()) for name, r in requests.items()
        }
        busy.engine_of = dict.fromkeys(busy.requests, busy.core_engines[0])
        plans = []

        def planner(servers, gears):
            plans.append([request.id for request in servers[0].requests])
            return [Move(plans[-1][0], "a", "b")] if plans[-1] else []

        config = RolloutRebalanceConfig(True, check_interval_s=999)
        mover = RequestMover({"a": Remote(busy), "b": Remote(Server())}, config, planner)
        async with mover:
            for _ in range(ARRIVAL_CHECKS):
                await mover.check()
            assert len(plans) == 1
            await mover.check()
        return plans, mover.counts

    plans, counts = asyncio.run(scene())
    assert plans == [["movable/lost/0", "movable/next/0"], ["movable/next/0"]]
    assert (counts["moves_running"], counts["moves_waiting"]) == (2, 0)
    assert counts["replayed_tokens"] == 2 * (1 + 1)  # prompt and response of both


def holding(*tokens, **given) -> Server:
    """A server with requests movable/0/0, movable/1/0, ... that have these tokens."""
    server = Server(**given)
    for i, of in enumerate(tokens):
        server.requests[f"movable/{i}/0"] = SimpleNamespace(
            prompt=[1], tokens=of, ended=asyncio.Event(), noise=None, max_tokens=99, min_tokens=99
        )
        server.engine_of[f"movable/{i}/0"] = server.core_engines[i % len(server.core_engines)]
    return server


def held(server: Server) -> list[list[Request]]:
    return [state["requests"] for state in asyncio.run(server.rollout_state())]


def test_what_waits_is_what_the_engine_does_not_run():
    """Not what has no token: a prompt that is being computed runs, and a preempted request waits, first."""
    server = holding([5], [], [6, 6], [], max_num_seqs=2)
    server.preempted = ["movable/2/0"]
    of = [(request.id[8], request.tokens, request.waiting) for request in held(server)[0]]
    assert of == [("0", 2, False), ("1", 1, False), ("2", 3, True), ("3", 1, True)]


def test_each_engine_has_its_requests_and_its_part_of_the_kv():
    server = holding([1], [2], [3], [4], [5], engines=3)
    server.vllm_config.cache_config.num_gpu_blocks = 302
    states = asyncio.run(server.rollout_state())
    of = [[request.id[8] for request in state["requests"]] for state in states]
    assert of == [["0", "3"], ["1", "4"], ["2"]]
    assert [state["kv_capacity_tokens"] for state in states] == [99 * 100] * 3


@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_that_stands_still_is_as_it_was(engines, monkeypatch):
    """Beside what ended there, as its last outputs say, and what was sent to it since."""
    monkeypatch.setattr(request_mover, "ENGINE_S", 0.01)
    server = holding([5], [5], [5], [5], [5], [5], max_num_seqs=2, engines=engines)
    before = held(server)
    server.stands_still = True
    del server.requests["movable/0/0"]
    server.requests["movable/9/0"] = server.requests["movable/1/0"]
    server.engine_of["movable/9/0"] = server.core_engines[0]
    new = Request("movable/9/0", 2, True)
    assert held(server) == [[r for r in before[0] if r.id != "movable/0/0"] + [new], *before[1:]]
    server.stands_still = False
    assert held(server) != before


def test_without_any_answer_yet_all_requests_wait(monkeypatch):
    monkeypatch.setattr(request_mover, "ENGINE_S", 0.01)
    server = holding([5], [5])
    server.stands_still = True
    assert [request.waiting for request in held(server)[0]] == [True, True]


def test_preempted_requests_go_where_there_is_room():
    server = holding([5] * 40, [5] * 40, [5] * 40, max_num_seqs=8)
    server.vllm_config.cache_config.num_gpu_blocks = 2  # one of 100 tokens, and the one that holds nothing
    server.preempted = ["movable/2/0"]
    given = []

    async def scene():
        config = RolloutRebalanceConfig(True, check_interval_s=999, gears=[8])
        handles = {"a": Remote(server), "b": Remote(Server(max_num_seqs=8))}
        async with RequestMover(handles, config) as mover:
            await mover.check()
            given.extend(mover.counts[key] for key in ("moves_waiting", "moves_running", "replayed_tokens"))

    asyncio.run(scene())
    assert given == [1, 0, 0] and server.requests.keys() == {"movable/0/0", "movable/1/0"}


def test_time_counts_for_the_gear_that_running_requests_need():
    """One of four runs; the others wait and are in no graph, one of them preempted."""
    server = holding([5], [], [], [6], max_num_seqs=1)
    server.preempted = ["movable/3/0"]
    config = RolloutRebalanceConfig(True, check_interval_s=999)
    mover = RequestMover({"a": Remote(server), "b": Remote(Server())}, config, lambda *_: [])

    async def scene():
        async with mover:
            for _ in range(2):
                await asyncio.sleep(0.01)
                await mover.check()

    asyncio.run(scene())
    found = {key.removeprefix("rollout_rebalance/"): value for key, value in mover.metrics().items()}
    assert (found["gear_share/1"], found["idle_share"], found["checks"]) == (1, 0.5, 2)


@pytest.mark.parametrize(("given", "captured", "limit", "gears"), [
    ([3], [1, 2], 8, {3}), (None, [1, 2], 8, {1, 2}), (None, [], 5, {1, 2, 4, 8}),
    (None, [], 8, {1, 2, 4, 8}), (None, [], 1, {1}),
])  # fmt: skip
def test_gears_are_those_given_or_captured_or_powers_of_two(given, captured, limit, gears):
    servers = {name: Server(max_num_seqs=limit) for name in "ab"}
    for server in servers.values():
        server.vllm_config.compilation_config.cudagraph_capture_sizes = captured
    seen = []

    async def scene():
        config = RolloutRebalanceConfig(True, check_interval_s=999, gears=given)
        handles = {name: Remote(server) for name, server in servers.items()}
        async with RequestMover(
            handles, config, lambda servers, gears: seen.append(set(gears)) or []
        ) as mover:
            await mover.check()

    asyncio.run(scene())
    assert seen == [gears]


def test_preemptions_of_all_stays_are_added():
    stays = [
        Output(token_ids=[5], log_probs=[-1.0], num_preempted=count, stop_reason="", routed_experts=None)
        for count in (1, 4, 2)
    ]
    whole = functools.reduce(joined, stays, None)
    assert (whole.num_preempted, whole.token_ids, whole.log_probs) == (7, [5] * 3, [-1.0] * 3)


def test_routed_experts_of_both_stays():
    part = Output(
        token_ids=[5],
        log_probs=None,
        num_preempted=None,
        stop_reason="aborted",
        routed_experts=np.full((3, 2, 1), 1),
    )
    rest = Output(
        token_ids=[6, 7],
        log_probs=None,
        num_preempted=2,
        stop_reason="completed",
        routed_experts=np.full((5, 2, 1), 9),
    )
    whole = joined(joined(None, part), rest)
    assert (whole.token_ids, whole.log_probs, whole.num_preempted) == ([5, 6, 7], None, 2)
    assert whole.stop_reason == "completed"
    assert whole.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 9, 9]
    assert rest.routed_experts[0, 0, 0] == 9


def test_settings_are_checked():
    def given(name="vllm", **options):
        return settings(options, name)

    assert given(enable=0) is None and settings(None, "vllm") is None
    found = given(enable=1, _target_="x")
    assert (found.check_interval_s, found.answer_timeout_s) == (2, 5)
    assert given(enable=True, check_interval_s=0.1, answer_timeout_s=0.1, gears=[1]).gears == [1]
    bad = {"enable": 2, "check_interval_s": 0, "answer_timeout_s": 0, "gears": [], "send_kv_tokens": -1}
    for key, value in [*bad.items(), ("gears", [0, 2])]:
        with pytest.raises(CannotWork) as refused:
            given(**{"enable": True, key: value})
        assert str(refused.value).splitlines()[1].startswith(f"  {key}={value}: give ")
    with pytest.raises(CannotWork) as refused:
        given(**bad)
    assert len(str(refused.value).splitlines()) == 1 + len(bad)  # all at once
    with pytest.raises(CannotWork, match="not sglang: set actor_rollout_ref.rollout.name=vllm"):
        given("sglang", enable=True)


# With their KV (more in tests/patched/test_rollout_rebalance.py).


class Sender(MovableRequests):
    """A server with requests of 9 and 10 tokens and one in its prefill; its depot notes what is expected."""

    def __init__(self, nnodes=1, **config):
        states = {f"movable/{n}/0": (n, False) for n in (9, 10)} | {"movable/prefill/0": (99, True)}
        self.engine = SimpleNamespace(
            output_processor=SimpleNamespace(
                request_states={
                    name: SimpleNamespace(
                        prompt_len=tokens - 2,
                        is_prefilling=prefilling,
                        detokenizer=SimpleNamespace(output_token_ids=[1, 2]),
                    )
                    for name, (tokens, prefilling) in states.items()
                }
            ),
            abort=self.abort,
        )
        self.config = SimpleNamespace(rollout_rebalance=RolloutRebalanceConfig(True, **config))
        self.nnodes, self._server_address, self.global_steps = nnodes, "10.0.0.1", 3
        self.expected = []
        self.kv_depot = SimpleNamespace(expect=lambda name, weights: self.expected.append((name, weights)))

    async def abort(self, names):
        self.aborted = list(names)


@pytest.mark.parametrize(
    ("target", "config", "sent"),
    [
        ("10.0.0.1:80", {}, True),
        ("10.0.0.1:81#7", {}, True),
        ("10.0.0.2:80", {}, False),
        ("10.0.0.2:80", {"kv_directory": "/shared"}, True),
        ("10.0.0.1:80", {"nnodes": 2}, False),
        ("10.0.0.1:80", {"nnodes": 2, "kv_directory": "/shared"}, True),
        ("10.0.0.1:80", {"send_kv_tokens": 11}, False),
    ],
)
def test_long_running_requests_take_their_kv_where_the_target_can_read_it(target, config, sent):
    server = Sender(**{"send_kv_tokens": 10} | config)
    targets = dict.fromkeys(server.engine.output_processor.request_states, target)
    assert asyncio.run(server.give_up_requests(targets)) == list(targets) == server.aborted
    assert server.expected == ([("movable/10/0", 3)] if sent else [])


def test_without_the_switch_nothing_of_it_is_there():
    server = Sender()
    server.kv_depot = None
    targets = dict.fromkeys(server.engine.output_processor.request_states, "10.0.0.1:80")
    assert asyncio.run(server.give_up_requests(targets)) == list(targets) and not server.expected
    given = {"temperature": 1.0}
    assert asyncio.run(server.with_moved_kv(given, None)) is given
    for off in (RolloutRebalanceConfig(True), RolloutRebalanceConfig(False, send_kv_tokens=8), None):
        server.config.rollout_rebalance = off
        assert server.with_kv_transfer(given) is given and server.kv_depot is None


def test_moves_with_kv_replay_one_token():
    """Of three running requests two came with their KV; one more arrived that this mover did not plan."""
    names = [f"movable/{n}/1" for n in "abc"]
    requests = tuple(Request(name, 100, False) for name in names)
    state = {"requests": requests, "kv_capacity_tokens": 1000, "max_num_seqs": 4, "gears": (1, 2, 4)}
    came = {"movable-a-1": 101, "movable-b-1": 102, "movable-x-0": 50}

    class Played:
        def __init__(self, state, came):
            self.state, self.came = state, came

        def rollout_state(self):
            return [self.state]

        def give_up_requests(self, targets):
            return list(targets)

        def end_moves(self):
            return self.came

    servers = {"s:1": Remote(Played(state, {})), "t:1": Remote(Played(state | {"requests": ()}, came))}
    plan = [Move(name, "s:1", "t:1") for name in names]

    async def run():
        config = RolloutRebalanceConfig(True, check_interval_s=100, send_kv_tokens=10)
        async with RequestMover(servers, config, lambda *_: plan) as mover:
            await mover.check()
        return mover.metrics()

    found = asyncio.run(run())
    assert found["rollout_rebalance/kv_moves"] == 3 and found["rollout_rebalance/kv_tokens"] == 253
    assert found["rollout_rebalance/replayed_tokens"] == 100 + 1 + 1

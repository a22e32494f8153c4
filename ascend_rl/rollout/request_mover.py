"""Moves unfinished requests between live rollout servers, as the planner of rollout_rebalance says.

A rollout ends with its longest responses: some servers still decode many, others none. Every
``check_interval_s`` the mover asks each server which requests it holds, calls the planner and tells the
sources which requests to give up, and where they go. A move is an abort that keeps tokens and log-probs; the
caller of the request then continues prompt + tokens on the target, which recomputes the KV cache, or, from
``send_kv_tokens`` on, loads what the source saved (moved_kv.py).

- Which requests run, and which are queued, new or preempted, is what the engines' schedulers say; the front
  end sees only tokens.
- The target travels with the abort. An abort without a target (a pause, a timeout) stays one.
- Every token keeps the log-prob of the server that sampled it, and no request is lost or done twice: only its
  caller continues it. Without an answer from server, mover or planner, requests stay where they are.
- A request moves only if all that its sampling depends on is its token ids so far (``STATELESS``).
- The requests of a server that died start over elsewhere, from the tokens of their last move.

One check costs one small message per server, and one per engine, which answers between two steps; O(n log n)
for n requests. Nothing here imports verl, vLLM or Ray: servers and balancer are actor handles; they gain the
two mixins below.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from ascend_rl.process.counts import count
from ascend_rl.rollout.known_lengths import KEY, moved
from ascend_rl.rollout.moved_kv import CONNECTOR, MEMORY, PARAMETER, Depot, place
from ascend_rl.rollout.rollout_rebalance import Request, Server, plan
from ascend_rl.rollout.servers import address_of, engine_ids, has_died, server_of
from ascend_rl.settings.switch import refuse

logger = logging.getLogger(__name__)

# Request ids of the servers are MOVABLE + name + "/" + number of moves, or name alone.
MOVABLE = "movable/"
# Sampling parameters that a request cut in two can keep, or that `remaining` adapts. Others look at the
# whole response (penalties of its tokens, stop strings, grammars), which the target takes for the prompt.
STATELESS = {
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens", "max_new_tokens",
    "min_tokens", "logprobs", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "detokenize",
    "skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids", "logit_bias",
}  # fmt: skip
STATELESS_EXTRA = {"sam_history", KEY}  # of extra_args: earlier responses and their lengths
# What the engines of two servers must have in common to load each other's KV.
SAME_KV = (
    "dtype", "quantization", "kv_cache_dtype", "block_size", "tensor_parallel_size", "pipeline_parallel_size",
    "speculative_config",
)  # fmt: skip
# An engine that takes longer to answer, as a step takes longer, is as it was.
ENGINE_S = 1.0
# A moved request that is nowhere after this many checks has ended; it no longer holds up plans.
ARRIVAL_CHECKS = 10


@dataclass(frozen=True)
class RolloutRebalanceConfig:
    """``actor_rollout_ref.rollout.rollout_rebalance``.

    Attributes:
        enable: the switch; by default the environment variable ROLLOUT_REBALANCE_ENABLE.
        check_interval_s: pause between two checks.
        answer_timeout_s: a server that takes longer to answer sits out this check.
        gears: requests per server that decode fast; by default its graph sizes, else powers of two.
        send_kv_tokens: running requests with as many tokens move with their KV; None or 0: none do.
        kv_directory: for the KV, shared by all servers; by default memory, for moves within a node.
    """

    enable: bool = False
    check_interval_s: float = 2.0
    answer_timeout_s: float = 5.0
    gears: Sequence[int] | None = None
    send_kv_tokens: int | None = None
    kv_directory: str | None = None

    def __post_init__(self):
        rules = [
            (self.enable not in (0, 1), "enable", "give True or False (or 1 or 0)"),
            (self.check_interval_s <= 0, "check_interval_s", "give seconds > 0"),
            (self.answer_timeout_s <= 0, "answer_timeout_s", "give seconds > 0"),
            (self.gears is not None and (not self.gears or min(self.gears) < 1), "gears",
             "give batch sizes >= 1, or null"),
            ((self.send_kv_tokens or 0) < 0, "send_kv_tokens", "give tokens >= 1, or null"),
        ]  # fmt: skip
        refuse("rollout_rebalance", (f"{key}={getattr(self, key)}: {fix}" for bad, key, fix in rules if bad))


def settings(given: Mapping[str, Any] | None, rollout: str) -> RolloutRebalanceConfig | None:
    """The settings, or None where the feature is off.

    Args:
        given: ``rollout_rebalance`` of verl's rollout configuration.
        rollout: its ``name``.

    Raises:
        CannotWork: for another rollout than vLLM's, whose servers cannot say what they hold.
    """
    if not (given and given.get("enable")):
        return None
    if rollout != "vllm":
        reason = f"it moves requests between vLLM servers, not {rollout}"
        fix = "set actor_rollout_ref.rollout.name=vllm or rollout_rebalance.enable=False"
        refuse("rollout_rebalance.enable=True", [f"{reason}: {fix}"])
    return RolloutRebalanceConfig(**{key: value for key, value in given.items() if key != "_target_"})


# In the engines, the servers and the load balancer.


def held_requests(scheduler: Any) -> tuple[list[str], list[str]]:
    """Ids of the requests of vLLM's Scheduler: those that hold KV, and those queued without, in their order.

    A preempted request is queued, before all others. One whose KV comes from elsewhere has the room for it.
    """
    holding, queued = [request.request_id for request in scheduler.running], []
    for request in scheduler.waiting:
        loads = request.status.name == "WAITING_FOR_REMOTE_KVS"
        (holding if loads else queued).append(request.request_id)
    return holding, queued


class MovableRequests:
    """Added to verl's vLLM server; reads ``self.engine``, an AsyncLLM."""

    kv_depot: Depot | None = None  # where requests move with their KV

    @property
    def rollout_rebalance(self) -> RolloutRebalanceConfig | None:
        return self.config.rollout_rebalance

    def with_kv_transfer(self, args: dict[str, Any]) -> dict[str, Any]:
        """vLLM's arguments, with the connector that sends KV where that is switched on."""
        config = self.rollout_rebalance
        if not (config and config.enable and config.send_kv_tokens):
            return args
        unlike = ["kv_transfer_config", "decode_context_parallel_size", "prefill_context_parallel_size"]
        given = [key for key in unlike if args.get(key) not in (None, 1)]
        fix = "remove it from engine_kwargs.vllm, or set rollout_rebalance.send_kv_tokens=null"
        refuse("rollout_rebalance.send_kv_tokens", [f"it is incompatible with {key}: {fix}" for key in given])
        about = {"model": self.model_config.local_path} | {key: args.get(key) for key in SAME_KV}
        workers = (args.get("tensor_parallel_size") or 1) * (args.get("pipeline_parallel_size") or 1)
        name = f"{self._master_address}-{self._master_port}"
        self.kv_depot = Depot(config.kv_directory or MEMORY, name, about, workers)
        return args | {
            "kv_transfer_config": {
                "kv_connector": CONNECTOR.rpartition(".")[2],
                "kv_connector_module_path": CONNECTOR.rpartition(".")[0],
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"directory": str(self.kv_depot.directory)},
            }
        }

    async def dp_engines(self) -> int:
        """Engines to which this server deals its requests, those on other nodes included."""
        return self.engine.vllm_config.parallel_config.data_parallel_size

    async def rollout_state(self) -> list[dict[str, Any]]:
        """Of each engine: its unfinished requests, those that wait in the order of its queue, and what fits.

        Returns:
            [engines] ``{requests, kv_capacity_tokens, max_num_seqs, gears}``.

        Raises:
            RuntimeError: if an engine is dead.
        """
        engines = self.engine.engine_core.core_engines
        requests = await asyncio.gather(*map(self._held_by, engines)) if not self.engine.errored else []
        if self.engine.errored:
            raise RuntimeError("an engine of this server is dead")
        config = self.engine.vllm_config
        # vLLM sums up those of all engines, each of which has one that holds nothing.
        blocks = config.cache_config.num_gpu_blocks // len(engines) - 1
        return [
            {
                "requests": held,
                "kv_capacity_tokens": blocks * config.cache_config.block_size,
                "max_num_seqs": config.scheduler_config.max_num_seqs,
                "gears": tuple(config.compilation_config.cudagraph_capture_sizes or ()),
            }
            for held in requests
        ]

    async def _held_by(self, engine: bytes) -> list[Request]:
        """Unfinished requests of an engine, as its scheduler has them, or had them before a long step.

        What was sent to it since is queued; what it does not have any more has just ended.
        """
        client, unfinished = self.engine.engine_core, self.engine.output_processor.request_states
        said: dict[bytes, tuple] = self.__dict__.setdefault("_said_of_requests", {})
        sent = set(unfinished)
        asked = client._call_utility_async("held_requests", engine=engine)
        with contextlib.suppress(TimeoutError):
            said[engine] = sent, *await asyncio.wait_for(asked, ENGINE_S)
        sent, holding, queued = said.get(engine, ((), [], []))
        has = client.reqs_in_flight.get if len(client.core_engines) > 1 else lambda name: engine
        new = [name for name in unfinished if name not in sent and has(name) == engine]
        return [
            Request(name, self._tokens(name), waiting)
            for names, waiting in ((holding, False), ([*queued, *new], True))
            for name in names
            if name in unfinished
        ]

    def _tokens(self, request_id: str) -> int:
        """Of its prompt and response, so far."""
        state = self.engine.output_processor.request_states[request_id]
        return state.prompt_len + len(state.detokenizer.output_token_ids)

    async def give_up_requests(self, targets: Mapping[str, str]) -> list[str]:
        """Abort requests that are still here and may move; `take_target` gives each caller its target.

        Args:
            targets: server by request id.

        Returns:
            the ids of those aborted.
        """
        here = [
            name for name in targets
            if name.startswith(MOVABLE) and name in self.engine.output_processor.request_states
        ]  # fmt: skip
        self._move_targets().update({name: targets[name] for name in here})
        for name in here:
            if self._sends_kv(name, targets[name]):
                self.kv_depot.expect(name, self.global_steps)
        await self.engine.abort(here)
        return here

    def _sends_kv(self, request_id: str, target: str) -> bool:
        if self.kv_depot is None:
            return False
        config, state = self.rollout_rebalance, self.engine.output_processor.request_states[request_id]
        node = address_of(target).rpartition(":")[0].strip("[]")
        reached = config.kv_directory or (self.nnodes == 1 and node == self._server_address)
        return bool(reached and not state.is_prefilling and self._tokens(request_id) >= config.send_kv_tokens)

    async def sent_kv(self, request_id: str) -> str | None:
        """Where the KV of an aborted request is, once it is saved; None if it was not."""
        if self.kv_depot is None:
            return None
        return await self.kv_depot.saved(request_id, self.rollout_rebalance.answer_timeout_s)

    async def with_moved_kv(self, sampling_params: dict, kv: str | None) -> dict:
        """The parameters of a request that comes with KV, which the engine loads if it can be used."""
        given = await self.kv_depot.take(kv, self.global_steps) if kv and self.kv_depot else None
        if given is None:
            return sampling_params
        self._came_with_kv()[Path(kv).name] = given[PARAMETER]["tokens"]
        extra = (sampling_params.get("extra_args") or {}) | {"kv_transfer_params": given}
        return sampling_params | {"extra_args": extra}

    async def end_moves(self) -> dict[str, int]:
        """At the end of a rollout: leave no KV; tokens of what came with it, by `place` at the source."""
        came = dict(self._came_with_kv())
        self._came_with_kv().clear()
        if self.kv_depot:
            self.kv_depot.clear()
        return came

    def _came_with_kv(self) -> dict[str, int]:
        return self.__dict__.setdefault("_kv_of_moves", {})

    async def take_target(self, request_id: str) -> str | None:
        """Where an aborted request goes, or None if it was not aborted for a move."""
        return self._move_targets().pop(request_id, None)

    def _move_targets(self) -> dict[str, str]:
        return self.__dict__.setdefault("_targets_of_moves", {})


class MovableRouting:
    """Added to verl's GlobalRequestLoadBalancer: placed samples, requests that move, and servers that die."""

    def acquire_server(self, request_id: str, placed: str | None = None) -> Any:
        """The server where a request's sample is placed; for a later turn, where the conversation is."""
        if placed in self._inflight_requests and request_id not in self._request_id_to_server:
            self._request_id_to_server[request_id] = placed
        return super().acquire_server(request_id)

    def move_request(self, request_id: str, target: str | None) -> str:
        """Count a request, and its later turns, at ``target``; if that is gone, at the least loaded."""
        self._request_id_to_server.pop(request_id, None)
        if target in self._inflight_requests:
            self._request_id_to_server[request_id] = target
        return self.acquire_server(request_id)

    def leave_server(self, server_id: str) -> None:
        """Count a request off its server; nothing where that has been dropped meanwhile, with its count."""
        if self._inflight_requests.get(server_id):
            self._inflight_requests[server_id] -= 1

    def drop_server(self, server_id: str) -> int:
        """Send no more requests to a dead server, whichever of its engines; returns how many are left."""
        left = [id for id in self._inflight_requests if address_of(id) != address_of(server_id)]
        if left:
            self._inflight_requests = {id: self._inflight_requests[id] for id in left}
            for request_id, server in list(self._request_id_to_server.items()):
                if server not in self._inflight_requests:
                    del self._request_id_to_server[request_id]
        return len(left)

    def take_servers(self, servers: Mapping[str, Any]) -> None:
        """Send requests to these servers, handles by id, of which some may have been dropped."""
        self._inflight_requests = {id: self._inflight_requests.get(id, 0) for id in servers}


# At the caller: one request, however often it moves.


async def generate(
    manager,
    request_id: str,
    prompt_ids: list[int],
    sampling_params: dict,
    actor_died: type[BaseException],
    **media,
) -> Any:
    """`AsyncLLMServerManager.generate` for requests that move; same arguments, same result.

    Args:
        manager: `glue.rollout_manager.ServerManager`.
        request_id: of the conversation; its turns go to one server as long as none of them moves.
        prompt_ids: [P] token ids.
        sampling_params: of verl's server.
        actor_died: what a call of a server raises whose process is gone: ray.exceptions.RayActorError.
        media: image_data and video_data, or None.
    """
    movable = can_move(sampling_params) and not any(media.values())
    if movable:
        sampling_params = dict(sampling_params)
        budget = response_budget(manager.config, len(prompt_ids))
        sampling_params.setdefault("max_tokens", sampling_params.pop("max_new_tokens", budget))
    name, output, kv = uuid4().hex, None, None
    server_id, server = await manager._acquire_server(request_id)
    for moves in itertools.count():
        hop = f"{MOVABLE}{name}/{moves}" if movable else name
        done = output.token_ids if output else []
        loads, target, kv = {"kv": kv} if kv else {}, None, None
        try:
            part = await server.generate.remote(
                request_id=hop,
                prompt_ids=[*prompt_ids, *done],
                sampling_params=remaining(sampling_params, len(done)) if movable else sampling_params,
                **media,
                **loads,
            )
            output = joined(output, part)
            if movable and part.stop_reason == "aborted":
                target = await server.take_target.remote(hop)
            if target is None:
                manager._load_balancer.leave_server.remote(server_id)
                return output
            kv = await server.sent_kv.remote(hop)
            manager._load_balancer.leave_server.remote(server_id)
        except BaseException as error:
            gone = has_died(error, actor_died)
            if not gone or not await manager._load_balancer.drop_server.remote(server_id):
                manager._load_balancer.leave_server.remote(server_id)
                raise
            logger.warning("rollout server %s died; request %s starts over elsewhere", server_id, name)
        server_id, server = await manager.moved(request_id, target)


def can_move(sampling_params: Mapping[str, Any]) -> bool:
    """Whether a request may be cut in two: what it sets beyond ``STATELESS`` is empty or zero.

    >>> can_move({"extra_args": {"sam_history": [(1, b"")]}}), can_move({"extra_args": {"another": 1}})
    (True, False)
    """
    if sampling_params.get("prompt_logprobs") is not None:  # 0 asks for them too
        return False
    others = {key: value for key, value in sampling_params.items() if key not in STATELESS}
    extra = others.pop("extra_args", None) or {}
    return not any(others.values()) and extra.keys() <= STATELESS_EXTRA


def response_budget(config, prompt_tokens: int) -> int:
    """What verl's server takes for max_tokens where the request names none, from the original prompt."""
    rollout = config.actor_rollout_ref.rollout if config.get("actor_rollout_ref") else config.rollout
    return min(rollout.response_length, rollout.prompt_length + rollout.response_length - prompt_tokens)


def remaining(sampling_params: Mapping[str, Any], done: int) -> dict[str, Any]:
    """The sampling parameters of a request that has ``done`` tokens already.

    A seed must change: with the same one, the random numbers that chose the first tokens would choose the
    next ones too. The new one follows from the old one and ``done``; what a dying server loses is sampled
    again as it was.

    >>> remaining({"max_tokens": 10, "min_tokens": 2, "temperature": 0.9}, 3)
    {'max_tokens': 7, 'min_tokens': 0, 'temperature': 0.9}
    """
    params = dict(moved(sampling_params, done))
    params["max_tokens"] -= done
    if params.get("min_tokens"):
        params["min_tokens"] = max(0, params["min_tokens"] - done)
    if done and params.get("seed") is not None:
        digest = hashlib.sha256(f"{params['seed']}/{done}".encode()).digest()
        params["seed"] = int.from_bytes(digest[:7], "big")
    return params


def joined(earlier, part):
    """The outputs of a request before and after a move as one.

    ``routed_experts`` [T, layers, k] covers prompt and response; the rows of tokens that the source computed
    are the source's.
    """
    if earlier is None:
        return part
    changes = {"token_ids": list(earlier.token_ids) + list(part.token_ids)}
    if part.log_probs is not None:
        changes["log_probs"] = list(earlier.log_probs) + list(part.log_probs)
    if earlier.num_preempted is not None and part.num_preempted is not None:
        changes["num_preempted"] = earlier.num_preempted + part.num_preempted
    if earlier.routed_experts is not None and part.routed_experts is not None:
        new = part.routed_experts[len(earlier.routed_experts) :]
        changes["routed_experts"] = np.concatenate([earlier.routed_experts, new])
    return part.model_copy(update=changes)


# In the driver: which requests move.


class RequestMover:
    """Runs beside a rollout and moves its requests.

    Args:
        servers: handle by id, the ids being the balancer's, of servers or of engines.
        config: see `RolloutRebalanceConfig`.
        planner: (servers, gears) -> moves.
    """

    def __init__(
        self,
        servers: Mapping[str, Any],
        config: RolloutRebalanceConfig,
        planner: Callable[[Sequence[Server], Sequence[int]], Iterable] = plan,
    ):
        # A server is asked once for all of its engines.
        self.servers = {address_of(id): server_of(handle) for id, handle in servers.items()}
        self.config, self.planner = config, planner

    async def __aenter__(self) -> RequestMover:
        self.counts: Counter = Counter(
            moves_waiting=0, moves_running=0, replayed_tokens=0, checks=0, unanswered=0, failed=0
        )
        self.idle_s = self.server_s = 0.0
        self.gear_s: Counter = Counter()
        self.expected: dict[str, int] = {}  # request -> checks left until it counts as ended
        self.replays: dict[str, int] = {}  # tokens to recompute by `place`, if no KV comes along
        self.checked_at = time.monotonic()
        self.task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        if self.config.send_kv_tokens:
            ended = await self._ask({id: (server.end_moves,) for id, server in self.servers.items()})
            came = {name: tokens for counts in ended.values() for name, tokens in counts.items()}
            self.counts.update(kv_moves=len(came), kv_tokens=sum(came.values()))
            # Each computes one token.
            self.counts["replayed_tokens"] -= sum(self.replays.get(name, 1) - 1 for name in came)

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(self.config.check_interval_s)
                await self.check()
        except Exception:
            self.counts["failed"] = 1
            logger.exception("rollout_rebalance stopped; this rollout continues without moves")

    async def check(self) -> None:
        """Ask the servers, plan, move."""
        states = await self._ask({id: (server.rollout_state,) for id, server in self.servers.items()})
        engines = {
            id: state for address, found in states.items()
            for id, state in zip(engine_ids(address, len(found)), found, strict=True)
        }  # fmt: skip
        servers = [
            Server(id, tuple(state["requests"]), state["kv_capacity_tokens"], state["max_num_seqs"])
            for id, state in engines.items()
        ]
        most = max((server.max_num_seqs for server in servers), default=1)
        captured = [gear for state in engines.values() for gear in state["gears"]]
        gears = self.config.gears or captured or [2**i for i in range((most - 1).bit_length() + 1)]
        self._count(servers, gears)
        # A request on its way is nobody's yet: planning without it would fill its place twice.
        held = {_stem(request.id) for server in servers for request in server.requests}
        self.expected = {id: left - 1 for id, left in self.expected.items() if id not in held and left > 1}
        if self.expected or len(servers) < 2:
            return
        by_source: dict[str, dict[str, str]] = {}
        for move in self.planner(servers, gears):
            by_source.setdefault(address_of(move.source), {})[move.request] = move.target
        gone = await self._ask(
            {
                source: (self.servers[source].give_up_requests, targets)
                for source, targets in by_source.items()
            }
        )
        count("rollout_rebalance", sum(map(len, gone.values())))
        requests = {request.id: request for server in servers for request in server.requests}
        for request in (requests[id] for ids in gone.values() for id in ids):
            self.expected[_stem(request.id)] = ARRIVAL_CHECKS
            self.counts["moves_waiting" if request.waiting else "moves_running"] += 1
            if not request.waiting:
                self.replays[place(request.id)] = request.tokens
                self.counts["replayed_tokens"] += request.tokens

    async def _ask(self, calls: Mapping[str, tuple]) -> dict[str, Any]:
        """Results of remote calls ``{server: (method, *arguments)}``, less those that fail or hang."""

        async def ask(method, *arguments):
            return await asyncio.wait_for(method.remote(*arguments), self.config.answer_timeout_s)

        answers = await asyncio.gather(*(ask(*call) for call in calls.values()), return_exceptions=True)
        answered = {id: a for id, a in zip(calls, answers, strict=True) if not isinstance(a, BaseException)}
        self.counts["unanswered"] += len(calls) - len(answered)
        return answered

    def _count(self, servers: Sequence[Server], gears: Sequence[int]) -> None:
        now = time.monotonic()
        passed, self.checked_at = now - self.checked_at, now
        self.counts["checks"] += 1
        running = [sum(not request.waiting for request in server.requests) for server in servers]
        self.idle_s += passed * sum(not server.requests for server in servers)
        self.server_s += passed * len(servers)
        most = max(running, default=0)
        self.gear_s[min((gear for gear in gears if gear >= most), default=max(gears))] += passed

    def metrics(self) -> dict[str, float]:
        """Counts, the share of server time without a request, and the share of time in each gear."""
        found = {f"rollout_rebalance/{name}": float(count) for name, count in self.counts.items()}
        found["rollout_rebalance/moves"] = float(self.counts["moves_waiting"] + self.counts["moves_running"])
        if self.server_s:
            found["rollout_rebalance/idle_share"] = self.idle_s / self.server_s
            total = sum(self.gear_s.values())
            for gear, seconds in sorted(self.gear_s.items()):
                found[f"rollout_rebalance/gear_share/{gear}"] = seconds / total
        return found


def _stem(request_id: str) -> str:
    """The request behind the id of one of its stays."""
    return request_id.rpartition("/")[0] or request_id

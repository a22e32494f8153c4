"""Restarts vLLM servers that died or hang, while the run continues.

verl needs each of its servers until the end: one that dies, alone or with one of its engines, ends the run,
and one that hangs makes it wait. With RESTART_SERVERS=1 (the launcher's default) `attach` puts itself
between the trainer and what uses servers:

    rollout      asks all servers every CHECK_S seconds. What is dead, or has shown no progress for
                 SERVER_DEADLINE_S, is ended with all its processes; then its requests fail, and their
                 callers send them elsewhere (request_mover.generate).
    sleep        what does not sleep, or dies meanwhile, is ended.
    weight sync  before it, servers that were ended are started as at the start of the run, and asleep; then
                 they get the weights like all others, and requests again.

A death within a weight sync ends the run, as the trainer's ranks wait for each other and for the server; so
does the death of the last server in a rollout, and a server that does not start in two tries. The launcher's
watch over processes leaves vLLM's to this module (`process.progress.answer_for`).

A server that restarts has the id, so the place in data_rebalance, of the one before. Responses that were
under way are sampled again from where they last moved; a greedy run has the same result as an undisturbed one
(tests/e2e/test_resume.py). Cost: one small Ray call per server and CHECK_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psutil
import ray

from ascend_rl.process import progress
from ascend_rl.rollout.servers import handle_of, has_died, server_of
from ascend_rl.settings.switch import switched_on

SWITCH, DEADLINE = "RESTART_SERVERS", "SERVER_DEADLINE_S"
CHECK_S = 5.0
ANSWER_S = 5.0  # a server that takes longer is asked again at the next check
END_S = 60.0  # for the processes of a server to die, and for Ray to know
STARTS = 2  # tries: verl frees a port that it found some time before the engine takes it
METRIC = "rollout/servers_restarted"


def on(rollout_config: Any) -> bool:
    """Whether the servers of verl's rollout configuration are to be restarted: vLLM's only.

    Raises:
        CannotWork: the variable is none of 1, true, 0, false.
    """
    return switched_on(SWITCH) and rollout_config.name == "vllm"


def deadline_s() -> float:
    """Seconds that a server may take to its next token, where it has requests, or to answer; 0: no limit."""
    return float(os.environ.get(DEADLINE) or 0) or math.inf


# In a server.


def pulse(server: Any) -> tuple[int, int]:
    """Unfinished requests of a vLLMHttpServer, and a number that changes with each token.

    Raises:
        RuntimeError: if one of its engines is dead.
    """
    engine = getattr(server, "engine", None)
    if engine is None:  # of several nodes, the first one's has it
        return 0, 0
    if engine.errored:
        raise RuntimeError("one of its engines is dead")
    return engine.output_processor.get_num_unfinished_requests(), server.requests.counts(engine)["tokens"]


def processes(server: Any) -> list[tuple[int, float]]:
    """This server and all that it started: pid, and time of birth."""
    own = psutil.Process()
    return [(each.pid, each.create_time()) for each in [own, *own.children(recursive=True)]]


# In a training worker, which is on the server's node.


def answer_for_servers(worker: Any) -> None:
    """Tell this node's launcher that vLLM's processes are looked after."""
    progress.answer_for(progress.VLLM)


def end_processes(worker: Any, processes: list[tuple[int, float]]) -> None:
    """Kill what is left of a server, and wait until it is gone."""
    left = []
    for pid, born in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == born:
                process.kill()
                left.append(process)
    psutil.wait_procs(left, END_S / 2)


# In an agent loop worker.


def continue_elsewhere(worker: Any) -> None:
    """Send what a server that dies leaves elsewhere."""
    worker.server_manager.moves = True


def take_servers(worker: Any, servers: dict[str, Any]) -> None:
    """Replace the handles of an AgentLoopWorker, by id."""
    worker.server_manager.take_servers(servers)


# In the trainer.


def attach(manager: Any, checkpoints: Any, update: Callable[..., list] | None = None) -> None:
    """Let a trainer's servers be restarted, if that is switched on; the manager's rollouts watch them.

    Args:
        manager: glue.rollout_manager.RolloutManager, whose servers run.
        checkpoints: verl's CheckpointEngineManager; servers with accelerators of their own are left alone.
        update: (global_steps) -> what to wait for; by default that of the trainer's workers.
    """
    if not on(manager.rollout_config) or checkpoints.backend != "naive":
        return
    restarts = manager.restarts = Restarts(manager)
    update = update or checkpoints.trainer.update_weights

    def update_weights(global_steps=None):
        restarts.restart_dead()
        waiting = update(global_steps=global_steps)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=CHECK_S)
            ray.get(done)
            for replica, why in restarts.dead().items():
                raise RuntimeError(f"vLLM server {replica.replica_rank} {why} in a weight sync")

    checkpoints.update_weights, checkpoints.sleep_replicas = update_weights, restarts.sleep


class Restarts:
    """The servers of an AgentLoopManager that are alive, and those that wait to be restarted.

    Args:
        manager: verl's AgentLoopManager.
    """

    def __init__(self, manager: Any):
        self.manager, self.deadline_s = manager, deadline_s()
        self.replicas = list(manager.rollout_replicas)
        of_handle = {replica.server_handle: replica for replica in self.replicas}
        self.replica_of = {
            id: of_handle[server_of(handle)]
            for id, handle in zip(manager.server_addresses, manager.server_handles, strict=True)
        }
        self.processes: dict[int, list] = {}  # replica rank -> of each of its nodes
        self.progressed: dict[Any, tuple[int, float]] = {}  # server -> its number, and since when
        self.started = 0  # servers, so far
        for replica in self.replicas:
            self._know(replica)
        ray.get(
            [worker.__ray_call__.remote(answer_for_servers) for r in self.replicas for worker in beside(r)]
            + [worker.__ray_call__.remote(continue_elsewhere) for worker in manager.agent_loop_workers]
        )

    def _know(self, replica: Any) -> None:
        self.processes[replica.replica_rank] = ray.get(
            [server.__ray_call__.remote(processes) for server in replica.servers]
        )

    def _kill(self, replica: Any) -> None:
        servers, replica.servers = replica.servers, []
        for server in servers:
            ray.kill(server)
        # One whose start failed may not have come to its last nodes.
        known = zip(beside(replica), self.processes.pop(replica.replica_rank), strict=False)
        ray.get(
            [worker.__ray_call__.remote(end_processes, its) for worker, its in known if its], timeout=END_S
        )

    def living(self) -> list[Any]:
        return [replica for replica in self.replicas if replica.servers]

    def dead(self) -> dict[Any, str]:
        """Replicas that died or hang, each with a sentence's end that says so."""
        servers = [(server, replica) for replica in self.living() for server in replica.servers]
        asked = {server.__ray_call__.remote(pulse): (server, replica) for server, replica in servers}
        ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        now, found = time.monotonic(), {}
        for answer, (server, replica) in asked.items():
            number, since = self.progressed.get(server, (None, now))
            try:
                unfinished, tokens = ray.get(answer, timeout=0)
                if not unfinished or tokens != number:
                    number, since = tokens, now
            except ray.exceptions.GetTimeoutError:
                pass
            except Exception as error:
                reason = str(getattr(error, "cause", error)).strip().splitlines()
                found[replica] = f"died ({reason[0] if reason else type(error).__name__})"
                continue
            self.progressed[server] = number, since
            if now - since > self.deadline_s:
                found.setdefault(replica, f"made no progress for {self.deadline_s:g} s")
        return found

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Every CHECK_S seconds, in a thread, end what died or hangs."""
        over = threading.Event()
        self.progressed.clear()

        def watch():
            while not over.wait(CHECK_S):
                try:
                    for replica, why in self.dead().items():
                        self.end(replica, why)
                except Exception as error:  # the rollout may continue; if it cannot, it says why
                    say(f"vLLM's servers could not be looked after: {error}")

        thread = threading.Thread(target=watch, name="server_restart", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def end(self, replica: Any, why: str) -> None:
        """Kill a server with all its processes, on all its nodes; none gets requests any more."""
        say(
            f"vLLM server {replica.replica_rank} {why}: its requests continue elsewhere, it restarts at "
            "the next weight sync"
        )
        any_id = next(id for id, its in self.replica_of.items() if its is replica)
        dropped = self.manager.global_load_balancer.drop_server.remote(any_id)  # with all its engines
        self._kill(replica)
        ray.get(dropped, timeout=END_S)

    def sleep(self) -> None:
        """CheckpointEngineManager.sleep_replicas; ends what cannot sleep."""
        self.all_do(lambda replica: replica.sleep(), "sleep")

    def all_do(self, call: Callable[[Any], Awaitable], what: str) -> None:
        """Let the engines of all servers do something; end those that die or take too long.

        Watched, as a server that spans nodes does not answer forever where only its far node died.
        """

        async def every(replicas):
            limit_s = self.deadline_s if math.isfinite(self.deadline_s) else None
            calls = [asyncio.wait_for(call(replica), limit_s) for replica in replicas]
            return await asyncio.gather(*calls, return_exceptions=True)

        replicas = self.living()
        with self.watching():
            errors = asyncio.run(every(replicas))
        for replica, error in zip(replicas, errors, strict=True):
            if not replica.servers:
                continue  # ended by the watch
            if isinstance(error, TimeoutError):
                self.end(replica, f"did not {what} within {self.deadline_s:g} s")
            elif isinstance(error, BaseException):
                if not has_died(error, ray.exceptions.RayActorError):
                    raise error
                self.end(replica, "died")

    async def _start(self, replica: Any) -> None:
        """Start a server, asleep; where that fails, end what there is of it and try again."""
        for left in reversed(range(STARTS)):
            try:
                await replica.launch_servers()
                return await replica.sleep()
            except Exception as error:
                if not left:
                    raise
                lines = str(error).strip().splitlines()
                say(f"vLLM server {replica.replica_rank} did not start, once more: {(lines or [error])[-1]}")
                self.processes[replica.replica_rank] = [answered(server) for server in replica.servers]
                self._kill(replica)
                until_free(replica)

    def restart_dead(self) -> None:
        """Start what was ended, and what died or hangs since."""
        self.all_do(lambda replica: replica.clear_kv_cache(), "answer")
        ended = [replica for replica in self.replicas if not replica.servers]
        if not ended:
            return
        began = time.monotonic()

        async def every():
            await asyncio.gather(*map(self._start, ended))

        for replica in ended:
            until_free(replica)
        asyncio.run(every())
        for replica in ended:
            self._know(replica)
        handles = {id: handle_of(id, replica.server_handle) for id, replica in self.replica_of.items()}
        self.manager.server_handles = list(handles.values())
        ray.get(
            [worker.__ray_call__.remote(take_servers, handles) for worker in self.manager.agent_loop_workers]
            + [self.manager.global_load_balancer.take_servers.remote(handles)]
        )
        self.started += len(ended)
        ranks = ", ".join(str(replica.replica_rank) for replica in ended)
        say(f"vLLM server {ranks} restarted in {time.monotonic() - began:.0f} s")


def answered(server: Any) -> list[tuple[int, float]]:
    """A server's processes; none, if it is dead."""
    try:
        return ray.get(server.__ray_call__.remote(processes), timeout=ANSWER_S)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return []


def beside(replica: Any) -> list[Any]:
    """A training worker on the node of each server of a replica."""
    return replica.workers[:: replica.gpus_per_replica_node]


def until_free(replica: Any) -> None:
    """Wait until Ray has forgotten the names of a replica's servers.

    Raises:
        RuntimeError: after END_S seconds.
    """
    names = [f"vllm_server_{replica.replica_rank}_{node}" for node in range(replica.nnodes)]
    until = time.monotonic() + END_S
    while names:
        try:
            ray.get_actor(names[-1])
        except ValueError:
            names.pop()
            continue
        if time.monotonic() > until:
            raise RuntimeError(f"Ray keeps {names[-1]} {END_S:g} s after it was killed")
        time.sleep(0.1)


def say(text: str) -> None:
    """A line that the launcher shows to the user."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)

"""verl's own replicas under server_restart: a server that dies or hangs is replaced, and nothing is lost."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from types import SimpleNamespace

import psutil
import pytest

from ascend_rl.process import progress
from ascend_rl.rollout import server_restart

RESPONSE = 120
SAMPLING = [{"temperature": 0.0, "ignore_eos": True, "max_tokens": RESPONSE} for _ in range(16)]
DEADLINE_S = 600  # beside other load, a server may take long to its first token
HANGS_S = 30


def adapter():
    """The adapter of a training worker, to server 0."""
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    adapter = object.__new__(ServerAdapter)
    adapter.replica_rank = adapter.node_rank = adapter.rollout_rank = 0
    adapter.server_handle = None
    return adapter


@pytest.fixture(scope="module")
def trainer(start_ray, forked, tiny, tmp_path_factory):
    """Two replicas, and the adapter of a training worker."""
    import ray
    from live_servers import configuration, trainer_of

    sign = tmp_path_factory.mktemp("launcher") / "progress"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(progress.FILE, str(sign))
        patch.setenv(server_restart.SWITCH, "1")
        patch.setenv(server_restart.DEADLINE, str(DEADLINE_S))
        patch.setattr(server_restart, "CHECK_S", 0.5)
        patch.setattr(server_restart, "ANSWER_S", 2.0)
        start_ray(num_cpus=4, resources={"NPU": 2}, include_dashboard=False, runtime_env=forked)

        @ray.remote(num_cpus=0, resources={"NPU": 1})  # verl asks its training workers where they are
        class Worker:
            pass

        workers = [Worker.remote() for _ in range(2)]
        config = configuration(tiny / "model", tmp_path_factory.mktemp("servers"))
        trainer = trainer_of(config, workers)
        assert progress.answered_for(str(sign), progress.VLLM)
        trainer.adapter = adapter()
        yield trainer


class Played:
    """A server that gives no answer, or its replica."""

    replica_rank = 0

    def __init__(self):
        self.servers, self.__ray_call__ = [self], SimpleNamespace(remote=lambda _: object())

    async def clear_kv_cache(self):
        pass


def test_a_server_that_was_not_asked_for_long_does_not_hang(monkeypatch):
    """Between a rollout and the weight sync is the training, which takes hours."""
    import ray

    def no_answer(*_, **__):
        raise ray.exceptions.GetTimeoutError

    played = SimpleNamespace(wait=lambda *_, **__: None, get=no_answer, exceptions=ray.exceptions)
    monkeypatch.setattr(server_restart, "ray", played)
    clock = iter([0.0, 599.0, 601.0, 9999.0, 9999.0 + 601])
    monkeypatch.setattr(server_restart, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    restarts = object.__new__(server_restart.Restarts)
    restarts.replicas, restarts.deadline_s, restarts.progressed = [Played()], 600.0, {}
    assert [len(restarts.dead()) for _ in range(3)] == [0, 0, 1]
    restarts.restart_dead()
    assert [len(restarts.dead()) for _ in range(2)] == [0, 1]


class Stubborn(Played):
    """A replica that the first times does not start beyond its first node; its workers note what they end."""

    gpus_per_replica_node = 1

    def __init__(self, failures: int, nodes: int):
        super().__init__()
        self.nodes, self.servers, self.failures, self.ended, self.asleep = nodes, [], failures, [], False
        note = SimpleNamespace(remote=lambda function, its: self.ended.append(its))
        self.workers = [SimpleNamespace(__ray_call__=note)] * nodes

    async def launch_servers(self):
        self.servers.append(self)
        self.failures -= 1
        if self.failures >= 0:
            raise RuntimeError("the engine:\naddress already in use")
        self.servers += [self] * (self.nodes - 1)

    async def sleep(self):
        self.asleep = True


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_server_that_does_not_start_is_started_once_more(monkeypatch, capfd, failures, nodes):
    """A port that was found for an engine may be taken by the time the engine wants it."""
    import ray

    killed, played = [], Stubborn(failures, nodes)
    stub = SimpleNamespace(kill=killed.append, get=lambda *_, **__: [(7, 1.0)], exceptions=ray.exceptions)
    monkeypatch.setattr(server_restart, "ray", stub)
    monkeypatch.setattr(server_restart, "until_free", lambda replica: None)
    restarts = object.__new__(server_restart.Restarts)
    restarts.processes = {}
    starting = restarts._start(played)
    if failures == 2:
        with pytest.raises(RuntimeError, match="address already in use"):
            asyncio.run(starting)
    else:
        asyncio.run(starting)
    assert played.asleep is (failures < 2) and len(played.servers) == (1 if failures == 2 else nodes)
    once = failures > 0
    assert len(killed) == once and played.ended == [[(7, 1.0)]] * once
    assert ("did not start, once more: address already in use" in capfd.readouterr().out) is once


def test_a_training_worker_looks_its_server_up_each_time(monkeypatch):
    """It may have been restarted."""
    import ray

    async def answer(name, *_, **__):
        return name

    def server(name):
        return SimpleNamespace(collective_rpc=SimpleNamespace(remote=partial(answer, name)))

    servers = iter([server("first"), server("second")])
    monkeypatch.setattr(ray, "get_actor", lambda name: next(servers))
    workers = adapter()
    found = [asyncio.run(workers._execute_method("check_health")) for _ in range(2)]
    assert found == ["first", "second"]


def rollout(trainer) -> tuple[list[list[int]], dict]:
    """Responses and metrics of one rollout."""
    from live_servers import batch

    output = trainer.manager.generate_sequences(batch(SAMPLING))
    lengths = output.batch["response_mask"].sum(1).tolist()
    assert lengths == [RESPONSE] * len(SAMPLING)
    return output.batch["responses"].tolist(), output.meta_info["timing"]


@pytest.fixture(scope="module")
def undisturbed(trainer):
    return rollout(trainer)[0]


def server(trainer):
    """Server 0."""
    (server,) = trainer.manager.rollout_replicas[0].servers
    return server


def processes(trainer) -> list[psutil.Process]:
    """The actor of server 0, and its engine."""
    import ray
    from live_servers import fork_for

    found = ray.get(server(trainer).__ray_call__.remote(server_restart.processes))
    return [fork_for(pid) for pid, _ in found]


FAULTS = [
    pytest.param("ray::", signal.SIGKILL, id="server dies", marks=pytest.mark.weekly),
    pytest.param("VLLM::EngineCor", signal.SIGKILL, id="engine dies"),
    pytest.param("ray::", signal.SIGSTOP, id="server hangs", marks=pytest.mark.weekly),
    pytest.param("VLLM::EngineCor", signal.SIGSTOP, id="engine hangs", marks=pytest.mark.weekly),
]


@pytest.mark.parametrize(("victim", "number"), FAULTS)
def test_a_rollout_continues_and_the_server_restarts(
    trainer, undisturbed, victim, number, capfd, monkeypatch
):
    import ray
    from live_servers import steps_done, strike

    old = processes(trainer)
    pid = next(process.pid for process in old if process.name().startswith(victim))
    asyncio.run(trainer.adapter._execute_method("check_health"))
    ray.get(server(trainer).__ray_call__.remote(strike, pid, number))
    with monkeypatch.context() as patch:
        if number == signal.SIGSTOP:
            patch.setattr(trainer.checkpoints.sleep_replicas.__self__, "deadline_s", HANGS_S)
        responses, _ = rollout(trainer)
    assert responses == undisturbed
    trainer.checkpoints.sleep_replicas()  # the training step follows, without this server
    assert not trainer.manager.rollout_replicas[0].servers
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in old)

    trainer.checkpoints.update_weights(7)
    assert trainer.synced.pop() == 7
    new = processes(trainer)
    assert not {p.pid for p in old} & {p.pid for p in new}
    assert ray.get(server(trainer).__ray_call__.remote(steps_done)) == [0]
    asyncio.run(trainer.adapter._execute_method("check_health"))  # so the training workers know it
    responses, timing = rollout(trainer)
    assert responses == undisturbed
    assert ray.get(server(trainer).__ray_call__.remote(steps_done)) != [0]  # it gets requests again
    assert timing[server_restart.METRIC] >= 1
    said = capfd.readouterr().out
    assert f"vLLM server 0 {'died' if number == signal.SIGKILL else 'made no progress'}" in said
    assert "vLLM server 0 restarted in" in said

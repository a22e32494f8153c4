"""verl's vLLM servers that span two nodes each, under server_restart: an engine dies on the far node."""

from __future__ import annotations

import signal

import psutil
import pytest

from ascend_rl.process import progress
from ascend_rl.rollout import server_restart

pytestmark = pytest.mark.long

RESPONSE = 40
SAMPLING = [{"temperature": 0.0, "ignore_eos": True, "max_tokens": RESPONSE} for _ in range(6)]
SERVERS, NODES, DEADLINE_S = 2, 2, 300


@pytest.fixture(scope="module")
def cluster(start_ray):
    """Two raylets with a die of each server; without the token that Ray gives to those of ray.init alone."""
    import ray
    from ray._private.authentication_test_utils import reset_auth_token_state
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        reset_auth_token_state()  # else this process continues as in its last session, and GCS cannot ask it
        cluster = Cluster()
        try:
            for node in range(NODES):
                cluster.add_node(
                    num_cpus=8, resources={"NPU": SERVERS, f"node_{node}": 99}, include_dashboard=False
                )
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            patch.undo()
            reset_auth_token_state()  # also if a node did not start: other files' tests have Ray's token


@pytest.fixture(scope="module")
def trainer(cluster, start_ray, forked, checkpoint, tmp_path_factory):
    """A server is one engine on each node, which share the experts: only such span nodes in verl."""
    import ray
    from live_servers import configuration, trainer_of

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(progress.FILE, str(tmp_path_factory.mktemp("launcher") / "progress"))
        patch.setenv(server_restart.SWITCH, "1")
        patch.setenv(server_restart.DEADLINE, str(DEADLINE_S))
        patch.setattr(server_restart, "CHECK_S", 1.0)
        start_ray(cluster.address, runtime_env=forked)

        @ray.remote(num_cpus=0)
        class Worker:
            pass

        workers = [
            Worker.options(resources={"NPU": 1, f"node_{node}": 1}).remote()
            for _ in range(SERVERS)
            for node in range(NODES)
        ]
        sizes = {"data_parallel_size": NODES, "expert_parallel_size": NODES, "n_gpus_per_node": 1,
                 "nnodes": len(workers)}  # fmt: skip
        config = configuration(
            checkpoint, tmp_path_factory.mktemp("servers"),
            *(f"actor_rollout_ref.rollout.{key}={value}" for key, value in sizes.items()),
        )  # fmt: skip
        yield trainer_of(config, workers)


def rollout(trainer) -> tuple[list[list[int]], dict]:
    from live_servers import batch

    output = trainer.manager.generate_sequences(batch(SAMPLING))
    lengths = output.batch["response_mask"].sum(1).tolist()
    assert lengths == [RESPONSE] * len(SAMPLING)
    return output.batch["responses"].tolist(), output.meta_info["timing"]


def processes(trainer, replica: int) -> list[list[psutil.Process]]:
    """Of each node of a server: its actor, then what that started."""
    import ray
    from live_servers import fork_for

    servers = trainer.manager.rollout_replicas[replica].servers
    found = ray.get([server.__ray_call__.remote(server_restart.processes) for server in servers])
    return [[fork_for(pid) for pid, _ in node] for node in found]


@pytest.mark.weekly
def test_a_server_restarts_on_both_nodes(trainer, capfd):
    """vLLM's head does not watch engines of other nodes: the far node's server ends with its engine."""
    import ray
    from live_servers import strike

    undisturbed, _ = rollout(trainer)
    old = processes(trainer, 0)
    ours = [process for node in old for process in node]
    assert [sum(p.name().startswith("VLLM::EngineCor") for p in node) for node in old] == [1] * NODES
    engine = next(p for p in old[1] if p.name().startswith("VLLM::EngineCor"))
    head = trainer.manager.rollout_replicas[0].servers[0]

    ray.get(head.__ray_call__.remote(strike, engine.pid, signal.SIGKILL))
    responses, _ = rollout(trainer)
    assert responses == undisturbed
    trainer.checkpoints.sleep_replicas()
    assert not trainer.manager.rollout_replicas[0].servers and trainer.manager.rollout_replicas[1].servers
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ours)

    trainer.checkpoints.update_weights(7)
    assert trainer.synced.pop() == 7
    new = processes(trainer, 0)
    assert [sum(p.name().startswith("VLLM::EngineCor") for p in node) for node in new] == [1] * NODES
    assert not {p.pid for p in ours} & {p.pid for node in new for p in node}
    responses, timing = rollout(trainer)
    assert responses == undisturbed and timing[server_restart.METRIC] == 1
    said = capfd.readouterr().out
    assert "vLLM server 0 died" in said and "vLLM server 0 restarted in" in said, said

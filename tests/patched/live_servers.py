"""Real vLLM servers of verl behind its agent loop, without a trainer.

For tests of moved requests and restarted servers, and bench/bench_rollout_engine.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import ray
import torch
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from ascend_rl.glue.rollout_manager import RolloutManager
from ascend_rl.rollout import server_restart
from ascend_rl.rollout.servers import placed, server_of
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.protocol import DataProto
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer


class GivenSampling(SingleTurnAgentLoop):
    """verl's single-turn agent; each row brings sampling parameters, and may name the engine by number."""

    async def run(self, sampling_params, *, sampling, **kwargs):
        sampling = sampling_params | sampling
        engine = sampling.pop("engine", None)
        if engine is not None:
            placed.set(list(self.server_manager._server_id_to_handle)[engine])
        return await super().run(sampling, **kwargs)


class Servers(RolloutManager):
    """The manager, with servers that have no training workers beside them.

    The first has one engine; the second is what verl launches for large EP: two engines, which share the
    experts and step together. ``environment`` are variables of the servers, ``devices`` what each may see.
    """

    engines, devices, environment = (1, 2), ("", ""), {}

    async def _initialize_llm_servers(self):
        self.rollout_replicas = []
        server = ray.remote(vLLMHttpServer).options(
            max_concurrency=1000, runtime_env={"env_vars": self.environment}
        )
        self.server_handles = [
            server.remote(
                config=OmegaConf.merge(
                    self.rollout_config, {"data_parallel_size": engines, "expert_parallel_size": engines}
                ),
                model_config=self.model_config,
                workers=[None] * engines,
                replica_rank=rank,
                rollout_mode=RolloutMode.STANDALONE,
                node_rank=0,
                gpus_per_node=engines,
                nnodes=1,
                cuda_visible_devices=devices,
            )
            for rank, (engines, devices) in enumerate(zip(self.engines, self.devices, strict=True))
        ]
        await asyncio.gather(*(server.launch_server.remote() for server in self.server_handles))
        addresses = await asyncio.gather(*(s.get_server_address.remote() for s in self.server_handles))
        self.server_addresses = [f"{host}:{port}" for host, port in addresses]

    async def on_servers(self, function) -> list:
        """Results of function(server) of each engine, run in the servers."""
        servers = dict.fromkeys(map(server_of, self.server_handles))
        found = await asyncio.gather(*(server.__ray_call__.remote(function) for server in servers))
        return list(chain.from_iterable(found))


def configuration(model: Path, directory: Path, *overrides: str):
    """verl's own configuration with the sizes of this test."""
    agents = directory / "agents.yaml"
    agents.write_text(yaml.dump([{"name": "given", "_target_": f"{__name__}.GivenSampling"}]))
    rollout = {
        "name": "vllm",
        "load_format": "auto",
        "dtype": "float32",
        "enforce_eager": True,
        "calculate_log_probs": True,
        "tensor_model_parallel_size": 1,
        "n_gpus_per_node": 2,
        "nnodes": 1,
        "prompt_length": 16,
        "response_length": 220,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "agent.num_workers": 1,
        "agent.agent_loop_config_path": agents,
        "agent.default_agent_loop": "given",
        "+enable_sleep_mode": False,
        "+engine_kwargs.vllm.distributed_executor_backend": "uni",
        "+engine_kwargs.vllm.num_gpu_blocks_override": 128,
    }
    given = [
        f"{key[: key.startswith('+')]}actor_rollout_ref.rollout.{key.removeprefix('+')}={value}"
        for key, value in rollout.items()
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [f"actor_rollout_ref.model.path={model}", *given, *overrides])


def batch(sampling: list[dict], samples: int = 1) -> DataProto:
    """A request per row; as many as ``samples`` next to each other have the same prompt of the tiny task."""
    columns = {
        "sampling": sampling,
        "raw_prompt": [
            [{"role": "user", "content": f"{i % 50 + 10}+{i * 7 % 90 + 10}"}]
            for i in (row // samples for row in range(len(sampling)))
        ],
    }
    arrays = {name: np.empty(len(sampling), dtype=object) for name in columns}
    for name, column in columns.items():
        arrays[name][:] = column
    return DataProto.from_dict(tensors={"unused": torch.zeros(len(sampling), 1)}, non_tensors=arrays)


def steps_done(server: vLLMHttpServer) -> list[int]:
    """Steps with output of each engine, since the first call."""
    client = server.engine.engine_core
    if not hasattr(client, "steps_done"):
        client.steps_done, get_output = [0] * len(client.core_engines), client.get_output_async

        async def counted():
            outputs = await get_output()
            client.steps_done[outputs.engine_index] += len(outputs.outputs) > 0
            return outputs

        client.get_output_async = counted
    return client.steps_done


def prefills(server: vLLMHttpServer) -> list[tuple[str, int, int]]:
    """Of each request that began since the first call: its id, its engine's step, prompt tokens computed."""
    client, states = server.engine.engine_core, server.engine.output_processor.request_states
    if not hasattr(client, "prefills"):
        client.prefills, get_output = {}, client.get_output_async
        steps = [0] * len(client.core_engines)

        async def counted():
            outputs = await get_output()
            steps[outputs.engine_index] += 1
            for output in outputs.outputs:
                if output.request_id in states:
                    computed = states[output.request_id].prompt_len - output.num_cached_tokens
                    client.prefills.setdefault(output.request_id, (steps[outputs.engine_index], computed))
            return outputs

        client.get_output_async = counted
    return [(id, *prefill) for id, prefill in client.prefills.items()]


def scheduled(server: vLLMHttpServer) -> list[list[tuple[int, int]]]:
    """Of each engine, by step since the first call: requests that its scheduler runs, and that wait."""
    stats = server.engine.stats
    if not hasattr(stats, "scheduled"):
        stats.scheduled, record = [[] for _ in server.engine.engine_core.core_engines], stats.record

        def noted(outputs):
            record(outputs)
            if found := outputs.scheduler_stats:
                counts = found.num_running_reqs, found.num_waiting_reqs
                stats.scheduled[outputs.engine_index].append(counts)

        stats.record = noted
    return stats.scheduled


def requests_unfinished(server: vLLMHttpServer) -> int:
    return server.engine.output_processor.get_num_unfinished_requests()


def strike(server: vLLMHttpServer, pid: int, number: signal.Signals) -> None:
    """Send a signal when an engine has answered and two requests or more are unfinished.

    From within: a call of the server may wait for longer than a short rollout takes.
    """
    client = server.engine.engine_core
    get_output = client.get_output_async

    async def struck():
        outputs = await get_output()
        if requests_unfinished(server) > 1:
            client.get_output_async = get_output
            os.kill(pid, number)
        return outputs

    client.get_output_async = struck


def fork_for(pid: int) -> psutil.Process:
    """The process, or if it is a program whose place a fork takes (launch.warm_start), that fork."""
    name = psutil.Process(pid).name()
    return psutil.Process(int(name.removeprefix("for ")) if name.startswith("for ") else pid)


def engine_pids(server: vLLMHttpServer) -> list[int]:
    engines = [
        fork_for(started.pid) for started in server.engine.engine_core.resources.engine_manager.processes
    ]
    assert all("EngineCor" in engine.name() for engine in engines)
    assert len(engines) == len(server.engine.engine_core.core_engines)
    return [engine.pid for engine in engines]


def take_own_weights(server: vLLMHttpServer) -> list[None]:
    server.global_steps = server.replica_rank
    return []


def hold_kv(server: vLLMHttpServer) -> None:
    server.kv_depot.expect("movable/held/0", None)


def depot(server: vLLMHttpServer) -> list[str]:
    return [str(server.kv_depot.directory)]


def trainer_of(config, workers: list) -> SimpleNamespace:
    """What RayPPOTrainer has: verl's manager, and a sync of weights (that does nothing), with restarts."""
    group, synced = SimpleNamespace(world_size=len(workers), workers=workers), []
    manager = RolloutManager.create(config, worker_group=group)
    weights = SimpleNamespace(update_weights=lambda global_steps: [ray.put(synced.append(global_steps))])
    checkpoints = SimpleNamespace(backend="naive", trainer=weights)
    server_restart.attach(manager, checkpoints)
    return SimpleNamespace(manager=manager, checkpoints=checkpoints, synced=synced)

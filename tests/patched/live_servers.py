"""Two real vLLM servers of verl behind its agent loop, without a trainer, for test_rollout_rebalance.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import psutil
import ray
import torch
import yaml
from hydra import compose, initialize_config_module

from verl.experimental.agent_loop import AgentLoopManager
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.protocol import DataProto
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer


class GivenSampling(SingleTurnAgentLoop):
    """verl's single-turn agent; each row of the batch brings sampling parameters of its own."""

    async def run(self, sampling_params, *, sampling, **kwargs):
        return await super().run(sampling_params | sampling, **kwargs)


class TwoServers(AgentLoopManager):
    """The manager, with servers that have no training workers beside them."""

    async def _initialize_llm_servers(self):
        self.rollout_replicas = []
        server = ray.remote(vLLMHttpServer).options(max_concurrency=1000)
        self.server_handles = [
            server.remote(
                config=self.rollout_config, model_config=self.model_config, workers=[], replica_rank=rank,
                rollout_mode=RolloutMode.STANDALONE, node_rank=0, gpus_per_node=1, nnodes=1,
                cuda_visible_devices="",
            )
            for rank in range(2)
        ]
        await asyncio.gather(*(server.launch_server.remote() for server in self.server_handles))
        addresses = await asyncio.gather(*(s.get_server_address.remote() for s in self.server_handles))
        self.server_addresses = [f"{host}:{port}" for host, port in addresses]

    async def on_servers(self, function) -> list:
        """Results of function(server), run in the servers."""
        return await asyncio.gather(*(s.__ray_call__.remote(function) for s in self.server_handles))


def configuration(model: Path, directory: Path, *overrides: str):
    """verl's own configuration with the sizes of this test."""
    agents = directory / "agents.yaml"
    agents.write_text(yaml.dump([{"name": "given", "_target_": f"{__name__}.GivenSampling"}]))
    rollout = {
        "name": "vllm", "load_format": "auto", "dtype": "float32", "enforce_eager": True,
        "calculate_log_probs": True, "tensor_model_parallel_size": 1, "n_gpus_per_node": 2, "nnodes": 1,
        "prompt_length": 16, "response_length": 220, "max_model_len": 256, "max_num_seqs": 4,
        "max_num_batched_tokens": 1024, "agent.num_workers": 1, "agent.agent_loop_config_path": agents,
        "agent.default_agent_loop": "given", "+enable_sleep_mode": False,
        "+engine_kwargs.vllm.distributed_executor_backend": "uni",
        "+engine_kwargs.vllm.num_gpu_blocks_override": 128,
    }
    given = [f"{key[:key.startswith('+')]}actor_rollout_ref.rollout.{key.removeprefix('+')}={value}"
             for key, value in rollout.items()]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [f"actor_rollout_ref.model.path={model}", *given, *overrides])


def batch(sampling: list[dict]) -> DataProto:
    """One prompt of the tiny task a row."""
    columns = {"sampling": sampling, "raw_prompt": [
        [{"role": "user", "content": f"{i % 50 + 10}+{i * 7 % 90 + 10}"}] for i in range(len(sampling))
    ]}
    arrays = {name: np.empty(len(sampling), dtype=object) for name in columns}
    for name, column in columns.items():
        arrays[name][:] = column
    return DataProto.from_dict(tensors={"unused": torch.zeros(len(sampling), 1)}, non_tensors=arrays)


def steps_done(server: vLLMHttpServer) -> int:
    """Engine steps with output since the first call."""
    processor = server.engine.output_processor
    if not hasattr(processor, "steps_done"):
        processor.steps_done, process_outputs = 0, processor.process_outputs

        def counted(outputs, *args):
            processor.steps_done += len(outputs) > 0
            return process_outputs(outputs, *args)

        processor.process_outputs = counted
    return processor.steps_done


def engine_pid(server: vLLMHttpServer) -> int:
    (engine,) = [c for c in psutil.Process().children(recursive=True) if "EngineCor" in c.name()]
    return engine.pid

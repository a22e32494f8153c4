"""verl's own rollout manager, workers, agent loop and load balancer, with servers that only count."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

SERVERS = ("a", "b", "c")
LENGTH = {"11+1": 3, "12+1": 12, "13+1": 5, "14+1": 9}  # tokens of a response, by the prompt
PROMPTS = [*["11+1"] * 3, "12+1", *["13+1"] * 6, *["14+1"] * 4]  # groups of different sizes


def remote(actor):
    """Calls of an actor without Ray, one round of the event loop later."""

    def method(self, name):
        async def call(*args, **kwargs):
            await asyncio.sleep(0)
            result = getattr(actor, name)(*args, **kwargs)
            return await result if asyncio.iscoroutine(result) else result

        return SimpleNamespace(remote=lambda *args, **kwargs: asyncio.ensure_future(call(*args, **kwargs)))

    return type("Handle", (), {"__getattr__": method})()


class Server:
    """Answers a prompt with as many tokens as LENGTH says, and remembers the requests in order."""

    def __init__(self, tokenizer):
        self.tokenizer, self.prompts, self.asked = tokenizer, [], []

    async def generate(self, prompt_ids, sampling_params, **kwargs):
        from verl.workers.rollout.replica import TokenOutput

        text = self.tokenizer.decode(prompt_ids).replace(" ", "")
        (prompt,) = [prompt for prompt in LENGTH if prompt in text]
        self.prompts.append(prompt)
        self.asked.append((prompt_ids, sampling_params))
        return TokenOutput(token_ids=[3 + len(self.asked) % 7] * LENGTH[prompt], num_preempted=0)

    async def engine_stats(self):
        return {}


def make_manager(model: Path, *overrides: str):
    """A manager of two workers and three servers; ``servers`` has them by name, ``workers`` the workers."""
    from hydra import compose, initialize_config_module

    from verl.experimental.agent_loop import agent_loop
    from verl.utils.import_utils import load_class_from_fqn

    rollout = "actor_rollout_ref.rollout"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [
            f"actor_rollout_ref.model.path={model}", f"{rollout}.name=vllm",
            f"{rollout}.prompt_length=16", f"{rollout}.response_length=16", *overrides,
        ])  # fmt: skip

    name = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
    verls = agent_loop.AgentLoopManager

    class Manager(load_class_from_fqn(name) if name else verls):  # as the trainer does
        async def _initialize_llm_servers(self):
            self.server_addresses, self.servers = list(SERVERS), {}

        async def _init_global_load_balancer(self):
            balancer = getattr(self, "load_balancer_class", agent_loop.GlobalRequestLoadBalancer)
            self.global_load_balancer = remote(balancer.__ray_actor_class__(self.server_addresses))

        async def _init_agent_loop_workers(self):
            handles = [(name, SimpleNamespace(generate=None)) for name in SERVERS]
            balancer = self.global_load_balancer
            worker = self.agent_loop_workers_class.__ray_actor_class__
            self.workers = [worker(config, handles, balancer) for _ in range(2)]
            self.servers = {name: Server(self.workers[0].tokenizer) for name in SERVERS}
            for worker in self.workers:
                worker.server_manager._server_id_to_handle = {n: remote(s) for n, s in self.servers.items()}
            self.server_handles = [remote(server) for server in self.servers.values()]
            self.agent_loop_workers = [remote(worker) for worker in self.workers]

    return Manager.create(config, worker_group=object())


def rollout(manager, **meta_info):
    """PROMPTS through the manager: what came back, and what each server was asked."""
    from verl import DataProto

    messages = np.empty(len(PROMPTS), dtype=object)
    messages[:] = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    marks = np.arange(len(PROMPTS))
    batch = DataProto.from_dict(
        tensors={"unused": torch.zeros(len(PROMPTS), 1)},
        non_tensors={"raw_prompt": messages, "mark": marks},
        meta_info=meta_info,
    )
    for server in manager.servers.values():
        server.prompts.clear()
        server.asked.clear()
    output = manager.generate_sequences(batch)
    assert set(batch.non_tensor_batch) <= {"raw_prompt", "mark", "agent_name"}
    assert batch.non_tensor_batch["mark"].tolist() == marks.tolist()
    return output, {name: list(server.prompts) for name, server in manager.servers.items()}

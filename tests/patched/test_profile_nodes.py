"""A vLLM server over two nodes is profiled through the engine, which its first node alone has."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from live_servers import configuration

from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

NODES = 2
# As internal/recipe.sh sets them for PROFILE=1:<ranks>, with torch's profiler for that of the NPU.
PROFILE = """
global_profiler.tool=torch global_profiler.steps=[1] actor_rollout_ref.actor.profiler.enable=True
actor_rollout_ref.actor.profiler.tool_config.torch.contents=[cpu]
actor_rollout_ref.actor.profiler.tool_config.torch.discrete=True
""".split()


class Engine(Counter):
    """Counts what reaches it, and with it all workers of all nodes."""

    async def start_profile(self):
        self["starts"] += 1

    async def stop_profile(self):
        self["stops"] += 1


def profiled(checkpoint, directory, ranks: str, *given: str) -> Counter:
    """Calls of the engine in a step that is profiled as verl's replica does: on all nodes at once."""
    config = configuration(
        checkpoint, directory, *PROFILE, f"actor_rollout_ref.actor.profiler.ranks={ranks}", *given
    ).actor_rollout_ref
    servers = [
        vLLMHttpServer(
            config=config.rollout, model_config=config.model, rollout_mode=RolloutMode.HYBRID,
            workers=[None], replica_rank=0, node_rank=node, gpus_per_node=1, nnodes=NODES,
            cuda_visible_devices="",
        )
        for node in range(NODES)
    ]  # fmt: skip
    servers[0].engine = Engine()  # run_server sets it; the other node's run_headless sets none

    async def step():
        await asyncio.gather(*(server.start_profile() for server in servers))
        await asyncio.gather(*(server.stop_profile() for server in servers))

    asyncio.run(step())
    return servers[0].engine


@pytest.mark.parametrize("ranks, given, calls", [
    ("[0]", [], 1),
    ("[1]", [], 0),
    ("[0]", ["actor_rollout_ref.actor.profiler.enable=False"], 0),
])  # fmt: skip
def test_a_server_is_profiled_once(checkpoint, tmp_path, ranks, given, calls):
    engine = profiled(checkpoint, tmp_path, ranks, *given)
    assert (engine["starts"], engine["stops"]) == (calls, calls)

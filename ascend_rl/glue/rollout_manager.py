"""verl's rollout manager with everything that this project does around a rollout, in one written order.

verl constructs `RolloutManager` by its name (``rollout.agent.agent_loop_manager_class``). What
`generate_sequences` does, from the outside in:

    watch     end servers that die or hang; their requests continue elsewhere    server_restart
    send      give each sample its server and its prompt's earlier responses     data_rebalance
                                                                                 sam_history
                                                                                 known_lengths
    show      draw a progress line                                               rollout_progress
    move      move unfinished requests to other servers                          rollout_rebalance
    generate  verl's own, with one single-turn agent loop per worker             reuse_agent_loop
    learn     remember lengths and texts of the responses to each prompt         prompt_memory
    report    add what the engines did to the timing of the rollout              engine_stats

With the switches off, every step but the last is verl's (tests/patched/test_rollout_manager.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import hydra
import numpy as np
import ray

from ascend_rl.glue.samples import keeps_no_state, known_of
from ascend_rl.process.progress import sign
from ascend_rl.rollout import (
    engine_stats,
    known_lengths,
    request_mover,
    rollout_progress,
    server_restart,
)
from ascend_rl.rollout.data_rebalance import Placement
from ascend_rl.rollout.prompt_memory import PromptMemory, keys_of
from ascend_rl.rollout.servers import placed, split
from ascend_rl.speculation import sam_history
from verl import DataProto
from verl.experimental.agent_loop import agent_loop
from verl.utils.ray_utils import auto_await
from verl.utils.rollout_trace import rollout_trace_attr, rollout_trace_op

SERVER = "rollout_server"  # of a sample, in a DataProto's non_tensor_batch


class LoadBalancer(request_mover.MovableRouting, agent_loop.GlobalRequestLoadBalancer.__ray_actor_class__):
    """verl's, for placed samples, requests that move, and servers that restart."""


class ServerManager(agent_loop.AsyncLLMServerManager):
    """Asks the load balancer for the sample's server, and continues requests that move."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        rollout, _ = agent_loop._get_rollout_and_model_config(config)
        moves = request_mover.settings(rollout.get("rollout_rebalance"), rollout.name)
        self.moves = moves is not None  # or servers restart (server_restart)

    async def _acquire_server(self, request_id: str) -> tuple[str, Any]:
        id = await self._load_balancer.acquire_server.remote(request_id=request_id, placed=placed.get())
        return id, self._server_id_to_handle[id]

    async def moved(self, request_id: str, target: str | None) -> tuple[str, Any]:
        id = await self._load_balancer.move_request.remote(request_id, target)
        return id, self._server_id_to_handle[id]

    def take_servers(self, servers: dict[str, Any]) -> None:
        self._server_id_to_handle.update(servers)

    async def generate(self, request_id, **request):
        if self.moves:
            return await self.generate_moving(request_id, **request)
        return await super().generate(request_id, **request)

    @rollout_trace_op
    async def generate_moving(
        self, request_id, *, prompt_ids, sampling_params, image_data=None, video_data=None
    ):
        return await request_mover.generate(
            self,
            request_id,
            prompt_ids,
            sampling_params,
            ray.exceptions.RayActorError,
            image_data=image_data,
            video_data=video_data,
        )


class RolloutWorker(agent_loop.AgentLoopWorker):
    """Runs the agent loop of each sample with what the sample brings."""

    def __init__(self, config: Any, servers: Any, load_balancer_handle: Any, *args: Any, **kwargs: Any):
        self.server_manager = ServerManager(config, servers, load_balancer_handle=load_balancer_handle)
        self.agent_loops: dict[tuple, agent_loop.AgentLoopBase] = {}  # of classes that keep no state
        super().__init__(config, servers, load_balancer_handle, *args, **kwargs)

    async def _run_agent_loop(self, sampling_params, trajectory, *, agent_name, trace=True, **sample):
        placed.set(sample.pop(SERVER, None))
        sampling_params = sam_history.with_history(sampling_params, sample.pop(sam_history.KEY, None))
        expected = sample.pop(known_lengths.KEY, None)
        sampling_params = known_lengths.with_lengths(sampling_params, expected)
        known = agent_name, asyncio.get_running_loop()
        if known not in self.agent_loops:
            config = agent_loop._agent_loop_registry.get(agent_name)
            if config is None or not keeps_no_state(config["_target_"]):
                request = {"agent_name": agent_name, "trace": trace, **sample}
                return await super()._run_agent_loop(sampling_params, trajectory, **request)
            self.agent_loops[known] = hydra.utils.instantiate(
                config=config,
                trainer_config=agent_loop.DictConfigWrap(self.config),
                server_manager=self.server_manager,
                tokenizer=self.tokenizer,
                processor=self.processor,
                dataset_cls=self.dataset_cls,
                data_config=agent_loop.DictConfigWrap(self.config.data),
            )
        with rollout_trace_attr(**trajectory, name="agent_loop", trace=trace):
            output = await self.agent_loops[known].run(sampling_params, **sample)
            return await self._agent_loop_postprocess(output, **sample)

    async def _agent_loop_postprocess(self, output, **sample):
        sign()
        return await super()._agent_loop_postprocess(output, **sample)


class RolloutManager(agent_loop.AgentLoopManager):
    """See the module's docstring.

    Attributes:
        memory: what is known of prompts; None where no feature reads it.
        expects: whether the engines schedule by the lengths in it.
        restarts: server_restart.Restarts, where servers restart.
    """

    load_balancer_class = ray.remote(LoadBalancer)
    memory: PromptMemory | None = None
    restarts: server_restart.Restarts | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        self.agent_loop_workers_class = ray.remote(RolloutWorker)
        super().__init__(*args, **kwargs)
        vllm = (self.rollout_config.get("engine_kwargs") or {}).get("vllm") or {}
        texts, self.expects = sam_history.kept(vllm), known_lengths.schedules(vllm)
        if texts or self.expects or self.rollout_config.get("data_rebalance"):
            self.memory = PromptMemory(texts)

    async def _init_global_load_balancer(self) -> None:
        config = self.rollout_config
        moves = request_mover.settings(config.get("rollout_rebalance"), config.name)
        if config.name == "vllm" and (moves or config.get("data_rebalance")):
            await self._split_servers()
        self.global_load_balancer = self.load_balancer_class.remote(
            self.server_addresses, agent_loop.DEFAULT_ROUTING_CACHE_SIZE
        )

    async def _split_servers(self) -> None:
        """See each DP engine as a server."""
        by_id = await split(self.server_addresses, self.server_handles)
        self.server_addresses, self.server_handles = list(by_id), list(by_id.values())

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        config = self.rollout_config
        moves = request_mover.settings(config.get("rollout_rebalance"), config.name)
        step = prompts.meta_info.get("global_steps", "")
        title = f"validation {step}" if prompts.meta_info.get("validate") else f"rollout {step}"
        async with contextlib.AsyncExitStack() as around:
            if self.restarts:
                around.enter_context(self.restarts.watching())
            keys = keys_of(prompts.non_tensor_batch["raw_prompt"]) if self.memory else []
            sent, placement, timing = self._send(prompts, keys)
            if config.get("use_tqdm") and config.name == "vllm":
                await around.enter_async_context(rollout_progress.shown(self, len(prompts), title))
            if moves:
                servers = dict(zip(self.server_addresses, self.server_handles, strict=True))
                mover = await around.enter_async_context(request_mover.RequestMover(servers, moves))
            output = await super().generate_sequences(sent)
        output = self._learn(output, keys, placement)
        if moves:
            timing |= mover.metrics()
        if self.restarts and self.restarts.started:
            timing[server_restart.METRIC] = self.restarts.started
        output.meta_info["timing"] |= timing | await engine_stats.of_rollout(self)
        return output

    def _send(
        self, prompts: DataProto, keys: list[str]
    ) -> tuple[DataProto, Placement | None, dict[str, float]]:
        """The batch as it goes out, how its samples are placed, and metrics of what was known of them."""
        if self.memory is None:
            return prompts, None, {}
        columns: dict[str, np.ndarray] = {}
        ranks = len(self.server_addresses) if self.rollout_config.get("data_rebalance") else 0
        texts, placement, timing = known_of(self.memory, keys, ranks)
        if texts is not None:
            columns[sam_history.KEY] = np.empty(len(keys), dtype=object)
            for row, known in enumerate(texts):
                columns[sam_history.KEY][row] = known
        if self.expects:
            columns[known_lengths.KEY] = np.empty(len(keys), dtype=object)
            columns[known_lengths.KEY][:] = known_lengths.known_of(self.memory, keys)
        if placement is not None:
            columns[SERVER] = np.array(self.server_addresses, dtype=object)[placement.rank]
        sent = DataProto(prompts.batch, prompts.non_tensor_batch | columns, prompts.meta_info)
        return sent if placement is None else sent.select_idxs(placement.order), placement, timing

    def _learn(self, output: DataProto, keys: list[str], placement: Placement | None) -> DataProto:
        """The output in the order of the prompts; remember its responses."""
        if self.memory is None:
            return output
        if placement is not None:
            output = output.select_idxs(placement.inverse)
        for key in (SERVER, sam_history.KEY, known_lengths.KEY):
            output.non_tensor_batch.pop(key, None)
        self.memory.learn(keys, output.batch)
        return output


def save(manager: Any, checkpoint: str) -> None:
    """Put into a checkpoint what a rollout manager remembers."""
    if memory := getattr(manager, "memory", None):
        memory.save(checkpoint)


def load(manager: Any, checkpoint: str) -> None:
    """Take that from a checkpoint."""
    if memory := getattr(manager, "memory", None):
        memory.load(checkpoint)

"""verl's V1 rollout manager with what this project does around a rollout, as on the other stack
(glue/rollout_manager.py), by the same modules.

In V1 a rollout has no call that lasts as long as it: the trainer hands prompts to the manager and then looks
into TransferQueue until all responses are there. `Trainer` calls what is left of it, `AsyncTrainer` around
each of its steps:

    begin     watch servers, draw the progress line, move requests       prepare_step, on_validate_begin
    generate_sequences    place samples, add earlier responses           verl's trainer
    end       stop that; what the engines did, for the timing            on_sample_end, on_validate_end
    learn     remember lengths and texts of the responses                when they are sampled

What lasts runs in an event loop of its own, in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

import hydra
import numpy as np
import ray
import transfer_queue as tq

from ascend_rl.glue.cann9_1.options import options
from ascend_rl.glue.cann9_1.servers import Client, Servers
from ascend_rl.glue.samples import keeps_no_state, known_of
from ascend_rl.process.progress import sign
from ascend_rl.rollout import (
    engine_stats,
    known_lengths,
    request_mover,
    rollout_progress,
    server_restart,
)
from ascend_rl.rollout.prompt_memory import PromptMemory, keys_of
from ascend_rl.rollout.servers import placed
from ascend_rl.speculation import sam_history
from verl.experimental.agent_loop import agent_loop
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils.rollout_trace import rollout_trace_attr
from verl.utils.tensordict_utils import assign_non_tensor_stack

SERVERS = "rollout_servers"  # of a prompt's samples, in a column of the batch


class RolloutWorker(agent_loop_tq.AgentLoopWorkerTQ.__ray_actor_class__):
    """Runs the agent loop of each sample with what the sample brings, one instance for all."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.agent_loops: dict[str, agent_loop.AgentLoopBase] = {}  # of classes that keep no state
        super().__init__(*args, **kwargs)

    @property
    def server_manager(self) -> Client:
        return self.llm_client

    async def _run_agent_loop(
        self, sampling_params, trajectory, *, agent_name, session_id, trace=True, **sample
    ) -> None:
        servers = sample.pop(SERVERS, None)
        placed.set(servers[session_id] if servers else None)
        sampling_params = sam_history.with_history(sampling_params, sample.pop(sam_history.KEY, None))
        expected = sample.pop(known_lengths.KEY, None)
        sampling_params = known_lengths.with_lengths(sampling_params, expected)
        if agent_name not in self.agent_loops:
            config = agent_loop._agent_loop_registry.get(agent_name)
            if config is None or not keeps_no_state(config["_target_"]):
                request = {"agent_name": agent_name, "session_id": session_id, "trace": trace, **sample}
                return await super()._run_agent_loop(sampling_params, trajectory, **request)
            self.agent_loops[agent_name] = hydra.utils.instantiate(
                config=config,
                trainer_config=agent_loop.DictConfigWrap(self.config),
                server_manager=self.llm_client,
                tokenizer=self.tokenizer,
                processor=self.processor,
                hf_model_type=self.hf_model_type,
                dataset_cls=self.dataset_cls,
                data_config=agent_loop.DictConfigWrap(self.config.data),
                tools=agent_loop.ToolListWrap(self.tools),
            )
        sample["session_id"] = session_id
        with rollout_trace_attr(**trajectory, name="agent_loop", trace=trace):
            output = await self.agent_loops[agent_name].run(sampling_params, **sample)
            return await self._agent_loop_postprocess(output, trajectory["validate"], **sample)

    async def _agent_loop_postprocess(self, output, validate, **sample) -> None:
        sign()
        await super()._agent_loop_postprocess(output, validate, **sample)


class RolloutManager(agent_loop_tq.AgentLoopManagerTQ):
    """See the module's docstring.

    Attributes:
        memory: what is known of prompts; None where no feature reads it.
        expects: whether the engines schedule by the lengths in it.
        restarts: server_restart.Restarts, where servers restart.
    """

    memory: PromptMemory | None = None
    restarts: server_restart.Restarts | None = None
    mover: request_mover.RequestMover | None = None
    _around: contextlib.AsyncExitStack | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(RolloutWorker)
        self.options = options(self.rollout_config)
        self.timing: dict[str, float] = {}
        self.key_of: dict[str, str] = {}  # a prompt's key by its uid, until its responses are learned
        vllm = (self.rollout_config.get("engine_kwargs") or {}).get("vllm") or {}
        texts, self.expects = sam_history.kept(vllm), known_lengths.schedules(vllm)
        if texts or self.expects or self.options["data_rebalance"]:
            self.memory = PromptMemory(texts)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True).start()

    def take(self, servers: Servers) -> None:
        """Know the servers."""
        self.rollout_replicas = servers.rollout_replicas
        self.server_addresses, self.server_handles = servers.server_addresses, servers.server_handles
        self.global_load_balancer = servers.global_load_balancer

    def _run(self, coroutine: Coroutine) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def begin(self, requests: int, title: str) -> None:
        """Start what surrounds a rollout of so many requests."""
        self.end()
        self.timing.clear()
        self._run(self._begin(requests, title))

    async def _begin(self, requests: int, title: str) -> None:
        self._around, self.mover = contextlib.AsyncExitStack(), None
        if self.rollout_config.name != "vllm":
            return
        if self.restarts:
            self._around.enter_context(self.restarts.watching())
        if self.options["use_tqdm"]:
            await self._around.enter_async_context(rollout_progress.shown(self, requests, title))
        if moves := request_mover.settings(self.options["rollout_rebalance"], "vllm"):
            servers = dict(zip(self.server_addresses, self.server_handles, strict=True))
            mover = request_mover.RequestMover(servers, moves)
            self.mover = await self._around.enter_async_context(mover)

    def end(self) -> dict[str, float]:
        """End it; what the timing of the rollout has to say besides seconds."""
        if self._around is None:
            return {}
        found = self.timing | self._run(self._end())
        if self.restarts and self.restarts.started:
            found[server_restart.METRIC] = self.restarts.started
        return found

    async def _end(self) -> dict[str, float]:
        around, self._around = self._around, None
        await around.aclose()
        moved = self.mover.metrics() if self.mover else {}
        return moved | await engine_stats.of_rollout(self)

    def generate_sequences(self, prompts: Any) -> None:
        super().generate_sequences(self._sent(prompts) if self.memory else prompts)

    def _sent(self, prompts: Any) -> Any:
        """The prompts with what their samples bring along, those with the longest responses first."""
        rollout, count = self.rollout_config, len(prompts)
        n = rollout.val_kwargs.n if "validate" in prompts and prompts["validate"] else rollout.n
        sizes = [int(each) for each in prompts.get("__rollout_n__", None) or [n] * count]
        keys = keys_of(prompts["raw_prompt"])
        self.key_of.update(zip(prompts["uid"], keys, strict=True))
        ends = np.cumsum(sizes)
        samples = [key for key, size in zip(keys, sizes, strict=True) for _ in range(size)]
        ranks = len(self.server_addresses) if self.options["data_rebalance"] else 0
        texts, placement, metrics = known_of(self.memory, samples, ranks)
        self.timing |= metrics
        if texts is not None:
            assign_non_tensor_stack(prompts, sam_history.KEY, [texts[end - 1] for end in ends])
        if self.expects:
            known = known_lengths.known_of(self.memory, keys)
            assign_non_tensor_stack(prompts, known_lengths.KEY, known)
        if placement is not None:
            servers = [self.server_addresses[rank] for rank in placement.rank]
            of_prompts = [servers[end - size : end] for end, size in zip(ends, sizes, strict=True)]
            assign_non_tensor_stack(prompts, SERVERS, of_prompts)
            turn = np.empty(len(samples), dtype=np.int64)  # of each sample on its server, longest first
            turn[placement.order] = np.concatenate([np.arange(size) for size in placement.sizes])
            first = np.minimum.reduceat(turn, ends - sizes)
            prompts = prompts[np.argsort(first, kind="stable").tolist()]
        return prompts

    def learn(self, batch: Any) -> None:
        """Remember the responses of a rollout: verl's KVBatchMeta, as it is sampled."""
        if self.memory is None:
            return
        uids = [key.split("_")[0] for key in batch.keys]
        rows = [
            (self.key_of[uid], key, tag)
            for uid, key, tag in zip(uids, batch.keys, batch.tags, strict=True)
            if not tag.get("is_padding")
            and uid in self.key_of  # a resumed run has answers that it never sent
        ]
        for uid in uids:
            self.key_of.pop(uid, None)
        texts: Sequence[Any] = ()
        if self.memory.keep and rows:
            fields = {"partition_id": batch.partition_id, "select_fields": ["input_ids"]}
            texts = list(tq.kv_batch_get(keys=[key for _, key, _ in rows], **fields)["input_ids"].unbind())
        self.memory.take_in(
            [name for name, _, _ in rows],
            [tag["prompt_len"] for _, _, tag in rows],
            [tag["seq_len"] for _, _, tag in rows],
            texts,
        )

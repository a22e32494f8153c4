"""What engines say of themselves reaches verl's metrics, and is what vLLM's own statistics say."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_module

BLOCKS = 24  # of 16 tokens: two of the requests below fit to their end
REQUESTS, LENGTH = 6, 150


def configuration(model, *overrides: str):
    rollout = {
        "name": "vllm",
        "load_format": "auto",
        "dtype": "float32",
        "tensor_model_parallel_size": 1,
        "prompt_length": 32,
        "response_length": 220,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "+enable_sleep_mode": False,
        "+engine_kwargs.vllm.distributed_executor_backend": "uni",
        "+engine_kwargs.vllm.num_gpu_blocks_override": BLOCKS,
        "+engine_kwargs.vllm.block_size": 16,
        "+engine_kwargs.vllm.speculative_config.method": "sam",
        "+engine_kwargs.vllm.speculative_config.num_speculative_tokens": 3,
    }
    given = [
        f"{key[: key.startswith('+')]}actor_rollout_ref.rollout.{key.removeprefix('+')}={value}"
        for key, value in rollout.items()
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [f"actor_rollout_ref.model.path={model}", *given, *overrides])
    return config.actor_rollout_ref


def remote(actor):
    """Calls of an actor without Ray."""
    return type(
        "Handle", (), {"__getattr__": lambda self, name: SimpleNamespace(remote=getattr(actor, name))}
    )()


class Worker:
    """An agent loop worker: sends REQUESTS to its server."""

    def __init__(self, server):
        self.server = server

    async def generate_sequences(self, prompts):
        from verl import DataProto

        sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": LENGTH}
        done = await asyncio.gather(
            *[self.server.generate([5, 6, 3 + i], dict(sampling), f"request-{i}") for i in range(REQUESTS)]
        )
        assert {len(one.token_ids) for one in done} == {LENGTH}
        metrics = [{"generate_sequences": 1.0, "tool_calls": 0.0, "num_preempted": 0} for _ in done]
        ones = torch.ones(REQUESTS, 2, dtype=torch.long)
        tensors = {"prompts": ones[:, :1], "attention_mask": ones}
        return DataProto.from_dict(tensors, meta_info={"metrics": metrics})


def prometheus(name: str) -> float:
    from prometheus_client import REGISTRY

    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"vllm:{name}_total"
    )


def two_rollouts(model, monkeypatch, *overrides: str) -> list[dict]:
    """Timings of verl's manager with one real server, what its progress line knew, vLLM's own totals."""
    import verl.workers.rollout.vllm_rollout.vllm_async_server as server_module
    from ascend_rl.glue.rollout_manager import RolloutManager
    from verl import DataProto
    from verl.workers.rollout.replica import RolloutMode

    monkeypatch.setattr(server_module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    config = configuration(model, *overrides)
    names = ("num_preemptions", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")

    async def run() -> list[dict]:
        server = server_module.vLLMHttpServer(
            config.rollout, config.model, RolloutMode.STANDALONE, [None], 0, 0, 1, 1, ""
        )
        gc.unfreeze()
        await server.launch_server()
        frozen = gc.get_freeze_count()
        manager = object.__new__(RolloutManager)
        manager.rollout_config = config.rollout
        manager.server_handles, manager.agent_loop_workers = [remote(server)], [remote(Worker(server))]
        prompts, found = DataProto.from_dict({"prompts": torch.ones(REQUESTS, 1)}), []
        try:
            for _ in range(2):
                before = {name: prometheus(name) for name in names}
                fullest, over = [], asyncio.Event()

                async def look(fullest=fullest, over=over) -> None:
                    while not over.is_set():
                        fullest.append((await server.rollout_progress())["kv"])
                        await asyncio.sleep(0.01)

                looking = asyncio.create_task(look())
                output = await manager.generate_sequences(prompts)
                over.set()
                await looking
                found.append({
                    "timing": output.meta_info["timing"],
                    "live": max(fullest),
                    "own": {name: prometheus(name) - before[name] for name in names},
                    "quiet": server.engine.logger_manager is None,
                    "frozen": frozen,
                })  # fmt: skip
        finally:
            server.engine.shutdown()
        return found

    return asyncio.run(run())


def assert_rollout(timing: dict, live: float) -> None:
    """A pool of BLOCKS is full, and requests were preempted; counts start at zero with each rollout."""
    assert 0.9 < timing["rollout/kv_cache_usage/max"] <= 1.0
    assert 0.5 < live <= timing["rollout/kv_cache_usage/max"]
    assert 0 < timing["rollout/num_preempted"] < 10 * REQUESTS
    assert timing["rollout/requests/0/max"] == REQUESTS
    assert 0 < timing["rollout/accepted"] < timing["rollout/drafted"] < 3 * REQUESTS * LENGTH
    assert "rollout/steps" not in timing  # no graphs on a CPU


@pytest.mark.long
def test_counts_are_those_of_vllms_own_statistics(tiny, monkeypatch):
    on = "actor_rollout_ref.rollout.disable_log_stats=False"
    for found in two_rollouts(tiny / "model", monkeypatch, on):
        timing, own = found["timing"], found["own"]
        assert_rollout(timing, found["live"])
        assert not found["quiet"]
        assert timing["rollout/num_preempted"] == own["num_preemptions"]
        assert timing["rollout/drafted"] == own["spec_decode_num_draft_tokens"]
        assert timing["rollout/accepted"] == own["spec_decode_num_accepted_tokens"]


def test_by_default_engines_count_and_the_front_end_does_not(tiny, monkeypatch):
    for found in two_rollouts(tiny / "model", monkeypatch):
        assert_rollout(found["timing"], found["live"])
        assert found["quiet"] and not any(found["own"].values())
        assert found["frozen"] > 100_000  # the server's heap: no later collection of garbage visits it


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_verls_setting_stays(name):
    with initialize_config_module("verl.trainer.config", version_base=None):
        assert compose(name).actor_rollout_ref.rollout.disable_log_stats is True

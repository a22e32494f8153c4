"""verl's own rollout manager and vLLM server, with an engine that counts up: what a user sees."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import torch
from omegaconf import OmegaConf

from ascend_rl.rollout.engine_stats import EngineStats

LENGTHS = [3, 9, 1, 6, 4, 2]


class Engine:
    """vLLM's AsyncLLM as far as a server calls it; the prompt is the number of tokens to generate."""

    output_processor = SimpleNamespace(request_states={})

    def __init__(self):
        self.stats = EngineStats(graphs=False)

    def generate(self, prompt, sampling_params, request_id, **kwargs):
        from vllm.outputs import CompletionOutput, RequestOutput

        async def outputs():
            last = prompt["prompt_token_ids"][0]
            for length in range(1, last + 1):
                await asyncio.sleep(0.02)
                sample = CompletionOutput(
                    0, "", list(range(length)), None, None, "stop" if length == last else None
                )
                yield RequestOutput(request_id, None, None, None, [sample], length == last)

        return outputs()


def server(use_tqdm: bool):
    """A vLLMHttpServer that has been launched."""
    from ascend_rl.rollout.rollout_progress import Requests
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    made = object.__new__(vLLMHttpServer)
    made.config = OmegaConf.create(
        {
            "max_model_len": 64,
            "response_length": 32,
            "prompt_length": 32,
            "use_tqdm": use_tqdm,
            "enable_rollout_routing_replay": False,
        }
    )
    made.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
    made.engine, made.global_steps, made.requests = Engine(), 0, Requests()
    return made


def handle(actor):
    """Calls of an actor without Ray."""
    return type(
        "Handle", (), {"__getattr__": lambda self, name: SimpleNamespace(remote=getattr(actor, name))}
    )()


class Worker:
    """An agent loop worker: sends its chunk to its server."""

    def __init__(self, server):
        self.server = server

    async def generate_sequences(self, chunk):
        from verl import DataProto

        lengths = chunk.batch["prompts"][:, 0].tolist()
        done = await asyncio.gather(*[
            self.server.generate(prompt_ids=[length], sampling_params={}, request_id=str(i))
            for i, length in enumerate(lengths)
        ])  # fmt: skip
        assert [len(out.token_ids) for out in done] == lengths
        metrics = [{"generate_sequences": 1.0, "tool_calls": 0.0, "num_preempted": 0} for _ in lengths]
        ones = torch.ones(len(lengths), 2, dtype=torch.long)
        return DataProto.from_dict(
            {"prompts": ones[:, :1], "attention_mask": ones}, meta_info={"metrics": metrics}
        )


def generate(use_tqdm: bool, **meta_info):
    """A rollout of LENGTHS by two workers and two servers."""
    from ascend_rl.glue.rollout_manager import RolloutManager
    from verl import DataProto

    servers = [server(use_tqdm), server(use_tqdm)]
    manager = object.__new__(RolloutManager)
    manager.rollout_config = OmegaConf.create({"name": "vllm", "use_tqdm": use_tqdm})
    manager.server_handles = [handle(one) for one in servers]
    manager.agent_loop_workers = [handle(Worker(one)) for one in servers]
    prompts = DataProto.from_dict({"prompts": torch.tensor(LENGTHS)[:, None]}, meta_info=meta_info)
    return manager.generate_sequences(prompts), servers


def test_a_rollout_is_drawn_and_counted(capsys):
    for _ in range(2):  # the second starts at zero again
        output, servers = generate(True, global_steps=4)
        assert len(output) == len(LENGTHS)
        assert [one.requests.counts()["tokens"] for one in servers] == [sum(LENGTHS[:3]), sum(LENGTHS[3:])]
    text = capsys.readouterr().err
    last = re.findall(
        r"rollout 4: \d+ tokens/s, 0 running, 0 waiting, longest (\d+):[^\r]*?(\d+\.\d+)/6", text
    )[-1]
    assert last == ("9", "6.00")
    generate(True, validate=True, global_steps=4)
    assert "validation 4:" in capsys.readouterr().err


def test_switched_off_nothing_is_drawn_or_counted(capsys):
    output, servers = generate(False)
    assert len(output) == len(LENGTHS)
    assert not any(any(one.requests.counts().values()) for one in servers)
    assert not capsys.readouterr().err


def test_the_setting_is_verls():
    import hydra

    from verl.utils.config import omega_conf_to_dataclass

    for name in ("ppo_trainer", "ppo_megatron_trainer"):
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            config = hydra.compose(name, ["actor_rollout_ref.rollout.name=vllm"])
        assert config.actor_rollout_ref.rollout.use_tqdm is None
        assert omega_conf_to_dataclass(config.actor_rollout_ref.rollout).use_tqdm is None

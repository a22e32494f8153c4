"""Small faults of verl 0.7.1 that verl 0.9.1 does not have, and signs of progress on its engines."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from megatron_tiny import make_batch, make_checkpoint
from ranks import run_ranks
from test_megatron import infer

from ascend_rl.process.progress import FILE

ACTOR = "actor_rollout_ref.actor"


def trained_by(rank: int, path, place: str) -> tuple[bool, int, int]:
    """Whether FSDP2 shards the model; signs and forward passes of a pass for log-probs."""
    from hydra import compose, initialize_config_module
    from torch.distributed.fsdp import FSDPModule

    from verl.workers.engine_workers import ActorRolloutRefWorker

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={path}",
                "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
                f"{ACTOR}.strategy=fsdp2",
                f"{ACTOR}.use_torch_compile=False",
                f"{ACTOR}.ppo_mini_batch_size=8",
                f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
                f"{ACTOR}.optim.total_training_steps=1",
            ],
        )
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    os.environ[FILE] = f"{place}/{rank}"
    Path(os.environ[FILE]).touch()
    module, forwards = worker.actor.engine.module, []
    module.register_forward_pre_hook(lambda *_: forwards.append(1))
    infer(worker, make_batch())
    return isinstance(module, FSDPModule), Path(os.environ[FILE]).stat().st_size, len(forwards)


def test_the_engine_follows_the_strategy_and_gives_signs(tmp_path):
    path = make_checkpoint("dense", tmp_path / "dense", layers=2)
    for sharded, signs, forwards in run_ranks(2, trained_by, path, str(tmp_path)):
        assert sharded and signs == forwards > 1


def test_values_that_json_does_not_know_are_dumped(tmp_path):
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    given = {"overlong": np.array([True, False]), "words": np.arange(2), "share": np.float32([0.5, 1])}
    PPOTrainerSync._write_generations(["a", "b"], ["c", "d"], [None] * 2, [0.0, 1.0], given, tmp_path, 1)
    rows = [json.loads(line) for line in (tmp_path / "1.jsonl").read_text().splitlines()]
    assert [[row[key] for key in given] for row in rows] == [[True, 0, 0.5], [False, 1, 1.0]]


@pytest.mark.parametrize("enabled, calls", [(True, 1), (False, 0)])
def test_a_server_over_two_nodes_is_profiled_once(enabled, calls):
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    engine = Counter()

    async def start_profile():
        engine["starts"] += 1

    servers = []
    for node in range(2):
        server = object.__new__(vLLMHttpServer)
        server.node_rank = node
        server.profiler_controller = SimpleNamespace(
            check_enable=lambda: enabled, check_this_rank=lambda: True, is_discrete_mode=lambda: True
        )
        servers.append(server)
    servers[0].engine = SimpleNamespace(start_profile=start_profile)  # the other node has none

    async def step():
        await asyncio.gather(*(server.start_profile() for server in servers))

    asyncio.run(step())
    assert engine["starts"] == calls

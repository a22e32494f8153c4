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
from megatron_tiny import Gathers, make_batch, make_checkpoint
from ranks import run_ranks
from test_megatron import infer

from ascend_rl.process.progress import FILE

FLOAT32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
ACTOR, LAYERS, TOKENS = "actor_rollout_ref.actor", 3, 48


def log_probs_by(rank: int, path, place: str) -> dict[bool, SimpleNamespace]:
    """Without forward_prefetch and with it: what a pass for log-probs does on one rank."""
    from hydra import compose, initialize_config_module
    from torch.distributed.fsdp import FSDPModule

    from verl.workers.engine_workers import ActorRolloutRefWorker

    found = {}
    for prefetch in (False, True):
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose(
                "ppo_trainer",
                overrides=[
                    f"actor_rollout_ref.model.path={path}",
                    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
                    "actor_rollout_ref.rollout.name=vllm",
                    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
                    f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={TOKENS}",
                    f"{ACTOR}.strategy=fsdp2",
                    f"{ACTOR}.fsdp_config.forward_prefetch={prefetch}",
                    f"+{ACTOR}.fsdp_config.mixed_precision={FLOAT32}",
                    f"{ACTOR}.use_torch_compile=False",
                    f"{ACTOR}.ppo_mini_batch_size=8",
                    f"{ACTOR}.use_dynamic_bsz=True",
                    f"{ACTOR}.ppo_max_token_len_per_gpu={TOKENS}",
                    f"{ACTOR}.optim.total_training_steps=1",
                ],
            )
        worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
        worker.init_model()
        os.environ[FILE] = f"{place}/{prefetch}-{rank}"
        Path(os.environ[FILE]).touch()
        module, seen, tokens, gathers = worker.actor.engine.module, [], [], Gathers()
        module.register_forward_pre_hook(
            lambda _, args, given, t=tokens: t.append(given["input_ids"].numel()), with_kwargs=True
        )
        for layer in module.model.layers:
            layer.input_layernorm.register_forward_pre_hook(lambda *_, g=gathers, s=seen: s.append(g.count))
        with gathers:
            _, output = infer(worker, make_batch())
        found[prefetch] = SimpleNamespace(
            sharded=isinstance(module, FSDPModule), tokens=tokens,
            signs=Path(os.environ[FILE]).stat().st_size,
            gathers=seen[:LAYERS],
            log_probs=output["log_probs"].values().tolist(),
        )  # fmt: skip
    return found


def test_the_fsdp_engine(tmp_path):
    """It follows the strategy, takes as many micro-batches on all ranks, gathers early, and gives signs."""
    path = make_checkpoint("dense", tmp_path / "dense", layers=LAYERS)
    ranks = run_ranks(2, log_probs_by, path, str(tmp_path))
    for found in ranks:
        late, early = found[False], found[True]
        assert late.sharded and early.sharded
        assert early.log_probs == pytest.approx(late.log_probs, abs=1e-5)
        assert late.signs == len(late.tokens) == len(early.tokens) == 3 and max(late.tokens) <= TOKENS
        first = late.gathers[0]
        assert late.gathers == [first, first + 1, first + 2]
        assert early.gathers == [count + 1 for count in late.gathers]
    assert sum(ranks[0][False].tokens) <= 2 * TOKENS < sum(ranks[1][False].tokens)  # two would do on one rank


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

"""verl's engine workers shard the model with FSDP2 where the actor's strategy says so, else with FSDP1."""

from __future__ import annotations

import pytest
from megatron_tiny import make_checkpoint
from ranks import run_ranks

ACTOR = "actor_rollout_ref.actor"


def sharded_by(rank: int, path) -> dict[str, list[str]]:
    """Who shards the models of actor and reference, by strategy."""
    from hydra import compose, initialize_config_module
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    from verl.workers.engine_workers import ActorRolloutRefWorker

    found = {}
    for strategy in ("fsdp", "fsdp2"):
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose(
                "ppo_trainer",
                overrides=[
                    f"actor_rollout_ref.model.path={path}",
                    "actor_rollout_ref.model.use_remove_padding=False",
                    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
                    "actor_rollout_ref.rollout.name=vllm",
                    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
                    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
                    f"{ACTOR}.strategy={strategy}",
                    f"{ACTOR}.ppo_mini_batch_size=8",
                    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
                    f"{ACTOR}.optim.total_training_steps=1",
                ],
            )
        found[strategy] = []
        for role in ("actor", "ref"):
            worker = ActorRolloutRefWorker(config.actor_rollout_ref, role=role)
            worker.init_model()
            module = getattr(worker, role).engine.module
            two = isinstance(module, FSDPModule)
            assert two == all(isinstance(weight, DTensor) for weight in module.parameters())
            found[strategy] += ["fsdp2" if two else "fsdp" * isinstance(module, FullyShardedDataParallel)]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(2, sharded_by, make_checkpoint("dense", tmp_path_factory.mktemp("dense"), layers=2))


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_actor_and_reference_follow_the_strategy(ranks, strategy):
    for found in ranks:
        assert found[strategy] == [strategy, strategy]

"""data_rebalance in verl's own rollout manager, workers, agent loop and load balancer."""

from __future__ import annotations

from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from counting_servers import LENGTH, PROMPTS, SERVERS, make_manager, rollout

from ascend_rl.rollout.data_rebalance import place
from ascend_rl.rollout.sample_placer import KEY


@pytest.fixture
def manager(tiny):
    """(data_rebalance) -> a manager of two workers and three servers."""
    return lambda enabled: make_manager(tiny / "model", f"actor_rollout_ref.rollout.data_rebalance={enabled}")


def test_samples_go_where_they_are_placed_and_come_back_in_order(manager):
    made = manager(True)
    for step, predicted in enumerate((None, np.array([LENGTH[prompt] for prompt in PROMPTS]))):
        output, asked = rollout(made, validate=step > 0, global_steps=step)
        expected = place(PROMPTS, len(SERVERS), predicted)
        for index, name in enumerate(SERVERS):
            assert Counter(asked[name]) == Counter(np.array(PROMPTS)[expected.rank == index].tolist())
        assert output.non_tensor_batch["mark"].tolist() == list(range(len(PROMPTS)))
        lengths = output.batch["response_mask"].sum(1).tolist()
        assert lengths == [LENGTH[prompt] for prompt in PROMPTS]
        assert KEY not in output.non_tensor_batch
        assert output.meta_info["timing"]["data_rebalance/known_share"] == step
    for tokens in LENGTH.values():  # lengths known: any length is exceeded equally often everywhere
        longer = [sum(LENGTH[prompt] > tokens for prompt in prompts) for prompts in asked.values()]
        assert max(longer) - min(longer) <= 1


@pytest.mark.parametrize("before", [True, False])
def test_a_run_that_goes_on_knows_the_lengths(manager, tmp_path, before):
    """From the trainer's checkpoint; one of a run without data_rebalance knows none."""
    from omegaconf import OmegaConf
    from torchdata.stateful_dataloader import StatefulDataLoader

    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    def trainer(made):
        stands = RayPPOTrainer.__new__(RayPPOTrainer)
        stands.config = OmegaConf.create(
            {
                "trainer": {
                    "default_local_dir": str(tmp_path),
                    "default_hdfs_dir": None,
                    "resume_mode": "auto",
                    "del_local_ckpt_after_load": False,
                    "nnodes": 1,
                    "n_gpus_per_node": 1,
                },
                "actor_rollout_ref": {"actor": {"checkpoint": {}, "strategy": "fsdp"}},
            }
        )
        stands.actor_rollout_wg = SimpleNamespace(
            save_checkpoint=lambda *_, **__: None, load_checkpoint=lambda *_, **__: None
        )
        stands.train_dataloader, stands.passes = StatefulDataLoader([0]), None
        stands.use_critic, stands.global_steps, stands.async_rollout_manager = False, 1, made
        return stands

    first, second = manager(before), manager(True)
    rollout(first)
    trainer(first)._save_checkpoint()
    trainer(second)._load_checkpoint()
    output, asked = rollout(second, global_steps=2)
    assert output.meta_info["timing"]["data_rebalance/known_share"] == before
    if before:
        expected = rollout(first, global_steps=2)[1]
        assert {name: Counter(asked[name]) for name in SERVERS} == {
            name: Counter(expected[name]) for name in SERVERS
        }


def test_switched_off_the_balancer_deals(manager):
    made = manager(False)
    assert "generate_sequences" not in vars(made)
    for _ in range(2):
        output, asked = rollout(made)
        assert sum(map(len, asked.values())) == len(PROMPTS)
        assert "data_rebalance/known_share" not in output.meta_info["timing"]


def test_a_server_that_is_gone_is_replaced():
    from verl.experimental.agent_loop.agent_loop import GlobalRequestLoadBalancer

    balancer = GlobalRequestLoadBalancer.__ray_metadata__.modified_class(["a", "b"])
    taken = defaultdict(int)
    for index in range(6):
        taken[balancer.acquire_server(f"request {index}", placed="b" if index < 4 else "c")] += 1
    assert taken == {"b": 4, "a": 2}
    assert balancer.acquire_server("request 0", placed="a") == "b"  # a conversation stays

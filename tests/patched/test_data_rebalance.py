"""data_rebalance in verl's own rollout manager, workers, agent loop and load balancer."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from counting_servers import LENGTH, PROMPTS, SERVERS, make_manager, rollout

from ascend_rl.glue.rollout_manager import SERVER
from ascend_rl.rollout.data_rebalance import place


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
        assert SERVER not in output.non_tensor_batch
        assert output.meta_info["timing"]["data_rebalance/known_share"] == step
    for tokens in LENGTH.values():  # lengths known: any length is exceeded equally often everywhere
        longer = [sum(LENGTH[prompt] > tokens for prompt in prompts) for prompts in asked.values()]
        assert max(longer) - min(longer) <= 1


def test_switched_off_the_balancer_deals(manager):
    made = manager(False)
    for _ in range(2):
        output, asked = rollout(made)
        assert sum(map(len, asked.values())) == len(PROMPTS)
        assert "data_rebalance/known_share" not in output.meta_info["timing"]


def test_a_server_that_is_gone_is_replaced():
    from ascend_rl.glue.rollout_manager import LoadBalancer

    balancer = LoadBalancer(["a", "b"])
    taken = defaultdict(int)
    for index in range(6):
        taken[balancer.acquire_server(f"request {index}", placed="b" if index < 4 else "c")] += 1
    assert taken == {"b": 4, "a": 2}
    assert balancer.acquire_server("request 0", placed="a") == "b"  # a conversation stays

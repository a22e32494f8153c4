"""One instance of verl's single-turn agent loop serves all requests of a worker; others are created again."""

from __future__ import annotations

from collections import Counter

import pytest
from counting_servers import LENGTH, PROMPTS, make_manager, rollout


@pytest.fixture
def made(monkeypatch) -> Counter:
    """Instances made, by the name of their class."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase

    made, construct = Counter(), AgentLoopBase.__init__

    def counted(self, *args, **kwargs):
        made[type(self).__name__] += 1
        construct(self, *args, **kwargs)

    monkeypatch.setattr(AgentLoopBase, "__init__", counted)
    return made


def test_one_instance_serves_a_batch(tiny, made):
    manager = make_manager(tiny / "model")
    for batches in (1, 2):
        output, _ = rollout(manager)
        lengths = output.batch["response_mask"].sum(1).tolist()
        assert lengths == [LENGTH[prompt] for prompt in PROMPTS]
        # asyncio.run gives each batch here an event loop of its own; a Ray worker has one.
        assert made == {"SingleTurnAgentLoop": batches * len(manager.workers)}


def test_a_loop_that_may_keep_state_is_made_for_each_request(tiny, tmp_path, made):
    """Also if it inherits from one that keeps none."""
    path = tmp_path / "agents.yaml"
    path.write_text(f"[{{name: own, _target_: {__name__}.Keeps}}]")
    agent = "actor_rollout_ref.rollout.agent"
    manager = make_manager(
        tiny / "model", f"{agent}.agent_loop_config_path={path}", f"{agent}.default_agent_loop=own"
    )
    rollout(manager)
    assert made == {"Keeps": len(PROMPTS)}


def __getattr__(name):
    if name != "Keeps":
        raise AttributeError(name)
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    return type("Keeps", (SingleTurnAgentLoop,), {})

"""Samples bring the lengths of earlier responses to their prompt, where the engine schedules by them."""

from __future__ import annotations

import pytest
from counting_servers import LENGTH, PROMPTS, make_manager, rollout

from ascend_rl.rollout.known_lengths import KEY, SCHEDULER

ON = f"+actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls={SCHEDULER}"


def brought(manager) -> list[tuple[str, dict]]:
    """Of each request, its prompt and what it brings."""
    return [
        (prompt, params.get("extra_args", {}))
        for server in manager.servers.values()
        for prompt, (_, params) in zip(server.prompts, server.asked, strict=True)
    ]


@pytest.mark.parametrize("overrides", [[], ["actor_rollout_ref.rollout.data_rebalance=True"]])
def test_a_sample_brings_the_lengths_of_the_last_responses_to_its_prompt(tiny, overrides):
    manager, names = make_manager(tiny / "model", ON, *overrides), {}
    for step in range(3):
        output, _ = rollout(manager, global_steps=step)
        assert output.non_tensor_batch["mark"].tolist() == list(range(len(PROMPTS)))
        assert KEY not in output.non_tensor_batch
        requests = brought(manager)
        assert len(requests) == len(PROMPTS)
        for prompt, extra in requests:
            known = extra[KEY]
            assert names.setdefault(prompt, known["prompt"]) == known["prompt"]
            assert known["lengths"] == [LENGTH[prompt]] * (PROMPTS.count(prompt) if step else 0)
    assert len(set(names.values())) == len(LENGTH)


@pytest.mark.parametrize("overrides", [[], ["actor_rollout_ref.rollout.data_rebalance=True"]])
def test_with_vllms_scheduler_requests_are_as_before(tiny, overrides):
    manager = make_manager(tiny / "model", *overrides)
    for _ in range(2):
        rollout(manager)
        assert not any(extra for _, extra in brought(manager))

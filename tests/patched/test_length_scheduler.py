"""vLLM with the scheduler by length, in its real engine where KV is short: same tokens, fewer recomputed."""

from __future__ import annotations

import pytest
from length_engines import requests, run
from spec_engines import Engine, random_model

from ascend_rl.rollout.known_lengths import SCHEDULER
from ascend_rl.rollout.length_scheduler import LengthScheduler
from ascend_rl.settings.switch import CannotWork

PROMPTS, SAMPLES, MOST = 8, 12, 200


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("lengths")
    random_model(path)
    return path


def rollout(path, ours: bool, sampled: bool, hints: bool = True, alone: bool = True, **options) -> dict:
    options = {"max_num_seqs": 48, "block_size": 16, "enable_prefix_caching": False} | options
    options |= {"scheduler_cls": SCHEDULER} if ours else {}
    engine = Engine(path, num_gpu_blocks_override=100, **options)
    if not alone:  # as one of several engines that step together
        core = engine.core.scheduler
        core.lengths = LengthScheduler(core.kv_tokens)
    return run(engine.llm, requests(PROMPTS, SAMPLES, MOST, sampled, hints))


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_tokens_are_the_same_and_fewer_are_computed_again(path, sampled, caching):
    before = rollout(path, False, sampled, enable_prefix_caching=caching)
    assert "Admission" not in before["of"] and before["preempted"] > 50
    for alone, preempted, again, steps in ((False, 0.1, 0.1, 1.03), (True, 0.4, 0.5, 1)):
        after = rollout(path, True, sampled, alone=alone, enable_prefix_caching=caching)
        assert "Admission" in after["of"] and after["ids"] == before["ids"]
        changes = (f"{what} {before[what]} -> {after[what]}" for what in ("preempted", "again", "steps"))
        print(f"alone {alone}, caching {caching}:", *changes)
        assert after["preempted"] <= preempted * before["preempted"]
        assert after["again"] <= again * before["again"] and after["steps"] <= steps * before["steps"]


def test_without_known_lengths_siblings_that_end_say_enough(path):
    before, after = (rollout(path, ours, False, hints=False) for ours in (False, True))
    assert after["ids"] == before["ids"] and after["preempted"] <= 0.7 * before["preempted"]


def test_it_refuses_a_policy_of_its_own(path):
    with pytest.raises(CannotWork, match="scheduling_policy=priority"):
        Engine(path, scheduler_cls=SCHEDULER, scheduling_policy="priority")

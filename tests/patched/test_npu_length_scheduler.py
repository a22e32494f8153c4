"""The scheduler by length on vllm-ascend, synchronous and asynchronous."""

from __future__ import annotations

import pytest
from npu_ground import make_llm

from ascend_rl.rollout.known_lengths import SCHEDULER

pytestmark = pytest.mark.long


def rollout(path: str, ours: bool, ahead: bool) -> dict:
    """A job."""
    from length_engines import requests, run

    from ascend_rl.rollout.length_scheduler import LengthScheduler

    options = {"scheduler_cls": SCHEDULER} if ours else {}
    llm = make_llm(
        path, async_scheduling=ahead, max_num_seqs=24, num_gpu_blocks_override=14, skip_tokenizer_init=True,
        enable_prefix_caching=False, **options,
    )  # fmt: skip
    if ours:  # as one of several engines that step together
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        scheduler.lengths = LengthScheduler(scheduler.kv_tokens)
    return run(llm, requests(6, 6, 400, sampled=False))


@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_are_the_same_and_few_are_computed_again(npu_ground, tmp_path, ahead):
    from spec_engines import random_model

    random_model(tmp_path)
    before, after = (npu_ground.run(rollout, str(tmp_path), ours, ahead) for ours in (False, True))
    assert after["ids"] == before["ids"]
    assert ("AsyncScheduler" in after["of"]) == ahead and "Admission" in after["of"]
    for what in ("preempted", "again", "steps"):
        print(f"ahead {ahead}, {what}: {before[what]} -> {after[what]}")
    assert before["preempted"] > 5 and after["preempted"] <= 0.5 * before["preempted"]
    assert after["again"] < before["again"]

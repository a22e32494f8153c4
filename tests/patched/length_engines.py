"""Rollouts with lengths of their own in one engine, and what its scheduler did."""

from __future__ import annotations

from typing import Any

import numpy as np

from ascend_rl.rollout.known_lengths import with_lengths

END = 0  # the token that ends a response


def requests(prompts: int, samples: int, most: int, sampled: bool, hints: bool = True) -> list[tuple]:
    """[N] prompt, sampling parameters and tokens of requests that end by themselves, at max_tokens ``most``.

    Args:
        hints: they bring the lengths of an earlier epoch.
    """
    from vllm import SamplingParams

    rng = np.random.default_rng(0)
    means = rng.permutation(np.geomspace(0.06 * most, 0.75 * most, prompts))
    tokens_of = [rng.integers(1, 12, 10).tolist() for _ in range(prompts)]
    rows = []
    for turn in range(samples):
        for i, mean in enumerate(means):
            tokens = int(mean * rng.uniform(0.85, 1.15))
            # The end is forbidden before, and then certain.
            given = {"min_tokens": tokens - 1, "logit_bias": {END: 100.0}, "max_tokens": most}
            if hints:
                given = with_lengths(given, {"prompt": f"{i}", "lengths": [mean * 0.95, mean * 1.05]})
            given |= {"temperature": 1.0, "seed": 100 * turn + i} if sampled else {"temperature": 0}
            rows.append((tokens_of[i], SamplingParams(**given, stop_token_ids=[END]), tokens))
    return rows


def run(llm: Any, rows: list[tuple]) -> dict:
    """Of a rollout: token ids, steps, preemptions, tokens computed again, classes of the scheduler."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, preempt = scheduler.schedule, scheduler._preempt_request
    found = {"steps": 0, "preempted": 0, "again": 0, "of": [one.__name__ for one in type(scheduler).__mro__]}
    places = scheduler.max_num_running_reqs

    def counted_schedule():
        output = schedule()
        found["steps"] += output.total_num_scheduled_tokens > 0
        found["again"] += output.total_num_scheduled_tokens
        assert len(scheduler.running) <= places == scheduler.max_num_running_reqs
        return output

    def counted_preempt(*args):
        found["preempted"] += 1
        return preempt(*args)

    scheduler.schedule, scheduler._preempt_request = counted_schedule, counted_preempt
    prompts, parameters, tokens = zip(*rows, strict=True)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], list(parameters), use_tqdm=False
    )
    found["ids"] = [list(output.outputs[0].token_ids) for output in outputs]
    assert [*map(len, found["ids"])] == [*tokens]
    found["again"] -= sum(map(len, prompts)) + sum(tokens) - len(tokens)  # the last is not computed
    return found

"""verl's own training loop with dynamic sampling, on the stage of training_stage.py."""

from __future__ import annotations

import numpy as np
import pytest
from training_stage import FILTER, PROMPTS, N, rewards, train


def brute_force(drawn: list[list[int]], want: int) -> list[tuple[list[int], int]]:
    """For each step the prompts to train on and the batches it takes, from those of all batches drawn."""
    steps, batches, call = [], iter(drawn), 0
    while True:
        kept, used = [], 0
        while len(kept) < want:
            if (batch := next(batches, None)) is None:
                return steps
            kept += [p for p in batch if len(set(rewards(p, call))) > 1]
            used, call = used + 1, call + 1
        steps.append((kept[:want], used))


def picked(events: list[tuple], name: str) -> list[list[int]]:
    return [event[1] for event in events if event[0] == name]


def drawn(events: list[tuple]) -> list[list[int]]:
    return [indices[::N] for indices in picked(events, "generate")]


def test_trained_groups_vary_and_fill_the_batch(tmp_path, monkeypatch):
    events, rows = train(tmp_path, *FILTER, monkeypatch=monkeypatch)
    expected = brute_force(drawn(events), want=4)
    assert picked(events, "train") == [kept for kept, _ in expected] and len(expected) == 5
    assert all(event[2] > 0 for event in events if event[0] == "train")  # no advantage is zero
    assert {used for _, used in expected} - {1}, "no step needed a second batch"
    order = sum(drawn(events), [])
    for start in range(0, len(order) - PROMPTS + 1, PROMPTS):  # each prompt once in a pass
        assert sorted(order[start : start + PROMPTS]) == list(range(PROMPTS))

    # The servers keep weights and caches between the batches of a step: asleep and synced once a step.
    steps = "".join(
        {"generate": "g", "sleep": "s", "train": "t", "weights": "w"}.get(event[0], "") for event in events
    )
    assert steps == "w" + "".join("g" * used + "stw" for _, used in expected)

    logged = [row for row in rows if "critic/score/mean" in row]
    assert [row["dapo/num_gen_batches"] for row in logged] == [used for _, used in expected]
    assert all(row["dapo/kept_share"] < 1 and row["critic/score/mean"] == 1 / N for row in logged)
    assert all(row["dapo/reward_before_filter/mean"] != 1 / N for row in logged)
    assert logged[-1]["dapo/data_passes"] == (len(order) - 1) // PROMPTS >= 1
    # The slowest generation batch of a step is its last; timings of a step come from all its batches.
    assert [row["timing_s/agent_loop/slowest/tool_calls"] for row in logged] == np.cumsum(
        [used for _, used in expected]
    ).tolist()


def test_a_step_generates_less_than_whole_batches_and_loses_no_prompt(tmp_path, monkeypatch):
    """Counted in responses; every batch divides by the agent loop workers, whose chunks are equal."""
    workers = 8  # for 4 responses per prompt: two prompts at a time
    options = [*FILTER, f"actor_rollout_ref.rollout.agent.num_workers={workers}", "+data.gen_batch_size=12"]
    events, rows = train(tmp_path, *options, monkeypatch=monkeypatch)
    batches = drawn(events)
    assert {len(batch) for batch in batches} == {8, 12}
    assert all(len(responses) % workers == 0 for responses in picked(events, "generate"))
    logged = [row for row in rows if "dapo/generated_prompts" in row]
    order, start, whole = sum(batches, []), 0, 0
    for row, trained in zip(logged, picked(events, "train"), strict=True):
        mine = order[start : start + int(row["dapo/generated_prompts"])]
        varying = [place for place, prompt in enumerate(mine) if prompt % 3 == 2][:4]
        assert trained == [mine[place] for place in varying]  # the first that vary, in the order of the data
        whole += 12 * (varying[-1] // 12 + 1)
        start += len(mine)
    assert start == len(order) < whole


def test_validation_sees_all_prompts_as_before(tmp_path, monkeypatch):
    off, _ = train(tmp_path / "off", monkeypatch=monkeypatch)
    on, rows = train(tmp_path / "on", *FILTER, monkeypatch=monkeypatch)
    assert sorted(picked(on, "validate")[0]) == list(range(PROMPTS))
    assert [sorted(v) for v in picked(on, "validate")] == [sorted(v) for v in picked(off, "validate")]
    assert len(picked(on, "validate")) == 4  # before, at steps 2 and 4, and at the last
    assert sum(any(key.startswith("val-core") for key in row) for row in rows) == 4


def test_switched_off_every_batch_is_trained(tmp_path, monkeypatch):
    events, rows = train(tmp_path, monkeypatch=monkeypatch)
    assert picked(events, "train") == drawn(events) and len(drawn(events)) == 5
    assert not any(key.startswith("dapo/") for row in rows for key in row)


@pytest.mark.parametrize("overrides", [[], ["data.shuffle=False", "+data.gen_batch_size=8"]])
def test_a_resumed_run_trains_what_the_whole_run_trained(tmp_path, monkeypatch, overrides):
    """Beyond the configured epochs too: steps count, and the data goes round."""
    options = [*FILTER, *overrides, "trainer.total_epochs=1", "trainer.test_freq=-1"]
    whole, _ = train(tmp_path / "whole", *options, "trainer.total_training_steps=9", monkeypatch=monkeypatch)
    for stop in (1, 7):
        folder = tmp_path / f"cut{stop}"
        first, _ = train(
            folder,
            *options,
            f"trainer.total_training_steps={stop}",
            f"trainer.save_freq={stop}",
            monkeypatch=monkeypatch,
        )
        second, _ = train(folder, *options, "trainer.total_training_steps=9", monkeypatch=monkeypatch)
        assert drawn(first) + drawn(second) == drawn(whole)
        assert len(picked(first, "train")) == stop and len(picked(second, "train")) == 9 - stop


def test_too_few_varying_groups_end_the_run_with_advice(tmp_path, monkeypatch):
    from ascend_rl.rollout.dapo import DynamicSamplingError

    with pytest.raises(DynamicSamplingError, match="after 1 generation batches . of 4 groups vary"):
        train(tmp_path, *FILTER, "algorithm.filter_groups.max_num_gen_batches=1", monkeypatch=monkeypatch)
    with pytest.raises(KeyError, match="metric=nonesuch is not reported by the reward function"):
        train(tmp_path, *FILTER, "algorithm.filter_groups.metric=nonesuch", monkeypatch=monkeypatch)
    with pytest.raises(ValueError, match="rollout.n: a group of one"):
        train(tmp_path, *FILTER, "actor_rollout_ref.rollout.n=1", monkeypatch=monkeypatch)

"""Dynamic sampling against brute force: which groups are trained on, what is drawn, and what is resumed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from ascend_rl import dapo


@st.composite
def searches(draw):
    """Groups in the order of the data, with sizes of everything."""
    samples, batch = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    batches = draw(st.integers(1, 6))
    rows = draw(
        st.lists(
            st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=samples, max_size=samples),
            min_size=batch * batches,
            max_size=batch * batches,
        )
    )
    return np.array(rows), batch, draw(st.integers(1, 8))


@given(searches())
def test_the_first_varying_groups_are_trained_and_nothing_more_is_drawn(case):
    groups, batch, wanted = case
    samples, limit = groups.shape[1], len(groups) // batch
    expected = [i for i, group in enumerate(groups.tolist()) if len(set(group)) > 1][:wanted]
    enough = len(expected) == wanted
    needed = expected[-1] // batch + 1 if enough else limit

    search = dapo.DynamicSampling(wanted, samples, max_batches=limit, pass_batches=99)
    trained, refused = [], False
    for number in range(limit):
        chunk = groups[number * batch : (number + 1) * batch]
        try:
            kept = search.add(chunk.ravel(), rewards=chunk.ravel() - 1)
        except dapo.DynamicSamplingError:
            refused = True
            break
        trained += (kept + number * batch).tolist()
        if search.complete:
            break
    assert refused != enough and search.batches == needed
    seen = groups[: needed * batch]
    varying = sum(len(set(group)) > 1 for group in seen.tolist())
    if enough:
        assert trained == expected
        metrics = search.metrics()
        assert metrics["dapo/num_gen_batches"] == needed
        assert metrics["dapo/kept_share"] == pytest.approx(varying / len(seen))
        assert metrics["dapo/surplus_groups"] == varying - wanted
        assert metrics["dapo/reward_before_filter/mean"] == pytest.approx(seen.mean() - 1)


def test_a_limit_that_is_reached_says_what_was_found_and_what_to_change():
    search = dapo.DynamicSampling(prompts=3, samples=2, max_batches=2, pass_batches=9)
    search.add(np.array([0, 0, 1, 1, 0, 0]), np.zeros(6))
    with pytest.raises(dapo.DynamicSamplingError) as error:
        search.add(np.array([0, 1, 0, 0, 0, 0]), np.zeros(6))
    text = str(error.value)
    assert "after 2 generation batches 1 of 6 groups vary" in text and "trains on 3" in text
    assert "4 groups all 0, 1 groups all 1" in text
    assert "max_num_gen_batches" in text and "data.train_batch_size" in text


def test_no_limit_is_one_pass_over_the_data():
    search = dapo.DynamicSampling(prompts=1, samples=2, max_batches=0, pass_batches=3)
    for _ in range(2):
        assert not len(search.add(np.zeros(4), np.zeros(4)))
    with pytest.raises(dapo.DynamicSamplingError, match="one pass"):
        search.add(np.zeros(4), np.zeros(4))


def test_equal_numbers_never_vary_whatever_their_rounding():
    """A standard deviation of three times 0.1 is not always 0."""
    values = np.random.default_rng(0).normal(size=(200, 1)).repeat(3, axis=1)
    assert values.std(axis=1).any() and not dapo.varying(values).any()


def test_the_metric_is_the_reward_or_what_the_reward_function_reported():
    rewards = np.array([0.5, 1.0])
    reported = {
        "acc": np.array([0, 1]),
        "ok": np.array([False, True]),
        "text": np.array(["a", "b"], dtype=object),
    }
    assert dapo.metric_of("seq_reward", reported, rewards) is rewards
    assert dapo.metric_of("ok", reported, rewards).tolist() == [0, 1]
    with pytest.raises(KeyError, match="metric=score is not reported.*acc, ok"):
        dapo.metric_of("score", reported, rewards)


def configuration(**changes) -> OmegaConf:
    config = OmegaConf.create(
        {
            "algorithm": {
                "adv_estimator": "grpo",
                "use_kl_in_reward": False,
                "filter_groups": {"enable": True, "metric": "acc", "max_num_gen_batches": 10},
            },
            "actor_rollout_ref": {"rollout": {"n": 4}},
            "data": {"train_batch_size": 32},
            "reward": {"reward_model": {"enable": False, "enable_resource_pool": False}},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    return config


@pytest.mark.parametrize(("changes", "message"), [
    ({"actor_rollout_ref__rollout__n": 1}, "rollout.n: a group of one"),
    ({"algorithm__filter_groups__metric": None}, "metric: not set"),
    ({"algorithm__adv_estimator": "remax"}, "use grpo"),
    ({"algorithm__filter_groups__metric": "seq_final_reward", "algorithm__use_kl_in_reward": True},
     "use seq_reward"),
    ({"reward__reward_model__enable": True}, "enable_resource_pool: .* set True"),
    ({"data__gen_batch_size": 3}, "10 x 3 prompts cannot give the 32"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_the_start(changes, message):
    dapo.check(configuration())
    with pytest.raises(ValueError, match=message):
        dapo.check(configuration(**changes))


def test_timings_of_batches_merge_as_if_they_were_one():
    """Against the statistics of all responses together."""
    rng = np.random.default_rng(0)
    batches = rng.random((3, 8, 2))  # batches, responses, (generation, tools) in s

    def timing(samples):
        generation, tools = samples[:, 0], samples[:, 1]
        slowest = int(np.argmax(generation + tools))
        return {
            "agent_loop/generate_sequences/min": generation.min(),
            "agent_loop/generate_sequences/max": generation.max(),
            "agent_loop/generate_sequences/mean": generation.mean(),
            "agent_loop/slowest/generate_sequences": generation[slowest],
            "agent_loop/slowest/tool_calls": tools[slowest],
        }

    merged = dapo.merge_timings([timing(batch) for batch in batches])
    assert merged == pytest.approx(timing(batches.reshape(-1, 2)))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_goes_round_and_resumes_where_it_was(shuffle, workers):
    import torch
    from torch.utils.data import SequentialSampler
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler

    def stream():
        data = list(range(7))
        sampler = (
            RandomSampler(data, generator=torch.Generator().manual_seed(3))
            if shuffle
            else SequentialSampler(data)
        )
        loader = StatefulDataLoader(data, batch_size=2, num_workers=workers, drop_last=True, sampler=sampler)
        return dapo.PromptStream(loader)

    whole = stream()
    drawn = [next(whole).tolist() for _ in range(8)]
    assert whole.batches == 3 and whole.passes == 2
    for start in (0, 3):  # no prompt twice in a pass
        assert len(set(sum(drawn[start : start + 3], []))) == 6
    for stop in (1, 3, 4) if workers else range(1, 7):
        first, second = stream(), stream()
        for _ in range(stop):
            next(first)
        second.load_state_dict(first.state_dict())
        assert [next(second).tolist() for _ in range(8 - stop)] == drawn[stop:], stop
        assert second.passes == 2

"""Dynamic sampling against brute force: which groups are trained on, what is drawn, and how it resumes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from ascend_rl.loss import dapo
from ascend_rl.settings.switch import CannotWork


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


@settings(deadline=None)
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
        for name in ("mean", "max", "min"):
            assert metrics[f"dapo/reward_before_filter/{name}"] == pytest.approx(getattr(seen, name)() - 1)


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


FAILED = (np.nan, np.inf, -np.inf)


@settings(deadline=None)
@given(searches(), st.data())
def test_groups_with_a_failed_score_are_never_trained_and_are_counted(case, data):
    """Whether the metric or the reward is not finite, at any response; others are filtered as before."""
    groups, _, _ = case
    places = st.lists(st.sampled_from(list(np.ndindex(groups.shape))), max_size=4)
    metric, rewards = groups.copy(), groups - 1
    for array in (metric, rewards):
        for place in data.draw(places):
            array[place] = data.draw(st.sampled_from(FAILED))
    bad = {i for i, row in enumerate(np.hstack([metric, rewards])) if not np.isfinite(row).all()}
    expected = [i for i, g in enumerate(groups.tolist()) if i not in bad and len(set(g)) > 1]

    search = dapo.DynamicSampling(len(expected), groups.shape[1], max_batches=1, pass_batches=1)
    assert search.add(metric.ravel(), rewards.ravel()).tolist() == expected
    if expected:
        metrics = search.metrics()
        assert metrics["dapo/failed_groups"] == len(bad)
        assert metrics["dapo/kept_share"] == pytest.approx(len(expected) / len(groups))
        finite = [reward for reward in rewards.ravel().tolist() if np.isfinite(reward)]
        assert metrics["dapo/reward_before_filter/mean"] == pytest.approx(np.mean(finite))
        assert metrics["dapo/reward_before_filter/max"] == max(finite)
        assert metrics["dapo/reward_before_filter/min"] == min(finite)


def test_a_scorer_that_always_fails_ends_the_run_with_that_reason():
    search = dapo.DynamicSampling(prompts=1, samples=2, max_batches=1, pass_batches=9)
    with pytest.raises(
        dapo.DynamicSamplingError, match="2 groups have a metric or reward that is not finite"
    ):
        search.add(np.array([np.nan, 1, np.nan, np.nan]), np.zeros(4))


class Batch:
    """As much of a DataProto as select_groups touches; rows are (prompt, sample)."""

    def __init__(self, rows, rewards=(), seconds=0.0):
        self.rows, self.non_tensor_batch = rows, {"acc": np.array(rewards)}
        self.batch = {"rm_scores": torch.tensor(rewards).reshape(-1, 1) * torch.tensor([[0.0, 1.0]])}
        slowest = {f"agent_loop/slowest/{key}": seconds for key in ("generate_sequences", "tool_calls")}
        self.meta_info = {"timing": slowest | {"count": 1}}

    def select_idxs(self, indices):
        return Batch([self.rows[i] for i in indices])

    @staticmethod
    def join(batches):
        return Batch(sum((batch.rows for batch in batches), []))


@settings(deadline=None)
@given(searches())
def test_a_step_joins_the_first_varying_prompts_with_their_responses(case):
    groups, size, wanted = case
    samples, limit = groups.shape[1], len(groups) // size
    expected = [i for i, group in enumerate(groups.tolist()) if len(set(group)) > 1][:wanted]

    def generation_batch(number):
        rows = range(number * size, (number + 1) * size)
        responses = [(row, sample) for row in rows for sample in range(samples)]
        return Batch(list(rows)), Batch(responses, groups[rows].ravel(), seconds=float(number))

    stream, drawn, metrics = SimpleNamespace(batches=limit, passes=7), itertools.count(1), {"other": 1}
    config = configuration(
        data__train_batch_size=wanted,
        actor_rollout_ref__rollout__n=samples,
        algorithm__filter_groups__max_num_gen_batches=0,
    )

    def select():
        first = generation_batch(0)
        return dapo.select_groups(
            config, stream, *first, metrics, lambda: generation_batch(next(drawn)), Batch.join
        )

    if len(expected) < wanted:
        with pytest.raises(dapo.DynamicSamplingError, match=f"after {limit} generation batches"):
            select()
        return
    prompts, responses = select()
    used = next(drawn)
    assert prompts.rows == expected
    assert responses.rows == [(row, sample) for row in expected for sample in range(samples)]
    assert metrics["other"] == 1 and metrics["dapo/data_passes"] == 7
    assert metrics["dapo/num_gen_batches"] == used == expected[-1] // size + 1
    timing = responses.meta_info["timing"]
    assert timing["count"] == used and timing["agent_loop/slowest/tool_calls"] == used - 1


def test_ids_are_unlike_any_other():
    first, second = dapo.new_ids(3), dapo.new_ids(2)
    assert len({*first, *second}) == 5 and first.dtype == object


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
    with pytest.raises(CannotWork, match=message):
        dapo.check(configuration(**changes))


@pytest.mark.parametrize(("limit", "drawn", "refused"), [
    (1, 31, True), (1, 32, False), (2, 15, True), (2, 16, False), (0, 1, False), (-1, 1, False),
    (1, None, False), (1, 1, True),
])  # fmt: skip
def test_the_limit_must_allow_a_full_batch_unless_there_is_none(limit, drawn, refused):
    changes = {"algorithm__filter_groups__max_num_gen_batches": limit}
    changes |= {"data__gen_batch_size": drawn} if drawn else {}
    found = [key for key, _ in dapo.problems(configuration(**changes))]
    assert found == ["algorithm.filter_groups.max_num_gen_batches"] * refused


@pytest.mark.parametrize(("given", "batches"), [(1, 1), (2, 2), (0, 3), (-1, 3)])
def test_no_batch_is_drawn_beyond_the_limit(given, batches):
    search = dapo.DynamicSampling(prompts=1, samples=2, max_batches=given, pass_batches=3)
    for _ in range(batches - 1):
        search.add(np.zeros(4), np.zeros(4))
    with pytest.raises(dapo.DynamicSamplingError, match=f"after {batches} generation batches"):
        search.add(np.zeros(4), np.zeros(4))


def test_the_last_batch_allowed_may_complete_the_search():
    search = dapo.DynamicSampling(prompts=2, samples=2, max_batches=2, pass_batches=9)
    assert search.add(np.array([0, 1, 1, 1]), np.zeros(4)).tolist() == [0] and not search.complete
    assert search.add(np.array([0, 0, 1, 0]), np.zeros(4)).tolist() == [1] and search.complete


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


def test_the_slowest_batch_is_slowest_with_its_tools():
    def timing(generation, tools):
        return {"agent_loop/slowest/generate_sequences": generation, "agent_loop/slowest/tool_calls": tools}

    batches = [timing(5.0, 0.0), timing(3.0, 4.0), timing(1.0, 5.0)]
    assert dapo.merge_timings(batches) == batches[1]


def test_a_checkpoint_without_filtering_has_no_passes():
    loaded = []
    loader = type(
        "Loader", (list,), {"load_state_dict": lambda self, state: loaded.append(state), "sampler": "s"}
    )
    stream = dapo.PromptStream(loader())
    stream.passes = 3
    stream.load_state_dict({"position": 5})
    assert stream.passes == 0 and loaded == [{"position": 5}] and stream.sampler == "s"


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_goes_round_and_resumes_where_it_was(shuffle, workers):
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

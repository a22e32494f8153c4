"""Dynamic sampling against brute force: which groups are trained on, what is drawn, and how it resumes."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from scipy.stats import nbinom

from ascend_rl.rollout import dapo
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


def search_of(prompts, samples, batch=1, unit=1, max_batches=0, data=99) -> dapo.DynamicSampling:
    return dapo.DynamicSampling(prompts, samples, batch, unit, max_batches, data)


@given(searches(), st.integers(1, 3))
def test_the_first_varying_groups_are_trained_and_nothing_more_is_drawn(case, unit):
    """A batch after the first has the fewest units that reach the mean number of draws the missing groups
    take, and a standard deviation more.
    """
    groups, batch, wanted = case
    groups = np.repeat(groups, unit, axis=0)  # as many prompts as whole batches have
    batch *= unit
    samples, limit = groups.shape[1], len(groups) // batch
    expected = [i for i, group in enumerate(groups.tolist()) if len(set(group)) > 1][:wanted]
    enough = len(expected) == wanted

    search = search_of(wanted, samples, batch, unit, max_batches=limit)
    trained, refused, size, drawn, batches = [], False, batch, 0, 0
    while not search.complete:
        chunk = groups[drawn : drawn + size]
        assert len(chunk) == size, "more than allowed"
        batches += 1
        try:
            kept = search.add(chunk.ravel(), rewards=chunk.ravel() - 1)
        except dapo.DynamicSamplingError:
            refused = True
            break
        trained += (kept + drawn).tolist()
        drawn += size
        if not search.complete:
            share = sum(len(set(group)) > 1 for group in groups[:drawn].tolist()) / drawn
            sizes = range(unit, min(batch, len(groups) - drawn) + 1, unit)
            missing = wanted - len(trained)
            needed = nbinom(missing, share) if share else None
            enough_of = needed.mean() + needed.std() + missing if needed else math.inf
            fits = (s for s in sizes if s >= enough_of - 1e-9)
            size = search.next_size()
            assert size == next(fits, sizes[-1])
    assert refused != enough
    if not enough:
        assert drawn + size == len(groups)  # all that was allowed
        return
    seen = groups[:drawn]
    varying = sum(len(set(group)) > 1 for group in seen.tolist())
    assert trained == expected
    assert drawn - size <= expected[-1] < drawn, "the last batch was not needed"
    metrics = search.metrics()
    assert metrics["dapo/num_gen_batches"] == batches and metrics["dapo/generated_prompts"] == drawn
    assert metrics["dapo/kept_share"] == pytest.approx(varying / len(seen))
    assert metrics["dapo/surplus_groups"] == varying - wanted
    for name in ("mean", "max", "min"):
        assert metrics[f"dapo/reward_before_filter/{name}"] == pytest.approx(getattr(seen, name)() - 1)


@pytest.mark.parametrize(("share", "most"), [(0.9, 0.67), (0.5, 0.91), (0.125, 1.0)])
def test_fewer_prompts_are_generated_than_with_whole_batches(share, most):
    """Counted over 300 steps of 16 groups from batches of 16: no more than this part of them."""
    rng, sized, whole = np.random.default_rng(0), 0, 0
    for _ in range(300):
        varies = rng.random(4000) < share
        groups = np.stack([np.zeros(4000), varies], axis=1)
        search, size = search_of(16, 2, 16, data=4000), 16
        while not search.complete:
            chunk = groups[search.drawn : search.drawn + size]
            search.add(chunk.ravel(), chunk.ravel())
            size = search.next_size() if not search.complete else 0
        sized += search.drawn
        whole += 16 * -(-(np.flatnonzero(varies)[15] + 1) // 16)
    assert sized <= most * whole


def test_a_limit_that_is_reached_says_what_was_found_and_what_to_change():
    search = search_of(prompts=3, samples=2, batch=3, max_batches=2)
    search.add(np.array([0, 0, 1, 1, 0, 0]), np.zeros(6))
    with pytest.raises(dapo.DynamicSamplingError) as error:
        search.add(np.array([0, 1, 0, 0, 0, 0]), np.zeros(6))
    text = str(error.value)
    assert "after 2 generation batches 1 of 6 groups vary" in text and "trains on 3" in text
    assert "4 groups all 0, 1 groups all 1" in text
    assert "max_num_gen_batches" in text and "data.train_batch_size" in text


def test_no_limit_is_one_pass_over_the_data():
    search = search_of(prompts=1, samples=2, batch=2, max_batches=0, data=6)
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

    search = search_of(len(expected), groups.shape[1], len(groups), max_batches=1)
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
    search = search_of(prompts=1, samples=2, batch=2, max_batches=1)
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

    def __len__(self):
        return len(self.rows)

    @staticmethod
    def join(batches):
        return Batch(sum((batch.rows for batch in batches), []))


@given(searches())
def test_a_step_joins_the_first_varying_prompts_with_their_responses(case):
    groups, size, wanted = case
    samples, limit = groups.shape[1], len(groups) // size
    expected = [i for i, group in enumerate(groups.tolist()) if len(set(group)) > 1][:wanted]

    generated = []  # prompts of each batch

    def generate(count):
        rows = range(sum(generated), sum(generated) + count)
        responses = [(row, sample) for row in rows for sample in range(samples)]
        seconds = float(len(generated))
        generated.append(count)
        return Batch(list(rows)), Batch(responses, groups[rows].ravel(), seconds)

    stream, metrics = SimpleNamespace(size=size, unit=1, prompts=len(groups), passes=7), {"other": 1}
    config = configuration(
        data__train_batch_size=wanted,
        actor_rollout_ref__rollout__n=samples,
        algorithm__filter_groups__max_num_gen_batches=0,
    )

    def select():
        return dapo.select_groups(config, stream, *generate(size), metrics, generate, Batch.join)

    if len(expected) < wanted:
        with pytest.raises(dapo.DynamicSamplingError, match=r"after \d+ generation batches"):
            select()
        assert sum(generated) == limit * size  # one pass
        return
    prompts, responses = select()
    assert prompts.rows == expected
    assert responses.rows == [(row, sample) for row in expected for sample in range(samples)]
    assert metrics["other"] == 1 and metrics["dapo/data_passes"] == 7
    assert metrics["dapo/num_gen_batches"] == len(generated)
    assert metrics["dapo/generated_prompts"] == sum(generated) > expected[-1] >= sum(generated[:-1])
    timing = responses.meta_info["timing"]
    assert timing["count"] == len(generated)
    assert timing["agent_loop/slowest/tool_calls"] == len(generated) - 1


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
            "actor_rollout_ref": {"rollout": {"n": 4, "agent": {"num_workers": 8}}},
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
    ({"data__gen_batch_size": 2}, "10 x 2 prompts cannot give the 32"),
    ({"data__gen_batch_size": 31}, "31 prompts do not make equal chunks .* multiple of 2"),
])  # fmt: skip
def test_incompatible_settings_are_refused_before_the_start(changes, message):
    dapo.check(configuration())
    with pytest.raises(CannotWork, match=message):
        dapo.check(configuration(**changes))


@pytest.mark.parametrize(("limit", "drawn", "refused"), [
    (1, 31, True), (1, 32, False), (2, 15, True), (2, 16, False), (0, 1, False), (-1, 1, False),
    (1, None, False), (1, 1, True),
])  # fmt: skip
def test_the_limit_must_allow_a_full_batch_unless_there_is_none(limit, drawn, refused):
    changes = {"algorithm__filter_groups__max_num_gen_batches": limit}
    changes["actor_rollout_ref__rollout__agent__num_workers"] = 1
    changes |= {"data__gen_batch_size": drawn} if drawn else {}
    found = [key for key, _ in dapo.problems(configuration(**changes))]
    assert found == ["algorithm.filter_groups.max_num_gen_batches"] * refused


@pytest.mark.parametrize(("workers", "samples"), list(itertools.product(range(1, 10), repeat=2)))
def test_a_unit_is_the_fewest_prompts_that_agent_loop_workers_can_share(workers, samples):
    config = configuration(
        actor_rollout_ref__rollout__n=samples, actor_rollout_ref__rollout__agent__num_workers=workers
    )
    assert dapo.unit_of(config) == next(u for u in itertools.count(1) if u * samples % workers == 0)


@pytest.mark.parametrize(("given", "batches"), [(1, 1), (2, 2), (0, 3), (-1, 3)])
def test_no_batch_is_drawn_beyond_the_limit(given, batches):
    search = search_of(prompts=1, samples=2, batch=2, max_batches=given, data=6)
    for _ in range(batches - 1):
        search.add(np.zeros(4), np.zeros(4))
    with pytest.raises(dapo.DynamicSamplingError, match=f"after {batches} generation batches"):
        search.add(np.zeros(4), np.zeros(4))


def test_the_last_batch_allowed_may_complete_the_search():
    search = search_of(prompts=2, samples=2, batch=2, max_batches=2)
    assert search.add(np.array([0, 1, 1, 1]), np.zeros(4)).tolist() == [0] and not search.complete
    assert search.add(np.array([0, 0, 1, 0]), np.zeros(4)).tolist() == [1] and search.complete


def test_timings_of_batches_merge_as_if_they_were_one():
    """Against the statistics of all responses together."""
    rng = np.random.default_rng(0)
    batches = [rng.random((size, 2)) for size in (8, 8, 3)]  # responses, (generation, tools) in s

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

    merged = dapo.merge_timings([timing(batch) for batch in batches], sizes=[8, 8, 3])
    assert merged == pytest.approx(timing(np.concatenate(batches)))


def test_the_slowest_batch_is_slowest_with_its_tools():
    def timing(generation, tools):
        return {"agent_loop/slowest/generate_sequences": generation, "agent_loop/slowest/tool_calls": tools}

    batches = [timing(5.0, 0.0), timing(3.0, 4.0), timing(1.0, 5.0)]
    assert dapo.merge_timings(batches, [1, 1, 1]) == batches[1]


class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, i):
        return {"number": torch.tensor([i]), "name": f"prompt {i}"}


def collate(rows):
    """As verl's: tensors and arrays of objects."""
    return {
        "number": torch.stack([row["number"] for row in rows]),
        "name": np.array([row["name"] for row in rows], dtype=object),
    }


def loader_of(shuffle: bool, workers: int, batch: int = 2):
    from torch.utils.data import SequentialSampler
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler

    data = Dataset()
    generator = torch.Generator().manual_seed(3)
    sampler = RandomSampler(data, generator=generator) if shuffle else SequentialSampler(data)
    options = dict(num_workers=workers, drop_last=True, sampler=sampler, collate_fn=collate)
    return StatefulDataLoader(data, batch_size=batch, **options)


def numbers(rows: dict) -> list[int]:
    assert rows["number"].shape[1:] == (1,)
    found = rows["number"][:, 0].tolist()
    assert rows["name"].tolist() == [f"prompt {i}" for i in found]
    return found


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("unit", [1, 2])
def test_a_stream_goes_round_and_resumes_where_it_was(shuffle, workers, unit):
    """With batches of several sizes, at the end of a pass and across it."""
    sizes = [2, 2, 4, 2, 6, 2] if unit == 2 else [2, 1, 4, 3, 2, 1, 5]

    def draw(stream, size):
        return numbers(next(stream) if size == 2 else stream.take(size))

    whole = dapo.PromptStream(loader_of(shuffle, workers), unit)
    drawn = [draw(whole, size) for size in sizes]
    assert [len(batch) for batch in drawn] == sizes and whole.size == 2
    length = 7 // unit * unit
    assert whole.prompts == length and whole.passes == (sum(sizes) - 1) // length == 2
    flat = sum(drawn, [])
    for start in (0, length):  # each prompt once in a pass
        assert len(set(flat[start : start + length])) == length
    for stop in (1, 3, 4) if workers else range(1, len(sizes)):
        first, second = (dapo.PromptStream(loader_of(shuffle, workers), unit) for _ in range(2))
        for size in sizes[:stop]:
            draw(first, size)
        second.load_state_dict(first.state_dict())
        assert [draw(second, size) for size in sizes[stop:]] == drawn[stop:], stop
        assert second.passes == 2


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_runs_with_and_without_filtering_resume_each_other(shuffle, workers):
    """verl's dataloader, of batches of 2, continues where a stream was, and a stream where that was."""
    order = numbers(dapo.PromptStream(loader_of(shuffle, workers), 1).take(7))
    stream = dapo.PromptStream(loader_of(shuffle, workers), 1)
    stream.passes = 3
    iterator = iter(plain := loader_of(shuffle, workers))
    assert numbers(next(iterator)) + numbers(next(iterator)) == order[:4]
    stream.load_state_dict(plain.state_dict())
    assert stream.passes == 0 and numbers(stream.take(3)) == order[4:]

    stream = dapo.PromptStream(loader_of(shuffle, workers), 1)
    stream.take(3)
    plain = loader_of(shuffle, workers)
    plain.load_state_dict({key: value for key, value in stream.state_dict().items()})
    assert sum(map(numbers, plain), []) == order[3:]
    assert stream.sampler is stream.loader.sampler

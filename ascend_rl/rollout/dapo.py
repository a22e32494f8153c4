"""Dynamic sampling of DAPO (arXiv 2503.14476): train on groups of responses that differ, and on a full batch.

If all responses of a prompt are right, or all are wrong, their advantage is 0: they cost time and train
nothing, and the rest of the batch shrinks as the model gets better. Dynamic sampling leaves such groups
out and draws further prompts until the batch is full again:

1. generate a batch of prompts, n responses each;
2. keep the groups whose metric is not the same for all n, and leave out those with a metric or reward that is
   not a finite number: a scorer failed, and one such response makes the advantages of its whole group NaN;
3. with fewer kept groups than the training batch has prompts, draw again and continue at 1: as many prompts
   as the missing groups take if the share that varies stays as it was in this step, and one standard
   deviation of that number more, since a further batch has a further long tail; at most a whole batch;
4. train on the first kept groups, exactly as many as configured, in the order they were drawn.

Invariants (tests/test_dapo.py, against brute force): the trained groups are the first of all varying groups
in the order of the data, the same as if all batches were whole; their metrics and rewards are finite; no
batch is drawn that is not needed, none is larger than a whole one, and all together stay within the limit;
what is drawn is every prompt of a pass over the data once, in the dataloader's order, also after a resume.
Cost: O(samples) a batch.
"""

from __future__ import annotations

import math
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ascend_rl.settings.switch import refuse

# These are not reported by the reward function: they mean the whole reward that is trained on.
REWARD_METRICS = ("seq_reward", "seq_final_reward")


class DynamicSamplingError(RuntimeError):
    """Too few groups vary; says how many did and what to change."""


def unit_of(config: Any) -> int:
    """The number of prompts that agent loop workers can share is a multiple of this: their chunks are equal.

    Args:
        config: verl's whole configuration, an OmegaConf node.
    """
    rollout = config.actor_rollout_ref.rollout
    return rollout.agent.num_workers // math.gcd(rollout.agent.num_workers, rollout.n)


def problems(config: Any) -> list[tuple[str, str]]:
    """Settings that are incompatible with filter_groups: (key, what is wrong and what to set instead).

    Args:
        config: verl's whole configuration, an OmegaConf node.
    """
    algorithm, reward_model = config.algorithm, config.reward.reward_model
    train, limit = config.data.train_batch_size, algorithm.filter_groups.max_num_gen_batches
    drawn = config.data.get("gen_batch_size") or train
    metric, unit = algorithm.filter_groups.metric, unit_of(config)
    rules = [
        (config.actor_rollout_ref.rollout.n < 2, "actor_rollout_ref.rollout.n",
         "a group of one never varies; use 2 or more"),
        (not metric, "algorithm.filter_groups.metric",
         "not set; use acc, or any number the reward function reports"),
        (metric == "seq_final_reward" and algorithm.use_kl_in_reward, "algorithm.filter_groups.metric",
         "seq_final_reward with use_kl_in_reward needs log-probs of responses that are left out; use "
         "seq_reward, or the KL term of the loss (use_kl_loss)"),
        (algorithm.adv_estimator == "remax", "algorithm.adv_estimator",
         "remax compares with a greedy response, not within a group; use grpo"),
        (reward_model.enable and not reward_model.enable_resource_pool,
         "reward.reward_model.enable_resource_pool",
         "a reward model on the rollout's devices scores after the rollout, which is too late; set True"),
        (0 < limit * drawn < train, "algorithm.filter_groups.max_num_gen_batches",
         f"{limit} x {drawn} prompts cannot give the {train} of data.train_batch_size; raise it, or "
         "data.gen_batch_size"),
        (drawn % unit, "data.gen_batch_size",
         f"{drawn} prompts do not make equal chunks for the agent loop workers; use a multiple of {unit}"),
    ]  # fmt: skip
    return [(key, message) for applies, key, message in rules if applies]


def check(config: Any) -> None:
    """Refuse incompatible settings before models are loaded.

    Raises:
        CannotWork: naming the settings and what to set instead.
    """
    refuse("algorithm.filter_groups.enable=True", (f"{key}: {message}" for key, message in problems(config)))


def metric_of(name: str, reported: Mapping[str, Any], rewards: np.ndarray) -> np.ndarray:
    """The metric of each response: the reward itself, or a number that the reward function reported.

    Args:
        name: algorithm.filter_groups.metric.
        reported: name -> [R], what came with the responses.
        rewards: [R], with all penalties.

    Raises:
        KeyError: the reward function reports no such number.
    """
    if name in REWARD_METRICS:
        return rewards
    if name not in reported:
        names = sorted(key for key, values in reported.items() if np.asarray(values).dtype.kind in "biuf")
        raise KeyError(
            f"algorithm.filter_groups.metric={name} is not reported by the reward function; use seq_reward"
            f" or one of: {', '.join(names)}"
        )
    return np.asarray(reported[name], dtype=np.float64)


def varying(metric_pn: np.ndarray) -> np.ndarray:
    """Which groups have responses that differ, by finite metrics: [P, n] -> [P] bool.

    >>> varying(np.array([[0, 1, 0], [1, 1, 1], [0, 0, 0]])).tolist()
    [True, False, False]
    """
    return metric_pn.max(axis=1) != metric_pn.min(axis=1)


def rows_of(prompts_k: np.ndarray, samples: int) -> np.ndarray:
    """Rows of the responses of these prompts, where the n of one prompt are neighbours: [K] -> [K * n].

    >>> rows_of(np.array([0, 2]), 3).tolist()
    [0, 1, 2, 6, 7, 8]
    """
    return (prompts_k[:, None] * samples + np.arange(samples)).ravel()


def new_ids(count: int) -> np.ndarray:
    """[count] ids of prompts, unlike any other; verl tells the groups of a batch apart by them."""
    return np.array([str(uuid.uuid4()) for _ in range(count)], dtype=object)


class DynamicSampling:
    """The search of one training step; `add` each generated batch until `complete`.

    Args:
        prompts: groups to train on, data.train_batch_size.
        samples: responses of a group, rollout.n.
        batch: prompts of a whole generation batch, data.gen_batch_size.
        unit: the prompts of any batch are a multiple of this; ``batch`` is one.
        max_batches: draw at most as many prompts as this many whole batches have; not positive: ``data``.
        data: prompts of one pass over the data.

    >>> step = DynamicSampling(prompts=2, samples=2, batch=3, unit=1, max_batches=3, data=99)
    >>> kept = step.add(np.array([0, 1, 1, 1, 0, 0]), rewards=np.array([0, 1, 1, 1, 0, 0]))
    >>> kept.tolist(), step.complete, step.next_size()
    ([0], False, 3)
    >>> step.add(np.array([0, 1, 1, 0, 0, 0]), rewards=np.array([0, 1, 1, 0, 0, 0])).tolist(), step.complete
    ([0], True)
    """

    def __init__(self, prompts: int, samples: int, batch: int, unit: int, max_batches: int, data: int):
        self.prompts, self.samples, self.batch, self.unit = prompts, samples, batch, unit
        self.limited = max_batches > 0
        self.most = max_batches * batch if self.limited else data
        self.batches = self.drawn = self.varied = self.failed = 0
        self.rewards: list[np.ndarray] = []
        self.same: list[np.ndarray] = []

    def add(self, metric: np.ndarray, rewards: np.ndarray) -> np.ndarray:
        """Prompts of this batch to train on: [P * n], [P * n] -> [K] ascending.

        Raises:
            DynamicSamplingError: no more prompts are allowed, and there are still too few groups.
        """
        metric_pn = np.asarray(metric, dtype=np.float64).reshape(-1, self.samples)
        rewards_pn = np.asarray(rewards, dtype=np.float64).reshape(-1, self.samples)
        scored = (np.isfinite(metric_pn) & np.isfinite(rewards_pn)).all(axis=1)
        varies = scored & varying(metric_pn)
        missing = self.prompts - self.varied
        self.batches += 1
        self.drawn += len(varies)
        self.varied += int(varies.sum())
        self.failed += int((~scored).sum())
        self.rewards.append(rewards_pn[np.isfinite(rewards_pn)])
        self.same.append(metric_pn[scored & ~varies, 0])
        if not self.complete and self.drawn >= self.most:
            raise DynamicSamplingError(self._failure())
        return np.flatnonzero(varies)[:missing]

    @property
    def complete(self) -> bool:
        return self.varied >= self.prompts

    def next_size(self) -> int:
        """Prompts to draw next: most likely enough, but no more than a whole batch or than allowed."""
        size = self.batch
        if self.varied:
            share, missing = self.varied / self.drawn, self.prompts - self.varied
            size = math.ceil((missing + math.sqrt(missing * (1 - share))) / share)
        return min(math.ceil(size / self.unit) * self.unit, self.batch, self.most - self.drawn)

    def metrics(self) -> dict[str, float]:
        """What is logged of the step; rewards are the finite ones before filtering."""
        rewards = np.concatenate(self.rewards)
        return {
            "dapo/num_gen_batches": self.batches,
            "dapo/generated_prompts": self.drawn,
            "dapo/kept_share": self.varied / self.drawn,
            "dapo/surplus_groups": self.varied - self.prompts,
            "dapo/failed_groups": self.failed,
            "dapo/reward_before_filter/mean": float(rewards.mean()),
            "dapo/reward_before_filter/max": float(rewards.max()),
            "dapo/reward_before_filter/min": float(rewards.min()),
        }

    def said(self) -> str:
        """A line for the log; ascend_rl/launch/supervise.py looks for it."""
        return f"generation batch {self.batches}: {self.varied} of {self.prompts} groups found"

    def _failure(self) -> str:
        values, counts = np.unique(np.concatenate(self.same), return_counts=True)
        often = np.argsort(-counts, kind="stable")[:3]
        equal = ", ".join(f"{counts[i]} groups all {values[i]:g}" for i in often)
        if self.limited:
            change = "raise algorithm.filter_groups.max_num_gen_batches or data.gen_batch_size"
        else:
            change = "add data (this was one pass over it)"
        failed = f" {self.failed} groups have a metric or reward that is not finite: a scorer failed."
        return (
            f"after {self.batches} generation batches {self.varied} of {self.drawn} groups vary, and a step "
            f"trains on {self.prompts}. The others: {equal or 'none'}.{failed * (self.failed > 0)} "
            "Mostly low: the data is too hard, or responses are cut off or scored wrongly; mostly high: it "
            f"is too easy. Change the data, lower data.train_batch_size, or {change}; "
            "the run can be resumed from its last checkpoint"
        )


def merge_timings(timings: Sequence[Mapping[str, float]], sizes: Sequence[int]) -> dict[str, float]:
    """Timings of generation batches that ran one after another, as if they were one batch.

    Extremes stay extremes, means and shares are averaged over all responses, `.../slowest/*` is that of the
    slowest batch, and counts are added.

    Args:
        sizes: of the batches.
    """
    slowest = max(
        timings, key=lambda t: t["agent_loop/slowest/generate_sequences"] + t["agent_loop/slowest/tool_calls"]
    )
    merged = {}
    for key in dict.fromkeys(key for timing in timings for key in timing):
        values = [timing[key] for timing in timings if key in timing]
        last = key.rpartition("/")[2]
        if "/slowest/" in key:
            merged[key] = slowest[key]
        elif "share" in key or last == "mean":
            total = sum(timing.get(key, 0) * size for timing, size in zip(timings, sizes, strict=True))
            merged[key] = total / sum(sizes)
        else:
            merged[key] = {"min": min, "max": max}.get(last, sum)(values)
    return merged


def select_groups(
    config: Any,
    stream: PromptStream,
    batch: Any,
    responses: Any,
    metrics: dict[str, float],
    draw: Callable[[int], tuple[Any, Any]],
    join: Callable[[list], Any],
) -> tuple[Any, Any]:
    """The prompts of one training step and their responses, from as many generation batches as it takes.

    Args:
        config: verl's whole configuration.
        stream: where the prompts come from.
        batch, responses: the first generation batch, DataProtos of P prompts and of their P * n responses,
            the n of one prompt next to each other.
        metrics: gets those of the search.
        draw: generates a batch of the next prompts, as many as it is told, and returns it like the first.
        join: DataProto.concat.

    Raises:
        DynamicSamplingError: too few groups vary.
    """
    settings, samples = config.algorithm.filter_groups, config.actor_rollout_ref.rollout.n
    train, limit = config.data.train_batch_size, settings.max_num_gen_batches
    sampling = DynamicSampling(train, samples, stream.size, stream.unit, limit, stream.prompts)
    prompts, kept_responses, timings, sizes = [], [], [], []
    while True:
        sizes.append(len(batch))
        timings.append(responses.meta_info.pop("timing"))
        rewards = responses.batch["rm_scores"].sum(-1).numpy()
        kept = sampling.add(metric_of(settings.metric, responses.non_tensor_batch, rewards), rewards)
        if len(kept):
            prompts.append(batch.select_idxs(kept))
            kept_responses.append(responses.select_idxs(rows_of(kept, samples)))
        print(sampling.said(), flush=True)  # the launcher takes it for a sign of progress
        if sampling.complete:
            break
        batch, responses = draw(sampling.next_size())
    metrics.update(sampling.metrics() | {"dapo/data_passes": stream.passes})
    responses = join(kept_responses)
    responses.meta_info["timing"] = merge_timings(timings, sizes)
    return join(prompts), responses


class PromptStream:
    """A dataloader that starts over at its end, with one iterator for the training loop and for `take`.

    A step may need the end of one pass and the start of the next, and a part of a batch. verl's loop
    therefore sees one endless pass: a run ends by its number of steps, which verl derives from the epochs
    before this takes the place of the dataloader. Nothing drawn is ever left over: the dataloader it draws
    from hands out ``unit`` prompts at a time. The state is that dataloader's own, which counts prompts, so
    checkpoints of runs with and without filtering are alike; the passes that are over are one more key in it.

    Args:
        loader: verl's, of whole generation batches; not used itself.
        unit: see `unit_of`.
    """

    def __init__(self, loader: Any, unit: int):
        self.size, self.unit, self.passes = loader.batch_size, unit, 0
        self.loader = type(loader)(
            dataset=loader.dataset, batch_size=unit, num_workers=loader.num_workers, drop_last=True,
            collate_fn=loader.collate_fn, sampler=loader.sampler,
        )  # fmt: skip
        self.prompts = len(self.loader) * unit  # of one pass
        self._iterator: Iterator | None = None

    def _unit(self) -> Mapping[str, Any]:
        if self._iterator is None:
            self._iterator = iter(self.loader)
        try:
            return next(self._iterator)
        except StopIteration:
            self.passes += 1
            self._iterator = iter(self.loader)
            return next(self._iterator)

    def take(self, prompts: int) -> dict[str, Any]:
        """The next prompts, collated as a batch of verl's dataloader is: tensors and arrays."""
        import torch

        units = [self._unit() for _ in range(prompts // self.unit)]
        columns = {key: [unit[key] for unit in units] for key in units[0]}
        return {
            key: torch.cat(values) if isinstance(values[0], torch.Tensor) else np.concatenate(values)
            for key, values in columns.items()
        }

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> dict[str, Any]:
        return self.take(self.size)

    def __len__(self) -> int:
        return sys.maxsize

    @property
    def sampler(self) -> Any:
        return self.loader.sampler

    def state_dict(self) -> dict:
        return self.loader.state_dict() | {"passes": self.passes}

    def load_state_dict(self, state: dict) -> None:
        self.passes = state.get("passes", 0)
        self.loader.load_state_dict({key: value for key, value in state.items() if key != "passes"})
        self._iterator = None

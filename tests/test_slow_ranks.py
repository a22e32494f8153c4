"""Times of ranks and engines: what is measured around calls, and who is called slow."""

from __future__ import annotations

import functools
import json
import random
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from ascend_rl.process import rank_times
from ascend_rl.process.rank_times import Clock
from ascend_rl.rollout import slow_ranks
from ascend_rl.rollout.engine_stats import EngineStats, merged, step_metrics
from ascend_rl.rollout.engine_times import EngineTimes
from ascend_rl.rollout.slow_ranks import FACTOR, STEPS, Streaks, engine_ratios, over_median, own_s


class Device:
    """A stream that runs behind the host: work takes `seconds`, and is over when `host` is at its end."""

    def __init__(self):
        self.end = self.host = 0.0

    def work(self, seconds: float) -> None:
        self.end += seconds

    def event(self) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.end)
        event.query = lambda: event.at <= self.host
        event.synchronize = lambda: setattr(self, "host", max(self.host, event.at))
        event.elapsed_time = lambda other: 1000 * (other.at - event.at)
        return event


def micro_batch(clock: Clock, run, rng: random.Random) -> tuple[float, float, float]:
    """One of random pieces: its own seconds of forward and backward, and those in collectives."""
    own, waits = {"forward": 0.0, "backward": 0.0}, 0.0

    def phase(kind: str) -> None:
        nonlocal waits
        for _ in range(rng.randrange(1, 4)):
            own[kind] += (seconds := rng.random())
            run(seconds)
            waits += (seconds := rng.random())
            inner = clock.collective(run)
            clock.collective(functools.partial(inner))(seconds)  # one calls another

    clock.phase_of("forward", lambda: phase("forward"))()
    clock.phase_of("backward", lambda: clock.phase_of("backward", lambda: phase("backward"))())()
    waits += (seconds := rng.random())
    clock.collective(run)(seconds)  # of the optimizer: in no phase
    return own["forward"], own["backward"], waits


def test_times_are_those_of_the_device():
    """However far the host is ahead, and whatever was added up on the way."""
    rng, device = random.Random(0), Device()
    clock = Clock(device.event)
    for _ in range(20):
        rows = []
        for _ in range(rng.randrange(1, 6)):
            rows.append(micro_batch(clock, device.work, rng))
            device.host = max(device.host, device.end - rng.random() * 5)
        found = clock.take()
        expected = [sum(column) for column in zip(*rows, strict=True)]
        assert [found[f"{kind}_s"] for kind in ("forward", "backward", "collectives")] == pytest.approx(
            expected
        )
        assert found["micro_batches"] == len(rows) and not clock.open
    made = len(clock.free)
    micro_batch(clock, device.work, rng)
    clock.take()
    assert len(clock.free) == made  # events are used again


def test_results_and_errors_are_those_of_the_call():
    clock = Clock()

    def fail():
        time.sleep(0.01)
        raise KeyError("x")

    for wrapped in (clock.collective(fail), clock.phase_of("forward", fail)):
        with pytest.raises(KeyError):
            wrapped()
    assert clock.collective(max)(1, 2) == 2
    works = clock.calls
    assert clock.collective(lambda async_op: "work")(async_op=True) == "work" and clock.calls == works
    found = clock.take()
    assert found["collectives_s"] >= 0.01 and found["forward_s"] >= 0.01
    assert not any(clock.take().values())


def test_tokens_are_those_of_forward_passes(monkeypatch):
    """Of Hugging Face's model, with recomputation; of Megatron, whose later stages embed nothing."""
    import torch
    from torch.utils.checkpoint import checkpoint

    class Block(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)

    megatron = ModuleType("megatron.core.transformer.transformer_block")
    megatron.TransformerBlock = Block
    for modules, embeds, tokens in (
        ({}, True, 2 * 15),
        ({megatron.__name__: megatron}, True, 2 * 15),
        ({megatron.__name__: megatron}, False, 2 * 15),
        ({}, False, 0),
    ):
        with monkeypatch.context() as context:
            context.setattr(torch.nn.functional, "embedding", torch.nn.functional.embedding)
            context.setattr(Block, "forward", Block.forward)
            loaded = {"torch.nn.functional": torch.nn.functional, "torch": torch} | modules
            context.setattr(rank_times, "sys", SimpleNamespace(modules=loaded))
            clock, embedding, block = Clock(), torch.nn.Embedding(9, 4), Block(4, 4)
            rank_times.install(clock)

            def forward(embedding=embedding, block=block, embeds=embeds):
                ids = torch.zeros(3, 5, dtype=torch.long)
                x = embedding(ids) if embeds else torch.zeros(3, 5, 4, requires_grad=True)
                return checkpoint(block, x, use_reentrant=True).sum()

            for _ in range(2):
                loss = clock.phase_of("forward", forward)()
                clock.phase_of("backward", loss.backward)()
            forward()  # a validation, say
            assert clock.take()["tokens"] == tokens and clock.take()["tokens"] == 0


def test_a_backward_in_a_thread_of_its_own():
    clock = Clock()

    def backward():
        thread = threading.Thread(target=clock.collective(time.sleep), args=[0.05])
        thread.start()
        thread.join()

    clock.phase_of("backward", backward)()
    found = clock.take()
    assert found["collectives_s"] > 0.04 and found["backward_s"] < 0.04


def test_what_others_have_imported_is_wrapped_too(monkeypatch):
    """Megatron keeps a collective under a name of its own."""
    import torch

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda: "reduced")
    user, other = ModuleType("megatron.user"), ModuleType("unrelated")
    user.mine = other.mine = torch.distributed.all_reduce
    for module in (user, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    loaded = {"megatron.user": user, "unrelated": other, "torch": torch}
    fake = SimpleNamespace(modules=loaded)
    monkeypatch.setattr(rank_times, "sys", fake)
    clock = Clock()
    rank_times.install(clock)
    assert (user.mine(), other.mine()) == ("reduced", "reduced") and clock.calls == 1


def test_the_slow_rank_is_found_whoever_it_is():
    """Ranks of random stages; one takes 30% longer: its ratio is the largest, and about 1.3."""
    rng = random.Random(1)
    for _ in range(200):
        stages, members = rng.randrange(1, 4), rng.randrange(2, 9)
        own = [1 + 5 * rng.random() for _ in range(stages)]
        ranks = [
            {"stage": n % stages, "forward_s": own[n % stages] * 0.3, "backward_s": own[n % stages] * 0.7}
            for n in range(stages * members)
        ]
        slow = rng.randrange(len(ranks))
        ranks[slow] = {key: value * (1.3 if key != "stage" else 1) for key, value in ranks[slow].items()}
        found = over_median(ranks, own_s)
        assert found[slow] == 1.3 and sorted(found)[:-1] == [1.0] * (len(ranks) - 1)


def message(engine, at, running, computed, waiting=0):
    outputs = [SimpleNamespace(events=None, new_token_ids=[1, 2]) for _ in range(computed)]
    stats = SimpleNamespace(
        kv_cache_usage=0.5, num_running_reqs=running, num_waiting_reqs=waiting, spec_decoding_stats=None,
        cudagraph_stats=None,
    )  # fmt: skip
    return SimpleNamespace(outputs=outputs, scheduler_stats=stats, engine_index=engine, timestamp=at)


def rollout(slow: float, requests: int, rng: random.Random) -> EngineStats:
    """An engine whose step takes 10 ms and 1 ms per request, `slow` times; requests end one by one."""
    stats, at = EngineStats(graphs=False), 0.0
    left = requests
    stats.record(message(0, at, left, left, waiting=3))
    while left:
        for _ in range(rng.randrange(5, 30)):
            at += slow * (0.01 + 0.001 * left) * rng.uniform(0.98, 1.02)
            stats.record(message(0, at, left, left))
        left -= 1
    return stats


def test_engines_are_compared_at_the_same_size():
    """An engine with few requests has short steps, and is not called fast for it."""
    rng = random.Random(2)
    servers = [rollout(slow, requests, rng) for slow, requests in ((1, 40), (1.3, 12), (1, 25), (1, 8))]
    timing = merged([server.take() for server in servers])
    engines = slow_ranks.of_engines(timing)
    assert not any(key.startswith("rollout/engine_times") for key in timing)
    ratios = engine_ratios(engines)
    assert max(ratios, key=ratios.get) == "1" and ratios["1"] > FACTOR
    assert all(ratios[name] < 1.1 for name in ("0", "2", "3"))
    steps, seconds, tokens = (sum(sums[n] for sums in engines["1"].values()) for n in range(3))
    assert steps > 60 and tokens > 2 * steps and seconds > 0.01 * steps


def test_steps_that_do_more_than_decode_are_left_out():
    times = EngineTimes()
    times.record(0, message(0, 0.0, 4, 4))
    times.record(0, message(0, 1.0, 6, 6))  # two were added
    times.record(0, message(0, 2.0, 6, 6, waiting=1))
    times.record(0, message(0, 3.0, 6, 0))  # a prefill in pieces
    assert times.take() == {}
    times.record(0, message(0, 3.5, 0, 6))
    times.record(0, message(0, 50.0, 3, 3))  # the next rollout
    assert times.take() == {0: {3: [1, 0.5, 12]}}


def test_a_metric_of_engines_that_nobody_reads_is_no_time():
    timing = {"rollout/engine_times/0/3/steps": 8, "gen": 1.0}
    assert step_metrics(timing, {}) == {} and timing == {"gen": 1.0}


class Ranks:
    """verl's worker group; rank 2 computes 30% longer from step 4 to 7."""

    def __init__(self):
        self.step = 0

    def times(self) -> list[dict]:
        self.step += 1
        of = [1.3 if rank == 2 and 4 <= self.step <= 7 else 1.0 for rank in range(4)]
        return [
            {"forward_s": s, "backward_s": 2 * s, "collectives_s": 0.1, "micro_batches": int(self.step > 1),
             "calls": 3, "tokens": 90 + rank, "rank": rank, "stage": 0, "node": "10.0.0.1",
             "device": str(rank)}
            for rank, s in enumerate(of)
        ]  # fmt: skip


def test_a_slow_rank_is_named_once_and_all_times_are_kept(tmp_path, monkeypatch, capsys):
    group = Ranks()
    monkeypatch.setattr(slow_ranks, "of_workers", lambda of: of.times())
    monkeypatch.setattr(slow_ranks, "_ranks", Streaks())
    assert slow_ranks.step_times(0, group, {}) == {} and group.step == 0  # verl writes no metrics
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    found = [slow_ranks.step_times(step, group, {}) for step in range(1, 9)]
    assert found == [{}] + [{"perf/slowest_rank": 1.3 if 4 <= step <= 7 else 1.0} for step in range(2, 9)]
    said = capsys.readouterr().out
    assert said.count("WARNING") == 1
    assert "device 2) computes 1.30 times as long as the median, on 1.01 times as many tokens" in said
    lines = [json.loads(line) for line in (tmp_path / slow_ranks.FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(2, 9))
    assert slow_ranks.ratios(lines[2], "ranks") == {"0": 1.0, "1": 1.0, "2": 1.3, "3": 1.0}
    monkeypatch.setenv(slow_ranks.SWITCH, "0")
    assert slow_ranks.step_times(9, group, {}) == {} and group.step == 8


def test_a_streak_is_as_long_as_it_says():
    rng, streaks, history = random.Random(3), Streaks(), []
    for _ in range(2000):
        ratio = rng.choice([1.0, FACTOR - 0.01, FACTOR, 2.0, 2.0])
        history.append(ratio >= FACTOR)
        before = history[-STEPS - 1] if len(history) > STEPS else False
        assert bool(streaks.add({"x": ratio})) == (
            len(history) >= STEPS and all(history[-STEPS:]) and not before
        )

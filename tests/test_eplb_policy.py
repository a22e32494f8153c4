"""What EPLB's worker process answers, tested without one; with one: tests/patched/test_eplb_policy.py."""

from __future__ import annotations

import pickle
import queue
from types import SimpleNamespace

import numpy as np
import pytest

from ascend_rl.experts.eplb import copied, lower_bound, rank_loads, rebalance_table, replica_counts
from ascend_rl.experts.eplb_policy import Moves, VllmAscendPolicy, answer, failure


class Worker(SimpleNamespace):
    """Alive for ``looks`` looks; then it puts its last words, if any, into the queue, and is gone."""

    exitcode = -9

    def is_alive(self) -> bool:
        self.looks -= 1
        if self.looks < 0 and self.last_words is not None:
            self.results.put(self.last_words)
            self.last_words = None
            return True
        return self.looks >= 0


def worker(results, looks, last_words=None):
    return Worker(results=results, looks=looks, last_words=last_words)


def test_the_policy_is_rebalance_table():
    table = np.tile((np.arange(4)[:, None] * 2 + np.arange(3)) % 8, (2, 1, 1))
    load = np.random.default_rng(0).integers(1, 1000, table.shape)
    changed, priority, new = VllmAscendPolicy(None).rebalance_experts(table.tolist(), load.tolist())
    expected = rebalance_table(table, load)
    assert changed and expected[0]
    assert priority.tolist() == expected[1].tolist() and new.tolist() == expected[2].tolist()


def rounds(load, table, count, seed=0):
    """Experts copied in each of the rounds that count tokens of this popularity, and the last table."""
    random, layer, fetched = np.random.default_rng(seed), np.arange(len(load))[:, None, None], []
    for _ in range(count):
        share = random.poisson(load) / replica_counts(table, load.shape[1])
        new = VllmAscendPolicy(None).rebalance_experts(table, np.rint(share[layer, table]))[2]
        fetched.append(int(copied(table, new).sum()))
        table = new
    return fetched, table


@pytest.mark.parametrize("ranks, slots, tokens", [(128, 2, 1e3), (128, 2, 1e5), (32, 5, 1e4), (16, 8, 1e4)])
def test_the_policy_moves_experts_when_popularity_shifts_and_only_then(ranks, slots, tokens):
    random = np.random.default_rng(1)
    table = np.tile((np.arange(ranks)[:, None] * 128 // ranks + np.arange(slots)) % 128, (4, 1, 1))
    for _ in range(2):
        load = random.permuted(np.tile(np.arange(1, 129) ** -0.7, (4, 1)), axis=1)
        load *= tokens / load.mean()
        fetched, table = rounds(load, table, 6)
        assert fetched[0] > 0 and fetched[1:] == [0] * 5, fetched
        over = rank_loads(load, table).max(1) / lower_bound(load, ranks, slots)
        assert (over < 1.03 + 4 / tokens**0.5).all(), over


@pytest.mark.parametrize("result", [["a plan"], [], None, ""])
def test_a_plan_comes_as_it_was_sent(result):
    results = queue.Queue()
    results.put(result)
    assert answer(results, worker(results, looks=0), poll_s=0.01) == result


def test_experts_count_as_their_layer_moves(counts):
    plan = Moves([([], [(1, 7), (2, 8)], "map", "slots", 0), ([(1, 5)], [], "map", "slots", 1)])
    assert not counts()
    assert plan.pop(0)[-1] == 0 and counts() == {"eplb": 2}
    assert plan.pop(0)[-1] == 1 and counts() == {"eplb": 2}


def test_an_answer_that_takes_long_is_awaited():
    results = queue.Queue()
    assert answer(results, worker(results, looks=3, last_words=["a plan"]), poll_s=0.01) == ["a plan"]


def test_a_worker_that_is_gone_says_so():
    with pytest.raises(RuntimeError, match="EPLB worker is gone, exit code -9"):
        answer(queue.Queue(), worker(None, looks=2), poll_s=0.01)


def test_a_failure_crosses_the_queue_and_raises():
    try:
        raise KeyError("no maps")
    except KeyError:
        sent = pickle.loads(pickle.dumps(failure()))  # as a queue between processes does
    results = queue.Queue()
    results.put(sent)
    with pytest.raises(RuntimeError, match="EPLB worker failed:\nTraceback(.|\n)*KeyError: 'no maps'"):
        answer(results, worker(results, looks=0), poll_s=0.01)

"""verl's training loop asks its workers for their times, and logs who is slow."""

from __future__ import annotations

from training_stage import train

from ascend_rl.process.logs import by_step
from ascend_rl.rollout import slow_ranks


def test_each_step_has_the_times_of_its_ranks(tmp_path, monkeypatch):
    asked = []

    def of_workers(group) -> list[dict]:
        asked.append(group)
        of = [
            {"forward_s": s, "backward_s": s, "micro_batches": 1, "tokens": 9}
            for s in (1.0, 1.0 + len(asked) / 10)
        ]
        return [each | {"rank": rank, "stage": 0} for rank, each in enumerate(of)]

    monkeypatch.setattr(slow_ranks, "of_workers", of_workers)
    _, rows = train(tmp_path, "trainer.total_training_steps=2", monkeypatch=monkeypatch)
    assert [row["perf/slowest_rank"] for row in rows if "perf/slowest_rank" in row] == [1.1, 1.2]
    assert [hasattr(group, "update_actor") for group in asked] == [True, True]  # verl's group of trainers
    assert sorted(by_step(tmp_path / slow_ranks.FILE)) == [1, 2]

"""verl's training loop writes a few responses of each step."""

from __future__ import annotations

import json

from training_stage import WIDTH, N, train

from ascend_rl.process.logs import by_step
from ascend_rl.rollout.generations import FILE


def test_each_step_has_its_samples(tmp_path, monkeypatch):
    options = f"data.max_response_length={WIDTH}", "trainer.total_training_steps=3"
    train(tmp_path, *options, monkeypatch=monkeypatch)
    found = by_step(tmp_path / FILE)
    assert sorted(found) == [1, 2, 3]
    for samples in found.values():
        of = {kind: sample for sample in samples for kind in sample["kinds"]}
        assert set(of) == {"first", "longest", "best", "worst", "truncated"}  # all have WIDTH tokens
        assert (of["worst"]["score"], of["best"]["score"]) == (0, 1)
        for sample in samples:
            assert sample["tokens"] == WIDTH
            prompt, response = (json.loads(sample[name]) for name in ("prompt", "response"))
            assert response == [response[0]] * WIDTH and prompt == [prompt[0]] * 2
            assert response[0] - 7 * prompt[0] in range(N)  # a response with its own prompt

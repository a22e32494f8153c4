"""Dumped rollouts hold what the reward says, as JSON's own types, whatever numpy or other type it came in."""

from __future__ import annotations

import json

import numpy as np
import training_stage
from training_stage import N, train

GIVEN = {
    "overlong": np.arange(4 * N) % 3 == 0,  # as overlong_buffer_cfg.log
    "words": np.arange(4 * N),
    "share": np.linspace(0, 1, 4 * N, dtype=np.float32),
    "parts": np.array([{"place": np.array([i, 2]), "kind": complex(i)} for i in range(4 * N)]),
}
EXPECTED = [
    {"overlong": i % 3 == 0, "words": i, "share": float(GIVEN["share"][i]),
     "parts": {"place": [i, 2], "kind": str(complex(i))}}
    for i in range(4 * N)
]  # fmt: skip


class Tokenizer(training_stage.Tokenizer):
    def batch_decode(self, rows, **kwargs) -> list[str]:
        return [self.decode(row) for row in rows]


class Stage(training_stage.Stage):
    def generate_sequences(self, batch):
        output = super().generate_sequences(batch)
        if not batch.meta_info.get("validate", False):
            output.non_tensor_batch |= GIVEN
            output.meta_info["reward_extra_keys"] += list(GIVEN)
        return output


def test_values_that_json_does_not_know_are_dumped_as_what_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(training_stage, "Stage", Stage)
    monkeypatch.setattr(training_stage, "Tokenizer", Tokenizer)
    options = ("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.total_training_steps=1")
    train(tmp_path, f"trainer.rollout_data_dir={tmp_path}/dumped", *options, monkeypatch=monkeypatch)
    rows = [json.loads(line) for line in (tmp_path / "dumped/1.jsonl").read_text().splitlines()]
    assert [{key: row[key] for key in GIVEN} for row in rows] == EXPECTED
    assert all(isinstance(row["overlong"], bool) and isinstance(row["words"], int) for row in rows)
    assert {row["acc"] for row in rows} == {0.0, 1.0}

"""The metrics of a step say how its response lengths are distributed, as numpy does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics

PROMPT, RESPONSE = 4, 40
QUANTILES = (10, 25, 50, 75, 90, 99)


@pytest.mark.parametrize("count", [1, 2, 37])
def test_quantiles_of_a_batch(count):
    lengths = np.random.default_rng(count).integers(1, RESPONSE + 1, count)
    mask = torch.arange(RESPONSE)[None] < torch.from_numpy(lengths)[:, None]
    zeros = torch.zeros(count, RESPONSE)
    batch = {
        "prompts": torch.zeros(count, PROMPT, dtype=torch.long),
        "responses": torch.zeros(count, RESPONSE, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(count, PROMPT, dtype=torch.bool), mask], 1),
        "response_mask": mask,
        **dict.fromkeys(("token_level_scores", "token_level_rewards", "advantages", "returns"), zeros),
    }
    metrics = compute_data_metrics(DataProto.from_dict(tensors=batch), use_critic=False)
    for percent in QUANTILES:
        assert metrics[f"response_length/p{percent}"] == pytest.approx(np.percentile(lengths, percent))
    assert metrics["response_length/mean"] == pytest.approx(lengths.mean())

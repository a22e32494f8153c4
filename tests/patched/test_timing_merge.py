"""Agent loop workers time their own requests: merging them neither fails nor takes the first's."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

# (generation s, tools s, preemptions, response tokens) of each request, in the order of the batch.
REQUESTS = [
    (3.0, 0.5, 0, 30),
    (9.0, 0.0, 2, 90),
    (1.0, 0.0, 0, 10),
    (6.0, 5.0, 1, 60),
    (4.0, 0.0, 0, 40),
    (2.0, 1.0, 0, 20),
]


class Worker:
    """Returns what an AgentLoopWorker returns for its chunk."""

    def __init__(self):
        self.generate_sequences = SimpleNamespace(remote=self.generate)

    async def generate(self, chunk):
        from verl import DataProto

        rows = [REQUESTS[i] for i in chunk.batch["row"][:, 0].tolist()]
        metrics = [
            {"generate_sequences": s, "tool_calls": tools, "num_preempted": k} for s, tools, k, _ in rows
        ]
        response = torch.arange(100)[None] < torch.tensor([tokens for *_, tokens in rows])[:, None]
        prompts = torch.ones(len(rows), 4, dtype=torch.long)
        return DataProto.from_dict(
            {"prompts": prompts, "attention_mask": torch.cat([prompts, response.long()], dim=1)},
            meta_info={"metrics": metrics, "reward_extra_keys": ["acc"]},
        )


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_times_of_all_workers_are_in_the_merged_ones(workers):
    from ascend_rl.glue.rollout_manager import RolloutManager
    from verl import DataProto

    manager = object.__new__(RolloutManager)
    manager.rollout_config = OmegaConf.create({"name": "vllm", "use_tqdm": False})
    manager.agent_loop_workers = [Worker() for _ in range(workers)]
    manager.server_handles = []
    rows = DataProto.from_dict({"row": torch.arange(len(REQUESTS))[:, None]})
    output = manager.generate_sequences(rows)

    seconds, tools, preempted, _ = np.array(REQUESTS).T
    expected = {
        "slowest/generate_sequences": 6, "slowest/tool_calls": 5, "slowest/num_preempted": 1,
        "slowest/prompt_length": 4, "slowest/response_length": 60,
    }  # fmt: skip
    for name, values in (
        ("generate_sequences", seconds),
        ("tool_calls", tools),
        ("num_preempted", preempted),
    ):
        expected |= {f"{name}/min": values.min(), f"{name}/max": values.max(), f"{name}/mean": values.mean()}
    timing = output.meta_info.pop("timing")
    assert timing == pytest.approx({f"agent_loop/{key}": value for key, value in expected.items()})
    assert output.meta_info == {"reward_extra_keys": ["acc"]}


def test_rollouts_with_their_timing_cannot_be_joined():
    """Why dynamic sampling takes the timing out before it joins batches, and merges it by itself."""
    from verl import DataProto

    parts = [
        DataProto.from_dict({"x": torch.zeros(1, 1)}, meta_info={"timing": {"gen": s}}) for s in (1.0, 1.1)
    ]
    with pytest.raises(AssertionError, match="Conflicting values for meta_info key 'timing'"):
        DataProto.concat(parts)

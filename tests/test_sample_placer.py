"""What is remembered between rollouts; a batch goes out sorted by server and comes back in order."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ascend_rl.rollout.data_rebalance import place
from ascend_rl.rollout.sample_placer import KEY, Placer, attach

LENGTH = {"short": 2, "long": 9, "middle": 5}


class Batch:
    """As much of a DataProto as `attach` touches."""

    def __init__(self, prompts, lengths=(), **columns):
        self.non_tensor_batch = {"raw_prompt": np.array(prompts, dtype=object), **columns}
        width = max(lengths, default=0)
        mask = torch.arange(width) < torch.tensor(lengths).reshape(-1, 1)
        prompt_mask = torch.ones(len(lengths), 3, dtype=torch.bool)
        self.batch = {"responses": mask, "attention_mask": torch.cat([prompt_mask, mask], dim=1)}
        self.lengths, self.meta_info = list(lengths), {"timing": {}}

    def select_idxs(self, indices):
        columns = {key: values[indices] for key, values in self.non_tensor_batch.items()}
        lengths = [self.lengths[i] for i in indices] if self.lengths else []
        return Batch(columns.pop("raw_prompt"), lengths, **columns)


class Manager:
    """An AgentLoopManager that answers with LENGTH and notes which server got what."""

    def __init__(self, enabled):
        self.rollout_config = SimpleNamespace(get={"data_rebalance": enabled}.get)
        self.server_addresses, self.sent = ["a", "b"], []

    def generate_sequences(self, batch):
        columns = dict(batch.non_tensor_batch)
        prompts = columns.pop("raw_prompt")
        self.sent.append(list(zip(columns.get(KEY, prompts), prompts, strict=True)))
        return Batch(prompts, [LENGTH[prompt] for prompt in prompts], **columns)


def test_the_lengths_of_the_last_rollout_of_a_prompt_count():
    placer = Placer(["a", "b"])
    assert placer.place(["x", "x", "y", "z"])[1] == 0
    placer.learn(["x", "x", "y"], [100, 300, 7])
    placer.learn(["x", "z"], [4, 8])  # x again: 4 replaces 100 and 300
    placement, known = placer.place(["x", "y", "z", "new"])
    assert known == 0.75
    expected = place(["x", "y", "z", "new"], 2, np.array([4, 7, 8, np.nan]))
    assert placement.rank.tolist() == expected.rank.tolist()
    with pytest.raises(ValueError):
        placer.learn(["x", "y"], [1])


def test_a_batch_goes_out_by_servers_and_comes_back_in_order(counts):
    manager = Manager(True)
    attach(manager)
    prompts = ["short", "short", "long", "long", "middle", "middle"]
    marks, moved = np.arange(6), 0
    for known in (0, 1):
        batch = Batch(prompts, mark=marks)
        output = manager.generate_sequences(batch)
        assert output.non_tensor_batch["raw_prompt"].tolist() == prompts
        assert output.non_tensor_batch["mark"].tolist() == marks.tolist()
        assert KEY not in output.non_tensor_batch and KEY not in batch.non_tensor_batch
        assert output.meta_info["timing"] == {"data_rebalance/known_share": known}
        predicted = np.array([LENGTH[prompt] for prompt in prompts]) if known else None
        placed = place(prompts, 2, predicted)
        assert manager.sent[-1] == [("ab"[placed.rank[i]], prompts[i]) for i in placed.order]
        moved += sum(placed.rank != [0, 0, 0, 1, 1, 1])  # verl's order, cut into two parts
        assert counts() == {"data_rebalance": moved} | ({"known_lengths": 6} if known else {}) and moved > 0
    longest_first = [prompt for server, prompt in manager.sent[-1] if server == "a"]
    assert longest_first == ["long", "middle", "short"]


def test_switched_off_nothing_is_wrapped():
    manager = Manager(False)
    attach(manager)
    assert "generate_sequences" not in vars(manager)

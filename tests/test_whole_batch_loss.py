"""Counts, what the losses are told, and what is refused; on ranks of gloo where ranks matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import run_ranks

from ascend_rl.loss import whole_batch_loss
from ascend_rl.settings.switch import CannotWork

LENGTHS = [[3, 0, 8], [1, 1, 0], [0, 0, 0]]  # of three ranks


def actor(loss_mode: str = "vanilla", on: bool = True) -> dict:
    return {"whole_batch_loss": on, "policy_loss": {"loss_mode": loss_mode}, "global_batch_info": {}}


def mask_of(lengths: list[int]) -> torch.Tensor:
    return torch.arange(9) < torch.tensor(lengths)[:, None]


def on_a_rank(rank: int) -> list:
    mask, found = mask_of(LENGTHS[rank]), []
    pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([1, 2])]
    for group in (None, *pairs):
        found.append(None)
        if group is None or torch.distributed.get_rank(group) >= 0:
            found[-1] = whole_batch_loss.counts(mask, group, "cpu")
    return found


def test_tokens_and_responses_are_counted_over_the_ranks_of_a_group():
    ranks = run_ranks(3, on_a_rank)
    groups = [(0, 1, 2), (0, 1), (1, 2)]
    for number, members in enumerate(groups):
        lengths = np.array([LENGTHS[rank] for rank in members])
        expected = (lengths.sum(), (lengths > 0).sum(), lengths.size, len(members))
        assert [found[number] for found in ranks] == [expected if r in members else None for r in range(3)]


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "gspo_token"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_losses_divide_by_the_whole_mini_batch_and_never_by_zero(loss_mode, lengths):
    """GSPO's mean has the responses without tokens, other terms and losses do not."""
    config = actor(loss_mode)
    config["global_batch_info"]["loss_scale_factor"] = 7
    terms = whole_batch_loss.prepare(config, mask_of(lengths), 5, None, "cpu")
    some = max(1, sum(length > 0 for length in lengths))
    assert terms == {"dp_size": 5, "batch_num_tokens": max(1, sum(lengths)), "global_batch_size": some}
    policy = terms | {"global_batch_size": some if loss_mode == "vanilla" else 3, "loss_scale_factor": 7}
    assert config["global_batch_info"] == policy


def test_switched_off_nothing_is_told_or_scaled():
    config = actor(on=False)
    assert whole_batch_loss.prepare(config, mask_of([3]), 5, None, "cpu") == {}
    assert config["global_batch_info"] == {}
    assert whole_batch_loss.scale(config, 0.3, 5) == 0.3 and whole_batch_loss.scale(actor(), 0.3, 5) == 0.2
    whole_batch_loss.check(actor("geo_mean", on=False))


def test_a_loss_that_knows_no_counts_is_refused():
    whole_batch_loss.check(actor("gspo"))
    with pytest.raises(
        CannotWork, match="whole_batch_loss=True is incompatible with this configuration:\n.*geo_mean"
    ):
        whole_batch_loss.check(actor("geo_mean"))

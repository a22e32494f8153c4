"""GSPO in verl: through its registered loss functions, its aggregation modes and its metric reduction."""

from __future__ import annotations

import math
import subprocess
import types

import numpy as np
import pytest
import torch

from ascend_rl.settings.stack import DEFAULT, NAME

LOW, HIGH = 0.03, 0.04
MODES = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def config(loss_mode: str, **global_batch_info):
    from verl.workers.config import FSDPActorConfig, OptimizerConfig
    from verl.workers.config.actor import PolicyLossConfig

    return FSDPActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=4,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
        global_batch_info=global_batch_info,
        optim=OptimizerConfig(lr=1.0),
        loss_scale_factor=17,
    )


def batch(seed: int = 0, rows: int = 16, width: int = 11) -> dict[str, torch.Tensor]:
    """float64; row 1 is empty, row 0 full, the others have holes, as multi-turn responses have."""
    generator = np.random.default_rng(seed)
    mask = generator.random((rows, width)) < 0.7
    mask[0], mask[1] = True, False
    old = -generator.exponential(1.0, (rows, width))
    new = old + 0.1 * generator.normal(size=(rows, width)) + 0.04 * generator.normal(size=(rows, 1))
    return {
        "old_log_prob": torch.tensor(old),
        "log_prob": torch.tensor(new),
        "advantages": torch.tensor(generator.normal(size=(rows, 1)) * np.ones((rows, width))),
        "response_mask": torch.tensor(mask).long(),
    }


def loss_and_gradient(inputs: dict, mode: str, actor_config, scale: float = 1.0):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    log_prob = inputs["log_prob"].clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(actor_config.policy_loss.loss_mode)(
        **(inputs | {"log_prob": log_prob}), loss_agg_mode=mode, config=actor_config
    )
    (loss * scale).backward()
    return loss.item() * scale, log_prob.grad, metrics


def reference(inputs: dict, mode: str) -> float:
    """The objective of arXiv 2507.18071 (constant advantages), aggregated as verl defines each mode."""
    old, new, advantages, mask = (
        inputs[k].double().numpy() for k in ("old_log_prob", "log_prob", "advantages", "response_mask")
    )
    sequences, lengths = [], []
    for i in range(len(new)):
        chosen = mask[i] > 0
        lengths.append(int(chosen.sum()))
        ratio = math.exp((new[i] - old[i])[chosen].mean()) if chosen.any() else 0.0
        sequences.append(
            -min(ratio * advantages[i, 0], min(max(ratio, 1 - LOW), 1 + HIGH) * advantages[i, 0])
            if chosen.any()
            else 0.0
        )
    tokens = sum(loss * length for loss, length in zip(sequences, lengths, strict=True))
    return {
        "seq-mean-token-mean": sum(sequences) / len(sequences),
        "token-mean": tokens / sum(lengths),
        "seq-mean-token-sum": tokens / len(sequences),
        "seq-mean-token-sum-norm": tokens / len(sequences) / 17,
    }[mode]


@pytest.mark.parametrize("loss_mode", ["gspo", "gspo_token"])
@pytest.mark.parametrize("mode", MODES)
def test_loss_agg_mode_is_honoured(loss_mode, mode):
    inputs = batch()
    loss, _, _ = loss_and_gradient(inputs, mode, config(loss_mode))
    assert loss == pytest.approx(reference(inputs, mode), rel=1e-6)


@pytest.mark.parametrize("loss_mode", ["gspo", "gspo_token"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks,micro_batches", [(1, 4), (2, 2), (4, 4)])
def test_splitting_over_ranks_and_micro_batches_changes_nothing(loss_mode, mode, ranks, micro_batches):
    """Engine workers: verl tells the global sizes, ranks average their gradients."""
    inputs = batch()
    rows, tokens = len(inputs["log_prob"]), int(inputs["response_mask"].sum())
    whole_loss, whole_gradient, _ = loss_and_gradient(inputs, mode, config(loss_mode))
    share = rows // ranks // micro_batches
    total, gradients = 0.0, []
    for start in range(0, rows, share):
        part = {k: v[start : start + share] for k, v in inputs.items()}
        actor_config = config(
            loss_mode, dp_size=ranks, batch_num_tokens=tokens, global_batch_size=rows, loss_scale_factor=17
        )
        loss, gradient, _ = loss_and_gradient(part, mode, actor_config)
        total += loss / ranks
        gradients.append(gradient / ranks)
    assert total == pytest.approx(whole_loss, abs=1e-6)
    torch.testing.assert_close(torch.cat(gradients), whole_gradient, atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "token-mean"])
@pytest.mark.parametrize("micro_batches", [2, 4, 16])
def test_the_actor_that_knows_no_global_sizes_is_split_invariant_too(mode, micro_batches):
    """dp_actor scales each micro-batch by its share of rows; the empty row must count."""
    inputs = batch()
    whole_loss, whole_gradient, _ = loss_and_gradient(inputs, mode, config("gspo"))
    parts = [
        loss_and_gradient(
            {k: v.chunk(micro_batches)[i] for k, v in inputs.items()}, mode, config("gspo"), 1 / micro_batches
        )
        for i in range(micro_batches)
    ]
    assert sum(loss for loss, _, _ in parts) == pytest.approx(whole_loss, abs=1e-6)
    torch.testing.assert_close(torch.cat([g for _, g, _ in parts]), whole_gradient, atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [0, 5])
def test_a_micro_batch_without_tokens_has_loss_0(mode, rows):
    """Of every loss where the actor knows the sizes of the mini-batch; GSPO's where it does not, too."""
    from ascend_rl.loss import whole_batch_loss
    from ascend_rl.settings.switch import CannotWork
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    whole = batch()["response_mask"]
    known, empty = [], {key: column[:rows] * (key != "response_mask") for key, column in batch().items()}
    for loss_mode in POLICY_LOSS_REGISTRY.keys() - {"bypass_mode", "dro"}:  # refused by name; needs dro_beta
        actor_config = config(loss_mode)
        object.__setattr__(actor_config, "whole_batch_loss", True)
        try:
            whole_batch_loss.check(actor_config)
        except CannotWork:
            continue
        for mask in (whole, whole * 0):
            actor_config.global_batch_info.clear()
            whole_batch_loss.prepare(actor_config, mask, 3, None, "cpu")
            loss, gradient, _ = loss_and_gradient(empty, mode, actor_config)
            assert loss == 0 and not gradient.any(), loss_mode
        known.append(loss_mode)
    assert {"vanilla", "gspo", "gspo_token"} < set(known)
    for loss_mode in ("gspo", "gspo_token"):
        loss, gradient, _ = loss_and_gradient(empty, mode, config(loss_mode))
        assert loss == 0 and not gradient.any(), loss_mode


@pytest.mark.skipif(NAME != DEFAULT, reason="verl's engine workers summarise each micro-batch")
@pytest.mark.parametrize("info", [{}, {"dp_size": 8, "batch_num_tokens": 90, "global_batch_size": 16}])
def test_metrics_of_micro_batches_and_ranks_meet_exactly(info):
    """Of micro-batches of different sizes, whether they know the sizes of the whole batch or not."""
    from verl import DataProto
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import append_to_dict

    inputs = batch(rows=16)
    per_rank = []
    for rank in range(2):
        metrics: dict = {}
        for start, end in ((0, 1), (1, 3), (3, 8)):
            part = {k: v[rank * 8 + start : rank * 8 + end] for k, v in inputs.items()}
            actor_config = config("gspo", **info)
            append_to_dict(metrics, loss_and_gradient(part, "seq-mean-token-mean", actor_config)[2])
        per_rank.append(DataProto(meta_info={"metrics": metrics}))
    reduced = reduce_metrics(DataProto.concat(per_rank).meta_info["metrics"])

    mask = inputs["response_mask"].bool()
    difference = inputs["log_prob"] - inputs["old_log_prob"]
    full = [i for i in range(16) if mask[i].any()]
    ratios = np.array([difference[i][mask[i]].mean().exp().item() for i in full])
    advantages = inputs["advantages"][full, 0].numpy()
    assert reduced["actor/gspo/seq_ratio/mean"] == pytest.approx(ratios.mean())
    assert reduced["actor/gspo/seq_ratio/max"] == pytest.approx(ratios.max())
    assert reduced["actor/gspo/seq_ratio/p05"] == pytest.approx(np.quantile(ratios, 0.05))
    high, low = (
        ((ratios > 1 + HIGH) & (advantages > 0)).mean(),
        ((ratios < 1 - LOW) & (advantages < 0)).mean(),
    )
    assert high > 0 and low > 0
    assert reduced["actor/gspo/clipfrac_high"] == pytest.approx(high)
    assert reduced["actor/gspo/clipfrac_low"] == pytest.approx(low)
    assert reduced["actor/pg_clipfrac"] == pytest.approx(high + low)
    assert "actor/ppo_kl" in reduced


def test_engine_workers_get_numbers():
    """They sum or average what `ppo_loss` reports, and know no lists."""
    from verl.utils.metric import Metric
    from verl.utils.tensordict_utils import get_tensordict
    from verl.workers.utils import losses

    inputs = {name: value.float() for name, value in batch(rows=4).items()}
    log_prob = inputs.pop("log_prob")
    sizes = {"dp_size": 1, "batch_num_tokens": 30, "global_batch_size": 4}
    data = get_tensordict(inputs | {"old_log_probs": inputs.pop("old_log_prob")}, sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "no_padding_2_padding", lambda values, data: values)
        _, metrics = losses.ppo_loss(config("gspo"), {"log_probs": log_prob}, data)
    assert "actor/gspo/seq_ratio/p95" in metrics
    assert all(np.isscalar(m.aggregate() if isinstance(m, Metric) else m) for m in metrics.values())


@pytest.mark.parametrize("loss_mode", ["vanilla", "sapo", "geo_mean", "gpg", "cispo"])
def test_other_losses_are_as_upstream(loss_mode, frameworks):
    """Switched off, nothing changes: the losses of the unpatched module, bit by bit."""
    from verl.trainer.ppo import core_algos

    source = subprocess.run(
        ["git", "-C", frameworks / "verl", "show", "ascend-rl-base:verl/trainer/ppo/core_algos.py"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    upstream = types.ModuleType("upstream_core_algos")
    exec(compile(source, "upstream_core_algos.py", "exec"), upstream.__dict__)
    inputs = batch()
    inputs["response_mask"][1] = 1  # upstream has its own view of empty rows
    for mode in MODES[:3]:
        ours = core_algos.get_policy_loss_fn(loss_mode)(
            **inputs, loss_agg_mode=mode, config=config(loss_mode)
        )
        theirs = upstream.get_policy_loss_fn(loss_mode)(
            **inputs, loss_agg_mode=mode, config=config(loss_mode)
        )
        assert torch.equal(ours[0], theirs[0]) and ours[1] == theirs[1]

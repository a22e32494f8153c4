"""GSPO's value and gradient against a float64 reference from arXiv 2507.18071, and traps of other code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_rl.loss import gspo

LOW, HIGH = 3e-2, 4e-2


def batch(seed: int, rows: int = 6, width: int = 9, spread: float = 0.1, constant: bool = False) -> dict:
    """Random float64 inputs; masks have holes (tool output), full rows (truncated) and empty rows."""
    generator = np.random.default_rng(seed)
    mask = generator.random((rows, width)) < 0.7
    mask[0] = True
    if rows > 1:
        mask[1] = False
    old = -generator.exponential(1.0, (rows, width))
    advantages = generator.normal(size=(rows, 1 if constant else width)) * np.ones((rows, width))
    return {
        "old_log_prob": torch.tensor(old),
        "log_prob": torch.tensor(
            old + spread * generator.normal(size=(rows, width)) + 0.05 * generator.normal(size=(rows, 1))
        ),
        "advantages": torch.tensor(advantages),
        "response_mask": torch.tensor(mask),
    }


def reference(inputs: dict, token_level: bool) -> tuple[float, np.ndarray]:
    """Mean over responses of eq. 5 or eq. 13, and its gradient, derived by hand, in plain loops."""
    old, new, advantages, mask = (
        inputs[k].double().numpy() for k in ("old_log_prob", "log_prob", "advantages", "response_mask")
    )
    rows = len(new)
    loss, gradient = 0.0, np.zeros_like(new)
    for i in range(rows):
        tokens = [t for t in range(new.shape[1]) if mask[i, t]]
        if not tokens:
            continue
        length = len(tokens)
        ratio = math.exp(sum(new[i, t] - old[i, t] for t in tokens) / length)
        clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
        if token_level:
            terms = [(advantages[i, t], [t]) for t in tokens]
        else:
            terms = [(sum(advantages[i, t] for t in tokens) / length, tokens)]
        for advantage, touched in terms:
            objective = min(ratio * advantage, clipped * advantage)
            loss -= objective / len(terms) / rows
            if ratio * advantage <= clipped * advantage:
                for t in touched:
                    gradient[i, t] -= ratio * advantage / len(terms) / len(touched) / rows
    return loss, gradient


def seq_mean_token_mean(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (losses.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def ours(inputs: dict, token_level: bool) -> tuple[torch.Tensor, torch.Tensor, dict]:
    log_prob = inputs["log_prob"].clone().requires_grad_()
    losses, stats = gspo.policy_losses(
        **(inputs | {"log_prob": log_prob}), clip_ratio_low=LOW, clip_ratio_high=HIGH, token_level=token_level
    )
    loss = seq_mean_token_mean(losses, inputs["response_mask"])
    loss.backward()
    return loss.detach(), log_prob.grad, stats


@pytest.mark.parametrize("token_level", [False, True])
@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 8), width=st.integers(1, 12))
def test_value_and_gradient_equal_the_paper(token_level, seed, rows, width):
    inputs = batch(seed, rows, width)
    loss, gradient, _ = ours(inputs, token_level)
    expected_loss, expected_gradient = reference(inputs, token_level)
    assert loss.item() == pytest.approx(expected_loss, abs=1e-12)
    np.testing.assert_allclose(gradient.numpy(), expected_gradient, atol=1e-12)


def test_the_reference_clips():
    """Guards the test above: its inputs reach both bounds."""
    _, _, stats = ours(batch(0, rows=64), False)
    assert np.nansum(stats[gspo.CLIP_HIGH]) > 3 and np.nansum(stats[gspo.CLIP_LOW]) > 3


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30)
def test_both_variants_agree_for_constant_advantages(seed):
    inputs = batch(seed, constant=True)
    (loss, gradient, _), (loss_token, gradient_token, _) = ours(inputs, False), ours(inputs, True)
    torch.testing.assert_close(loss, loss_token, atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient, gradient_token, atol=1e-12, rtol=0)


def test_both_variants_differ_for_token_advantages():
    inputs = batch(3)
    assert not torch.allclose(ours(inputs, False)[1], ours(inputs, True)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("token_level", [False, True])
def test_on_policy_ratio_is_exactly_one(dtype, token_level):
    inputs = {k: v if v.dtype == torch.bool else v.to(dtype) for k, v in batch(1).items()}
    inputs["old_log_prob"] = inputs["log_prob"].clone()
    _, stats = gspo.policy_losses(**inputs, clip_ratio_low=LOW, clip_ratio_high=HIGH, token_level=token_level)
    ratios = stats[gspo.SEQ_RATIO]
    assert torch.equal(ratios[~ratios.isnan()], torch.ones_like(ratios[~ratios.isnan()]))


def test_a_ratio_at_the_bound_is_not_clipped():
    """On-policy ratios with a clip range of 0."""
    inputs = batch(1)
    inputs["old_log_prob"] = inputs["log_prob"].clone()
    _, stats = gspo.policy_losses(**inputs, clip_ratio_low=0, clip_ratio_high=0, token_level=False)
    assert not np.nansum(stats[gspo.CLIP_HIGH]) and not np.nansum(stats[gspo.CLIP_LOW])


def test_ratio_is_the_exponential_of_the_mean_not_the_mean_of_exponentials():
    inputs = batch(2, spread=1.0)
    _, _, stats = ours(inputs, False)
    difference = (inputs["log_prob"] - inputs["old_log_prob"])[0]
    assert stats[gspo.SEQ_RATIO][0].item() == pytest.approx(difference.mean().exp().item())
    assert stats[gspo.SEQ_RATIO][0].item() != pytest.approx(difference.exp().mean().item())
    assert stats[gspo.SEQ_RATIO][0].item() != pytest.approx(difference.sum().exp().item())


def test_padding_does_not_count_in_the_length():
    """A response of 4 tokens has the same loss padded to 4 or to 4000 (a trap of trl and ROLL)."""
    inputs = batch(4, rows=3, width=4)
    inputs["response_mask"][:] = True
    padded = {k: torch.nn.functional.pad(v, (0, 3996)) for k, v in inputs.items()}
    for token_level in (False, True):
        torch.testing.assert_close(ours(inputs, token_level)[0], ours(padded, token_level)[0])


@pytest.mark.parametrize("poison", [float("nan"), float("-inf")])
@pytest.mark.parametrize("token_level", [False, True])
def test_masked_tokens_do_not_matter(poison, token_level):
    inputs = batch(5)
    loss, gradient, _ = ours(inputs, token_level)
    poisoned = inputs | {"log_prob": inputs["log_prob"].masked_fill(~inputs["response_mask"], poison)}
    loss_poisoned, gradient_poisoned, _ = ours(poisoned, token_level)
    assert torch.equal(loss, loss_poisoned) and torch.equal(gradient, gradient_poisoned)
    assert torch.equal(
        gradient[~inputs["response_mask"]], torch.zeros(int((~inputs["response_mask"]).sum())).double()
    )


@pytest.mark.parametrize("token_level", [False, True])
def test_a_token_that_both_policies_rule_out_has_ratio_one_and_no_gradient(token_level):
    """Its log-probs are -inf without being masked; all others count as if its ratio were exactly 1."""
    inputs = batch(4, spread=0.001)
    ruled_out = dict(inputs)
    for name in ("old_log_prob", "log_prob"):
        ruled_out[name] = inputs[name].clone()
        ruled_out[name][0, 3] = -torch.inf
    inputs["log_prob"][0, 3] = inputs["old_log_prob"][0, 3]
    loss, gradient, stats = ours(ruled_out, token_level)
    expected, slopes, expected_stats = ours(inputs, token_level)
    slopes[0, 3] = 0
    assert torch.isfinite(loss) and loss == expected and torch.equal(gradient, slopes)
    assert all(torch.equal(stats[name][0], expected_stats[name][0]) for name in stats)


@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize("name", ["old_log_prob", "log_prob"])
def test_a_token_that_one_policy_rules_out_gives_no_nan(name, token_level):
    inputs = batch(4)
    inputs[name][0, 3] = -torch.inf
    loss, gradient, stats = ours(inputs, token_level)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()
    assert stats[gspo.SEQ_RATIO][0] == (0 if name == "log_prob" else math.exp(gspo.LOG_RATIO_MAX))


@pytest.mark.parametrize("token_level", [False, True])
def test_nan_of_a_broken_model_is_not_hidden(token_level):
    inputs = batch(4)
    inputs["log_prob"][0, 3] = torch.nan
    assert torch.isnan(ours(inputs, token_level)[0])


@pytest.mark.parametrize("name", ["old_log_prob", "advantages", "response_mask"])
@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_what_would_broadcast_is_refused(name, shape):
    inputs = batch(6)
    inputs[name] = inputs[name][:, 0].reshape(shape)
    with pytest.raises(ValueError, match="one shape"):
        gspo.policy_losses(**inputs, clip_ratio_low=LOW, clip_ratio_high=HIGH, token_level=False)


def test_extreme_ratios_stay_finite():
    inputs = batch(7)
    inputs["log_prob"] = inputs["log_prob"] + 1e4
    for token_level in (False, True):
        loss, gradient, _ = ours(inputs, token_level)
        assert torch.isfinite(loss) and torch.isfinite(gradient).all()


@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize("log_ratio, cut", [(9.9, 9.9), (10.1, 10.0), (1e4, 10.0), (-30.0, -30.0)])
def test_log_ratios_are_cut_at_10_and_beyond_it_nothing_is_trained(token_level, log_ratio, cut):
    """A negative advantage, for which the ratio is not clipped from above."""
    old = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    inputs = {
        "old_log_prob": old,
        "log_prob": old + log_ratio,
        "advantages": -torch.ones_like(old),
        "response_mask": torch.ones_like(old, dtype=torch.bool),
    }
    loss, gradient, stats = ours(inputs, token_level)
    assert stats[gspo.SEQ_RATIO].item() == pytest.approx(math.exp(cut))
    assert loss.item() == pytest.approx(max(math.exp(cut), 1 - LOW))
    assert gradient.any() == (0 < log_ratio < 10)


def test_metrics_are_those_of_the_whole_batch_however_it_is_split():
    inputs = batch(8, rows=24)
    _, _, stats = ours(inputs, False)
    whole = gspo.summarise(gspo.sequence_metrics(stats))

    parts = []
    # One of the parts holds only the empty row.
    for rows in (slice(0, 1), slice(1, 2), slice(2, 11), slice(11, 24)):
        part = {k: v[rows] for k, v in inputs.items()}
        parts.append(gspo.sequence_metrics(ours(part, False)[2]))
    # As DataProto.concat.
    by_rank = {k: [parts[0][k] + parts[1][k], parts[2][k] + parts[3][k]] for k in parts[0]}
    assert gspo.summarise(by_rank) == pytest.approx(whole)

    ratios = [
        math.exp((inputs["log_prob"] - inputs["old_log_prob"])[i][inputs["response_mask"][i]].mean())
        for i in range(24)
        if inputs["response_mask"][i].any()
    ]
    advantages = [
        inputs["advantages"][i][inputs["response_mask"][i]].mean().item()
        for i in range(24)
        if inputs["response_mask"][i].any()
    ]
    high = np.mean([r > 1 + HIGH and a > 0 for r, a in zip(ratios, advantages, strict=True)])
    low = np.mean([r < 1 - LOW and a < 0 for r, a in zip(ratios, advantages, strict=True)])
    assert whole == pytest.approx(
        {
            f"{gspo.SEQ_RATIO}/mean": np.mean(ratios),
            f"{gspo.SEQ_RATIO}/min": min(ratios),
            f"{gspo.SEQ_RATIO}/max": max(ratios),
            f"{gspo.SEQ_RATIO}/p05": np.quantile(ratios, 0.05),
            f"{gspo.SEQ_RATIO}/p50": np.median(ratios),
            f"{gspo.SEQ_RATIO}/p95": np.quantile(ratios, 0.95),
            gspo.CLIP_HIGH: high,
            gspo.CLIP_LOW: low,
            "actor/pg_clipfrac": high + low,
        }
    )
    assert high > 0 and low > 0


def test_other_metrics_pass_through():
    metrics = {"actor/pg_loss": [1.0, 2.0]}
    assert gspo.summarise(metrics) == metrics

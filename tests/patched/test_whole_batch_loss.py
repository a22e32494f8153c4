"""verl's Megatron and FSDP actors on two data-parallel ranks: the gradient is that of one loss over the whole
mini-batch, by Hugging Face in float64, although micro-batches by tokens hold 1 or 3 sequences.

One worker of each kind makes a series of updates, each with another loss, so that errors add up.
"""

from __future__ import annotations

import pytest
import torch
from megatron_tiny import (
    RESPONSE,
    Layout,
    exported,
    hugging_face,
    make_batch,
    make_checkpoint,
    make_worker,
    own_share,
    response_log_probs,
)
from patched.test_compute_old_log_prob import fsdp_worker
from ranks import run_ranks

ACTOR = "actor_rollout_ref.actor"
RATE, EPSILON, COEFFICIENT, CLIP_LOW, CLIP_HIGH = 1e-3, 1e-4, 0.1, 0.9, 9.0
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
# (loss, aggregation, KL and entropy terms) of each update
UPDATES = [
    ("vanilla", "token-mean", False),
    ("vanilla", "seq-mean-token-mean", False),
    ("gspo", "seq-mean-token-mean", False),
    ("gspo", "token-mean", False),
    ("vanilla", "token-mean", True),
    ("gspo", "seq-mean-token-mean", True),
]
COMMON = (
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=64",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=64",
    f"{ACTOR}.clip_ratio_low={CLIP_LOW}",
    f"{ACTOR}.clip_ratio_high={CLIP_HIGH}",
    f"{ACTOR}.kl_loss_coef={COEFFICIENT}",
    f"{ACTOR}.kl_loss_type=k2",
    f"{ACTOR}.optim.lr={RATE}",
    f"{ACTOR}.optim.weight_decay=0",
    f"{ACTOR}.optim.clip_grad=1e9",
)
MEGATRON = (f"+{ACTOR}.optim.override_optimizer_config.adam_eps={EPSILON}",)
FSDP = (f"{ACTOR}.optim.override_optimizer_config={{eps: {EPSILON}}}", f"{ACTOR}.grad_clip=1e9")
WORKERS = {"megatron": (Layout(), MEGATRON), "megatron pp2": (Layout(pp=2), MEGATRON), "fsdp": (None, FSDP)}


def batch() -> dict[str, torch.Tensor]:
    """Sequences of 9 to 40 tokens with 0 to 8 that count; old log-probs are off, so that ratios are not 1."""
    generator = torch.Generator().manual_seed(7)
    counted = torch.tensor([8, 3, 0, 2, 8, 6, 1, 7])
    offsets = 0.02 * torch.randn(2, 8, RESPONSE, generator=generator)
    mask = (torch.arange(RESPONSE) < counted[:, None]).float()
    old = -4.5 + offsets[0]
    return make_batch() | {"response_mask": mask, "old_log_probs": old, "ref_log_prob": -4.5 + offsets[1]}


def empty(batch: dict[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    mask = batch["response_mask"].clone()
    mask[rows] = 0
    return batch | {"response_mask": mask}


def set_loss(actor, loss: str, aggregation: str, terms: bool) -> None:
    for name, value in {
        "loss_agg_mode": aggregation,
        "use_kl_loss": terms,
        "entropy_coeff": COEFFICIENT * terms,
        "use_rollout_log_probs": True,  # else the FSDP actor takes its own as the old ones in a single update
    }.items():
        object.__setattr__(actor.config, name, value)
    object.__setattr__(actor.config.policy_loss, "loss_mode", loss)
    actor.config.global_batch_info.clear()


def learn(kind: str, path, on: bool) -> dict:
    layout, overrides = WORKERS[kind]
    overrides = *COMMON, *overrides, f"{ACTOR}.whole_batch_loss={on}"
    worker = make_worker(layout, path, *overrides) if layout else fsdp_worker(path, *overrides)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def update(rows: dict[str, torch.Tensor]) -> dict:
        share = own_share(rows) if layout else own_share(rows, rank, size)
        return worker.update_actor(share).meta_info["metrics"]

    result: dict = {"norms": [], "losses": []}
    for loss in UPDATES if on else UPDATES[:1]:
        set_loss(worker.actor, *loss)
        metrics = update(batch())
        result["norms"].append(torch.tensor(metrics["actor/grad_norm"]).mean().item())
        result["losses"].append(metrics.get("actor/pg_loss"))
    if on:
        if layout:
            weights = exported(worker)
        else:
            state = worker.actor_module_fsdp.state_dict()
            weights = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}
        result["weights"] = {k: v.detach().clone().numpy() for k, v in weights.items()}
        for aggregation in ("token-mean", "seq-mean-token-mean"):
            set_loss(worker.actor, "vanilla", aggregation, True)
            metrics = update(empty(batch(), slice(None)))
            result["norms"].append(torch.tensor(metrics["actor/grad_norm"]).mean().item())
    return result


def workers(rank: int, path) -> dict:
    return {(kind, on): learn(kind, path, on) for kind in WORKERS for on in (True, False)}


def whole_loss(model, rows: dict[str, torch.Tensor], loss: str, aggregation: str, terms: bool):
    """One loss over all rows, from the definitions, without a line of verl."""
    new, mask, old = response_log_probs(model, rows), rows["response_mask"], rows["old_log_probs"]
    lengths, seen = mask.sum(-1), mask.sum(-1) > 0

    def mean(matrix, responses):
        per_response = (matrix * mask).sum(-1)
        if aggregation == "token-mean":
            return per_response.sum() / mask.sum()
        return (per_response / lengths.clamp(min=1)).sum() / responses

    if loss == "gspo":
        log_ratio = (((new - old) * mask).sum(-1) / lengths.clamp(min=1))[:, None].expand_as(new)
    else:
        log_ratio = new - old
    ratio, advantages = log_ratio.exp(), rows["advantages"]
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if loss == "vanilla":  # verl's second clip, for negative advantages
        objective = torch.where(advantages < 0, torch.maximum(objective, 3 * advantages), objective)
    value = policy = -mean(objective, len(mask) if loss == "gspo" else seen.sum())
    if terms:
        logits = model(**{k: rows[k] for k in ("input_ids", "attention_mask", "position_ids")}).logits
        log_p = logits[:, -RESPONSE - 1 : -1].log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        kl = (new - rows["ref_log_prob"]) ** 2 / 2
        value = policy + COEFFICIENT * (mean(kl, seen.sum()) - mean(entropy, seen.sum()))
    return value, policy


def reference(path) -> dict:
    model = hugging_face(path).double()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, eps=EPSILON, betas=(0.9, 0.999), weight_decay=0
    )
    rows = {k: v.double() if v.is_floating_point() else v for k, v in batch().items()}
    norms, losses = [], []
    for update in UPDATES:
        optimizer.zero_grad()
        loss, policy = whole_loss(model, rows, *update)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        losses.append(policy.item())
        optimizer.step()
    return {"norms": norms, "losses": losses, "weights": model.state_dict()}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    path = make_checkpoint("dense", tmp_path_factory.mktemp("models") / "dense", layers=2)
    return run_ranks(2, workers, path), reference(path)


@pytest.mark.parametrize("kind", WORKERS)
def test_the_gradient_is_that_of_one_loss_over_the_mini_batch(learnt, kind):
    ranks, expected = learnt
    assert min(expected["norms"]) > 0.01
    for results in ranks:
        assert results[kind, True]["norms"][: len(UPDATES)] == pytest.approx(expected["norms"], rel=1e-5)
    for name, value in ranks[0][kind, True]["weights"].items():
        error = (expected["weights"][name] - torch.from_numpy(value)).abs().max().item()
        assert error < 5e-6, f"{name} differs by {error}"


@pytest.mark.parametrize("kind", WORKERS)
def test_the_reported_loss_is_that_of_the_mini_batch(learnt, kind):
    """The mean over micro-batches and ranks, as the trainer takes it, without entropy and KL terms."""
    ranks, expected = learnt
    reported = [
        [torch.tensor(loss).mean() for loss in results[kind, True]["losses"] if loss is not None]
        for results in ranks
    ]
    means = torch.tensor([found for found in reported if found]).mean(0)
    torch.testing.assert_close(means, torch.tensor(expected["losses"]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", WORKERS)
def test_switched_off_the_split_changes_the_gradient(learnt, kind):
    """Else the equality above would say nothing; switched off is what verl does."""
    ranks, expected = learnt
    assert ranks[0][kind, False]["norms"][0] != pytest.approx(expected["norms"][0], rel=1e-3)


@pytest.mark.parametrize("kind", WORKERS)
def test_a_mini_batch_without_tokens_has_no_gradient(learnt, kind):
    assert learnt[0][0][kind, True]["norms"][len(UPDATES) :] == [0, 0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "gspo_token"])
def test_losses_of_micro_batches_add_up_to_that_of_the_batch(mode, loss_mode):
    """All aggregations, in float64, with an empty row, an empty micro-batch and an empty mini-batch."""
    from patched import test_gspo

    from ascend_rl.loss import whole_batch_loss
    from verl.trainer.ppo.core_algos import agg_loss

    micro_batches = [[0], [1], [2, 3, 4, 5, 6], [7, 8], list(range(9, 16))]
    for rows in (test_gspo.batch(), empty(test_gspo.batch(), slice(None))):
        known = test_gspo.config(loss_mode)
        object.__setattr__(known, "whole_batch_loss", True)
        mask = rows["response_mask"]
        terms = whole_batch_loss.prepare(known, mask, len(micro_batches), None, "cpu")
        policies, gradients, others = [], [], []
        for part in micro_batches:
            own = {name: column[part] for name, column in rows.items()}
            loss, gradient, _ = test_gspo.loss_and_gradient(own, mode, known, 1 / len(micro_batches))
            policies.append(loss)
            gradients.append(gradient)
            others.append(agg_loss(own["log_prob"], own["response_mask"], mode, **terms))
        if not mask.any():
            assert policies == [0] * 5 and not torch.cat(gradients).any() and not sum(others)
            continue
        config = test_gspo.config(loss_mode)
        loss, gradient, _ = test_gspo.loss_and_gradient(rows, mode, config)
        assert sum(policies) == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(torch.cat(gradients), gradient, rtol=1e-6, atol=1e-9)
        whole = agg_loss(rows["log_prob"], mask, mode)
        assert sum(others).item() / len(micro_batches) == pytest.approx(whole.item(), rel=1e-6)

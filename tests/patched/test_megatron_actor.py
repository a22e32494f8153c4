"""verl's Megatron actor on megatron-core 0.12.1 learns the same in every layout, and resumes correctly.

The oracle is the loss of verl on Hugging Face's log-probs, one process, differentiated by torch: gradient
norms and the weights after two updates by AdamW agree. A checkpoint saved by verl's manager and loaded into a
changed worker gives the same next update bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from megatron_tiny import (
    Layout,
    exported,
    hugging_face,
    make_batch,
    make_checkpoint,
    make_worker,
    own_share,
    response_log_probs,
)
from ranks import run_ranks

pytestmark = pytest.mark.long

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(pp=2),
    Layout(cp=2),
    Layout(tp=2, pp=2),
    Layout(tp=2, cp=2),
    Layout("moe"),
    Layout("moe", ep=2),
    Layout("moe", ep=4),
    Layout("moe", tp=2, ep=2),
    Layout("moe", pp=2, ep=2),
    Layout("moe", cp=2, ep=2),
    Layout("moe", tp=2, pp=2, ep=2),
]
RESUMED = (Layout(tp=2, pp=2), Layout("moe", tp=2, ep=2), Layout("moe", pp=2, ep=2))
UPDATES, LEARNING_RATE, EPSILON, WEIGHT_DECAY, CLIP = 2, 1e-2, 1e-4, 0.01, 1.0
# AdamW divides by sqrt(v) + EPSILON: a large one keeps rounding errors of vanishing gradients from becoming
# steps.
OVERRIDES = (
    f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
    f"+actor_rollout_ref.actor.optim.override_optimizer_config.adam_eps={EPSILON}",
    f"actor_rollout_ref.actor.optim.weight_decay={WEIGHT_DECAY}",
    f"actor_rollout_ref.actor.optim.clip_grad={CLIP}",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]",
)


def update(worker, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor, dict]:
    """One update of the actor; returns the gradient norm, the log-probs before, the metrics."""
    share = own_share(batch)
    log_probs = worker.compute_log_prob(own_share(batch)).batch["old_log_probs"]
    share.batch["old_log_probs"] = log_probs
    metrics = worker.update_actor(share).meta_info["metrics"]
    norm = metrics["actor/grad_norm"]
    return norm[0] if isinstance(norm, list) else norm, log_probs, metrics


def learn_in(rank: int, layouts: list[Layout], paths: dict, directory) -> list[dict]:
    batch, results = make_batch(), []
    for layout in layouts:
        worker = make_worker(layout, paths[layout.kind], *OVERRIDES)
        norms = [update(worker, batch)[0] for _ in range(UPDATES)]
        weights = exported(worker)
        result = {
            "norms": norms,
            "weights": {k: v.numpy() for k, v in weights.items()} if rank == 0 else None,
        }
        if layout in RESUMED:
            result["resumed"] = resumes(worker, batch, directory / str(layout).replace(" ", "_"))
        results.append(result)
    return results


def resumes(worker, batch, path) -> dict[str, bool]:
    saved = exported(worker)
    worker.save_checkpoint(str(path))
    first_norm, first = update(worker, batch)[0], exported(worker)
    update(worker, batch)
    worker.load_checkpoint(str(path), del_local_after_load=False)
    loaded = exported(worker)
    second_norm, second = update(worker, batch)[0], exported(worker)
    return {
        "the update changes weights": any(not torch.equal(saved[k], first[k]) for k in saved),
        "loaded weights are the saved ones": all(torch.equal(saved[k], loaded[k]) for k in saved),
        "the next gradient norm is the same": first_norm == second_norm,
        "the next weights are the same": all(torch.equal(first[k], second[k]) for k in first),
    }


def reference(
    path, batch: dict[str, torch.Tensor], kl_coef: float = 0.0
) -> tuple[torch.Tensor, list[float], dict[str, torch.Tensor]]:
    """The same updates with Hugging Face and torch's AdamW: first log-probs, gradient norms, weights."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, kl_penalty
    from verl.workers.config import FSDPActorConfig, OptimizerConfig

    config = FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=8, optim=OptimizerConfig(lr=1.0)
    )
    model = hugging_face(path)
    matrices, vectors = (
        [p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPSILON)
    mask = batch["response_mask"]
    norms, first = [], None
    for _ in range(UPDATES):
        log_prob = response_log_probs(model, batch)
        first = log_prob.detach() if first is None else first
        loss, _ = compute_policy_loss_vanilla(
            log_prob.detach(), log_prob, batch["advantages"], mask, "token-mean", config
        )
        if kl_coef:
            kl = kl_penalty(log_prob, batch["ref_log_prob"], "low_var_kl")
            loss = loss + kl_coef * (kl * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return first, norms, model.state_dict()


def test_every_layout_learns_the_same_and_resumes(tmp_path):
    paths = {kind: make_checkpoint(kind, tmp_path / kind) for kind in ("dense", "moe")}
    ranks = run_ranks(4, learn_in, LAYOUTS, paths, tmp_path)
    expected = {kind: reference(path, make_batch()) for kind, path in paths.items()}
    for number, layout in enumerate(LAYOUTS):
        _, norms, weights = expected[layout.kind]
        for rank, results in enumerate(ranks):
            assert results[number]["norms"] == pytest.approx(norms, rel=1e-5), f"{layout}, rank {rank}"
        got = ranks[0][number]["weights"]
        worst = max((weights[name] - torch.from_numpy(got[name])).abs().max().item() for name in weights)
        print(f"{layout}: gradient norms {norms}, weights differ by at most {worst:.1e}")
        assert worst < 5e-6, f"{layout}: weights differ by {worst}"
        if layout in RESUMED:
            for rank, results in enumerate(ranks):
                assert all(results[number]["resumed"].values()), (
                    str(layout),
                    rank,
                    results[number]["resumed"],
                )

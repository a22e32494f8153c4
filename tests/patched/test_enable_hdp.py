"""verl's Megatron actor on megatron-core 0.12.1 learns the same with USE_HDP=1 as without.

The oracle is Hugging Face in one process on the whole mini-batch: log-probs, gradient norms and the weights
after two updates by AdamW agree, whichever rings (of 1 to 4 ranks) and micro-batches the plan has. What ranks
send in attention's rings is counted and compared with plain CP.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch
from megatron_tiny import RESPONSE, Layout, exported, make_batch, make_checkpoint, make_worker
from ranks import run_ranks
from test_megatron_actor import OVERRIDES, UPDATES, reference, update

from ascend_rl.hdp.hdp_training import RINGS, HybridDataParallel, Ring

RECOMPUTE = tuple(
    f"+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_{name}"
    for name in ("granularity=full", "method=uniform", "num_layers=1")
)
KL = 0.1
LOSS = (
    "actor_rollout_ref.actor.whole_batch_loss=True",
    "actor_rollout_ref.actor.use_kl_loss=True",
    f"actor_rollout_ref.actor.kl_loss_coef={KL}",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
)
# (layout, tokens a rank holds; None without HDP): the lengths are 40, 17, 26, 11, 33, 40, 9 and 21
RUNS = [
    (Layout(cp=4), None),
    (Layout(cp=2), None),
    (Layout(cp=4), 12),  # rings of 1 to 4
    (Layout(cp=4), 64),  # every sequence fits a rank
    (Layout(cp=2), 20),  # two CP groups
    (Layout("moe", tp=2, cp=2, ep=2), 20),
    (Layout(pp=2, cp=2, options=RECOMPUTE), 20),  # forwards, backwards and recomputation interleave
]


def batch_of_many_lengths() -> dict[str, torch.Tensor]:
    """Responses of 2 to 8 tokens that count, so that a sequence's weight shows."""
    batch = make_batch()
    counted = torch.tensor([8, 3, 5, 2, 8, 6, 4, 7])
    mask = (torch.arange(RESPONSE) < counted[:, None]).float()
    return batch | {"response_mask": mask, "ref_log_prob": batch["advantages"] / 4 - 4.5}


class Sent:
    """Bytes this rank sends in attention's rings between ``with`` and its end."""

    def __enter__(self):
        from transformer_engine.pytorch import ring_attention

        self.bytes, self.module, self.passed_on = 0, ring_attention, ring_attention.passed_on

        def passed_on(tensor, group):
            self.bytes += tensor.numel() * tensor.element_size()
            return self.passed_on(tensor, group)

        ring_attention.passed_on = passed_on
        return self

    def __exit__(self, *_):
        self.module.passed_on = self.passed_on


def learn(layout: Layout, path, rank: int, cap: int | None) -> dict:
    """The updates; ``cap``: tokens a rank holds, by HDP, or None for the whole mini-batch by plain CP."""
    actor, batch = "actor_rollout_ref.actor", batch_of_many_lengths()
    overrides = [f"{actor}.ppo_micro_batch_size_per_gpu=8"]
    if cap:
        os.environ["USE_HDP"] = "1"
        overrides = [f"{actor}.use_dynamic_bsz=True", f"{actor}.ppo_max_token_len_per_gpu={cap}"]
    worker = make_worker(layout, path, *OVERRIDES, *LOSS, *overrides)
    norms, log_probs, metrics = zip(*(update(worker, batch) for _ in range(UPDATES)), strict=True)
    weights = exported(worker)
    return {
        "log_probs": log_probs[0].numpy(),
        "norms": list(norms),
        "metrics": {k: v for k, v in metrics[-1].items() if k.startswith("hdp/")},
        "weights": {k: v.numpy() for k, v in weights.items()} if rank == 0 else None,
    }


def fused_rope_place() -> tuple[int, int]:
    """What megatron-core tells TransformerEngine's fused RoPE, on a rank alone in a ring."""
    from megatron.core.models.common.embeddings import rope_utils

    kernel, bounds = rope_utils.fused_apply_rotary_pos_emb_thd, torch.tensor([0, 8])
    bounds.hdp_ring = Ring((3, 5, 7), 1, None)
    rope_utils.fused_apply_rotary_pos_emb_thd = lambda *_, cp_size, cp_rank: (cp_size, cp_rank)
    try:
        config = SimpleNamespace(apply_rope_fusion=True)
        return rope_utils.apply_rotary_pos_emb(torch.zeros(4, 1, 2), torch.zeros(8, 1, 1, 2), config, bounds)
    finally:
        rope_utils.fused_apply_rotary_pos_emb_thd = kernel


def learn_in(rank: int, paths: dict, dump: str) -> tuple[list[dict], tuple[int, int]]:
    os.environ["HDP_DUMP"], results = dump, []
    for layout, cap in RUNS:
        with Sent() as sent:
            results.append(learn(layout, paths[layout.kind], rank, cap))
        results[-1]["sent"] = sent.bytes
    return results, fused_rope_place()


def test_rope_follows_the_ring(monkeypatch):
    """A rank's chunks are rotated by their place in the whole sequence, whatever the CP group."""
    from megatron.core.models.common.embeddings import rope_utils

    monkeypatch.setattr(rope_utils.parallel_state, "get_context_parallel_world_size", lambda: 4)
    monkeypatch.setattr(rope_utils.parallel_state, "get_context_parallel_rank", lambda: 3)
    whole, turns = torch.randn(24, 2, 8), torch.randn(24, 1, 1, 8)
    expected = rope_utils._apply_rotary_pos_emb_bshd(whole.unsqueeze(1), turns).squeeze(1).chunk(6)
    chunks = whole.chunk(6)
    for rank in range(3):
        bounds = torch.tensor([0, 24])
        bounds.hdp_ring = Ring((3, 5, 7), rank, None)
        mine = torch.cat([chunks[rank], chunks[5 - rank]])
        got = rope_utils._apply_rotary_pos_emb_thd(mine, bounds, turns)
        assert torch.equal(got, torch.cat([expected[rank], expected[5 - rank]]))


def test_packing_follows_the_ring():
    """The second of two ranks, each alone with a sequence."""
    from verl.models.mcore import util

    parallel = SimpleNamespace(cp_rank=1, tp_size=1, ring=lambda first, size: Ring((1,), 0, None))
    micro_batch = {RINGS: torch.tensor([[0, 1], [1, 1]])}
    pack = HybridDataParallel.on(parallel, micro_batch, util.preprocess_packed_seqs)
    packed, params = pack(torch.arange(20).view(2, 10), torch.ones(2, 10, dtype=torch.bool))
    assert packed.tolist() == [list(range(10, 20))] and params.cu_seqlens_q_padded.tolist() == [0, 10]


def test_engine_workers_are_refused(monkeypatch):
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    monkeypatch.setenv("USE_HDP", "1")
    with pytest.raises(ValueError, match="use_legacy_worker_impl=auto"):
        MegatronEngine(None, None, None, None)
    monkeypatch.setenv("USE_HDP", "0")
    with pytest.raises(AttributeError):  # of the configuration, which is None
        MegatronEngine(None, None, None, None)


@pytest.mark.long
def test_rings_learn_what_plain_cp_and_hugging_face_learn(tmp_path):
    paths = {kind: make_checkpoint(kind, tmp_path / kind, layers=2) for kind in ("dense", "moe")}
    dump = tmp_path / "hdp.jsonl"
    ranks = run_ranks(4, learn_in, paths, str(dump))
    known, sent = {}, []
    for number, (layout, cap) in enumerate(RUNS):
        if layout.kind not in known:
            known[layout.kind] = reference(paths[layout.kind], batch_of_many_lengths(), KL)
        results = [results[number] for results, _ in ranks]
        compare(results, *known[layout.kind], f"{layout} {cap}")
        sent.append(sum(result["sent"] for result in results))
        print(f"{layout} {cap}: {sent[-1]} bytes", results[0]["metrics"])
        assert bool(results[0]["metrics"]) == (cap is not None)

    plans = [json.loads(line) for line in dump.read_text().splitlines()]
    assert {p["phase"] for p in plans} == {"log_prob", "update"}
    sizes = [set(p["size"]) for p in plans]
    assert {1, 2, 3, 4} in sizes and {1} in sizes and {1, 2} in sizes
    cp4, cp2, rings_of_cp4, none, rings_of_cp2, *_ = sent
    assert 0 < rings_of_cp4 < 0.8 * cp4 and 0 < rings_of_cp2 < 0.9 * cp2 and none == 0
    assert all(place == (3, 1) for _, place in ranks)


def compare(results: list[dict], log_probs, norms: list[float], weights: dict, what: str) -> None:
    """What ranks learnt with what `reference` did."""
    for rank, result in enumerate(results):
        found = torch.from_numpy(result["log_probs"])
        error = min((found - part).abs().max().item() for part in log_probs.split(len(found)))
        assert error <= 1e-5, f"{what}, rank {rank}: log-probs are off by {error}"
        assert result["norms"] == pytest.approx(norms, rel=1e-5), f"{what}, rank {rank}"
    got = results[0]["weights"]
    worst = max((weights[name] - torch.from_numpy(got[name])).abs().max().item() for name in weights)
    gaps = [abs(a / b - 1) for a, b in zip(results[0]["norms"], norms, strict=True)]
    print(f"{what}: log-probs {error:.1e}, gradient norms {max(gaps):.1e}, weights {worst:.1e}")
    assert worst < 5e-6, f"{what}: weights differ by {worst}"

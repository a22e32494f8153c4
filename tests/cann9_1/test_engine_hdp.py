"""verl 0.9.1's Megatron engine learns the same with USE_HDP=1 as Hugging Face does, in rings and alone.

Batch, runs and bars are those of the other stack's test. What ranks send in attention's rings is counted and
compared with plain CP.
"""

from __future__ import annotations

import json
import os

import pytest
import torch
from megatron_tiny import Layout, hugging_face, make_checkpoint
from mindspeed_tree import MINDSPEED, needs_mindspeed
from ranks import run_ranks
from tensordict import NonTensorStack
from test_enable_hdp import KL, LOSS, RECOMPUTE, Sent, batch_of_many_lengths, compare
from test_megatron import exported, log_probs, make_worker, on_disk, update
from test_megatron_actor import UPDATES, reference

pytestmark = pytest.mark.long

FLASH = "+actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=True"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS = [option for option in LOSS if "whole_batch_loss" not in option]
# (layout, tokens a rank holds; None without HDP): the lengths are 40, 17, 26, 11, 33, 40, 9 and 21
RUNS = [
    (Layout(cp=4), None),
    (Layout(cp=4), 12),  # rings of 1 to 4
    (Layout("moe", tp=2, cp=2, ep=2), 20),
    (Layout(pp=2, cp=2, options=RECOMPUTE), 20),
]


def learn(layout: Layout, path, rank: int, cap: int | None, *options: str) -> dict:
    """The updates; ``cap``: tokens a rank holds, by HDP, or None for the whole mini-batch by plain CP."""
    os.environ["USE_HDP"] = "1" if cap else "0"
    overrides = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=8", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8"]
    if cap:
        overrides = [f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu={cap}"]
        overrides += [
            f"{ROLLOUT}.log_prob_use_dynamic_bsz=True",
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu={cap}",
        ]
    worker, batch = make_worker(layout, path, *LOSS, *overrides, *options), batch_of_many_lengths()
    first = log_probs(worker, batch)
    rows = len(batch["input_ids"]) // worker.actor.engine.get_data_parallel_size()
    texts = NonTensorStack(*({} for _ in range(rows)))  # as verl's agent loop gives them
    norms = [update(worker, batch, multi_modal_inputs=texts) for _ in range(UPDATES)]
    weights = exported(worker)
    return {
        "log_probs": first.cpu().numpy(),
        "norms": norms,
        "weights": {k: v.cpu().numpy() for k, v in weights.items()} if rank == 0 else None,
    }


def learn_in(rank: int, paths: dict, dump: str) -> list[dict]:
    os.environ["HDP_DUMP"], results = dump, []
    for layout, cap in RUNS:
        with Sent() as sent:
            results.append(learn(layout, paths[layout.kind], rank, cap))
        results[-1]["sent"] = sent.bytes
    return results


def with_norms(results: list[dict]) -> list[dict]:
    """The results, with the gradient norms of one that has them where a rank has none."""
    found = next(result["norms"] for result in results if None not in result["norms"])
    return [result | ({"norms": found} if None in result["norms"] else {}) for result in results]


def expected(path, learned) -> tuple:
    """First log-probs, gradient norms and weights of Hugging Face, which keeps experts together in memory."""
    first, norms, weights = reference(path, batch_of_many_lengths(), KL)
    model = hugging_face(path)
    model.load_state_dict(weights)
    model.save_pretrained(learned)
    return first, norms, on_disk(learned)


def test_rings_learn_what_plain_cp_and_hugging_face_learn(tmp_path):
    paths = {kind: make_checkpoint(kind, tmp_path / kind, layers=2) for kind in ("dense", "moe")}
    dump = tmp_path / "hdp.jsonl"
    ranks = run_ranks(4, learn_in, paths, str(dump))
    known = {kind: expected(path, tmp_path / f"{kind} learned") for kind, path in paths.items()}
    for number, (layout, cap) in enumerate(RUNS):
        compare(with_norms([results[number] for results in ranks]), *known[layout.kind], f"{layout} {cap}")
    plans = [json.loads(line) for line in dump.read_text().splitlines()]
    assert {p["phase"] for p in plans} == {"log_prob", "update"}
    assert {1, 2, 3, 4} in [set(p["size"]) for p in plans]
    whole, rings, *_ = (sum(results[number]["sent"] for results in ranks) for number in range(len(RUNS)))
    print(whole, rings)
    assert 0 < rings < 0.8 * whole


def on_mindspeed(rank: int, path) -> dict:
    """As above on a software NPU, with the bytes that this rank sent in MindSpeed's rings."""
    from mindspeed.core.context_parallel.utils import RingP2P

    send, sizes = RingP2P.async_send_recv, []

    def counted(self, tensor, *args, **kwargs):
        sizes.append(torch.distributed.get_world_size(self.group))
        return send(self, tensor, *args, **kwargs)

    RingP2P.async_send_recv = counted
    result = learn(Layout(cp=3), path, rank, 22, FLASH)
    return result | {"rings": set(sizes)}


@needs_mindspeed
def test_rings_of_mindspeed_learn_what_hugging_face_learns(tmp_path, monkeypatch):
    """Three ranks, where the longest sequences need all and others two or one."""
    monkeypatch.delenv("VERL_PLATFORM")
    path = make_checkpoint("dense", tmp_path / "dense", layers=2)
    ranks = run_ranks(3, on_mindspeed, path, stubs=(MINDSPEED,), npu=True)
    assert set().union(*(result["rings"] for result in ranks)) == {2, 3}
    compare(with_norms(ranks), *reference(path, batch_of_many_lengths(), KL), "CP3")

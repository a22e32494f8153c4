"""Packing by rings, agreement between CP groups, and what is refused: no Megatron needed."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import queue
import time
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ascend_rl.hdp import hdp_training
from ascend_rl.hdp.hdp import QWEN3_235B, plan
from ascend_rl.hdp.hdp_training import Ring, Share
from ascend_rl.settings.model import PUBLISHED
from ascend_rl.settings.switch import CannotWork

PackedSeqParams = make_dataclass("PackedSeqParams", [
    f"{what}_{side}{padded}"
    for what, ends in (("cu_seqlens", ("", "_padded")), ("max_seqlen", ("",))) for padded in ends
    for side in ("q", "kv")
] + ["qkv_format"])  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_token_is_on_one_rank_where_cp_puts_it(size, tp_size):
    generator = torch.Generator().manual_seed(size)
    width, lengths = 50, torch.tensor([50, 1, 17, 24, 7])
    begin = torch.randint(0, 50, (5,), generator=generator).minimum(width - lengths)
    columns = torch.arange(width)
    mask = (columns >= begin[:, None]) & (columns < (begin + lengths)[:, None])
    values = torch.randint(1, 1000, mask.shape, generator=generator)
    mine = [0, 1, 3, 4]
    held = torch.zeros_like(mask, dtype=torch.int64)
    for rank in range(size):
        share = Share(mask, mine, Ring(tuple(range(size)), rank, None), tp_size)
        held[share.row, share.column] += 1
        assert share.tokens * size == share.bounds[-1] and share.tokens % tp_size == 0
        packed = torch.zeros(share.tokens, dtype=values.dtype)
        packed[share.at] = values[share.row, share.column]
        expected = []  # each sequence, padded, in 2 * size chunks, of which a rank has one from each end
        for i, end in zip(mine, share.bounds.diff().tolist(), strict=True):
            assert end % (2 * size * tp_size) == 0 and end - lengths[i] < 2 * size * tp_size
            chunks = torch.nn.functional.pad(values[i][mask[i]], (0, end - int(lengths[i]))).chunk(2 * size)
            expected += [chunks[rank], chunks[2 * size - 1 - rank]]
        assert torch.equal(packed, torch.cat(expected))
        assert share.longest == share.bounds.diff().max()
        assert hdp_training.place(share.bounds, 8, 7) == (size, rank)
    assert torch.equal(held, mask.long() * torch.tensor([1, 1, 0, 1, 1])[:, None])


def test_bounds_without_a_ring_are_those_of_the_cp_group():
    assert hdp_training.place(torch.tensor([0, 8]), 8, 7) == (8, 7)


def test_other_stages_of_a_pipeline_embed_nothing(counts):
    mask = torch.ones(2, 8, dtype=torch.bool)
    parallel = SimpleNamespace(cp_rank=1, tp_size=1, ring=lambda first, size: Ring((1,), 0, None))
    micro_batch = hdp_training.MicroBatch(torch.tensor([[0, 1], [1, 1]]), parallel)
    ids = torch.arange(16).view(2, 8)
    packed, params = micro_batch.pack(ids, mask, PackedSeqParams, True)
    assert packed.tolist() == [list(range(8, 16))] and params.cu_seqlens_kv_padded.tolist() == [0, 8]
    assert micro_batch.pack(ids, mask, PackedSeqParams, False)[0] is ids
    assert counts() == {"hdp_alone": 1}  # however often it is packed


def _in_group(rank: int, world: int, store: str, function, results) -> None:
    torch.set_num_threads(1)
    torch.distributed.distributed_c10d._update_default_pg(
        None
    )  # that of a test before, of which this is a fork
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    results.put((rank, function(rank)))
    results.close()
    results.join_thread()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def in_ranks(world: int, function, folder: Path) -> list:
    """What ``function(rank)`` returns in each process of a group."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = world, str(folder / "store"), function, results
    ranks = [context.Process(target=_in_group, args=(rank, *arguments)) for rank in range(world)]
    found, deadline = {}, time.monotonic() + 60
    for process in ranks:
        process.start()
    try:
        while len(found) < world:
            with contextlib.suppress(queue.Empty):
                found |= [results.get(timeout=0.2)]
            assert all(process.exitcode in (None, 0) for process in ranks) and time.monotonic() < deadline
    finally:
        for process in ranks:
            process.join(10 if len(found) == world else 0)
            process.kill()
    return [found[rank] for rank in range(world)]


def _unpack(rank: int) -> tuple[np.ndarray, ...]:
    """In a CP group of three: a ring of the first two, and the third one alone."""
    width, lengths = 13, torch.tensor([13, 1, 6, 9])
    columns = torch.arange(width)
    mask = columns >= (width - lengths)[:, None]
    mask[3] = columns < 9
    values = (torch.arange(4 * width).view(4, width) + 1.0).requires_grad_()
    rings = torch.tensor([[0, 2], [2, 1], [0, 2], [2, 1]])
    ring = Ring((0, 1), rank, None) if rank < 2 else Ring((2,), 0, None)
    parallel = SimpleNamespace(cp_rank=rank, tp_size=1, cp_group=None, ring=lambda first, size: ring)
    micro_batch = hdp_training.MicroBatch(rings, parallel)
    packed = micro_batch.pack(values, mask, PackedSeqParams, True)[0]
    padding = torch.ones(packed.shape[1], dtype=torch.bool)
    padding[micro_batch.share(mask).at] = False
    out = micro_batch.unpack(packed.masked_fill(padding, 1e6), mask)  # what a model makes of padding
    (out * (columns + 2.0)).sum().backward()
    return out.detach().numpy(), values.grad.numpy(), mask.numpy()


def test_unpacked_everywhere_and_with_its_own_gradient(tmp_path):
    """Every rank has all values; each token's gradient goes back to the rank that computed it, once."""
    outs, grads, (mask, *_) = zip(*in_ranks(3, _unpack, tmp_path), strict=True)
    values = (np.arange(mask.size).reshape(mask.shape) + 1.0) * mask
    for out in outs:
        assert np.array_equal(out, values)
    assert np.array_equal(sum(grads), (np.arange(mask.shape[1]) + 2.0) * mask)
    held = [grad != 0 for grad in grads]
    assert [bool(rows.any()) for rows in held[2]] == [False, True, False, True]
    assert all(share.any() for share in held) and not (held[0] & held[1]).any()


CP, LENGTHS = 4, ([60, 3, 41, 9, 22, 17], [5, 5, 30, 12, 64, 8])


def _mpu(rank: int) -> SimpleNamespace:
    """Two CP groups of four; data parallel ranks have the same place in theirs."""
    dist = torch.distributed
    cp = [dist.new_group(list(range(first, first + CP))) for first in (0, CP)]
    dp = [dist.new_group([place, place + CP]) for place in range(CP)]
    return SimpleNamespace(
        get_context_parallel_group=lambda: cp[rank // CP],
        get_data_parallel_group=lambda: dp[rank % CP],
        get_context_parallel_rank=lambda: rank % CP,
        get_data_parallel_rank=lambda: rank // CP,
        get_tensor_model_parallel_world_size=lambda: 3,
    )


def _parallel(rank: int) -> dict:
    """What an actor's `HybridDataParallel` says and does in this rank."""
    model = hdp_training.cost_model(transformer("qwen3-235b-a22b", 4))
    parallel = hdp_training.HybridDataParallel(_mpu(rank), "cpu", model)
    rings, sums = {}, {}
    for size in range(1, CP + 1):
        for first in range(CP - size + 1):
            if first <= rank % CP < first + size:
                ring = parallel.ring(first, size)
                rings[first, size] = ring.ranks, ring.rank, ring.whole
                if size > 1:
                    value = torch.tensor(2.0**rank)
                    torch.distributed.all_reduce(value, group=ring.group)
                    sums[first, size] = value.item()
    mask = torch.arange(64) < torch.tensor(LENGTHS[rank // CP])[:, None]
    batch = TensorDict({"attention_mask": mask}, [len(mask)])
    split = []
    for update in (False, True):
        micro_batches, rows = parallel.split(batch, True, 16 * CP, 2, **({"update": True} if update else {}))
        split.append(([each[hdp_training.RINGS].tolist() for each in micro_batches], rows))
    return {"rings": rings, "sums": sums, "split": split, "metrics": parallel.metrics, "tp": parallel.tp_size}


def test_the_rings_and_plans_of_real_process_groups(tmp_path, monkeypatch):
    monkeypatch.setenv("HDP_DUMP", str(tmp_path / "dump.jsonl"))
    monkeypatch.delenv("HDP_COST_MODEL", raising=False)
    found = in_ranks(2 * CP, _parallel, tmp_path)
    model = hdp_training.cost_model(transformer("qwen3-235b-a22b", 4))
    plans = hdp_training.agree(LENGTHS, CP, 16, model, 2)
    for rank, here in enumerate(found):
        group, base, assigned = rank // CP, rank // CP * CP, plans[rank // CP]
        for (first, size), (ranks, place, whole) in here["rings"].items():
            assert ranks == tuple(range(base + first, base + first + size)) and ranks[place] == rank
            assert whole == (size == CP)
            if size > 1:
                assert here["sums"][first, size] == sum(2.0**member for member in ranks)
        assert here["tp"] == 3 and here["split"][0] == here["split"][1]
        rings, rows = here["split"][0]
        assert len(rows) == assigned.micro_batches == plans[1 - group].micro_batches
        for m, (own, members) in enumerate(zip(rows, rings, strict=True)):
            assert own == [i for i in range(len(LENGTHS[group])) if assigned.micro_batch[i] == m]
            assert members == [[assigned.first[i], assigned.size[i]] for i in own]
        assert here["metrics"] == {
            "hdp/micro_batches": assigned.micro_batches,
            "hdp/ring_size": assigned.size.mean(),
            "hdp/alone": (assigned.size == 1).mean(),
            "hdp/balance": assigned.bound / assigned.makespan,
        }
        assert 0 < here["metrics"]["hdp/balance"] <= 1
    lines = [json.loads(line) for line in (tmp_path / "dump.jsonl").read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["log_prob"] * 2 + ["update"] * 2  # by the first rank alone
    for nth, line in enumerate(lines):
        assert (line["cp_group"], tuple(line["lengths"])) == (nth % 2, tuple(LENGTHS[nth % 2]))
        for key in ("micro_batch", "first", "size"):
            assert line[key] == getattr(plans[nth % 2], key).tolist()
        assert (line["makespan"], line["bound"]) == (plans[nth % 2].makespan, plans[nth % 2].bound)


def test_the_rings_of_a_micro_batch_are_there_in_its_forward_alone():
    parallel = SimpleNamespace(cp_rank=1, ring=lambda first, size: Ring((1,), 0, None))

    def forward(fails: bool, *, doubled: int) -> int:
        assert hdp_training.current().parallel is parallel and hdp_training.current().mine == [1]
        return 2 * doubled // (not fails)

    run = hdp_training.HybridDataParallel.on(
        parallel, {hdp_training.RINGS: torch.tensor([[0, 1], [1, 1]])}, forward
    )
    assert run(False, doubled=4) == 8 and hdp_training.current() is None
    with pytest.raises(ZeroDivisionError):
        run(True, doubled=4)
    assert hdp_training.current() is None


def test_engine_workers_are_refused(monkeypatch):
    monkeypatch.setenv("USE_HDP", "0")
    hdp_training.refuse_engine_workers()
    monkeypatch.setenv("USE_HDP", "1")
    with pytest.raises(CannotWork, match="USE_HDP=1 is incompatible with this configuration"):
        hdp_training.refuse_engine_workers()


@pytest.mark.parametrize("multiple", [1, 2])
def test_cp_groups_agree_on_the_number_of_micro_batches(multiple):
    rng = np.random.default_rng(1)
    for _ in range(20):
        lengths = [rng.integers(1, 400, 24).tolist() for _ in range(3)]
        lengths[1] = [20] * 24  # needs far fewer on its own
        plans = hdp_training.agree(lengths, 4, 200, QWEN3_235B, multiple)
        counts = {p.micro_batches for p in plans}
        alone = [plan(own, 4, 1, 200, multiple=multiple).micro_batches for own in lengths]
        assert len(counts) == 1 and counts.pop() >= max(alone) > min(alone)
        for own, found in zip(lengths, plans, strict=True):
            assert found.micro_batches % multiple == 0
            assert set(found.micro_batch.tolist()) == set(range(found.micro_batches))
            assert len(own) == len(found.size)


ACTOR = {"megatron": {"context_parallel_size": 2, "use_remove_padding": True}}


@pytest.mark.parametrize(
    "changes, transformer, mtp, said",
    [
        ({"megatron": {"context_parallel_size": 1}}, {}, None, "context_parallel_size"),
        ({"megatron": ACTOR["megatron"] | {"use_remove_padding": False}}, {}, None, "use_remove_padding"),
        ({"use_fused_kernels": True}, {}, None, "use_fused_kernels"),
        ({"router_replay": {"mode": "R3"}}, {}, None, "router_replay"),
        ({"policy_loss": {"loss_mode": "geo_mean"}, "whole_batch_loss": True}, {}, None, "geo_mean"),
        ({"policy_loss": {"loss_mode": "gspo"}}, {}, None, "whole_batch_loss=True"),
        ({}, {}, {"enable": True}, "multi-token prediction"),
        ({}, {"fp8": "e4m3"}, None, "fp8"),
        ({}, {"context_parallel_algo": "ulysses_cp_algo"}, None, "context_parallel_algo"),
        ({}, {"attention_mask_type": "general"}, None, "attention_mask_type"),
    ],
)
def test_what_does_not_work_together_is_refused(changes, transformer, mtp, said, monkeypatch):
    arguments = ACTOR | changes, SimpleNamespace(**transformer), mtp, None, "cpu"
    monkeypatch.setenv("USE_HDP", "0")
    assert hdp_training.setup(*arguments) is None
    monkeypatch.setenv("USE_HDP", "1")
    with pytest.raises(CannotWork, match=said) as refused:
        hdp_training.setup(*arguments)
    assert str(refused.value).startswith("USE_HDP=1 is incompatible with this configuration:\n")
    actor = ACTOR | {"policy_loss": {"loss_mode": "gspo"}, "whole_batch_loss": True}
    unsaid = {"megatron": {"context_parallel_size": 2}}
    for works in (ACTOR, actor, unsaid):  # the reference policy, which has no loss, and the actor
        assert hdp_training.problems(works, SimpleNamespace(), None) == []


def transformer(path: str, tp: int) -> SimpleNamespace:
    """A published model as megatron-core's TransformerConfig has it."""
    shape = PUBLISHED[path]
    return SimpleNamespace(
        hidden_size=shape["hidden_size"],
        num_attention_heads=shape["num_attention_heads"],
        num_query_groups=shape["num_key_value_heads"],
        kv_channels=shape["head_dim"],
        ffn_hidden_size=shape["intermediate_size"],
        num_moe_experts=shape.get("num_experts"),
        moe_router_topk=shape.get("num_experts_per_tok", 2),
        moe_ffn_hidden_size=shape.get("moe_intermediate_size"),
        tensor_model_parallel_size=tp,
    )


def test_the_cost_model_follows_the_model(monkeypatch):
    monkeypatch.delenv("HDP_COST_MODEL", raising=False)
    assert hdp_training.cost_model(transformer("qwen3-235b-a22b", 4)) == QWEN3_235B
    dense = hdp_training.cost_model(transformer("qwen3-32b", 8))
    # FLOPs of causal attention and of the linear layers; the rest takes as long as a layer, in other units.
    assert dense.pair / QWEN3_235B.pair == pytest.approx((8192 / 487.6e6) / (8192 / 222.3e6), rel=1e-3)
    less = (222.3 / 4) / (487.6 / 8)
    assert dense.ring_step == pytest.approx(600 * less, rel=1e-3)
    assert dense.ring_token == pytest.approx(0.025 * less, rel=1e-3)  # a KV head on a rank, as 235B at TP4
    assert dense.micro_batch == pytest.approx(800 * less, rel=1e-3)


def test_the_cost_model_can_be_given(monkeypatch):
    monkeypatch.setenv("HDP_COST_MODEL", "1,2e-5,3,4,5")
    assert hdp_training.cost_model(None).pair == 2e-5
    monkeypatch.setenv("HDP_COST_MODEL", "1,2")
    with pytest.raises(CannotWork, match="five numbers"):
        hdp_training.cost_model(None)


def test_micro_batches_of_a_fixed_count_are_refused():
    with pytest.raises(CannotWork, match="use_dynamic_bsz=True"):
        hdp_training.HybridDataParallel.divide(SimpleNamespace(), [], False, None, 1, False, False)


def test_text_is_planned_though_verl_sends_inputs_for_images_with_it_and_images_are_refused():
    """verl's agent loop gives every sequence a dict of them: that of a text is empty."""
    mask = torch.arange(16) < torch.tensor([[16], [3], [12], [5]])
    batch = TensorDict({"attention_mask": mask}, [4])
    batch["multi_modal_inputs"] = np.array([{}] * 4, dtype=object)
    batch["multi_modal_inputs_idx"] = torch.arange(4)
    parallel = SimpleNamespace(
        _gather=lambda numbers, group: [numbers], dp_group=None, dp_rank=0, ranks=(0, 1), dump=None,
        model=hdp_training.cost_model(transformer("qwen3-235b-a22b", 4)),
    )  # fmt: skip
    parallel.divide = functools.partial(hdp_training.HybridDataParallel.divide, parallel)
    micro_batches, rows = hdp_training.HybridDataParallel.split(parallel, batch, True, 20, 1)
    assert sorted(sum(rows, [])) == [0, 1, 2, 3]
    for micro_batch, own in zip(micro_batches, rows, strict=True):
        assert micro_batch["multi_modal_inputs_idx"].tolist() == own
        assert micro_batch["attention_mask"].equal(mask[own])
    # Of more than 10 tokens, a rank's part of 20: only two ranks together have the room.
    sizes = {row: size for m, own in zip(micro_batches, rows, strict=True)
             for row, (_, size) in zip(own, m[hdp_training.RINGS].tolist(), strict=True)}  # fmt: skip
    assert sizes[0] == sizes[2] == 2
    batch["multi_modal_inputs"] = np.array([{}, {}, {"pixel_values": mask}, {}], dtype=object)
    with pytest.raises(CannotWork, match="multi-modal"):
        hdp_training.HybridDataParallel.split(parallel, batch, True, 20, 1)

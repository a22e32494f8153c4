"""ascend_rl.estimate: the published tables, and counts against Hugging Face, autograd and brute force.

Megatron's own model is the reference in tests/patched/test_memory_plan.py.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import asdict, replace

import pytest
import torch
from torch.nn import functional

from ascend_rl.estimate import (
    die,
    fsdp_memory,
    layouts,
    megatron_memory,
    memory_plan,
    partitions,
    plan_text,
    rollout_memory,
    tensors,
)
from ascend_rl.estimate.die import GIB, MIB
from ascend_rl.estimate.layouts import Rollout, Training
from ascend_rl.settings.model import PUBLISHED, Model
from ascend_rl.settings.switch import CannotWork
from ascend_rl.weights import qwen3

BIG = Model.load("qwen3-235b-a22b")
DENSE = Model.load("qwen3-32b")
SEQUENCE = 32768
# The layouts of the published run.
TRAINING = Training(dies=128, tp=4, pp=4, cp=4, ep=32)
ROLLOUT = Rollout(dies=128, tp=4, ep=128, max_num_batched_tokens=34816)
# Of the released weights (metadata.total_size of model.safetensors.index.json, halved: tensors are bf16, or
# the sizes in the headers of a single file), lm_head not counted where it is tied.
PARAMETERS = {
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-14b": 14_768_307_200,
    "qwen3-8b": 8_190_735_360,
    "qwen3-4b": 4_022_468_096,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-0.6b": 596_049_920,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-0.5b": 494_032_768,
}


# ------------------------------------------------------------------------------------------ published tables


def published() -> list[tuple[str, float, float]]:
    """Name, published and our figure, units as published ("GB" is GiB, "MB" is MiB)."""
    rollout = rollout_memory.plan_rollout(BIG, ROLLOUT)
    parts = {name: size / GIB for name, size in rollout.weights.items()}
    layer = sum(tensors.layer_parameters(BIG, tp=4, ep=32).values())
    rows = [
        ("rollout weights, TP4 EP128, GB", 7.09, rollout.weights_bytes / GIB),
        ("- embedding and lm_head, GB", 0.58, parts["embedding_lm_head"]),
        ("- QKV, GB", 1.65, parts["qkv"]),
        ("- O, GB", 1.47, parts["o"]),
        ("- MoE, GB", 3.30, parts["moe"]),
        ("- gate, GB", 0.09, parts["gate"]),
        ("KV cache, 32k sequence, TP4, GB", 1.47, rollout_memory.kv_bytes_per_token(BIG, 4) * SEQUENCE / GIB),
        ("training weights a layer, TP4 EP32, MB", 178, layer * 2 / MIB),
        ("training weights, 24 layers, GB", 4.17, 24 * layer * 2 / GIB),
        ("training gradients, 24 layers, GB", 8.34, 24 * layer * 4 / GIB),
    ]
    table = {
        1: (600, 1408, 20608),
        2: (300, 704, 10304),
        4: (150, 352, 5152),
        8: (75, 176, 2576),
    }
    worst = tensors.worst_imbalance(BIG, 32)
    for cp, (attention, balanced, imbalanced) in table.items():
        tokens = SEQUENCE // cp
        ours = tensors.attention_activation_bytes(BIG, tokens, 4)
        rows.append((f"attention activations a layer, CP{cp}, MB", attention, ours / MIB))
        ours = tensors.mlp_activation_bytes(BIG, tokens, 4)
        rows.append((f"MoE activations a layer, balanced, CP{cp}, MB", balanced, ours / MIB))
        ours = tensors.mlp_activation_bytes(BIG, tokens, 4, imbalance=worst)
        rows.append((f"MoE activations a layer, worst case, CP{cp}, MB", imbalanced, ours / MIB))
    return rows


@pytest.mark.parametrize("name,wanted,ours", published(), ids=lambda value: str(value))
def test_published_figures(name, wanted, ours):
    assert ours == pytest.approx(wanted, rel=0.05)


def test_published_concurrency():
    """ "The theoretical limit is only 20 to 30" sequences of full length."""
    assert 20 <= rollout_memory.plan_rollout(BIG, ROLLOUT).max_num_seqs <= 30


@pytest.mark.parametrize("page", ["memory_plan.md", "memory_plan.zh.md"])
def test_the_pages_show_these_figures(root, page):
    numbers = [
        tuple(map(float, row))
        for row in re.findall(r"\| ([\d.]+) \| ([\d.]+) \|", (root / "docs" / page).read_text())
    ]
    for name, wanted, ours in published():
        assert any(a == wanted and math.isclose(b, ours, rel_tol=0.005) for a, b in numbers), (name, ours)


def test_why_the_practice_needs_zero_memory():
    """The published layout holds 34816 tokens with MoE zero memory only; level1 survives any imbalance."""
    fits = {
        level: megatron_memory.plan_training(BIG, replace(TRAINING, moe_zero_memory=level))
        for level in layouts.CHOICES["moe_zero_memory"]
    }
    assert [fits[level].fits for level in ("disable", "level0", "level1")] == [False, True, True]
    assert fits["level0"].max_imbalance < 16 == fits["level1"].max_imbalance


# ---------------------------------------------------------------------------------------------- parameters


def whole(model: Model) -> int:
    return sum(tensors.stage_parameters(model, model.layers).values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_the_released_weights_and_hugging_face(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = Model.load(name)
    assert whole(model) == PARAMETERS[name]

    def hugging_face(layers: int) -> int:
        config = AutoConfig.for_model(**PUBLISHED[name] | {"num_hidden_layers": layers})
        with torch.device("meta"):
            return sum(
                parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters()
            )

    one, two = hugging_face(1), hugging_face(2)
    assert whole(model) == one + (model.layers - 1) * (two - one)


@pytest.mark.parametrize("name", ["qwen3-235b-a22b", "qwen3-8b"])
def test_parameters_equal_the_converters_megatron_tensors(name):
    tensors = qwen3.mcore_tensors(Model.from_config(PUBLISHED[name]))
    assert whole(Model.load(name)) == sum(math.prod(tensor.size) for tensor in tensors)


@pytest.mark.parametrize("name", PUBLISHED)
def test_shares_of_all_training_ranks_add_up(name):
    model, checked = Model.load(name), 0
    for tp, pp, ep, etp in itertools.product((1, 2, 4), (1, 2, 3, 4), (1, 8, 32), (1, 2)):
        dies = 128 * pp
        layout = Training(dies=dies, tp=tp, pp=pp, ep=ep, etp=etp)
        if layouts.training_problems(model, layout):
            continue
        checked += 1
        once = tp_ranks = expert_ranks = 0
        for index, layers in enumerate(megatron_memory.split_layers(model.layers, pp)):
            parts = tensors.stage_parameters(model, layers, tp, ep, etp, index == 0, index == pp - 1)
            once += parts["norm"] + parts.get("gate", 0)  # the same on every rank
            tp_ranks += parts["qkv"] + parts["o"] + parts["embedding_lm_head"] + parts.get("mlp", 0)
            expert_ranks += parts.get("moe", 0)
        copies = model.vocabulary * model.hidden if model.tied and pp > 1 else 0
        assert once + tp * tp_ranks + ep * etp * expert_ranks == whole(model) + copies
    assert checked >= 8


@pytest.mark.parametrize("tp,ep,kv_copies", [(1, 1, 1), (4, 1, 1), (4, 128, 1), (8, 128, 2), (16, 1, 4)])
def test_shares_of_a_rollout_group_add_up(tp, ep, kv_copies):
    parts = rollout_memory.rollout_parameters(BIG, tp, ep)
    kv = BIG.layers * 2 * BIG.kv_heads * BIG.head_dim * BIG.hidden
    total = parts["norm"] + parts["gate"] + tp * (parts["qkv"] + parts["o"] + parts["embedding_lm_head"])
    total += parts["moe"] * (ep if ep > 1 else tp)
    assert total == whole(BIG) + (kv_copies - 1) * kv


def test_layers_of_stages():
    assert megatron_memory.split_layers(94, 4) == (23, 24, 24, 23)  # as in the published script
    for layers, pp in itertools.product(range(1, 100), range(1, 65)):
        if pp <= layers:
            split = megatron_memory.split_layers(layers, pp)
            assert sum(split) == layers and len(split) == pp and min(split) >= 1
            assert len(set(split[1:-1])) <= 1 and abs(split[0] - split[-1]) <= 1 or pp == 1
            if layers % pp == 0:
                assert len(set(split)) == 1


# --------------------------------------------------------------------------------------------- activations


class SwiGlu(torch.autograd.Function):
    """Like the fused operator: keeps its input only."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


def saved_bytes(function, inputs: torch.Tensor, weights: list[torch.Tensor]) -> int:
    """What autograd keeps for backward, each storage once, weights aside."""
    kept, ignored = {}, {weight.untyped_storage().data_ptr() for weight in weights}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            kept[storage.data_ptr()] = tensor  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(inputs * 1.0)
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_kept_activations_equal_what_autograd_saves():
    """A layer of fused operators: norm, projections, rotation, flash attention, MLP or experts, in bf16."""
    tokens, seed = 512, torch.Generator().manual_seed(0)
    dense = Model("dense", 1, hidden=96, heads=6, kv_heads=2, head_dim=32, vocabulary=8, ffn=160)
    moe = replace(dense, experts=4, experts_per_token=2, ffn=48)
    weights = []

    def weight(*shape):
        made = torch.randn(shape, generator=seed).mul_(0.1).bfloat16().requires_grad_()
        weights.append(made)
        return made

    def norm(x):  # layer_norm is one operator on a CPU, rms_norm is not
        return functional.layer_norm(x, x.shape[-1:])

    q, kv, dim = dense.heads * dense.head_dim, dense.kv_heads * dense.head_dim, dense.head_dim
    w_qkv, w_o = weight(q + 2 * kv, dense.hidden), weight(dense.hidden, q)
    cosine = torch.randn(tokens, dim, generator=seed).bfloat16()
    weights.append(cosine)

    def attention(x):
        query, key, value = (norm(x) @ w_qkv.T).split([q, kv, kv], -1)
        query, key = (norm(part.unflatten(-1, (-1, dim))) * cosine[:, None] for part in (query, key))
        parts = (query, key, value.unflatten(-1, (-1, dim)))
        core = functional.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in parts), is_causal=True, enable_gqa=True
        )
        return x + core[0].transpose(0, 1).flatten(1) @ w_o.T

    def mlp(width):
        w_in, w_out = weight(2 * width, dense.hidden), weight(dense.hidden, width)
        return w_in, w_out

    w_in, w_out = mlp(dense.ffn)

    def dense_mlp(x):
        return SwiGlu.apply(norm(x) @ w_in.T) @ w_out.T

    e_in, e_out = mlp(moe.ffn)

    def experts(copies):  # one expert stands for all: a grouped matmul keeps the same
        probability = torch.rand(len(copies), 1, generator=seed).bfloat16().requires_grad_()
        return (SwiGlu.apply(copies @ e_in.T) * probability) @ e_out.T

    x = torch.randn(tokens, dense.hidden, generator=seed).bfloat16().requires_grad_()
    fp32 = 4 * tokens  # norms keep a mean and a deviation, attention a log-sum-exp for each row and head
    small = 2 * fp32 + 2 * fp32 * (dense.heads + dense.kv_heads) + fp32 * dense.heads
    mine = (
        tensors.attention_activation_bytes(dense, tokens) - 2 * tokens * dense.hidden
    )  # less the residual sum
    assert mine <= saved_bytes(attention, x, weights) <= mine + small
    mine = tensors.mlp_activation_bytes(dense, tokens) + 2 * tokens * dense.hidden  # and the residual sum
    assert mine <= saved_bytes(dense_mlp, x, weights) <= mine + 2 * fp32
    copies = x.detach().repeat(moe.experts_per_token, 1).requires_grad_()
    mine = tensors.mlp_activation_bytes(moe, tokens) - 2 * 2 * tokens * moe.hidden  # less norm and output
    assert saved_bytes(experts, copies, weights) == mine + 2 * len(copies)  # and the probabilities


def test_worst_imbalance_by_counting():
    """Every token sends as many copies as it can to the experts of rank 0."""
    for ep in (1, 4, 16, 32, 128):
        fullest = [min(BIG.experts_per_token, BIG.experts // ep) for _ in range(ep * 10)]
        mean = BIG.experts_per_token * len(fullest) / ep
        assert tensors.worst_imbalance(BIG, ep) == sum(fullest) / mean
    assert tensors.worst_imbalance(Model.load("qwen3-8b"), 1) == 1


# ------------------------------------------------------------------------------------------- plans and limits


@pytest.mark.parametrize(
    "layout",
    [
        TRAINING,
        replace(TRAINING, cp=8, moe_zero_memory="level0"),
        replace(TRAINING, pp=2, ep=64, optimizer="resident"),
        replace(TRAINING, recompute="full", optimizer="offload"),
    ],
)
def test_limits_fit_and_one_more_does_not(layout):
    plan = megatron_memory.plan_training(BIG, layout)
    largest = replace(layout, max_token_len_per_gpu=plan.max_token_len_per_gpu)
    assert megatron_memory.plan_training(BIG, largest).fits
    assert not megatron_memory.plan_training(
        BIG, replace(largest, max_token_len_per_gpu=plan.max_token_len_per_gpu + 1)
    ).fits
    assert plan.max_sequence_tokens == plan.max_token_len_per_gpu * layout.cp
    if 0 < plan.max_imbalance < plan.worst_imbalance:
        assert megatron_memory.plan_training(BIG, replace(layout, imbalance=plan.max_imbalance)).fits
        assert not megatron_memory.plan_training(
            BIG, replace(layout, imbalance=plan.max_imbalance + 0.1)
        ).fits


def test_kv_cache_holds_what_it_says():
    plan = rollout_memory.plan_rollout(BIG, ROLLOUT)
    share = 0.87 * 64 * GIB
    used = plan.weights_bytes + plan.prefill_bytes + die.RESERVE_GIB * GIB
    block = plan.kv_bytes_per_token * 128
    assert plan.kv_bytes <= share - used < plan.kv_bytes + block
    blocks = math.ceil(ROLLOUT.max_model_len / 128)
    assert plan.max_num_seqs * blocks * block <= plan.kv_bytes < (plan.max_num_seqs + 1) * blocks * block
    tight = replace(ROLLOUT, gpu_memory_utilization=0.25)
    assert not rollout_memory.plan_rollout(BIG, tight).fits


@pytest.mark.parametrize("length", [127, 128, 129, 34700])
def test_a_sequence_takes_whole_blocks(length):
    """vLLM gives a sequence blocks of 128 tokens, the last one too; one sequence must fit."""
    blocks = {127: 1, 128: 1, 129: 2, 34700: 272}[length]
    layout = replace(ROLLOUT, max_model_len=length)
    plan = rollout_memory.plan_rollout(BIG, layout)
    block = 128 * plan.kv_bytes_per_token
    assert plan.max_num_seqs == plan.kv_bytes // block // blocks and plan.kv_tokens % 128 == 0
    # What others leave on the die takes blocks away, until there is room for one sequence and none.
    full = plan.kv_bytes - blocks * block
    assert (one := rollout_memory.plan_rollout(BIG, layout, full)).fits and one.max_num_seqs == 1
    assert (
        not (none := rollout_memory.plan_rollout(BIG, layout, full + block)).fits and none.max_num_seqs == 0
    )


def test_the_weight_sync_has_both_engines_weights_on_the_die():
    """The fullest stage's weights and all of the rollout's; a die too small for them fits nothing."""
    plan = memory_plan.plan(BIG, TRAINING, ROLLOUT)
    weights = [stage.weights for stage in plan.training.stages]
    assert plan.sync_bytes == max(weights) + plan.rollout.weights_bytes and min(weights) < max(weights)
    assert memory_plan.plan(BIG, TRAINING).sync_bytes == max(weights)
    assert memory_plan.plan(BIG, rollout=ROLLOUT).sync_bytes == plan.rollout.weights_bytes
    # FSDP2 in host memory and a small rollout: on 17 GiB each phase fits alone, the two copies do not.
    training = layouts.Fsdp(dies=8, max_token_len_per_gpu=16, offload_policy=True)
    rollout = Rollout(
        dies=8, max_model_len=128, max_num_seqs=1, max_num_batched_tokens=128, gpu_memory_utilization=1
    )
    for gib, fits in ((17, False), (18, True)):
        plan = memory_plan.plan(Model.named("qwen3-8b"), training, rollout, hbm_gib=gib, reserve_gib=0)
        assert plan.training.fits and plan.rollout.fits and plan.fits is fits
        assert (plan.sync_bytes <= gib * GIB) is fits


@pytest.mark.parametrize("ep", [1, 128])
def test_chunks_take_the_copies_of_other_tokens_off_the_prefill(ep):
    """Per copy: hidden states before and after, and gate, up and their product, split by TP either way."""
    whole = replace(ROLLOUT, ep=ep)
    chunked = replace(whole, moe_chunk_tokens=8192)
    copies = (34816 - 8192) * BIG.experts_per_token
    values = copies / 4 * (2 * 4096 + 3 * 1536) if ep > 1 else copies * (2 * 4096 + 3 * 1536 / 4)
    assert rollout_memory.prefill_bytes(BIG, whole) - rollout_memory.prefill_bytes(BIG, chunked) == 2 * values
    assert rollout_memory.prefill_bytes(
        BIG, replace(whole, moe_chunk_tokens=99999)
    ) == rollout_memory.prefill_bytes(BIG, whole)


def test_the_prefill_of_a_dense_model_tensor_by_tensor():
    """TP4 of Qwen3-32B, 1000 tokens: bf16 activations, and fp32 logits of 10 sequences with their copy."""
    layout = Rollout(dies=4, tp=4, max_num_batched_tokens=1000, max_num_seqs=10)
    hidden = residual = (1000, 5120)
    query = output = (1000, 16 * 128)
    key = value = (1000, 2 * 128)
    gate = up = product = (1000, 6400)
    bf16 = [hidden, residual, query, key, value, output, gate, up, product]
    logits = copy = (10, 151936)
    wanted = 2 * sum(map(math.prod, bf16)) + 4 * sum(map(math.prod, [logits, copy]))
    assert rollout_memory.prefill_bytes(DENSE, layout) == wanted


@pytest.mark.parametrize("sizes", [(32, 64, 128, 256), (4, 8, 16, 32, 64, 128, 256)])
def test_the_graphs_of_an_moe_model_tensor_by_tensor(sizes):
    """TP4 EP128 of Qwen3-235B, one expert a die, without and with the small sizes for moves. A step of 256
    tokens: each of 128 ranks may send this die's expert all the 64 tokens of its share.
    """
    plan = rollout_memory.plan_rollout(BIG, replace(ROLLOUT, graph_sizes=sizes))
    hidden = residual = (256, 4096)
    query = output = (256, 16 * 128)
    key = value = (256, 128)  # 4 heads over TP4
    received = sent_back = (128 * 64, 4096)
    gate = up = product = (128 * 64, 1536)
    bf16 = [hidden, residual, query, key, value, output, received, sent_back, gate, up, product]
    assert plan.graph_bytes == 2 * sum(map(math.prod, bf16)) + len(sizes) * 95 * 2**19
    without = rollout_memory.plan_rollout(BIG, ROLLOUT)
    assert without.graph_bytes == 0 and plan.kv_bytes == without.kv_bytes  # captured when the cache is there


def test_the_graphs_of_a_dense_model_and_of_one_server_a_replica():
    """TP4 of Qwen3-32B; Qwen3-235B without EP splits all experts by TP and copies each token 8 times."""
    dense = Rollout(dies=4, tp=4, graph_sizes=(8, 16))
    bf16 = [(16, 5120)] * 2 + [(16, 16 * 128)] * 2 + [(16, 2 * 128)] * 2 + [(16, 6400)] * 3
    assert rollout_memory.graph_bytes(DENSE, dense) == 2 * sum(map(math.prod, bf16)) + 2 * 65 * 2**19
    replica = Rollout(dies=16, tp=4, graph_sizes=(16,))
    bf16 = [(16, 4096)] * 2 + [(16, 16 * 128)] * 2 + [(16, 128)] * 2
    bf16 += [(16 * 8, 4096)] * 2 + [(16 * 8, 1536 // 4)] * 3
    assert rollout_memory.graph_bytes(BIG, replica) == 2 * sum(map(math.prod, bf16)) + 95 * 2**19


def test_graphs_must_fit_beside_the_share():
    """Published captures are no dearer than planned; of 64 GiB, 0.995 leave 0.32 GiB."""
    layout = replace(ROLLOUT, graph_sizes=(4, 8, 16, 32, 64, 128, 256))
    needed = rollout_memory.graph_bytes(BIG, layout)
    for share, fits in ((0.87, True), (0.99, True), (0.995, False)):
        plan = rollout_memory.plan_rollout(BIG, replace(layout, gpu_memory_utilization=share))
        assert plan.graph_room_bytes == pytest.approx((1 - share) * 64 * GIB, abs=2)
        assert plan.fits is fits is (needed <= plan.graph_room_bytes)
    published = {("Qwen3-30B-A3B", 2, 2, 11): 0.26, ("Qwen3-30B-A3B", 1, 4, 39): 0.45}
    for (name, tp, ep, count), gib in published.items():
        captured = Rollout(dies=ep, tp=tp, ep=ep, graph_sizes=(1,) * (count - 1) + (512,))
        assert rollout_memory.graph_bytes(Model.named(name), captured) >= gib * GIB


def test_the_command_plans_the_graphs_it_is_given(capsys):
    words = "--model qwen3-235b-a22b --dies 128 --tp 4 --pp 4 --cp 4 --ep 32 --rollout-tp 4 --rollout-ep 128"
    assert memory_plan.main([*words.split(), "--graph-sizes", "32,64,128,256"]) == 0
    needed = rollout_memory.graph_bytes(BIG, replace(ROLLOUT, graph_sizes=(32, 64, 128, 256)))
    assert f"4 decode graphs at most {needed / GIB:.2f} of the 8.32 GiB" in capsys.readouterr().out


def test_optimizer_and_offload_choices():
    kinds = {
        kind: memory_plan.plan(BIG, replace(TRAINING, optimizer=kind), ROLLOUT)
        for kind in layouts.CHOICES["optimizer"]
    }
    stages = {kind: plan.training.stages[1] for kind, plan in kinds.items()}
    dense, experts = 24 * (9_437_184 + 8_388_608 + 524_288 + 8448), 24 * 4 * 3 * 4096 * 1536
    states = 12 * (dense // 8 + experts // 1)  # DP2 x CP4 shards; EP32 covers all 32 dies of a stage
    assert stages["resident"].optimizer == stages["offload"].optimizer == states
    assert stages["swap"].optimizer == 0 and stages["swap"].swapped == states // 16
    left = {kind: plan.rollout.training_bytes for kind, plan in kinds.items()}
    assert left["swap"] == left["offload"] == 0 and left["resident"] >= states
    stay = memory_plan.plan(BIG, replace(TRAINING, param_offload=False), ROLLOUT)
    assert stay.rollout.training_bytes == max(s.weights + s.gradients for s in stay.training.stages)
    assert stay.rollout.kv_bytes < kinds["swap"].rollout.kv_bytes


def test_stages_keep_what_1f1b_has_in_flight():
    """megatron-core's schedule: PP - stage - 1 forward passes to warm up, then one forward, one backward."""
    stages = megatron_memory.plan_training(BIG, replace(TRAINING, recompute="full")).stages
    for index, stage in enumerate(stages):
        in_flight = most = len(stages) - index - 1
        for _ in range(8):
            in_flight += 1
            most = max(most, in_flight)
            in_flight -= 1
        layer_input = 2 * 8704 * 4096 // 4
        assert stage.activations == (23, 24, 24, 23)[index] * most * layer_input


def test_logits_are_on_the_last_stage_and_peaks_add_up():
    stages = megatron_memory.plan_training(BIG, TRAINING).stages
    assert [stage.logits for stage in stages] == [0, 0, 0, (2 + 4 + 2) * 8704 * 151936 // 4]
    for kind in layouts.CHOICES["optimizer"]:
        for stage in megatron_memory.plan_training(BIG, replace(TRAINING, optimizer=kind)).stages:
            update = max(stage.swapped, stage.activations + stage.working + stage.logits)
            assert stage.peak == stage.weights + stage.gradients + stage.optimizer + update


def test_the_ends_of_the_pipeline_hold_the_embedding_and_lm_head():
    layer = sum(tensors.layer_parameters(BIG, tp=4, ep=32).values())
    matrix = 151936 * 4096 // 4
    ends = (matrix, 0, 0, matrix + 4096)  # and the final norm
    stages = megatron_memory.plan_training(BIG, TRAINING).stages
    for stage, layers, end in zip(stages, (23, 24, 24, 23), ends, strict=True):
        assert stage.weights == 2 * (layers * layer + end) and stage.gradients == 2 * stage.weights


def test_a_dense_optimizer_is_sharded_over_dp_and_cp():
    layout = Training(dies=32, tp=8, pp=1, cp=2, optimizer="resident")
    (stage,) = megatron_memory.training_stages(DENSE, layout)
    assert stage.optimizer == 12 * (stage.weights // 2) // 4  # DP2 x CP2


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(tp=8), "4 key-value heads"),
        (dict(cp=3), "must divide the 128 dies"),
        (dict(pp=128, tp=1, cp=1, ep=1), "exceeds the 94 layers"),
        (dict(ep=3), "must divide the 128 experts"),
        (dict(ep=64), "dies of a pipeline stage"),
        (dict(layer_split=(24, 24, 24, 23)), "sum to 94"),
        (dict(optimizer="disk"), "use one of swap"),
        (dict(tp=0), "at least 1"),
    ],
)
def test_illegal_training_layouts_are_explained(change, message):
    with pytest.raises(CannotWork, match=message):
        memory_plan.plan(BIG, replace(TRAINING, **change))


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(tp=3), "must divide the 128 dies"),
        (dict(ep=2), "multiple of TP4"),
        (dict(dies=96, ep=96), "128 experts"),
        (dict(gpu_memory_utilization=87), "in \\(0, 1\\]"),
    ],
)
def test_illegal_rollout_layouts_are_explained(change, message):
    with pytest.raises(CannotWork, match=message):
        memory_plan.plan(BIG, rollout=replace(ROLLOUT, **change))


def rank(model: Model, layout: Training) -> tuple:
    worst = replace(layout, imbalance=tensors.worst_imbalance(model, layout.ep))
    size, risky = layout.tp * layout.pp * layout.cp, not megatron_memory.plan_training(model, worst).fits
    return risky, size, layout.cp, layout.pp, layout.etp, layout.ep


def test_suggestions_are_legal_fit_and_are_ranked():
    plans = partitions.suggest_training(BIG, TRAINING, count=100)
    ranks = [rank(BIG, plan.layout) for plan in plans]
    assert ranks == sorted(ranks)  # of one size, less CP first: PP8 CP2 before PP4 CP4
    sizes = [(plan.layout.tp, plan.layout.pp, plan.layout.cp) for plan in plans]
    assert len(set(sizes)) == len(sizes) and sizes.index((4, 8, 2)) < sizes.index((4, 4, 4))
    assert partitions.suggest_training(BIG, TRAINING, count=3) == plans[:3]
    assert partitions.suggest_training(BIG, TRAINING) == plans[:5]
    # Of one TP, PP and CP the best EP and ETP: by brute force over all that is legal and fits.
    best = {}
    for layout in partitions.training_layouts(BIG, replace(TRAINING, dies=64)):
        if megatron_memory.plan_training(BIG, layout).fits:
            size = (layout.tp, layout.pp, layout.cp)
            best[size] = min(best.get(size, rank(BIG, layout)), rank(BIG, layout))
    found = partitions.suggest_training(BIG, replace(TRAINING, dies=64), count=1000)
    assert [rank(BIG, plan.layout) for plan in found] == sorted(best.values())
    names = [plan_text.training_name(plan.layout) for plan in plans]
    assert all(plan.fits and not layouts.training_problems(BIG, plan.layout) for plan in plans)
    assert all(plan.layout.max_token_len_per_gpu * plan.layout.cp >= 34816 for plan in plans)
    keys = [
        (plan.max_imbalance < plan.worst_imbalance, plan.layout.tp * plan.layout.pp * plan.layout.cp)
        for plan in plans
    ]
    assert keys == sorted(keys)
    assert any(name.startswith("TP4 PP4 CP4 DP2") for name in names)  # the published choice
    assert partitions.suggest_training(BIG, replace(TRAINING, dies=16)) == []  # 16 dies cannot hold it
    best = partitions.suggest_rollout(BIG, ROLLOUT)[0].layout
    assert (best.tp, best.ep) == (4, 128)  # published


TEN = replace(Model.named("qwen3-14b"), vocabulary=152000, ffn=17400)  # 40 heads, 8 KV heads
ODD = replace(BIG, ffn=1000)
LEGAL = [
    (DENSE, Training(dies=8, tp=8), ""),
    (DENSE, Training(dies=8, ep=8), "no experts"),
    (DENSE, Training(dies=8, etp=8), "no experts"),
    (DENSE, Training(dies=3, pp=3, layer_split=(1, 62, 1)), ""),
    (DENSE, Training(dies=3, pp=3, layer_split=(0, 63, 1)), "layer_split"),
    (DENSE, Training(dies=3, pp=3, layer_split=(32, 32)), "layer_split"),
    (DENSE, Training(dies=1, imbalance=-1), "imbalance"),
    (BIG, Training(dies=16, ep=8, etp=2), ""),
    (ODD, Training(dies=16, etp=16), "ETP16 must divide the expert width 1000"),
    (TEN, Rollout(dies=8, tp=8), ""),
    (TEN, Rollout(dies=10, tp=10), "divide the 8 key-value heads or be a multiple"),
    (BIG, Rollout(dies=8, tp=8), ""),
    (ODD, Rollout(dies=16, tp=16), "TP16 must divide the MLP width 1000"),
    (ODD, Rollout(dies=16, tp=16, ep=16), ""),
    (DENSE, Rollout(dies=8, ep=8), "no experts"),
    (DENSE, Rollout(dies=8, gpu_memory_utilization=1), ""),
    (DENSE, Rollout(dies=8, gpu_memory_utilization=1.01), "must be in"),
    (DENSE, Rollout(dies=8, gpu_memory_utilization=0), "must be in"),
    (DENSE, layouts.Fsdp(dies=8, version=1), ""),
    (DENSE, layouts.Fsdp(dies=8, version=0), "FSDP 1 and 2"),
    (DENSE, layouts.Fsdp(dies=16, sp=16), ""),
    (TEN, layouts.Fsdp(dies=10, sp=10), "divide the 8 key-value heads or be a multiple"),
]


@pytest.mark.parametrize("model,layout,reason", LEGAL)
def test_what_is_legal_and_what_is_not(model, layout, reason):
    check = {Training: layouts.training_problems, Rollout: layouts.rollout_problems}
    problems = check.get(type(layout), layouts.fsdp_problems)(model, layout)
    assert len(problems) == bool(reason) and reason in "".join(problems)


@pytest.mark.parametrize("model,dies", [(BIG, 64), (DENSE, 96)])
def test_every_legal_layout_is_tried(model, dies):
    """TP inside a node, ETP 1 or TP; a micro-batch stays as long, rounded up."""
    base = Training(dies=dies, cp=4, max_token_len_per_gpu=8701)
    sizes, experts = range(1, dies + 1), (n for n in range(1, 129) if 128 % n == 0)
    wanted = set()
    for tp, pp, ep in itertools.product(range(1, 17), sizes, tuple(experts)):
        for cp in (n for n in sizes if dies % (tp * pp * n) == 0):
            for etp in (1, tp):
                tokens = -(-4 * 8701 // cp)
                layout = replace(base, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, max_token_len_per_gpu=tokens)
                if not layouts.training_problems(model, layout):
                    wanted.add(layout)
    found = list(partitions.training_layouts(model, base))
    assert set(found) == wanted and len(found) == len(wanted) > 50


def test_suggestions_for_the_rollout():
    """Most full sequences on all dies first; of equals small TP, then small EP; a dense model has EP 1."""
    for model in (BIG, DENSE):
        base = replace(ROLLOUT, tp=1, ep=1, dies=64)
        plans = partitions.suggest_rollout(model, base, count=100)
        assert partitions.suggest_rollout(model, base) == plans[:5] and len(plans) > 2
        assert partitions.suggest_rollout(model, base, count=2) == plans[:2]
        assert plans == [rollout_memory.plan_rollout(model, plan.layout) for plan in plans]
        keys = [(-plan.max_num_seqs * plan.dp, plan.layout.tp, plan.layout.ep) for plan in plans]
        assert keys == sorted(keys) and all(plan.fits for plan in plans)
        assert {plan.layout.tp for plan in plans} <= {1, 2, 4, 8, 16}
        if not model.experts:
            assert {plan.layout.ep for plan in plans} == {1}
    left = plans[0].kv_bytes  # what the trainer leaves on the die is not for the KV cache
    assert partitions.suggest_rollout(model, base, left)[0].max_num_seqs < plans[0].max_num_seqs


# -------------------------------------------------------------------------------------------------- FSDP

FSDP = layouts.Fsdp(dies=64, sp=4, max_token_len_per_gpu=8192)  # the published GSPO run


@pytest.mark.parametrize("name", PUBLISHED)
def test_units_of_fsdp_are_hugging_faces_tensors(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    model, experts = Model.load(name), {"num_experts": 3} if "num_experts" in PUBLISHED[name] else {}
    model = replace(model, layers=2, experts=experts.get("num_experts", 0))
    config = AutoConfig.for_model(**PUBLISHED[name] | {"num_hidden_layers": 2} | experts)
    with torch.device("meta"):
        theirs = sorted(tuple(p.shape) for p in AutoModelForCausalLM.from_config(config).parameters())
    for version in (1, 2):
        units = fsdp_memory.fsdp_units(model, version)
        assert sorted(shape for count, shapes in units for shape in shapes * count) == theirs


def test_states_are_fp32_and_shared_over_the_fsdp_size():
    one = fsdp_memory.plan_fsdp(DENSE, FSDP)
    assert one.weights == one.gradients == one.step == 4 * PARAMETERS["qwen3-32b"] // 64
    assert one.optimizer == 2 * one.weights and one.fits
    replicas = fsdp_memory.plan_fsdp(DENSE, replace(FSDP, size=16))
    assert replicas.weights == 4 * one.weights and replicas.gathered == one.gathered
    away = fsdp_memory.plan_fsdp(DENSE, replace(FSDP, offload_policy=True))
    assert away.weights == away.gradients == away.optimizer == away.step == 0
    assert one.peak_bytes - away.peak_bytes == 4 * one.weights
    whole_model = fsdp_memory.plan_fsdp(DENSE, replace(FSDP, reshard_after_forward=False))
    assert whole_model.gathered - one.gathered == 2 * PARAMETERS["qwen3-32b"]


@pytest.mark.parametrize("experts", [0, 4])
def test_adapters_are_those_of_peft(experts):
    """Every linear layer but lm_head, experts and gates included, as verl's FSDP workers ask for."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {
        **PUBLISHED["qwen3-30b-a3b" if experts else "qwen3-32b"],
        **dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8),
        **dict(vocab_size=64, intermediate_size=48, moe_intermediate_size=24, num_experts=experts),
    }
    model = Model.from_config(config)
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    adapted = get_peft_model(whole, LoraConfig(r=3, target_modules="all-linear"))
    trained = sum(one.numel() for one in adapted.parameters() if one.requires_grad)
    assert model.layers * tensors.adapter_parameters(model, 3) == trained
    layout = layouts.Fsdp(dies=1, lora_rank=3, max_token_len_per_gpu=64)
    one = fsdp_memory.plan_fsdp(model, layout)
    assert one.weights == 4 * sum(one.numel() for one in adapted.parameters())
    assert (one.gradients, one.optimizer, one.step) == (4 * trained, 8 * trained, 4 * trained)


def test_frozen_weights_have_neither_gradients_nor_optimizer():
    """verl#3566: of LoRA only the adapters do, in Megatron and FSDP, in a checkpoint and in the rollout."""
    full, lora = (memory_plan.plan(DENSE, replace(FSDP, lora_rank=rank)).training for rank in (0, 32))
    assert lora.gradients < full.gradients / 50 and lora.optimizer < full.optimizer / 50
    assert full.weights < lora.weights < 1.02 * full.weights
    for model, layout in ((BIG, TRAINING), (DENSE, Training(dies=32, tp=8, optimizer="resident"))):
        full, lora = (memory_plan.plan(model, replace(layout, lora_rank=rank)).training for rank in (0, 16))
        for all_, few in zip(full.stages, lora.stages, strict=True):
            adapters = (few.weights - all_.weights) // 2
            assert 0 < adapters and few.gradients == 4 * adapters < all_.gradients / 20
            assert few.optimizer + few.swapped < (all_.optimizer + all_.swapped) / 5
        assert lora.peak_bytes < full.peak_bytes
    for fsdp in (True, False):
        saved = [memory_plan.checkpoint_bytes(DENSE, fsdp, rank) for rank in (0, 32)]
        assert saved[1] < saved[0] * (0.4 if fsdp else 0.2)


@pytest.mark.parametrize("option", ["--hbm-gib", "--reserve-gib", "--gpu-memory-utilization", "--imbalance"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_size_is_a_number(option, value, capsys):
    with pytest.raises(SystemExit):
        memory_plan.main(["--model", "qwen3-8b", "--dies", "16", f"{option}={value}"])
    assert "is not a number from" in capsys.readouterr().err


def test_checkpointing_keeps_the_input_of_each_layer():
    kept = fsdp_memory.plan_fsdp(DENSE, replace(FSDP, recompute="none"))
    assert kept.activations == DENSE.layers * kept.working
    assert fsdp_memory.plan_fsdp(DENSE, FSDP).activations == DENSE.layers * 2 * 8192 * DENSE.hidden


def test_the_largest_token_budget_of_fsdp_fits_and_no_larger_one():
    one = fsdp_memory.plan_fsdp(DENSE, FSDP)
    tokens = one.max_token_len_per_gpu
    assert one.max_sequence_tokens == 4 * tokens
    assert fsdp_memory.plan_fsdp(DENSE, replace(FSDP, max_token_len_per_gpu=tokens)).fits
    assert not fsdp_memory.plan_fsdp(DENSE, replace(FSDP, max_token_len_per_gpu=tokens + 1)).fits


def test_the_rollout_finds_what_fsdp_leaves_on_the_die():
    rollout = Rollout(dies=64, tp=4, max_model_len=32768, max_num_batched_tokens=32768)
    for param, optimizer, parts in [(True, True, 0), (False, True, 1), (True, False, 2), (False, False, 3)]:
        both = memory_plan.plan(
            DENSE, replace(FSDP, param_offload=param, optimizer_offload=optimizer), rollout
        )
        assert both.rollout.training_bytes == parts * both.training.weights
        largest = 4 * DENSE.vocabulary * DENSE.hidden
        assert both.sync_bytes == both.training.weights + largest + both.rollout.weights_bytes


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(size=48), "size of 48 must divide the 64 dies"),
        (dict(sp=3), "must divide the 64 dies"),
        (dict(dies=96, sp=3), "64 attention heads"),
        (dict(version=3), "FSDP 1 and 2"),
        (dict(recompute="half"), "recompute=half"),
        (dict(version=1, offload_policy=True), "needs FSDP2"),
        (dict(sp=0), "at least 1"),
    ],
)
def test_illegal_fsdp_layouts_are_explained(change, message):
    with pytest.raises(CannotWork, match=message):
        memory_plan.plan(DENSE, replace(FSDP, **change))


def test_fsdp_on_the_command_line(capsys):
    run = "--model qwen3-32b --dies 64 --fsdp 2 --prompt 16384 --response 16384 --rollout-tp 4".split()
    assert memory_plan.main([*run, "--sp", "4"]) == 0
    assert "FSDP2 over 64 SP4 DP16" in capsys.readouterr().out
    assert memory_plan.main([*run, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    found = [layouts.Fsdp(**one["layout"]) for one in shown["suggestions"]["training"]]
    assert found[0].sp == 2 == shown["training"]["layout"]["sp"]  # SP1 does not fit
    assert all(not layouts.fsdp_problems(DENSE, one) and one.shards >= 16 for one in found)
    assert [one.sp for one in found] == sorted(one.sp for one in found)
    assert memory_plan.main([*run, "--sp", "4", "--fsdp-size", "8"]) == 1
    with pytest.raises(SystemExit):
        memory_plan.main([*run, "--optimizer", "swap"])
    assert "MindSpeed" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- command line


def test_command_line(tmp_path, capsys):
    published_run = "--dies 128 --tp 4 --pp 4 --cp 4 --ep 32 --rollout-tp 4 --rollout-ep 128".split()
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen3-235b-a22b"]))
    assert memory_plan.main(["--model", str(tmp_path), *published_run, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    training = replace(TRAINING, max_token_len_per_gpu=34816 // 4)
    expected = json.loads(json.dumps(asdict(memory_plan.plan(BIG, training, ROLLOUT))))
    assert {key: shown[key] for key in expected if key != "model"} == {
        key: value for key, value in expected.items() if key != "model"
    }
    assert (
        memory_plan.main(["--model", "qwen3-235b-a22b", *published_run, "--moe-zero-memory", "disable"]) == 1
    )
    assert "DOES NOT FIT" in capsys.readouterr().out
    for wrong, message in [
        (["--model", "qwen9", "--dies", "8"], "qwen9"),
        (["--model", "qwen3-8b", "--dies", "8", "--tp", "3"], "must divide"),
        (["--model", "qwen3-8b", "--dies", "0"], "number from 1"),
    ]:
        with pytest.raises(SystemExit) as status:
            memory_plan.main(wrong)
        assert status.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(("model", "said"), [("qwen3-32b", False), ("qwen3-30b-a3b", True)])
def test_only_models_with_experts_have_an_imbalance(model, said, capsys):
    memory_plan.main(["--model", model, "--dies", "32"])
    assert ("imbalance" in capsys.readouterr().out) is said

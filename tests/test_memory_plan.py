"""ascend_rl.memory_plan: the published tables, and counts against Hugging Face, autograd and brute force.

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

from ascend_rl import converter
from ascend_rl import memory_plan as mp
from ascend_rl.memory_plan import GIB, MIB, Model, PlanError, Rollout, Training

BIG = Model.load("qwen3-235b-a22b")
SEQUENCE = 32768
# The layouts of the published run.
TRAINING = Training(dies=128, tp=4, pp=4, cp=4, ep=32)
ROLLOUT = Rollout(dies=128, tp=4, ep=128, max_num_batched_tokens=34816)
# metadata.total_size of each model.safetensors.index.json, halved: its tensors are bf16.
PARAMETERS = {
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-3b": 3_085_938_688,
}


# ------------------------------------------------------------------------------------------ published tables


def published() -> list[tuple[str, float, float]]:
    """Name, published and our figure, units as published ("GB" is GiB, "MB" is MiB)."""
    rollout = mp.plan_rollout(BIG, ROLLOUT)
    parts = {name: size / GIB for name, size in rollout.weights.items()}
    layer = sum(mp.layer_parameters(BIG, tp=4, ep=32).values())
    rows = [
        ("rollout weights, TP4 EP128, GB", 7.09, rollout.weights_bytes / GIB),
        ("- embedding and lm_head, GB", 0.58, parts["embedding_lm_head"]),
        ("- QKV, GB", 1.65, parts["qkv"]),
        ("- O, GB", 1.47, parts["o"]),
        ("- MoE, GB", 3.30, parts["moe"]),
        ("- gate, GB", 0.09, parts["gate"]),
        ("KV cache, 32k sequence, TP4, GB", 1.47, mp.kv_bytes_per_token(BIG, 4) * SEQUENCE / GIB),
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
    worst = mp.worst_imbalance(BIG, 32)
    for cp, (attention, balanced, imbalanced) in table.items():
        tokens = SEQUENCE // cp
        ours = mp.attention_activation_bytes(BIG, tokens, 4)
        rows.append((f"attention activations a layer, CP{cp}, MB", attention, ours / MIB))
        ours = mp.mlp_activation_bytes(BIG, tokens, 4)
        rows.append((f"MoE activations a layer, balanced, CP{cp}, MB", balanced, ours / MIB))
        ours = mp.mlp_activation_bytes(BIG, tokens, 4, imbalance=worst)
        rows.append((f"MoE activations a layer, worst case, CP{cp}, MB", imbalanced, ours / MIB))
    return rows


@pytest.mark.parametrize("name,wanted,ours", published(), ids=lambda value: str(value))
def test_published_figures(name, wanted, ours):
    assert ours == pytest.approx(wanted, rel=0.05)


def test_published_concurrency():
    """ "The theoretical limit is only 20 to 30" sequences of full length."""
    assert 20 <= mp.plan_rollout(BIG, ROLLOUT).max_num_seqs <= 30


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
        level: mp.plan_training(BIG, replace(TRAINING, moe_zero_memory=level))
        for level in mp.CHOICES["moe_zero_memory"]
    }
    assert [fits[level].fits for level in ("disable", "level0", "level1")] == [False, True, True]
    assert fits["level0"].max_imbalance < 16 == fits["level1"].max_imbalance


# ---------------------------------------------------------------------------------------------- parameters


def whole(model: Model) -> int:
    return sum(mp.stage_parameters(model, model.layers).values())


@pytest.mark.parametrize("name", mp.CONFIGS)
def test_parameters_equal_the_released_weights_and_hugging_face(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = Model.load(name)
    assert whole(model) == PARAMETERS[name]

    def hugging_face(layers: int) -> int:
        config = AutoConfig.for_model(**mp.CONFIGS[name] | {"num_hidden_layers": layers})
        with torch.device("meta"):
            return sum(
                parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters()
            )

    one, two = hugging_face(1), hugging_face(2)
    assert whole(model) == one + (model.layers - 1) * (two - one)


@pytest.mark.parametrize("name", ["qwen3-235b-a22b", "qwen3-8b"])
def test_parameters_equal_the_converters_megatron_tensors(name):
    tensors = converter.mcore_tensors(converter.Model.from_config(mp.CONFIGS[name]))
    assert whole(Model.load(name)) == sum(math.prod(tensor.size) for tensor in tensors)


@pytest.mark.parametrize("name", mp.CONFIGS)
def test_shares_of_all_training_ranks_add_up(name):
    model, checked = Model.load(name), 0
    for tp, pp, ep, etp in itertools.product((1, 2, 4), (1, 2, 3, 4), (1, 8, 32), (1, 2)):
        dies = 128 * pp
        layout = Training(dies=dies, tp=tp, pp=pp, ep=ep, etp=etp)
        if mp.training_problems(model, layout):
            continue
        checked += 1
        once = tp_ranks = expert_ranks = 0
        for index, layers in enumerate(mp.split_layers(model.layers, pp)):
            parts = mp.stage_parameters(model, layers, tp, ep, etp, index == 0, index == pp - 1)
            once += parts["norm"] + parts.get("gate", 0)  # the same on every rank
            tp_ranks += parts["qkv"] + parts["o"] + parts["embedding_lm_head"] + parts.get("mlp", 0)
            expert_ranks += parts.get("moe", 0)
        copies = model.vocabulary * model.hidden if model.tied and pp > 1 else 0
        assert once + tp * tp_ranks + ep * etp * expert_ranks == whole(model) + copies
    assert checked >= 8


@pytest.mark.parametrize("tp,ep,kv_copies", [(1, 1, 1), (4, 1, 1), (4, 128, 1), (8, 128, 2), (16, 1, 4)])
def test_shares_of_a_rollout_group_add_up(tp, ep, kv_copies):
    parts = mp.rollout_parameters(BIG, tp, ep)
    kv = BIG.layers * 2 * BIG.kv_heads * BIG.head_dim * BIG.hidden
    total = parts["norm"] + parts["gate"] + tp * (parts["qkv"] + parts["o"] + parts["embedding_lm_head"])
    total += parts["moe"] * (ep if ep > 1 else tp)
    assert total == whole(BIG) + (kv_copies - 1) * kv


def test_layers_of_stages():
    assert mp.split_layers(94, 4) == (23, 24, 24, 23)  # as in the published script
    for layers, pp in itertools.product(range(1, 100), range(1, 65)):
        if pp <= layers:
            split = mp.split_layers(layers, pp)
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
    mine = mp.attention_activation_bytes(dense, tokens) - 2 * tokens * dense.hidden  # less the residual sum
    assert mine <= saved_bytes(attention, x, weights) <= mine + small
    mine = mp.mlp_activation_bytes(dense, tokens) + 2 * tokens * dense.hidden  # and the residual sum
    assert mine <= saved_bytes(dense_mlp, x, weights) <= mine + 2 * fp32
    copies = x.detach().repeat(moe.experts_per_token, 1).requires_grad_()
    mine = mp.mlp_activation_bytes(moe, tokens) - 2 * 2 * tokens * moe.hidden  # less norm and output
    assert saved_bytes(experts, copies, weights) == mine + 2 * len(copies)  # and the probabilities


def test_worst_imbalance_by_counting():
    """Every token sends as many copies as it can to the experts of rank 0."""
    for ep in (1, 4, 16, 32, 128):
        fullest = [min(BIG.experts_per_token, BIG.experts // ep) for _ in range(ep * 10)]
        mean = BIG.experts_per_token * len(fullest) / ep
        assert mp.worst_imbalance(BIG, ep) == sum(fullest) / mean
    assert mp.worst_imbalance(Model.load("qwen3-8b"), 1) == 1


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
    plan = mp.plan_training(BIG, layout)
    largest = replace(layout, max_token_len_per_gpu=plan.max_token_len_per_gpu)
    assert mp.plan_training(BIG, largest).fits
    assert not mp.plan_training(
        BIG, replace(largest, max_token_len_per_gpu=plan.max_token_len_per_gpu + 1)
    ).fits
    assert plan.max_sequence_tokens == plan.max_token_len_per_gpu * layout.cp
    if 0 < plan.max_imbalance < plan.worst_imbalance:
        assert mp.plan_training(BIG, replace(layout, imbalance=plan.max_imbalance)).fits
        assert not mp.plan_training(BIG, replace(layout, imbalance=plan.max_imbalance + 0.1)).fits


def test_kv_cache_holds_what_it_says():
    plan = mp.plan_rollout(BIG, ROLLOUT)
    share = 0.87 * 64 * GIB
    used = plan.weights_bytes + plan.prefill_bytes + mp.RESERVE_GIB * GIB
    block = plan.kv_bytes_per_token * 128
    assert plan.kv_bytes <= share - used < plan.kv_bytes + block
    blocks = math.ceil(ROLLOUT.max_model_len / 128)
    assert plan.max_num_seqs * blocks * block <= plan.kv_bytes < (plan.max_num_seqs + 1) * blocks * block
    tight = replace(ROLLOUT, gpu_memory_utilization=0.25)
    assert not mp.plan_rollout(BIG, tight).fits


@pytest.mark.parametrize("ep", [1, 128])
def test_chunks_take_the_copies_of_other_tokens_off_the_prefill(ep):
    """Per copy: hidden states before and after, and gate, up and their product, split by TP either way."""
    whole = replace(ROLLOUT, ep=ep)
    chunked = replace(whole, moe_chunk_tokens=8192)
    copies = (34816 - 8192) * BIG.experts_per_token
    values = copies / 4 * (2 * 4096 + 3 * 1536) if ep > 1 else copies * (2 * 4096 + 3 * 1536 / 4)
    assert mp.prefill_bytes(BIG, whole) - mp.prefill_bytes(BIG, chunked) == 2 * values
    assert mp.prefill_bytes(BIG, replace(whole, moe_chunk_tokens=99999)) == mp.prefill_bytes(BIG, whole)


def test_optimizer_and_offload_choices():
    kinds = {
        kind: mp.plan(BIG, replace(TRAINING, optimizer=kind), ROLLOUT) for kind in mp.CHOICES["optimizer"]
    }
    stages = {kind: plan.training.stages[1] for kind, plan in kinds.items()}
    dense, experts = 24 * (9_437_184 + 8_388_608 + 524_288 + 8448), 24 * 4 * 3 * 4096 * 1536
    states = 12 * (dense // 8 + experts // 1)  # DP2 x CP4 shards; EP32 covers all 32 dies of a stage
    assert stages["resident"].optimizer == stages["offload"].optimizer == states
    assert stages["swap"].optimizer == 0 and stages["swap"].swapped == states // 16
    left = {kind: plan.rollout.training_bytes for kind, plan in kinds.items()}
    assert left["swap"] == left["offload"] == 0 and left["resident"] >= states
    stay = mp.plan(BIG, replace(TRAINING, param_offload=False), ROLLOUT)
    assert stay.rollout.training_bytes == max(s.weights + s.gradients for s in stay.training.stages)
    assert stay.rollout.kv_bytes < kinds["swap"].rollout.kv_bytes


def test_stages_keep_what_1f1b_has_in_flight():
    """megatron-core's schedule: PP - stage - 1 forward passes to warm up, then one forward, one backward."""
    stages = mp.plan_training(BIG, replace(TRAINING, recompute="full")).stages
    for index, stage in enumerate(stages):
        in_flight = most = len(stages) - index - 1
        for _ in range(8):
            in_flight += 1
            most = max(most, in_flight)
            in_flight -= 1
        layer_input = 2 * 8704 * 4096 // 4
        assert stage.activations == (23, 24, 24, 23)[index] * most * layer_input


def test_logits_are_on_the_last_stage_and_peaks_add_up():
    stages = mp.plan_training(BIG, TRAINING).stages
    assert [stage.logits for stage in stages] == [0, 0, 0, (2 + 4 + 2) * 8704 * 151936 // 4]
    for stage in stages:
        dynamic = stage.activations + stage.working + stage.logits
        assert stage.peak == stage.weights + stage.gradients + max(stage.swapped, dynamic)


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
    with pytest.raises(PlanError, match=message):
        mp.plan(BIG, replace(TRAINING, **change))


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
    with pytest.raises(PlanError, match=message):
        mp.plan(BIG, rollout=replace(ROLLOUT, **change))


def test_suggestions_are_legal_fit_and_are_ranked():
    plans = mp.suggest_training(BIG, TRAINING, count=100)
    names = [mp.training_name(plan.layout) for plan in plans]
    assert all(plan.fits and not mp.training_problems(BIG, plan.layout) for plan in plans)
    assert all(plan.layout.max_token_len_per_gpu * plan.layout.cp >= 34816 for plan in plans)
    keys = [
        (plan.max_imbalance < plan.worst_imbalance, plan.layout.tp * plan.layout.pp * plan.layout.cp)
        for plan in plans
    ]
    assert keys == sorted(keys)
    assert any(name.startswith("TP4 PP4 CP4 DP2") for name in names)  # the published choice
    assert mp.suggest_training(BIG, replace(TRAINING, dies=16)) == []  # 16 dies cannot hold it
    best = mp.suggest_rollout(BIG, ROLLOUT)[0].layout
    assert (best.tp, best.ep) == (4, 128)  # published


# -------------------------------------------------------------------------------------------------- FSDP

DENSE = Model.load("qwen3-32b")
FSDP = mp.Fsdp(dies=64, sp=4, max_token_len_per_gpu=8192)  # the published GSPO run


@pytest.mark.parametrize("name", mp.CONFIGS)
def test_units_of_fsdp_are_hugging_faces_tensors(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    model, experts = Model.load(name), {"num_experts": 3} if "num_experts" in mp.CONFIGS[name] else {}
    model = replace(model, layers=2, experts=experts.get("num_experts", 0))
    config = AutoConfig.for_model(**mp.CONFIGS[name] | {"num_hidden_layers": 2} | experts)
    with torch.device("meta"):
        theirs = sorted(tuple(p.shape) for p in AutoModelForCausalLM.from_config(config).parameters())
    for version in (1, 2):
        units = mp.fsdp_units(model, version)
        assert sorted(shape for count, shapes in units for shape in shapes * count) == theirs


def test_states_are_fp32_and_shared_over_the_fsdp_size():
    one = mp.plan_fsdp(DENSE, FSDP)
    assert one.weights == one.gradients == one.step == 4 * PARAMETERS["qwen3-32b"] // 64
    assert one.optimizer == 2 * one.weights and one.fits
    replicas = mp.plan_fsdp(DENSE, replace(FSDP, size=16))
    assert replicas.weights == 4 * one.weights and replicas.gathered == one.gathered
    away = mp.plan_fsdp(DENSE, replace(FSDP, offload_policy=True))
    assert away.weights == away.gradients == away.optimizer == away.step == 0
    assert one.peak_bytes - away.peak_bytes == 4 * one.weights
    whole_model = mp.plan_fsdp(DENSE, replace(FSDP, reshard_after_forward=False))
    assert whole_model.gathered - one.gathered == 2 * PARAMETERS["qwen3-32b"]


def test_checkpointing_keeps_the_input_of_each_layer():
    kept = mp.plan_fsdp(DENSE, replace(FSDP, recompute="none"))
    assert kept.activations == DENSE.layers * kept.working
    assert mp.plan_fsdp(DENSE, FSDP).activations == DENSE.layers * 2 * 8192 * DENSE.hidden


def test_the_largest_token_budget_of_fsdp_fits_and_no_larger_one():
    one = mp.plan_fsdp(DENSE, FSDP)
    tokens = one.max_token_len_per_gpu
    assert one.max_sequence_tokens == 4 * tokens
    assert mp.plan_fsdp(DENSE, replace(FSDP, max_token_len_per_gpu=tokens)).fits
    assert not mp.plan_fsdp(DENSE, replace(FSDP, max_token_len_per_gpu=tokens + 1)).fits


def test_the_rollout_finds_what_fsdp_leaves_on_the_die():
    rollout = Rollout(dies=64, tp=4, max_model_len=32768, max_num_batched_tokens=32768)
    for param, optimizer, parts in [(True, True, 0), (False, True, 1), (True, False, 2), (False, False, 3)]:
        both = mp.plan(DENSE, replace(FSDP, param_offload=param, optimizer_offload=optimizer), rollout)
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
    with pytest.raises(PlanError, match=message):
        mp.plan(DENSE, replace(FSDP, **change))


def test_fsdp_on_the_command_line(capsys):
    run = "--model qwen3-32b --dies 64 --fsdp 2 --prompt 16384 --response 16384 --rollout-tp 4".split()
    assert mp.main([*run, "--sp", "4"]) == 0
    assert "FSDP2 over 64 SP4 DP16" in capsys.readouterr().out
    assert mp.main([*run, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    layouts = [mp.Fsdp(**one["layout"]) for one in shown["suggestions"]["training"]]
    assert layouts[0].sp == 2 == shown["training"]["layout"]["sp"]  # SP1 does not fit
    assert all(not mp.fsdp_problems(DENSE, one) and one.shards >= 16 for one in layouts)
    assert [one.sp for one in layouts] == sorted(one.sp for one in layouts)
    assert mp.main([*run, "--sp", "4", "--fsdp-size", "8"]) == 1
    with pytest.raises(SystemExit):
        mp.main([*run, "--optimizer", "swap"])
    assert "MindSpeed" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- command line


def test_command_line(tmp_path, capsys):
    published_run = "--dies 128 --tp 4 --pp 4 --cp 4 --ep 32 --rollout-tp 4 --rollout-ep 128".split()
    (tmp_path / "config.json").write_text(json.dumps(mp.CONFIGS["qwen3-235b-a22b"]))
    assert mp.main(["--model", str(tmp_path), *published_run, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    training = replace(TRAINING, max_token_len_per_gpu=34816 // 4)
    expected = json.loads(json.dumps(asdict(mp.plan(BIG, training, ROLLOUT))))
    assert {key: shown[key] for key in expected if key != "model"} == {
        key: value for key, value in expected.items() if key != "model"
    }
    assert mp.main(["--model", "qwen3-235b-a22b", *published_run, "--moe-zero-memory", "disable"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
    for wrong, message in [
        (["--model", "qwen9", "--dies", "8"], "qwen9"),
        (["--model", "qwen3-8b", "--dies", "8", "--tp", "3"], "must divide"),
        (["--model", "qwen3-8b", "--dies", "0"], "at least 1"),
    ]:
        with pytest.raises(SystemExit) as status:
            mp.main(wrong)
        assert status.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(model_type="llama"), "llama"),
        (dict(num_hidden_layers=None), "num_hidden_layers"),
        (dict(mlp_only_layers=[0]), "without experts"),
    ],
)
def test_unknown_models_are_refused(change, message):
    with pytest.raises(PlanError, match=message):
        Model.from_config(mp.CONFIGS["qwen3-235b-a22b"] | change)

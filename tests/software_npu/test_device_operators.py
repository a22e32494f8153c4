"""The operators of torch_npu: their schemas, their results and gradients against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from device_job import on_npu
from torch.nn import functional as F

GEN = torch.Generator().manual_seed(0)


def numbers(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=GEN, dtype=dtype)


def singles(*shape):
    return numbers(*shape).float()


def agree(operator, reference, *inputs, tolerance=1e-12):
    """Results and gradients of ``operator`` on an NPU and of ``reference`` on the CPU."""
    here = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    there = [x.npu().requires_grad_(x.is_floating_point()) for x in inputs]
    wanted, result = reference(*here), operator(*there)
    assert result.device.type == "npu" and result.dtype == wanted.dtype
    torch.testing.assert_close(result.cpu(), wanted, rtol=tolerance, atol=tolerance)
    factors = numbers(*wanted.shape).to(wanted.dtype)
    (wanted * factors).sum().backward()
    (result * factors.npu()).sum().backward()
    for x, y in zip(here, there, strict=True):
        if x.is_floating_point():
            assert y.grad.device.type == "npu" and y.grad.dtype == x.dtype
            torch.testing.assert_close(y.grad.cpu(), x.grad, rtol=tolerance, atol=tolerance)


@on_npu()
def test_norm_activation_and_rotation():
    import torch_npu

    x, gamma = numbers(5, 8), numbers(8)
    agree(
        lambda *a: torch_npu.npu_rms_norm(*a, epsilon=1e-5)[0],
        lambda x, g: F.rms_norm(x, (8,), g, 1e-5),
        x.float(),
        gamma.float(),
        tolerance=1e-5,
    )
    agree(torch_npu.npu_swiglu, lambda x: F.silu(x[:, :4]) * x[:, 4:], x)
    angles = numbers(5, 1, 4)
    x = numbers(5, 3, 8)

    def turned(x):  # pairs (a, b) as complex numbers
        turn = torch.polar(torch.ones_like(angles), angles)
        y = torch.complex(x[..., :4], x[..., 4:]) * turn
        return torch.cat([y.real, y.imag], -1)

    cos, sin = (torch.cat([f(angles), f(angles)], -1).npu() for f in (torch.cos, torch.sin))
    agree(lambda x: torch_npu.npu_rotary_mul(x, cos, sin), turned, x)


@on_npu()
def test_cross_entropy():
    import torch_npu

    logits, target = numbers(6, 9), torch.tensor([0, 8, 3, -100, 2, 2])
    for reduction in ("none", "mean", "sum"):
        agree(
            lambda x, t: torch_npu.npu_cross_entropy_loss(x, t, reduction=reduction)[0],  # noqa: B023
            lambda x, t: F.cross_entropy(x, t, reduction=reduction),  # noqa: B023
            logits,
            target,
        )
    agree(
        lambda x, t: torch_npu.npu_cross_entropy_loss(x, t)[1], lambda x, t: x.log_softmax(-1), logits, target
    )


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@on_npu()
def test_attention_with_a_batch(layout):
    import torch_npu

    batch, heads, tokens, channels = 2, 4, 5, 6
    q, k, v = (
        singles(batch, heads, tokens, channels),
        singles(batch, 2, tokens, channels),
        singles(batch, 2, tokens, channels),
    )
    order = {"BNSD": "bnsd", "BSND": "bsnd", "BSH": "bs(nd)", "SBH": "sb(nd)"}[layout]

    def to(x):
        x = x.permute(*["bnsd".index(c) for c in order if c in "bnsd"])
        return x.flatten(2) if "(" in order else x

    def reference(q, k, v):
        return to(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True))

    mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1).npu()

    def fused(q, k, v):
        return torch_npu.npu_fusion_attention(*map(to, (q, k, v)), heads, layout, atten_mask=mask, scale=0.3)[
            0
        ]

    agree(fused, reference, q, k, v, tolerance=1e-5)


@on_npu()
def test_packed_attention_stays_within_its_sequences():
    import torch_npu

    ends, heads = [3, 7], 4
    q, k, v = singles(7, 4, 6), singles(7, 2, 6), singles(7, 2, 6)
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()

    def reference(q, k, v):
        parts = [[x[a:b].transpose(0, 1) for x in (q, k, v)] for a, b in ((0, 3), (3, 7))]
        each = [F.scaled_dot_product_attention(*p, is_causal=True, scale=0.3, enable_gqa=True) for p in parts]
        return torch.cat([x.transpose(0, 1) for x in each])

    def fused(q, k, v, ends=ends):
        options = {"atten_mask": mask, "scale": 0.3, "sparse_mode": 3}
        lengths = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
        return torch_npu.npu_fusion_attention(q, k, v, heads, "TND", **options, **lengths)[0]

    agree(fused, reference, q, k, v, tolerance=1e-5)
    with pytest.raises(RuntimeError, match="actual_seq_qlen end at 6 of 7 rows"):
        fused(q.npu(), k.npu(), v.npu(), [3, 6])


@on_npu()
def test_experts():
    import torch_npu

    tokens, experts = numbers(4, 6), torch.tensor([[1, 0], [2, 1], [0, 2], [1, 2]])
    probabilities = numbers(4, 2).softmax(-1)
    by_expert = experts.flatten().argsort(stable=True)
    agree(lambda x: torch_npu.npu_moe_token_permute(x, experts.npu())[0], lambda x: x[by_expert // 2], tokens)

    def back_again(x, p):
        rows, where = torch_npu.npu_moe_token_permute(x, experts.npu())
        return torch_npu.npu_moe_token_unpermute(rows * 3, where, probs=p)

    agree(back_again, lambda x, p: x * 3 * p.sum(1, keepdim=True), tokens, probabilities)


@on_npu()
def test_grouped_products_leave_the_rest_alone_and_have_no_gradient():
    import torch_npu

    x, weight, sizes = numbers(9, 4).float(), numbers(3, 4, 5).float(), [2, 0, 4]
    wanted = torch.cat([x[:2] @ weight[0], x[2:6] @ weight[2]])
    a, w = x.npu().requires_grad_(), weight.npu()
    for kind, given in ((1, sizes), (0, [2, 2, 6])):
        group_list = torch.tensor(given).npu()
        (result,) = torch_npu.npu_grouped_matmul(
            [a],
            [w],
            group_list=group_list,
            split_item=2,
            group_type=0,
            group_list_type=kind,
        )
        torch.testing.assert_close(result[:6].cpu(), wanted)
        assert result.shape == (9, 5) and (result[6:].abs() > 1000).all() and not result.requires_grad
    (by_inner,) = torch_npu.npu_grouped_matmul(
        [a.detach().t()], [a.detach()], group_list=torch.tensor([4, 5]).npu(), split_item=3, group_type=2,
        group_list_type=1,
    )  # fmt: skip
    torch.testing.assert_close(by_inner.cpu(), torch.stack([x[:4].T @ x[:4], x[4:].T @ x[4:]]))


@on_npu()
def test_bfloat16_is_computed_in_float32_and_rounded_once():
    import torch_npu

    x, gamma = numbers(64, 128).bfloat16(), numbers(128).bfloat16()
    result, inverse = torch_npu.npu_rms_norm(x.npu(), gamma.npu())
    assert result.dtype is torch.bfloat16 and inverse.dtype is torch.float32
    exact = F.rms_norm(x.double(), (128,), gamma.double(), 1e-6)
    assert torch.equal(result.cpu(), exact.float().bfloat16())
    agree(lambda x: torch_npu.npu_swiglu(x), lambda x: F.silu(x[:, :64]) * x[:, 64:], x, tolerance=2e-2)


@on_npu()
def test_schemas_and_devices_are_checked():
    import torch_npu

    x = torch.ones(2, 4)
    with pytest.raises(NotImplementedError, match="npu::npu_swiglu was called with tensors of the cpu"):
        torch_npu.npu_swiglu(x)
    with pytest.raises(RuntimeError, match="same device.*npu::npu_rms_norm"):
        torch_npu.npu_rms_norm(x.npu(), torch.ones(4))
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'eps'"):
        torch_npu.npu_rms_norm(x.npu(), torch.ones(4).npu(), eps=1e-5)
    with pytest.raises(NotImplementedError, match="no kernel for npu::npu_fast_gelu"):
        torch_npu.npu_fast_gelu(x.npu())


@on_npu()
def test_dtypes_and_shapes_that_no_device_takes_are_refused():
    """Those that the reference of torch_npu names for the operator."""
    import torch_npu

    x, gamma = numbers(5, 8).npu(), numbers(8).npu()
    with pytest.raises(RuntimeError, match="aclnnRmsNorm.*Tensor x not implemented for DT_DOUBLE"):
        torch_npu.npu_rms_norm(x, gamma)
    x, gamma = x.float(), gamma.float()
    with pytest.raises(RuntimeError, match=r"shape of gamma \[1\] is not"):  # torch would broadcast it
        torch_npu.npu_rms_norm(x, gamma[:1])
    assert torch_npu.npu_rms_norm(x, x)[0].shape == (5, 8)

    rows, weight = torch.tensor([2, 3]).npu(), numbers(2, 8, 3).npu().bfloat16()

    def grouped(x, weight, **options):
        given = {"group_list": rows, "split_item": 2, "group_type": 0, "group_list_type": 1} | options
        return torch_npu.npu_grouped_matmul(x, weight, **given)

    for wrong, message in (
        (x, "one dtype, not .*DT_BFLOAT16.*DT_FLOAT"),
        (x.double(), "Tensor x not implemented for DT_DOUBLE"),
        (x.bfloat16()[None], "2 dimensions with split_item 2"),
    ):
        with pytest.raises(RuntimeError, match=message):
            grouped([wrong], [weight])
    with pytest.raises(RuntimeError, match="bias should be DT_FLOAT for x of DT_BFLOAT16"):
        grouped([x.bfloat16()], [weight], bias=[numbers(2, 3).npu().bfloat16()])
    with pytest.raises(RuntimeError, match="weight has 129 tensors"):
        grouped([x.bfloat16()], [weight[0]] * 129)
    assert grouped([x.bfloat16()], [weight])[0].dtype is torch.bfloat16


@on_npu()
def test_operators_are_captured_whole_and_counted():
    import torch_npu

    from software_npu.kernels.training import calls

    x, rows, graph = torch.ones(4, 6, device="npu"), torch.tensor([2, 2], device="npu"), torch.npu.NPUGraph()
    weight = torch.ones(2, 6, 3, device="npu")
    with torch.npu.graph(graph):
        (y,) = torch_npu.npu_grouped_matmul(
            [x], [weight], group_list=rows, split_item=2, group_type=0, group_list_type=1
        )
    assert graph.names() == ["npu::npu_grouped_matmul"] and calls["npu_grouped_matmul"] == 1
    rows.copy_(torch.tensor([1, 1]))
    x.fill_(2)
    graph.replay()
    assert y[:2].tolist() == [[12] * 3] * 2 and (y[2:] > 1000).all() and calls["npu_grouped_matmul"] == 2


@on_npu()
def test_integers_are_counted():
    assert torch.histc(torch.tensor([1, 1, 3], device="npu"), 4, 0, 3).tolist() == [0, 2, 0, 1]


def compiled(name):
    """MindSpeed's extension, as its builder loads it."""
    from torch.utils.cpp_extension import load

    return load(name, [__file__], extra_ldflags=["-ltorch_npu"])


@on_npu()
def test_permutation_by_a_map_of_experts():
    import torch_npu

    routing = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 1, 1]], dtype=torch.bool)
    tokens, probs = numbers(4, 6), numbers(4, 3).softmax(-1) * routing
    expert, token = routing.T.nonzero().unbind(1)
    rows, own, where = torch_npu.npu_moe_token_permute_with_routing_map(
        tokens.npu(), routing.npu(), probs=probs.npu(), num_out_tokens=8
    )
    assert torch.equal(rows.cpu(), tokens[token]) and torch.equal(own.cpu(), probs[token, expert])
    assert where.dtype is torch.int32 and torch.equal(
        rows[where.long()].cpu(), tokens.repeat_interleave(2, 0)
    )

    x, p = tokens.clone().requires_grad_(), probs.clone().requires_grad_()
    d_rows, d_own = numbers(8, 6), numbers(8)
    ((x[token] * d_rows).sum() + (p[token, expert] * d_own).sum()).backward()
    d_tokens, d_probs = torch_npu.npu_moe_token_permute_with_routing_map_grad(
        d_rows.npu(), d_own.npu(), where, routing.npu(), 3, 4, False
    )
    torch.testing.assert_close(d_tokens.cpu(), x.grad)
    assert torch.equal(d_probs.cpu(), p.grad)

    r, p = numbers(8, 6).requires_grad_(), probs.clone().requires_grad_()
    for weights in (p, None):
        r.grad = p.grad = None
        given = None if weights is None else weights.detach().npu()
        back = torch.zeros(4, 6, dtype=torch.float64)
        back = back.index_add(0, token, r if weights is None else r * p[token, expert, None])
        result, out, ids, _ = torch_npu._npu_moe_token_unpermute_with_routing_map(
            r.detach().npu(), where, [4, 6], probs=given, routing_map=routing.npu()
        )
        torch.testing.assert_close(result.cpu(), back.detach())
        (back * d_rows[:4]).sum().backward()
        d_permuted, d_probs = torch_npu.npu_moe_token_unpermute_with_routing_map_grad(
            d_rows[:4].npu(), out, ids, routing.npu(), r.detach().npu(), given, False, [4, 6]
        )
        torch.testing.assert_close(d_permuted.cpu(), r.grad)
        if weights is not None:
            torch.testing.assert_close(d_probs.cpu(), p.grad)


@on_npu()
def test_extensions_that_need_cann(tmp_path):
    from torch.utils.cpp_extension import load

    options = {"extra_ldflags": ["-Lsomewhere", "-ltorch_npu"]}
    assert load("npu_matmul_add_fp32", [__file__], **options) is compiled("npu_matmul_add_fp32")
    with pytest.raises(FileNotFoundError, match="absent.cpp"):
        load("grouped_matmul", [tmp_path / "absent.cpp"], **options)
    with pytest.raises(NotImplementedError, match="no kernels for the extension npu_ffn"):
        load("npu_ffn", [__file__], **options)
    with pytest.raises(RuntimeError, match="same device"):
        compiled("npu_matmul_add_fp32").npu_matmul_add_fp32(
            numbers(2, 3).npu(), numbers(2, 4), numbers(3, 4).npu()
        )


@pytest.mark.parametrize("ends", [True, False])
@on_npu()
def test_compiled_grouped_products(ends):
    name, given = ("grouped_matmul", [2, 2, 6]) if ends else ("grouped_matmul_v2", [2, 0, 4])
    gmm, kind = compiled(name), int(not ends)
    x, weight, grad = numbers(6, 4).requires_grad_(), numbers(3, 4, 5).requires_grad_(), numbers(6, 5)
    wanted = torch.cat([x[:2] @ weight[0], x[2:] @ weight[2]])
    (wanted * grad).sum().backward()
    a, w, g = x.detach().npu(), weight.detach().npu(), grad.npu()
    for group_list in (torch.tensor(given).npu(), given):
        if isinstance(group_list, list) and not ends:
            continue  # a list is of ends
        (result,) = gmm.npu_gmm([a], [w], [], group_list, 0, kind)
        torch.testing.assert_close(result.cpu(), wanted.detach())
        (dx,), (dw,), none = gmm.npu_gmm_backward([g], [a], [w], group_list, kind)
        torch.testing.assert_close(dx.cpu(), x.grad)
        torch.testing.assert_close(dw.cpu(), weight.grad)
        (alone,), *nothing = gmm.npu_gmm_backward_fusion([g], [w], group_list, kind)
        assert torch.equal(alone, dx) and nothing == [[], []] and none == []
    total = torch.ones(12, 5, dtype=torch.float64).npu()
    rows = torch.tensor([2, 2, 6]).npu()
    compiled("npu_groupmatmul_add_fp32").npu_groupmatmul_add_fp32(a, g, rows, total)
    torch.testing.assert_close(total.view(3, 4, 5).cpu(), weight.grad + 1)
    one = torch.ones(4, 5, dtype=torch.float64).npu()
    compiled("npu_matmul_add_fp32").npu_matmul_add_fp32(a, g, one)
    torch.testing.assert_close(one.cpu(), weight.grad.sum(0) + 1)


@on_npu()
def test_compiled_adamw():
    import torch_npu  # noqa: F401

    adamw = compiled("npu_apply_fused_adamw_v2").npu_apply_fused_adamw_v2
    theirs, mine = numbers(7).requires_grad_(), None
    optimizer = torch.optim.AdamW([theirs], 0.1, (0.8, 0.9), 1e-3, weight_decay=0.2)
    mine = theirs.detach().npu()
    moments, step, unused = [torch.zeros_like(mine) for _ in range(2)], torch.tensor(0).npu(), torch.ones(1)
    for grad in (numbers(7), numbers(7)):
        theirs.grad = grad
        optimizer.step()
        step += 1
        adamw(mine, grad.npu(), *moments, unused, step, 0.1, 0.8, 0.9, 0.2, 1e-3, False, False)
    torch.testing.assert_close(mine.cpu(), theirs.detach())


@on_npu()
def test_compiled_rotation():
    rope, angles, x = compiled("npu_rotary_position_embedding"), numbers(5, 1, 1, 4), numbers(5, 2, 3, 8)
    turn = torch.polar(torch.ones_like(angles), angles)
    for mode in (0, 1):
        cos, sin = (
            (torch.cat([f(angles)] * 2, -1) if mode == 0 else f(angles).repeat_interleave(2, -1)).npu()
            for f in (torch.cos, torch.sin)
        )

        def turned(x, mode=mode):
            pairs = torch.complex(*(x.chunk(2, -1) if mode == 0 else (x[..., ::2], x[..., 1::2]))) * turn
            if mode == 0:
                return torch.cat([pairs.real, pairs.imag], -1)
            return torch.stack([pairs.real, pairs.imag], -1).flatten(-2)

        agree(lambda x, a=(cos, sin, mode): rope.npu_rotary_position_embedding(x, *a), turned, x)


@pytest.mark.parametrize("layout", ["SBH", "TND"])
@on_npu()
def test_compiled_update_of_a_ring(layout):
    """Attention over the keys of two steps is that over all of them."""
    import torch_npu

    update = compiled("npu_ring_attention_update").npu_ring_attention_update
    heads, ends = 2, [3, 7]
    q, keys, values = singles(7, heads, 4), singles(2, 7, heads, 4), singles(2, 7, heads, 4)
    if layout == "SBH":
        q, keys, values = (x.flatten(-2).unsqueeze(-2) for x in (q, keys, values))

    def attention(k, v, kv_ends):
        lengths = {"actual_seq_qlen": ends, "actual_seq_kvlen": kv_ends} if layout == "TND" else {}
        return torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), heads, layout, scale=0.5, **lengths)

    first, second = (attention(k, v, ends)[:3] for k, v in zip(keys, values, strict=True))
    got = update(*first, *second, torch.tensor([0, *ends]).npu() if layout == "TND" else None, layout)
    both = [torch.cat([x[0, :3], x[1, :3], x[0, 3:], x[1, 3:]]) for x in (keys, values)]
    for mine, wanted in zip(got, attention(*both, [6, 14]), strict=False):
        torch.testing.assert_close(mine, wanted)


@on_npu(ranks=2)
def test_masked_tokens_are_not_dispatched(rank):
    """And of the combined rows theirs are left alone; real tokens come first."""
    import torch_npu

    backend = torch.distributed.group.WORLD._get_backend(torch.device("npu"))
    group = {"group_ep": backend.get_hccl_comm_name(rank), "ep_world_size": 2, "ep_rank_id": rank}
    x = (singles(3, 4) + rank).npu()
    experts = torch.tensor([[0, 2], [3, 1], [0, 1]], dtype=torch.int32).npu()
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).npu()
    all_three = [2, 2] if rank == 0 else [1, 1]
    for mask, expected in (([True, True, False], [1, 1]), ([True, True, True], all_three)):
        active = torch.tensor(mask).npu()
        rows, _, origins, counts, sent, *_ = torch_npu.npu_moe_distribute_dispatch_v2(
            x, experts, **group, moe_expert_num=4, x_active_mask=active, expert_token_nums_type=1
        )
        assert counts.tolist() == [2 * n for n in expected]  # both ranks send the same
        ends = torch_npu.npu_moe_distribute_dispatch_v2(
            x, experts, **group, moe_expert_num=4, x_active_mask=active, expert_token_nums_type=0
        )[3]
        assert ends.tolist() == counts.cumsum(0).tolist()
        output = torch_npu.npu_moe_distribute_combine_v2(
            rows, experts, origins, sent, scales, **group, moe_expert_num=4, x_active_mask=active
        )
        wanted = x.cpu() * scales.sum(1, keepdim=True).cpu()
        wanted[~torch.tensor(mask)] = 12345
        torch.testing.assert_close(output.cpu(), wanted)
    with pytest.raises(RuntimeError, match="x_active_mask has a True behind a False"):
        torch_npu.npu_moe_distribute_dispatch_v2(
            x, experts, **group, moe_expert_num=4, x_active_mask=torch.tensor([True, False, True]).npu()
        )


@on_npu()
@pytest.mark.parametrize("ranks, interleave", [(1, 1), (2, 1), (2, 4)])
def test_slots_of_tokens_are_those_of_the_triton_kernel(ranks, interleave):
    """Token by token: the page of a request that holds a position, and the place in it, on each rank."""
    from software_npu.kernels import triton

    launch = triton.KERNELS["vllm.v1.worker.block_table"]["_compute_slot_mapping_kernel"]
    starts, page, padding = [0, 3, 3, 8], 4, -1
    positions = [0, 1, 2, 5, 6, 7, 8, 9]
    table = [[7, 3, 5], [1, 2, 4], [6, 0, 8]]
    for rank in range(ranks):
        wanted = []
        for request in range(3):
            for position in positions[starts[request] : starts[request + 1]]:
                block, within = divmod(position, page * ranks)
                turn, place = divmod(within, interleave)
                own = turn % ranks == rank
                place += turn // ranks * interleave
                wanted.append(table[request][block] * page + place if own else padding)
        slots = torch.full((10,), 99).npu()
        launch[(4,)](
            8, 10, torch.tensor(starts, dtype=torch.int32).npu(), torch.tensor(positions).npu(),
            torch.tensor(table, dtype=torch.int32).npu(), 3, page, slots, TOTAL_CP_WORLD_SIZE=ranks,
            TOTAL_CP_RANK=rank, CP_KV_CACHE_INTERLEAVE_SIZE=interleave, PAD_ID=padding, BLOCK_SIZE=1024,
        )  # fmt: skip
        assert slots.tolist() == [*wanted, padding, padding]


@on_npu()
def test_the_tokens_of_top_k_and_top_p_remain():
    """Row by row: the k likeliest, then of these as few as make up p."""
    import torch_npu

    logits, ks, ps = singles(5, 9), [9, 1, 4, 9, 4], [1.0, 1.0, 1.0, 0.6, 0.7]
    for k, p in ((ks, None), (None, ps), (ks, ps)):
        wanted = torch.full_like(logits, -torch.inf)
        for row, values in enumerate(logits):
            kept = values.argsort(descending=True)[: k[row] if k else None]
            shares = values[kept].softmax(-1).cumsum(-1) - values[kept].softmax(-1)
            kept = kept[shares < p[row]] if p else kept
            wanted[row, kept] = values[kept]
        given = {"k": k and torch.tensor(k, dtype=torch.int32).npu(), "p": p and torch.tensor(p).npu()}
        assert torch.equal(torch_npu.npu_top_k_top_p(logits.npu(), **given).cpu(), wanted), given


@on_npu()
def test_chunks_change_places_as_by_the_triton_kernels():
    from software_npu.kernels import triton

    map_of, move = triton.KERNELS["mindspeed.ops.triton.sort_chunks_by_idx"].values()
    sizes, order = torch.tensor([2, 0, 3, 1], dtype=torch.int32), torch.tensor([2, 0, 3, 1])
    rows, weights = torch.arange(12.0).view(6, 2), torch.arange(6.0)
    wanted = [torch.cat([values.split(sizes.tolist())[i] for i in order]) for values in (rows, weights)]
    ends, new_ends = (
        torch.cat([torch.zeros(1, dtype=torch.int32), s.cumsum(0, dtype=torch.int32)])
        for s in (sizes, sizes[order])
    )
    places = torch.empty(6, dtype=torch.int32).npu()
    inverse = order.argsort().int().npu()
    map_of[(6,)](
        sizes.npu(), ends.npu(), inverse, new_ends.npu(), places, 4, 6, BLOCK_SIZE=1, IDX_LOAD_WIDTH=4
    )
    moved = [torch.empty_like(values).npu() for values in (rows, weights)]
    back = [torch.empty_like(values).npu() for values in (rows, weights)]
    strides = (2, 1, 2, 1, 1, 1)
    for (x, p), (to_x, to_p), forward in (((rows, weights), moved, True), (moved, back, False)):
        move[(48,)](
            x.npu(), to_x, places, p.npu(), to_p, 6, 2, 1, *strides, PERMUTE_PROBS=True, FORWARD=forward
        )
    assert all(torch.equal(m.cpu(), w) for m, w in zip(moved, wanted, strict=True))
    assert torch.equal(back[0].cpu(), rows) and torch.equal(back[1].cpu(), weights)


@on_npu()
def test_the_version_is_that_of_the_lock():
    import importlib.metadata

    import torch_npu
    from wheels import pinned

    assert torch_npu.__version__ == importlib.metadata.version("torch-npu") == pinned()

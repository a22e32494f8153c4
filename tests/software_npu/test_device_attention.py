"""Fused attention: calls that the references of torch_npu, CANN and ATB rule out, and calls they permit."""

from __future__ import annotations

import pytest
import torch
from device_job import on_npu

HEADS, GROUPS, SIZE, TOKENS = 4, 2, 16, 6
AXES = {"T": TOKENS, "S": TOKENS, "B": 1, "N": HEADS, "D": SIZE, "H": HEADS * SIZE}


def npu(*shape, dtype=torch.bfloat16):
    return torch.ones(shape, dtype=dtype).npu()


def mask(*shape, dtype=torch.bool):
    return torch.ones(shape).triu(1).to(dtype).npu()


def trained(layout="TND", **changes):
    """npu_fusion_attention as MindSpeed and transformers call it, but for ``changes``."""
    import torch_npu

    q = [AXES[axis] for axis in layout]
    k = [{"N": GROUPS, "H": GROUPS * SIZE}.get(axis, AXES[axis]) for axis in layout]
    given = {"query": npu(*q), "key": npu(*k), "value": npu(*k), "head_num": HEADS, "input_layout": layout}
    given |= {"atten_mask": mask(2048, 2048), "sparse_mode": 3}
    if layout == "TND":
        given |= {"actual_seq_qlen": [2, TOKENS], "actual_seq_kvlen": [2, TOKENS]}
    return torch_npu.npu_fusion_attention(**given | changes)[0]


def refused(call, cases, error=RuntimeError):
    for message, changes in cases:
        with pytest.raises(error, match=message):
            call(**changes)


def tensors(*shape, dtype=torch.bfloat16):
    return dict.fromkeys(("query", "key", "value"), npu(*shape, dtype=dtype))


@pytest.mark.long
@on_npu()
def test_training_takes_documented_dtypes_and_layouts_only():
    for layout in ("TND", "BSH", "SBH", "BSND", "BNSD"):
        assert trained(layout).dtype is torch.bfloat16
    for dtype in (torch.float16, torch.float32):
        assert trained(**tensors(6, 4, 16, dtype=dtype)).dtype is dtype
    refused(trained, [
        ("aclnnFlashAttentionVarLenScore.*Tensor query not implemented for DT_DOUBLE",
         tensors(6, 4, 16, dtype=torch.float64)),
        ("key is DT_FLOAT, query DT_BFLOAT16", {"key": npu(6, 2, 16, dtype=torch.float32)}),
        ("input_layout NTD is not one of BSH, SBH, BSND, BNSD, TND", {"input_layout": "NTD"}),
        ("query has 4 dimensions, layout TND 3", {"query": npu(1, 6, 4, 16)}),
        ("shapes of key .* and value .* differ", {"value": npu(5, 2, 16)}),
        ("padding_mask is not supported", {"padding_mask": mask(6, 6)}),
        (r"keep_prob 0.0 is not in \(0, 1\]", {"keep_prob": 0.0}),
        ("softmax_layout 'BSND'", {"softmax_layout": "BSND"}),
        ("softmax_layout 'TND'", {"layout": "BSND", "softmax_layout": "TND"}),
    ])  # fmt: skip
    refused(trained, [
        ("keep_prob 0.5 has no kernel", {"keep_prob": 0.5}),
        ("softmax_layout TND has no kernel", {"softmax_layout": "TND"}),
    ], NotImplementedError)  # fmt: skip


@on_npu()
def test_training_takes_documented_heads_only():
    assert trained(key=npu(6, 1, 16), value=npu(6, 1, 16)).shape == (6, 4, 16)
    assert trained(**tensors(6, 1, 768), head_num=1).shape == (6, 1, 768)
    assert trained(**tensors(6, 256, 16), head_num=256).shape == (6, 256, 16)
    refused(trained, [
        ("4 heads of query are no multiple of 3 heads", {"key": npu(6, 3, 16), "value": npu(6, 3, 16)}),
        ("head_num 2, but query has 4 heads", {"head_num": 2}),
        ("head sizes of query 16 and key 32 differ", {"key": npu(6, 2, 32), "value": npu(6, 2, 32)}),
        (r"head size 784 is not in \[1, 768\]", tensors(6, 1, 784) | {"head_num": 1}),
        (r"number of heads 257 is not in \[1, 256\]", tensors(6, 257, 16) | {"head_num": 257}),
        ("H 64 of query is not a multiple of head_num 3", {"layout": "BSH", "head_num": 3}),
        ("H 40 of key is not a multiple of the head size 16",
         {"layout": "BSH", "key": npu(1, 6, 40), "value": npu(1, 6, 40)}),
        (r"number of heads 0 is not in \[1, 256\]", tensors(6, 0, 16) | {"head_num": 0}),
        (r"4 heads of query are no multiple of 0 heads", {"key": npu(6, 0, 16), "value": npu(6, 0, 16)}),
        ("batches of query 1 and key 2 differ",
         {"layout": "BSND", "key": npu(2, 6, 2, 16), "value": npu(2, 6, 2, 16)}),
    ])  # fmt: skip


@on_npu()
def test_training_takes_ends_of_packed_sequences():
    empty = [0, 2, 2, 6]  # sequences of no tokens are permitted
    assert trained(actual_seq_qlen=empty, actual_seq_kvlen=empty).shape == (6, 4, 16)
    both = ("actual_seq_qlen", "actual_seq_kvlen")
    refused(trained, [
        ("actual_seq_qlen is needed with layout TND", {"actual_seq_qlen": None}),
        ("actual_seq_qlen are ends, which do not descend: 4, 2", dict.fromkeys(both, [4, 2])),
        ("actual_seq_kvlen end at 5 of 6 rows", {"actual_seq_kvlen": [2, 5]}),
        ("actual_seq_qlen begins at -1", dict.fromkeys(both, [-1, 6])),
        ("2 actual_seq_qlen, 1 actual_seq_kvlen", {"actual_seq_kvlen": [6]}),
        ("has 1025 sequences, more than 1024", dict.fromkeys(both, [0] * 1024 + [6])),
    ])  # fmt: skip
    assert trained(**dict.fromkeys(both, [0] * 1023 + [6])).shape == (6, 4, 16)


@on_npu()
def test_training_takes_the_mask_of_its_mode():
    causal = trained(sparse_mode=3)
    ends = {"actual_seq_qlen": [2, 6], "actual_seq_kvlen": [2, 6]}
    assert torch.equal(trained(sparse_mode=0, atten_mask=mask(4, 4)), causal)  # of the longest sequence
    assert trained("BSND", sparse_mode=1, atten_mask=mask(1, 4, 6, 6)).shape == (1, 6, 4, 16)
    assert trained("BSND", sparse_mode=2, atten_mask=mask(1, 1, 2048, 2048)).shape == (1, 6, 4, 16)
    refused(trained, [
        (r"atten_mask \[6, 6\] is not \[2048, 2048\], with sparse_mode 3", ends | {"atten_mask": mask(6, 6)}),
        (r"atten_mask \[6, 6\] is not \[2048, 2048\], with sparse_mode 2",
         ends | {"atten_mask": mask(6, 6), "sparse_mode": 2}),
        (r"atten_mask \[6, 6\] is not \[4, 4\], with sparse_mode 0",
         ends | {"atten_mask": mask(6, 6), "sparse_mode": 0}),
        (r"atten_mask \[1, 1, 1, 6\] is not \[6, 6\] or", {
            "layout": "BSND", "atten_mask": mask(1, 1, 1, 6), "sparse_mode": 0}),
        (r"is not \[2048, 2048\] or \[1, 1, 2048, 2048\], with sparse_mode 4",
         {"layout": "BSND", "atten_mask": mask(6, 6), "sparse_mode": 4}),
        (r"is not \[3072, 2048\] or \[1, 1, 3072, 2048\], with sparse_mode 6",
         {"layout": "BSND", "sparse_mode": 6}),
        ("Tensor atten_mask not implemented for DT_INT8", {"atten_mask": mask(2048, 2048, dtype=torch.int8)}),
        (r"sparse_mode 9 is not in \[0, 8\]", {"sparse_mode": 9}),
        ("sparse_mode 5 is not supported with layout TND", {"sparse_mode": 5}),
        ("sparse_mode 7 is supported with layout TND only", {"layout": "BSND", "sparse_mode": 7}),
    ])  # fmt: skip
    refused(trained, [("no kernel", {"sparse_mode": 4})], NotImplementedError)


@on_npu()
def test_training_without_a_mask_sees_all_whatever_the_mode():
    """As documented: a mode without its mask is no error, and does nothing."""
    value = torch.arange(TOKENS).view(TOKENS, 1, 1).expand(TOKENS, GROUPS, SIZE).float().npu()
    given = {
        "query": npu(6, 4, 16, dtype=torch.float32),
        "key": npu(6, 2, 16, dtype=torch.float32),
        "value": value,
    }
    given |= {"actual_seq_qlen": [TOKENS], "actual_seq_kvlen": [TOKENS]}
    assert trained(**given)[:, 0, 0].tolist() == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5])
    assert trained(**given, atten_mask=None)[:, 0, 0].tolist() == pytest.approx([2.5] * 6)


def inferred(**changes):
    """npu_fused_infer_attention_score as vllm-ascend calls it over its paged cache, but for ``changes``."""
    import torch_npu

    cache = npu(3, 128, GROUPS * SIZE)
    given = {"query": npu(6, 4, 16), "key": cache, "value": cache, "input_layout": "TND", "block_size": 128}
    given |= {"num_heads": HEADS, "num_key_value_heads": GROUPS, "sparse_mode": 3}
    given |= {"atten_mask": mask(2048, 2048, dtype=torch.int8), "actual_seq_lengths": [2, 6]}
    given |= {"block_table": torch.tensor([[0, 1], [2, 0]], dtype=torch.int32).npu()}
    return torch_npu.npu_fused_infer_attention_score(**given | {"actual_seq_lengths_kv": [200, 9]} | changes)[
        0
    ]


def cached(*shape, dtype=torch.bfloat16):
    return dict.fromkeys(("key", "value"), npu(*shape, dtype=dtype))


UNPAGED = {"block_table": None, "actual_seq_lengths_kv": [2, 6]}


@on_npu()
def test_inference_takes_documented_inputs_only():
    assert inferred().shape == (6, 4, 16)
    assert inferred(**UNPAGED, **cached(6, 2, 16)).shape == (6, 4, 16)
    assert inferred(**UNPAGED, **cached(6, 4, 16), num_key_value_heads=0).shape == (
        6,
        4,
        16,
    )  # as many as heads
    refused(inferred, [
        ("aclnnFusedInferAttentionScoreV3.*Tensor query not implemented for DT_DOUBLE",
         {"query": npu(6, 4, 16, dtype=torch.float64)}),
        ("key is DT_FLOAT16, query DT_BFLOAT16", cached(3, 128, 32, dtype=torch.float16)),
        ("input_layout TDN is not one of", {"input_layout": "TDN"}),
        ("num_heads 8, but query has 4 heads", {"num_heads": 8}),
        ("query has 2 dimensions, layout TND 3", {"query": npu(6, 64)}),
        (r"number of heads 257 is not in \[1, 256\]",
         {"query": npu(6, 257, 16), "num_heads": 257, "num_key_value_heads": 257}),
        ("4 heads of query are no multiple of 3 heads", {"num_key_value_heads": 3}),
        ("128 heads to 1 of key and value: more than 64",
         {"query": npu(6, 128, 16), "num_heads": 128, "num_key_value_heads": 1}),
        ("head size 24 is not a multiple of 16", {"query": npu(6, 4, 24)}),
        ("head size 272 is not a multiple of 16 in", {"query": npu(6, 4, 272)}),
        ("shapes of key .* and value .* differ", {"value": npu(4, 128, 32)}),
        (r"shape of key \[6, 4, 16\] is not \[tokens, 2, 16\]", UNPAGED | cached(6, 4, 16)),
    ])  # fmt: skip
    refused(inferred, [("input_layout BSH has no kernel", {"input_layout": "BSH"})], NotImplementedError)


@on_npu()
def test_inference_takes_ends_of_queries_and_lengths_of_paged_keys():
    refused(inferred, [
        ("actual_seq_lengths is needed", {"actual_seq_lengths": None}),
        ("actual_seq_lengths_kv is needed", {"actual_seq_lengths_kv": None}),
        ("actual_seq_lengths are ends, which do not descend: 6, 4", {"actual_seq_lengths": [6, 4]}),
        ("actual_seq_lengths end at 4 of 6 rows", {"actual_seq_lengths": [2, 4]}),
        ("actual_seq_lengths begins at -2", {"actual_seq_lengths": [-2, 6]}),
        ("lengths_kv end at 5 of 6 rows", UNPAGED | cached(6, 2, 16) | {"actual_seq_lengths_kv": [2, 5]}),
        ("2 actual_seq_lengths, 1 actual_seq_lengths_kv", {"actual_seq_lengths_kv": [200]}),
        ("has 4097 sequences, more than 4096", {"actual_seq_lengths": [0] * 4096 + [6],
                                                "actual_seq_lengths_kv": [0] * 4097}),
    ])  # fmt: skip


@on_npu()
def test_inference_takes_the_mask_of_its_mode():
    assert inferred(sparse_mode=0, atten_mask=None).shape == (6, 4, 16)
    assert inferred(atten_mask=mask(1, 1, 2048, 2048)).shape == (6, 4, 16)
    refused(inferred, [
        ("sparse_mode 3 needs an atten_mask", {"atten_mask": None}),
        ("sparse_mode 0 takes no atten_mask", {"sparse_mode": 0}),
        ("sparse_mode 2 with layout TND is not one of 0, 3, 4", {"sparse_mode": 2}),
        (r"atten_mask \[6, 6\] is not \[2048, 2048\], with sparse_mode 3", {"atten_mask": mask(6, 6)}),
        ("atten_mask not implemented for DT_FLOAT", {"atten_mask": mask(2048, 2048, dtype=torch.float32)}),
    ])  # fmt: skip
    refused(inferred, [("sparse_mode 4 has no kernel", {"sparse_mode": 4})], NotImplementedError)


@on_npu()
def test_inference_takes_documented_pages_only():
    small = {"block_size": 16, "actual_seq_lengths_kv": [20, 9]}
    assert inferred(**small, **cached(3, 16, 32)).shape == (6, 4, 16)
    table = {"block_table": torch.zeros(2, 2).npu()}
    refused(inferred, [
        ("block_size 24 is not a multiple of 16", small | cached(3, 24, 32) | {"block_size": 24}),
        ("block_size 256 is not a multiple of 16 in", cached(3, 256, 32) | {"block_size": 256}),
        (r"paged key \[3, 128, 2, 16\] is not \[blocks, block_size, 32\]", cached(3, 128, 2, 16)),
        (r"paged key \[3, 128, 32\] is not .*, of 64", {"block_size": 64}),
        ("Tensor block_table not implemented for DT_FLOAT", table),
        ("no row for each of 2 sequences", {"block_table": torch.zeros(1, 2, dtype=torch.int32).npu()}),
        ("2 columns for 3 blocks of 257 tokens", {"actual_seq_lengths_kv": [257, 9]}),
        ("256 heads of 256 in the paged key are 65536, more than 65535",
         cached(1, 16, 65536) | {"query": npu(6, 256, 256), "num_heads": 256, "num_key_value_heads": 256,
                                 "block_size": 16}),
    ])  # fmt: skip


def paged(**changes):
    """_npu_paged_attention as vllm-ascend calls it, but for ``changes``."""
    import torch_npu

    given = {"query": npu(2, 4, 16), "num_heads": HEADS, "num_kv_heads": GROUPS, "scale_value": 0.25}
    given |= dict.fromkeys(("key_cache", "value_cache"), npu(3, 128, 2, 16))
    given |= {"block_table": torch.tensor([[0, 1], [2, -1]], dtype=torch.int32).npu()}
    given |= {"context_lens": torch.tensor([200, 9], dtype=torch.int32)} | changes
    out = torch.empty_like(given["query"])
    torch_npu._npu_paged_attention(**given, out=out)
    return out


@on_npu()
def test_paged_attention_takes_what_atb_documents_only():
    def caches(*shape):
        return dict.fromkeys(("key_cache", "value_cache"), npu(*shape))

    assert paged()[0].tolist() == [[1.0] * 16] * 4
    assert paged(**caches(13, 16, 2, 16), context_lens=torch.tensor([20, 9], dtype=torch.int32)).shape == (
        2,
        4,
        16,
    )
    refused(paged, [
        ("PagedAttentionOperation.*4 heads of query are no multiple of 3", {"num_kv_heads": 3}),
        ("num_kv_heads 4, but key_cache has 2 heads", {"num_kv_heads": 4}),
        ("key_cache has 3 dimensions, not 4", caches(3, 128, 32)),
        (r"block_table \[1, 2\] has no row for each of 2 sequences",
         {"block_table": torch.zeros(1, 2, dtype=torch.int32).npu()}),
        ("block_size 24 is not a multiple of 16", caches(9, 24, 2, 16)),
        (r"query \[2, 4, 32\] is not \[tokens, 4, 16\]", {"query": npu(2, 4, 32)}),
        (r"head size 592 is not in \[1, 576\]", caches(3, 128, 2, 592) | {"query": npu(2, 4, 592)}),
        ("block_size 144 with head size 272 is over 128", caches(3, 144, 2, 272) | {"query": npu(2, 4, 272)}),
        ("2 columns for 3 blocks", {"context_lens": torch.tensor([300, 9], dtype=torch.int32)}),
        (r"block_table names \[2, -1\], the cache has blocks \[0, 3\)",
         {"context_lens": torch.tensor([200, 130], dtype=torch.int32)}),
        ("key_cache.*DT_FLOAT16, query DT_BFLOAT16", {"key_cache": npu(3, 128, 2, 16, dtype=torch.float16)}),
    ])  # fmt: skip

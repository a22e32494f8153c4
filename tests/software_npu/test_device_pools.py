"""Sleep: what vllm-ascend's CaMemAllocator does with the memory of a pool, its own code unmodified.

The invariants: asleep, the memory is free for others and an access is an error; awake, what was offloaded is
back at the same addresses, and the rest is garbage.
"""

from __future__ import annotations

import pytest
import torch
from device_job import ROOT, on_npu

MiB = 1 << 20
ASCEND = ROOT / "frameworks/vllm_ascend"


def allocator():
    """CaMemAllocator alone: its module imports nothing else of vllm-ascend."""
    import sys
    import types

    sys.modules["vllm_ascend"] = types.ModuleType("vllm_ascend")
    sys.modules["vllm_ascend"].__path__ = [str(ASCEND / "vllm_ascend")]
    from vllm_ascend.device_allocator import camem

    assert camem.camem_available and camem.lib_name.startswith(str(ROOT))
    return camem.CaMemAllocator.get_instance()


def fill(pools):
    with pools.use_memory_pool("weights"):
        weights = torch.arange(MiB, dtype=torch.float32, device="npu") * 1  # of an operator, too
    with pools.use_memory_pool("kv_cache"):
        cache = torch.ones(MiB, device="npu")
    return weights, cache


@on_npu(SOFTWARE_NPU_MEMORY_MB="64")
def test_level_1_restores_the_weights_and_discards_the_cache():
    pools, outside = allocator(), torch.ones(5, device="npu")
    weights, cache = fill(pools)
    assert pools.get_current_usage() == 8 * MiB  # what arange returned is free again
    addresses = weights.data_ptr(), cache.data_ptr()
    free = torch.npu.mem_get_info()[0]
    pools.sleep(offload_tags=("weights",))
    assert torch.npu.mem_get_info()[0] - free == pools.get_current_usage()
    other = torch.empty(56 * MiB, dtype=torch.uint8, device="npu")  # fits only now
    for asleep in (weights, cache):
        for access in (
            lambda x: x[5].item(),
            lambda x: x.add_(1),
            lambda x: x.cpu(),
            lambda x: x.view(4, -1).sum(),
        ):
            with pytest.raises(RuntimeError, match="unmapped: it sleeps"):
                access(asleep)
    assert outside.sum().item() == 5
    with pytest.raises(RuntimeError, match="out of memory"):
        pools.wake_up()
    del other
    pools.wake_up(["weights"])
    assert torch.equal(weights.cpu(), torch.arange(MiB, dtype=torch.float32))
    with pytest.raises(RuntimeError, match="unmapped"):
        cache.sum()
    pools.wake_up(["kv_cache"])
    assert cache.isnan().all() and (weights.data_ptr(), cache.data_ptr()) == addresses


@on_npu()
def test_level_2_discards_the_weights_too():
    pools = allocator()
    weights, cache = fill(pools)
    pools.sleep(offload_tags=())
    pools.wake_up()
    assert weights.isnan().all() and cache.isnan().all()
    weights.copy_(torch.ones(MiB))
    assert weights.sum().item() == MiB


@on_npu(SOFTWARE_NPU_MEMORY_MB="16")
def test_freed_tensors_leave_the_pool_asleep_or_awake_and_the_cap_holds():
    pools = allocator()
    before = torch.npu.mem_get_info()[0]
    weights, cache = fill(pools)
    del cache
    assert len(pools.pointer_to_data) == 1
    pools.sleep()
    del weights
    assert not pools.pointer_to_data and torch.npu.mem_get_info()[0] == before
    with pools.use_memory_pool("weights"):
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 20.00 MiB"):
            torch.empty(20 * MiB, dtype=torch.uint8, device="npu")
    assert torch.npu.memory_allocated() == 0


@on_npu(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True")
def test_expandable_segments_end_the_pool_before_anything_is_allocated():
    """So a rollout that may sleep does not start with them: vllm-ascend asserts it."""
    assert torch.npu.memory.allocator_options() == {"expandable_segments": "True"}
    with pytest.raises(AssertionError, match="Expandable segments are not compatible with memory pool"):
        allocator()
    assert torch.npu.memory_allocated() == 0


def sleeps_and_wakes():
    pools = allocator()
    weights, cache = fill(pools)
    pools.sleep(offload_tags=("weights",))
    pools.wake_up()
    assert torch.equal(weights.cpu(), torch.arange(MiB, dtype=torch.float32)) and cache.isnan().all()


@on_npu(PYTORCH_NPU_ALLOC_CONF="garbage_collection_threshold:0.6,max_split_size_mb:24")
def test_what_the_recipes_set_lets_the_pool_sleep():
    sleeps_and_wakes()


@on_npu(PYTORCH_NPU_ALLOC_CONF="")
def test_an_empty_variable_lets_the_pool_sleep():
    """Training then switches expandable segments on in its own processes (hot_swap_expandable_segments)."""
    sleeps_and_wakes()

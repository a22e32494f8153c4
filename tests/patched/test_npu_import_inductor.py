"""With triton-ascend a worker opens a context on its own die, and on no other."""

from __future__ import annotations

from npu_ground import make_llm, on_ranks, save_random_model

RANKS = 2


def opened(path: str) -> list[list[int]]:
    """A job of each rank: allocations on each die, by rank."""
    import sys

    import torch
    import torch.distributed as dist

    import vllm.triton_utils

    vllm.triton_utils.HAS_TRITON = True  # as on a host with triton-ascend; no kernel of it runs
    make_llm(path, tensor_parallel_size=RANKS, distributed_executor_backend="external_launcher")
    assert "torch_npu._inductor" in sys.modules
    found = [None] * RANKS
    own = [torch.npu.memory_stats(die)["allocation.all.allocated"] for die in range(RANKS)]
    dist.all_gather_object(found, own)
    return found


def on_all_ranks(path: str) -> list[list[int]]:
    return on_ranks("A3", RANKS, opened, path)


def test_each_worker_opens_its_own_die_only(npu_ground, tmp_path):
    found = npu_ground.run(on_all_ranks, str(save_random_model(tmp_path)))
    print(f"allocations by rank and die: {found}")
    for rank, allocations in enumerate(found):
        assert [die for die, number in enumerate(allocations) if number] == [rank]

"""torch_npu.contrib.transfer_to_npu: what is written for a GPU runs on the NPU."""

from __future__ import annotations

import pytest
from device_job import on_npu


@on_npu()
def test_without_it_cuda_is_cuda():
    import torch

    assert not torch.cuda.is_available() and not torch.ones(1).npu().is_cuda
    with pytest.raises((RuntimeError, AssertionError), match="CUDA|cuda|NVIDIA"):
        torch.ones(1, device="cuda")


@on_npu()
def test_names_of_cuda_are_the_devices():
    import torch
    from torch_npu.contrib import transfer_to_npu  # noqa: F401

    npu = torch.device("npu", 0)
    assert torch.cuda.is_available() and torch.cuda.device_count() == torch.npu.device_count() > 0
    x = torch.ones(3, device="cuda")
    for made in (
        x, torch.zeros(2, device="cuda:0"), torch.zeros(2, device=0), torch.ones(1).cuda(),
        torch.ones(1).to("cuda"), torch.ones(1).to(0), torch.ones(1).to(device=torch.device("cuda")),
        x.new_zeros(2, device="cuda"), torch.cuda.FloatTensor([1.0]), torch.nn.Linear(2, 2).cuda().weight,
        torch.nn.Linear(2, 2).to("cuda:0").weight, torch.nn.Linear(2, 2, device="cuda").weight,
    ):  # fmt: skip
        assert made.device == npu and made.is_cuda
    assert not torch.ones(1).is_cuda and torch.ones(1).to(torch.int64).dtype is torch.int64
    assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.cuda.IntTensor)
    assert not isinstance(torch.ones(1), (torch.cuda.FloatTensor, torch.cuda.HalfTensor))
    assert torch.cuda.memory_allocated() == torch.npu.memory_allocated() > 0
    before = torch.cuda.random.get_rng_state(device="cuda")
    first = torch.rand(2, device="cuda")
    torch.cuda.set_rng_state(before, "cuda:0")
    assert torch.equal(first, torch.rand(2, device="cuda"))
    with torch.cuda.stream(torch.cuda.Stream()), torch.autocast("cuda", torch.bfloat16):
        assert (torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")).dtype is torch.bfloat16
    with torch.device("cuda"):
        assert torch.ones(1).device == npu


@on_npu()
def test_saved_for_a_gpu_is_loaded_on_the_npu(tmp_path):
    import torch
    from torch_npu.contrib import transfer_to_npu  # noqa: F401

    torch.save({"x": torch.ones(2)}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", map_location="cuda")["x"].device.type == "npu"
    assert torch.load(tmp_path / "x.pt", map_location={"cuda": "cpu"})["x"].device.type == "cpu"


@on_npu(ranks=2)
def test_nccl_is_hccl(rank):
    import torch
    import torch.distributed as dist
    from torch_npu.contrib import transfer_to_npu  # noqa: F401

    group = dist.new_group(backend="nccl")
    assert dist.get_backend(group) == "hccl"
    x = torch.full((2,), rank + 1.0, device="cuda")
    dist.all_reduce(x, group=group)
    assert x.tolist() == [3, 3]

"""FSDP on two software NPUs over hccl: losses, gradients and weights equal those of one CPU process."""

from __future__ import annotations

import copy

import torch
from device_job import on_npu

STEPS = 2


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 12, generator=generator) for _ in range(STEPS)]


def train(model, data):
    """Gradient norms, losses."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for x in data:
        loss = model(x).square().mean()
        loss.backward()
        clip = getattr(model, "clip_grad_norm_", None)
        norm = clip(1.0) if clip else torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        seen.append((float(norm), float(loss.detach())))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def reference(model):
    """On the CPU, the batches of both ranks as one."""
    return train(model, [torch.cat(both) for both in zip(batches(0), batches(1), strict=True)])


@on_npu(ranks=2)
def test_fsdp2(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    host = Net()
    model = copy.deepcopy(host).npu()
    mesh = init_device_mesh("npu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert next(model.parameters()).to_local().device == torch.device("npu", rank)
    compare(train(model, [x.npu() for x in batches(rank)]), reference(host))
    for whole, shard in zip(host.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(shard.full_tensor().cpu(), whole.detach())


@on_npu(ranks=2)
def test_fsdp1(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    torch.manual_seed(0)
    host = Net()
    model = FSDP(copy.deepcopy(host), device_id=torch.npu.current_device(), use_orig_params=True)
    compare(train(model, [x.npu() for x in batches(rank)]), reference(host))
    with FSDP.summon_full_params(model):
        for whole, own in zip(host.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(own.detach().cpu(), whole.detach())


def compare(seen, wanted):
    """Norms are equal on each rank, losses in the mean of the ranks."""
    for (norm, loss), (norm_wanted, loss_wanted) in zip(seen, wanted, strict=True):
        mean = torch.tensor([loss], device="npu")
        torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.AVG)
        torch.testing.assert_close(
            torch.tensor([norm, mean.item()]), torch.tensor([norm_wanted, loss_wanted])
        )

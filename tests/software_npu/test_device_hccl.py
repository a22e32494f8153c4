"""The backend "hccl": every collective against its definition, on two ranks; what HCCL refuses is refused."""

from __future__ import annotations

import ctypes
import json

import pytest
import torch
import torch.distributed as dist
from device_job import on_npu


def mine(rank, *shape, dtype=torch.float32):
    """Different numbers on each rank."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=dtype) + 10 * (rank + 1)).view(shape).npu()


@on_npu(ranks=2)
def test_reductions(rank):
    a, b = mine(0, 4).cpu(), mine(1, 4).cpu()
    for op, wanted in (
        (dist.ReduceOp.SUM, a + b),
        (dist.ReduceOp.AVG, (a + b) / 2),
        (dist.ReduceOp.MAX, b),
        (dist.ReduceOp.MIN, a),
        (dist.ReduceOp.PRODUCT, a * b),
    ):
        x = mine(rank, 4)
        dist.all_reduce(x, op)
        assert x.device.index == rank and torch.equal(x.cpu(), wanted), op
    for dtype in (torch.bfloat16, torch.int64):
        x = mine(rank, 4, dtype=dtype)
        dist.all_reduce(x)
        assert x.tolist() == [30, 32, 34, 36]
    x = mine(rank, 4)
    dist.reduce(x, 1)
    assert rank == 0 or torch.equal(x.cpu(), a + b)
    for op, wanted in ((dist.ReduceOp.SUM, a + b), (dist.ReduceOp.AVG, (a + b) / 2)):
        half, halves = torch.empty(2, device="npu"), torch.empty(2, device="npu")
        dist.reduce_scatter_tensor(half, mine(rank, 4), op)
        dist.reduce_scatter(halves, list(mine(rank, 4).chunk(2)), op)
        assert torch.equal(half.cpu(), wanted.chunk(2)[rank]) and torch.equal(halves, half)
    x, y = mine(rank, 4), mine(rank, 2)
    with dist._coalescing_manager(device=x.device):
        dist.all_reduce(x)
        dist.all_reduce(y)
    assert torch.equal(x.cpu(), a + b) and torch.equal(y.cpu(), (a + b)[:2])


@on_npu(ranks=2)
def test_functions_for_c(rank):
    """libhccl.so, as vllm-ascend's PyHcclCommunicator opens it: group, reductions, broadcast, errors."""
    library = ctypes.CDLL("libhccl.so")
    library.HcclGetErrorString.restype = ctypes.c_char_p
    info, group = ctypes.create_string_buffer(4108), ctypes.c_void_p()
    assert rank or library.HcclGetRootInfo(info) == 0
    given = [info.raw]
    dist.broadcast_object_list(given, 0)
    assert library.HcclCommInitRootInfo(2, given[0], rank, ctypes.byref(group)) == 0
    a, b = mine(0, 4).cpu(), mine(1, 4).cpu()
    for op, wanted in ((0, a + b), (1, a * b), (2, b), (3, a)):  # sum, product, largest, smallest
        x, y = mine(rank, 4), torch.empty(4, device="npu")
        count, to = ctypes.c_uint64(4), ctypes.c_void_p(y.data_ptr())
        assert library.HcclAllReduce(ctypes.c_void_p(x.data_ptr()), to, count, 4, op, group, None) == 0
        assert torch.equal(y.cpu(), wanted) and torch.equal(x.cpu(), (a, b)[rank])
    for dtype, number in ((torch.uint8, 7), (torch.bfloat16, 11), (torch.int64, 5)):
        x = mine(rank, 4, dtype=dtype)
        assert (
            library.HcclBroadcast(ctypes.c_void_p(x.data_ptr()), ctypes.c_uint64(4), number, 1, group, None)
            == 0
        )
        assert x.tolist() == [20, 21, 22, 23]
    assert library.HcclBroadcast(ctypes.c_void_p(x.data_ptr()), ctypes.c_uint64(4), 12, 1, group, None)
    assert b"no data type 12" in library.HcclGetErrorString(1)
    assert library.HcclCommDestroy(group) == 0


@on_npu(ranks=2)
def test_gathering_and_sending(rank):
    a, b = mine(0, 2, 3).cpu(), mine(1, 2, 3).cpu()
    x = mine(rank, 2, 3)
    dist.broadcast(x, 1)
    assert torch.equal(x.cpu(), b)
    both = [torch.empty(2, 3, device="npu") for _ in range(2)]
    dist.all_gather(both, mine(rank, 2, 3))
    assert torch.equal(both[0].cpu(), a) and torch.equal(both[1].cpu(), b)
    flat = torch.empty(12, device="npu")  # HCCL counts elements only
    dist.all_gather_into_tensor(flat, mine(rank, 2, 3))
    assert torch.equal(flat.view(2, 2, 3).cpu(), torch.stack([a, b]))
    received = torch.empty(2, 3, device="npu")
    sent = mine(rank, 2, 3)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, received, 1 - rank), dist.P2POp(dist.isend, sent, 1 - rank)]
    ):
        work.wait()
    assert torch.equal(received.cpu(), (b, a)[rank])
    work = dist.all_reduce(sent, async_op=True)
    work.wait()
    assert torch.equal(sent.cpu(), a + b)
    gathered = [torch.empty(2, 3, device="npu") for _ in range(2)] if rank == 0 else None
    dist.gather(mine(rank, 2, 3), gathered, 0)
    assert rank or torch.equal(gathered[1].cpu(), b)
    dist.scatter(received, [mine(5, 2, 3), mine(6, 2, 3)] if rank == 0 else None, 0)
    assert torch.equal(received.cpu(), mine(5 + rank, 2, 3).cpu())


@on_npu(ranks=2)
def test_all_to_all(rank):
    rows = [[1, 2], [3, 2]][rank]  # what rank 0 and 1 send to this one
    out = torch.empty(sum(rows), device="npu")
    dist.all_to_all_single(out, mine(rank, 4), rows, [[1, 3], [2, 2]][rank])
    wanted = [[10, 20, 21], [11, 12, 13, 22, 23]][rank]
    assert out.tolist() == wanted


@on_npu(ranks=2)
def test_an_empty_all_to_all_is_refused(rank):
    """Only where both sides are: a rank that sends and receives nothing while others do as well."""
    nothing = torch.empty(0, device="npu")
    with pytest.raises(RuntimeError, match="both buffers are empty"):
        dist.all_to_all_single(nothing, nothing)
    with pytest.raises(RuntimeError, match="all buffers are empty"):
        dist.all_to_all([nothing, nothing], [nothing, nothing])
    lists = [torch.empty(1 + rank, device="npu"), torch.empty(1 + rank, device="npu")]
    dist.all_to_all(lists, [mine(rank, 1), mine(rank, 2)])
    assert [part.tolist() for part in lists] == ([[10], [20]], [[10, 11], [20, 21]])[rank]


@on_npu(ranks=2)
def test_the_cpu_and_views_with_holes_are_refused(rank):
    group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("npu"))
    assert group.name() == "hccl" and group.get_hccl_comm_name(rank).startswith("hccl_")
    with pytest.raises(RuntimeError, match="HCCL takes tensors of the NPU, not of cpu"):
        group.allreduce([torch.ones(2)], dist.AllreduceOptions())
    with pytest.raises((RuntimeError, ValueError), match="contiguous"):
        dist.all_reduce(torch.ones(4, 4, device="npu")[:, :2])


@on_npu(ranks=2)
def test_collectives_in_a_graph(rank):
    x, graph = torch.ones(2, device="npu"), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x * (rank + 1)
        dist.all_reduce(y)
        z = y + 1
    x.fill_(10)
    graph.replay()
    assert z.tolist() == [31, 31] and graph.names() == ["aten::mul", "hccl::allreduce", "aten::add"]


@on_npu(ranks=2)
def test_unknown_options_of_a_group_are_refused(rank, tmp_path):
    import os

    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    known = tmp_path / f"known{rank}"
    known.write_text(json.dumps({"HCCL options": ["hccl_buffer_size"]}))
    os.environ["SOFTWARE_NPU_WHEELS"] = str(known)
    options = ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": 200}
    group = dist.new_group(backend="hccl", pg_options=options)
    x = torch.ones(1, device="npu")
    dist.all_reduce(x, group=group)
    assert x.item() == 2
    with pytest.raises(ValueError, match="HCCL has no option hccl_bufer_size"):
        options.hccl_config = {"hccl_bufer_size": 200}
    with pytest.raises(TypeError, match="ProcessGroupHCCL.Options"):
        dist.new_group(backend="hccl", pg_options=dist.ProcessGroupGloo._Options())


@on_npu(ranks=2)
def test_shares_of_different_lengths_are_gathered(rank):
    """As HCCL does; gloo alone refuses them."""
    share = torch.arange(1 + 2 * rank, device="npu") + 10 * rank
    gathered = [torch.empty(length, dtype=torch.long, device="npu") for length in (1, 3)]
    torch.distributed.all_gather(gathered, share)
    assert [part.tolist() for part in gathered] == [[0], [10, 11, 12]]


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("HCCL_CONNECT_TIMEOUT", "60", "120"),
        ("HCCL_CONNECT_TIMEOUT", "7201", "7200"),
        ("HCCL_CONNECT_TIMEOUT", "2h", "200"),
        ("HCCL_EXEC_TIMEOUT", "-1", "7200"),
        ("HCCL_BUFFSIZE", "0", "300"),
        ("HCCL_BUFFSIZE", "0.5", "1"),
        ("HCCL_OP_EXPANSION_MODE", "aiv", "AIV"),
        ("HCCL_DETERMINISTIC", "1", "strict"),
    ],
)
@on_npu()
def test_variables_of_hccl_have_rules(name, wrong, right, tmp_path):
    """The first group refuses what HCCL's documentation does not permit, by name and value."""
    import os

    os.environ[name] = wrong
    place = {"init_method": f"file://{tmp_path}/store", "rank": 0, "world_size": 1}
    with pytest.raises(ValueError, match=f"{name}={wrong}: "):
        dist.init_process_group("cpu:gloo,npu:hccl", **place)
    os.environ[name] = right
    place["init_method"] += "2"
    dist.init_process_group("cpu:gloo,npu:hccl", **place)
    x = torch.ones(1, device="npu")
    dist.all_reduce(x)
    assert x.item() == 1

"""Streams and events, and graphs: what is captured, what a replay does, what is refused."""

from __future__ import annotations

import pytest
import torch
from device_job import on_npu


@on_npu(SOFTWARE_NPU_COUNT="2")
def test_a_stream_is_current_within_its_context():
    default, other, there = torch.npu.current_stream(), torch.npu.Stream(), torch.npu.Stream("npu:1")
    assert default == torch.npu.default_stream() and other != default
    with torch.npu.stream(other):
        assert torch.npu.current_stream() == other
        with torch.npu.stream(there):
            assert torch.npu.current_device() == 1 and torch.npu.current_stream() == there
            assert torch.npu.current_stream(0) == other
        assert torch.npu.current_device() == 0
        with torch.npu.stream(None):
            assert torch.npu.current_stream() == other
    assert torch.npu.current_stream() == default
    assert other.query()
    other.wait_stream(default)
    other.synchronize()
    x = torch.ones(2, device="npu")
    x.record_stream(other)
    with pytest.raises(RuntimeError, match="invalid device npu:2"):
        torch.npu.Stream(2)


@on_npu(SOFTWARE_NPU_COUNT="2")
def test_a_stream_is_set_by_its_number():
    """As programs do that take the CUDA name of this call for the NPU's."""
    import torch_npu

    there = torch.npu.Stream("npu:1")
    torch_npu._C._npu_setStream(there.stream_id, there.device_index, there.device_type)
    assert torch.npu.current_device() == 1 and torch.npu.current_stream() == there


@on_npu(SOFTWARE_NPU_COUNT="2")
def test_events_keep_time_and_their_device():
    first, last = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    with pytest.raises(ValueError, match="recorded"):
        first.elapsed_time(last)
    first.record()
    torch.ones(400, 400, device="npu").mm(torch.ones(400, 400, device="npu"))
    last.record()
    assert 0 < first.elapsed_time(last) < 60_000 and first.elapsed_time(last) == -last.elapsed_time(first)
    assert first.query()
    first.synchronize()
    torch.npu.current_stream().wait_event(first)
    with pytest.raises(RuntimeError, match="npu:0 cannot be recorded on a stream of npu:1"):
        first.record(torch.npu.Stream(1))


@on_npu()
def test_a_replay_does_the_calls_again_with_what_the_memory_holds_now():
    x, weight, total = (
        torch.ones(3, device="npu"),
        torch.full((3,), 2.0, device="npu"),
        torch.zeros(3, device="npu"),
    )
    graph, number = torch.npu.NPUGraph(), 10
    with torch.npu.graph(graph):
        assert torch.npu.is_current_stream_capturing()
        y = x * weight + number
        parts = y.split(1)
        total.copy_(y)
    assert not torch.npu.is_current_stream_capturing()
    number = 20  # what was a number at capture stays that number
    x.copy_(torch.tensor([1.0, 2, 3]))
    weight.data = torch.zeros(3, device="npu")  # the graph has the memory, not the name
    before = torch.npu.graphs.counts()
    graph.replay()
    graph.replay()
    after = torch.npu.graphs.counts()
    assert (y.tolist(), total.tolist(), parts[2].tolist()) == ([12, 14, 16], [12, 14, 16], [16])
    assert after["replays"] - before["replays"] == 2
    assert graph.names()[:2] == ["aten::mul", "aten::add"]
    assert after["steps"] - before["steps"] == 2 * len(graph.names())
    graph.reset()
    with pytest.raises(RuntimeError, match="has not been captured"):
        graph.replay()


@on_npu()
def test_what_waits_for_the_device_cannot_be_captured():
    x, event = torch.ones(3, device="npu"), torch.npu.Event()
    waits = [
        lambda: x.sum().item(),
        lambda: x.cpu(),
        lambda: x.copy_(torch.ones(3)),
        lambda: x.nonzero(),
        lambda: x[x > 0],
        lambda: bool(x.equal(x)),
        lambda: torch.npu.synchronize(),
        lambda: torch.npu.current_stream().synchronize(),
        lambda: (event.record(), event.synchronize()),
    ]
    for wait in waits:
        with pytest.raises(RuntimeError, match="not permitted while a graph is captured"):
            with torch.npu.graph(torch.npu.NPUGraph()):
                wait()
    assert x.sum().item() == 3  # the failed captures have ended


@on_npu()
def test_a_stream_that_waits_for_a_captured_one_is_captured_too():
    x, side, graph = torch.ones(2, device="npu"), torch.npu.Stream(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y = x + 1
        torch.npu.current_stream().wait_stream(side)
        z = y * 3
    with torch.npu.stream(side):
        x.fill_(4)  # not captured
    graph.replay()
    assert z.tolist() == [15, 15]


@on_npu()
def test_gradients_are_captured():
    x = torch.ones(2, device="npu", requires_grad=True)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        (gradient,) = torch.autograd.grad((x * x).sum(), x)
    with torch.no_grad():
        x.copy_(torch.tensor([3.0, 4.0]))
    graph.replay()
    assert gradient.tolist() == [6, 8]


@on_npu()
def test_a_task_group_takes_new_arguments_while_the_graph_waits():
    """The way vllm-ascend feeds lengths to attention in a captured graph."""
    x, out, graph = torch.arange(4.0, device="npu"), torch.zeros(4, device="npu"), torch.npu.NPUGraph()
    event, update_stream = torch.npu.ExternalEvent(), torch.npu.Stream()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        torch.add(x, x, alpha=1, out=out)
        handle = torch.npu.graph_task_group_end(stream)
        y = out + 100

    def update(alpha, operator=torch.add):
        with torch.npu.stream(update_stream):
            torch.npu.graph_task_update_begin(update_stream, handle)
            try:
                operator(x, x, alpha=alpha, out=out)
            finally:
                torch.npu.graph_task_update_end(update_stream)

    for alpha in (3, 5):
        before = y.tolist()
        graph.replay()
        assert not torch.npu.current_stream().query()
        with pytest.raises(RuntimeError, match="waits for an ExternalEvent"):
            y.tolist()
        update(alpha)
        event.record(update_stream)
        assert torch.npu.current_stream().query() and y.tolist() != before
        assert y.tolist() == [100 + n * (1 + alpha) for n in range(4)]
    assert torch.npu.graphs.counts()["updates"] == 2
    with pytest.raises(RuntimeError, match="has aten::add where it is updated with aten::sub|0 of 1 calls"):
        update(1, torch.sub)
    with pytest.raises(RuntimeError, match="0 of 1 calls"):
        torch.npu.graph_task_update_begin(update_stream, handle)
        torch.npu.graph_task_update_end(update_stream)

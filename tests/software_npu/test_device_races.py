"""SOFTWARE_NPU_RACES=1: what a device would let race is refused, and what waits as it should is not."""

from __future__ import annotations

import pytest
import torch
from device_job import on_npu


def side(make):
    """A tensor made on a stream of its own, and the stream."""
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        return make(), stream


def again(stream):
    """What the stream allocates next, in the place of what was freed."""
    with torch.npu.stream(stream):
        return torch.empty(4, device="npu")


@on_npu(SOFTWARE_NPU_RACES="1")
def test_memory_that_another_stream_may_still_use_is_not_given_out():
    q, stream = side(lambda: torch.ones(4, device="npu"))
    torch.npu.current_stream().wait_stream(stream)
    y = q * 2
    del q
    with pytest.raises(RuntimeError, match="stream 1 allocates while the default stream may .*aten::fill_"):
        again(stream)
    again(stream)  # it is reported once
    assert y.tolist() == [2] * 4


@on_npu(SOFTWARE_NPU_RACES="1")
def test_memory_may_be_given_out_once_its_user_has_ended():
    def recorded(q, stream):
        q.record_stream(torch.npu.current_stream())

    def awaited_by_its_stream(q, stream):
        stream.wait_stream(torch.npu.current_stream())

    def awaited_by_the_host(q, stream):
        torch.npu.current_stream().synchronize()

    def event(q, stream):
        torch.npu.current_stream().record_event().synchronize()

    def seen_by_the_host(q, stream):
        q.sum().item()

    for so in (recorded, awaited_by_its_stream, awaited_by_the_host, event, seen_by_the_host):
        q, stream = side(lambda: torch.ones(4, device="npu"))
        torch.npu.current_stream().wait_stream(stream)
        q.mul_(2)
        so(q, stream)
        del q
        again(stream)


@on_npu(SOFTWARE_NPU_RACES="1")
def test_a_stream_waits_for_what_it_uses():
    x, stream = side(lambda: torch.ones(4, device="npu"))
    for use in (lambda: x + 1, lambda: x.copy_(torch.zeros(4)), lambda: x.zero_(), lambda: x.cpu()):
        with pytest.raises(RuntimeError, match="the default stream uses what aten::fill_ writes on stream 1"):
            use()
    torch.npu.current_stream().wait_stream(stream)
    y = x + 1
    with torch.npu.stream(stream), pytest.raises(RuntimeError, match="zero_ on stream 1 writes what the"):
        x.zero_()
    assert y.tolist() == [2] * 4


@on_npu(SOFTWARE_NPU_RACES="1")
def test_a_copy_from_pinned_memory_is_not_awaited():
    there, pinned, stream = torch.empty(4, device="npu"), torch.ones(4).pin_memory(), torch.npu.Stream()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        there.copy_(pinned, non_blocking=True)
    with pytest.raises(RuntimeError, match="uses what aten::copy_ writes"):
        there + 1
    with torch.npu.stream(stream):
        there.copy_(torch.ones(4), non_blocking=True)  # not pinned: the host copies, and waits
    assert (there + 1).tolist() == [2] * 4


@on_npu(SOFTWARE_NPU_RACES="1")
def test_the_host_leaves_pinned_memory_alone_until_it_is_copied():
    there, pinned = torch.empty(4, device="npu"), torch.ones(4).pin_memory()
    there.copy_(pinned, non_blocking=True)
    pinned[2] = 5
    with pytest.raises(RuntimeError, match="the host has written pinned memory while a copy"):
        torch.npu.synchronize()
    there.copy_(pinned, non_blocking=True)
    event = torch.npu.current_stream().record_event()
    event.synchronize()
    pinned.zero_()
    there.copy_(pinned, non_blocking=True)
    del pinned
    torch.npu.synchronize()


@on_npu()
def test_races_are_not_looked_for_otherwise():
    x, stream = side(lambda: torch.ones(4, device="npu"))
    x.zero_()
    del x
    again(stream)

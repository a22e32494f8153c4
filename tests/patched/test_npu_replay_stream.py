"""A graph replay waits for the calls on its own stream, not for what other streams do meanwhile."""

from __future__ import annotations

import pytest
from test_npu_races import refuse_races


def replay_beside_a_copy(own_stream: bool) -> int:
    """Replays while a copy is under way whose source the host has since overwritten: the software NPU refuses
    that when the host waits for the copy. Returns the replays, if none is refused."""
    refuse_races()
    import torch

    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.forward_context import BatchDescriptor, get_forward_context, set_forward_context
    from vllm_ascend.compilation.acl_graph import ACLGraphWrapper

    config, x = VllmConfig(), torch.ones(4, device="npu")
    graph = ACLGraphWrapper(lambda x: x + 1, config, CUDAGraphMode.FULL)

    def step():
        with set_forward_context(
            None, config, num_tokens=4, cudagraph_runtime_mode=CUDAGraphMode.FULL,
            batch_descriptor=BatchDescriptor(4),
        ):  # fmt: skip
            get_forward_context().is_draft_model = False  # as set_ascend_forward_context does
            return graph(x)

    step()  # captures
    there, here = torch.empty(4, device="npu"), torch.ones(4).pin_memory()
    side = torch.npu.current_stream() if own_stream else torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    torch.npu.graphs.reset_counts()
    with torch.npu.stream(side):
        there.copy_(here, non_blocking=True)
    here[2] = 5
    step()
    return torch.npu.graphs.counts()["replays"]


def test_copies_of_other_streams_continue(npu_ground):
    assert npu_ground.run(replay_beside_a_copy, False) == 1


def test_calls_of_its_stream_have_ended(npu_ground):
    with pytest.raises(AssertionError, match="the host has written pinned memory while a copy"):
        npu_ground.run(replay_beside_a_copy, True)

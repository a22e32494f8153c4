"""actor_rollout_ref.rollout.cudagraph_capture_sizes reaches vLLM's compilation config."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("sizes", [None, [1, 2, 4]])
def test_sizes_reach_vllm(launch, sizes):
    given = "null" if sizes is None else sizes
    args = launch(f"actor_rollout_ref.rollout.cudagraph_capture_sizes={given}", device="cpu")
    assert (args.cudagraph_capture_sizes or args.compilation_config.cudagraph_capture_sizes) == sizes

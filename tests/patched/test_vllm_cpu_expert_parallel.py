"""vLLM's CPU experts, spread over ranks; a whole server with two engines is in test_rollout_rebalance.py."""

from __future__ import annotations

import pytest
import torch

EXPERTS, TOP_K, HIDDEN, WIDTH, TOKENS = 8, 2, 16, 24, 12


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_parts_of_all_ranks_add_up_to_the_layer(ranks):
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    torch.manual_seed(0)
    gate_up, down = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN), torch.randn(EXPERTS, HIDDEN, WIDTH)
    tokens, router = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, EXPERTS)
    weights, chosen = router.softmax(-1).topk(TOP_K)
    weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.zeros(TOKENS, HIDDEN)
    for token in range(TOKENS):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            gate, up = (gate_up[expert] @ tokens[token]).chunk(2)
            expected[token] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))

    total, size = torch.zeros_like(expected), EXPERTS // ranks
    for rank in range(ranks):
        mine = slice(rank * size, (rank + 1) * size)
        layer = torch.nn.Module()
        layer.w13_weight, layer.w2_weight, layer.router = gate_up[mine], down[mine], None
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[mine] = torch.arange(size, dtype=torch.int32)
        total += CPUFusedMOE(layer)(
            layer, tokens, False, TOP_K, router, True,
            global_num_experts=EXPERTS, expert_map=expert_map if ranks > 1 else None,
        )  # fmt: skip
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-5)

"""Expert weights back in the layout that checkpoints are loaded into, before every weight sync.

vllm-ascend transposes a layer's expert weights once they are loaded, because its grouped matmul wants [in,
out]. Only waking up from sleep undoes this, so without sleep mode (free_cache_engine=False) the next sync
writes [out, in] weights into [in, out] memory and fails. The transposition here is a view, and processing the
loaded weights, which follows, makes the fast layout again. Weights that are already in the layout of loading
(CUDA, CPU, after a wake-up) are left alone; where one weight is square, the shape of the other decides.
Cost: O(1) a layer.
"""

from __future__ import annotations

import torch


def to_loading_layout(layer: torch.nn.Module) -> bool:
    """Give ``layer``'s expert weights the shapes of loading; returns whether they had to be transposed.

    Args:
        layer: vLLM's FusedMoE, or any other module, which is left alone. Shapes of loading, with H hidden and
            I intermediate channels of this rank: w13_weight [experts, 2 * I, H], w2_weight [experts, H, I].
            vLLM 0.13 keeps H and I in the layer, vLLM 0.23 in its moe_config.
    """
    sizes = layer if hasattr(layer, "hidden_size") else getattr(layer, "moe_config", None)
    hidden = getattr(sizes, "hidden_size" if sizes is layer else "hidden_dim", None)
    intermediate = getattr(sizes, "intermediate_size_per_partition", None)
    if None in (hidden, intermediate) or not hasattr(layer, "w13_weight") or not hasattr(layer, "w2_weight"):
        return False
    if hidden != intermediate:  # one of the two is never square
        transposed = tuple(layer.w2_weight.shape[1:]) == (intermediate, hidden)
    else:
        transposed = tuple(layer.w13_weight.shape[1:]) == (hidden, 2 * intermediate)
    if transposed:
        for name in ("w13_weight", "w2_weight"):
            view = getattr(layer, name).data.transpose(1, 2)
            setattr(layer, name, torch.nn.Parameter(view, requires_grad=False))
    return transposed

"""Stand-in for the CUDA package grouped_gemm 1.1.4, as megatron-core calls it: one matrix product an
expert."""

from __future__ import annotations

from types import SimpleNamespace

import torch


def gmm(a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
    """``a``: [tokens, in]; ``b``: [experts, in, out], or [experts, out, in] with ``trans_b``; gives [tokens,
    out]."""
    weights = b.transpose(1, 2) if trans_b else b
    return torch.cat(
        [rows @ weight for rows, weight in zip(a.split(batch_sizes.tolist()), weights, strict=True)]
    )


ops = SimpleNamespace(gmm=gmm)

"""What a framework has as a Triton kernel only and Qwen3 needs, in plain torch on tensors of an NPU.

A kernel takes its grid as Triton's do, ``kernel[grid](...)``, and its launches are counted in
``training.calls``. ``KERNELS`` names them by the module whose attribute they replace.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from .training import counted

KERNELS: dict[str, dict[str, Launcher]] = {}


class Launcher:
    """``launcher[grid](...)`` calls the function with the grid first."""

    def __init__(self, function: Callable[..., None]):
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.function(grid, *args, **kwargs)


def kernel(module: str):
    def register(function):
        KERNELS.setdefault(module, {})[function.__name__] = Launcher(counted(function))
        return function

    return register


def stand_in(module: ModuleType) -> None:
    """Replace the kernels that this version of the module has."""
    for name, launcher in KERNELS[module.__name__].items():
        if hasattr(module, name):
            setattr(module, name, launcher)


@kernel("vllm.v1.worker.block_table")
def _compute_slot_mapping_kernel(
    grid: tuple[int, ...],
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    block_size: int,
    slot_mapping: torch.Tensor,
    *,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """Where in the KV cache each token goes: PAD_ID for those of other ranks, and behind the last token.

    One program for each request, and one for the padding. With two ranks and interleave 1, a page of 4 slots
    holds the even ones of 8 positions on rank 0, the odd ones on rank 1.
    """
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID
    ranks, interleave = TOTAL_CP_WORLD_SIZE, CP_KV_CACHE_INTERLEAVE_SIZE
    bounds = query_start_loc[: grid[0]].tolist()
    for request, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        position = positions[begin:end]
        page, offset = position // (block_size * ranks), position % (block_size * ranks)
        slots = block_table[request][page].long() * block_size
        slots += offset // (ranks * interleave) * interleave + offset % interleave
        held = offset // interleave % ranks == TOTAL_CP_RANK
        slot_mapping[begin:end] = torch.where(held, slots, PAD_ID)


@kernel("mindspeed.ops.triton.sort_chunks_by_idx")
def _make_chunk_sort_map_kernel(
    grid: tuple[int, ...],
    split_sizes: torch.Tensor,
    cumsum: torch.Tensor,
    inverse_sorted_indices: torch.Tensor,
    output_cumsum: torch.Tensor,
    dst_rows: torch.Tensor,
    num_splits: int,
    num_tokens: int,
    BLOCK_SIZE: int,
    *,
    IDX_LOAD_WIDTH: int,
) -> None:
    """The row to which each token goes: chunks of 2 and 1 tokens in the order 1, 0 have rows 1, 2 and 0."""
    token = torch.arange(num_tokens, device=cumsum.device)
    chunk = torch.searchsorted(cumsum[1:].long(), token, right=True)
    dst_rows.copy_(output_cumsum[inverse_sorted_indices[chunk].long()] + token - cumsum[chunk])


@kernel("mindspeed.ops.triton.sort_chunks_by_idx")
def _sort_chunks_by_map_kernel(
    grid: tuple[int, ...],
    inp: torch.Tensor,
    output: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    permuted_probs: torch.Tensor | None,
    num_tokens: int,
    hidden_size: int,
    block_size: int,
    *strides: int | None,
    PERMUTE_PROBS: bool,
    FORWARD: bool,
) -> None:
    """Rows, and what each is weighted with, to where the map says, or back."""
    rows = row_id_map.long()
    for given, moved in ((inp, output), (probs, permuted_probs))[: 1 + PERMUTE_PROBS]:
        if FORWARD:
            moved[rows] = given
        else:
            moved.copy_(given[rows])

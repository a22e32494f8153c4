"""What operators that also communicate send over their group, which they know by HCCL's name of it."""

from __future__ import annotations

import torch

groups: dict[str, torch.distributed.ProcessGroup] = {}  # gloo's, by get_hccl_comm_name


def group(name: str):
    """Raises KeyError as a device fails: no group of this process has the name."""
    if name not in groups:
        raise KeyError(f"HCCL has no group {name!r} in this process; it has {', '.join(groups) or 'none'}")
    return groups[name]


def all_reduce(name: str, value: torch.Tensor) -> torch.Tensor:
    """The sum over the group, in the dtype of ``value``."""
    result = value.contiguous().clone()
    group(name).allreduce([result]).wait()
    return result


def all_gather(name: str, value: torch.Tensor) -> list[torch.Tensor]:
    """What every rank passes, by rank; the first dimension may differ."""
    gloo = group(name)
    rows = [torch.empty(1, dtype=torch.long) for _ in range(gloo.size())]
    gloo.allgather([rows], [torch.tensor([len(value)])]).wait()
    most = max(int(number) for number in rows)
    padded = value.new_zeros(most, *value.shape[1:])
    padded[: len(value)] = value
    gathered = [torch.empty_like(padded) for _ in rows]
    if padded.numel():
        gloo.allgather([gathered], [padded]).wait()
    return [part[: int(number)] for part, number in zip(gathered, rows, strict=True)]

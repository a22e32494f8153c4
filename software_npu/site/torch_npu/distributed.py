"""The backend "hccl" of torch.distributed; csrc/hccl.h says what it does."""

from __future__ import annotations

import itertools

import torch.distributed as dist

from software_npu.kernels import communication

from ._C._distributed_c10d import Options, ProcessGroupHCCL

_numbers = itertools.count()


def make_group(given, options=None):
    """Called by torch for each group of which this process is a member."""
    if options is not None and not isinstance(options, Options):
        raise TypeError(
            f"options of an HCCL group are ProcessGroupHCCL.Options, not {type(options).__name__}"
        )
    gloo = dist.ProcessGroupGloo(given.store, given.group_rank, given.group_size, given.timeout)
    name = f"hccl_{given.group_id}_{next(_numbers)}"
    communication.groups[name] = gloo
    return ProcessGroupHCCL(gloo, given.group_rank, given.group_size, name)


dist.Backend.register_backend("hccl", make_group, extended_api=True, devices=["npu"])
dist.is_hccl_available = lambda: True
dist.ProcessGroupHCCL = ProcessGroupHCCL

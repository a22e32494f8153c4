"""The backend "hccl" of torch.distributed; csrc/hccl.h says what it does."""

from __future__ import annotations

import itertools
import os
import re

import torch.distributed as dist

from software_npu.kernels import communication

from ._C._distributed_c10d import Options, ProcessGroupHCCL

_numbers = itertools.count()

# What HCCL documents of its variables: what they may be, and (lowest, highest) or the values.
VARIABLES = {
    "HCCL_CONNECT_TIMEOUT": ("whole seconds", 120, 7200),
    "HCCL_EXEC_TIMEOUT": ("whole seconds", 0, 2**31 - 1),
    "HCCL_BUFFSIZE": ("whole MB", 1, 2**32 - 1),
    "HCCL_OP_EXPANSION_MODE": ("one", "AI_CPU", "AIV", "HOST", "HOST_TS"),
    "HCCL_DETERMINISTIC": ("one", "false", "true", "strict"),
}


def check_variables() -> None:
    """Raises ValueError for a variable of HCCL with a value that its documentation does not permit."""
    for name, (kind, *allowed) in VARIABLES.items():
        value = os.environ.get(name)
        if value is None:
            continue
        if kind == "one":
            if value not in allowed:
                raise ValueError(f"{name}={value}: HCCL knows {', '.join(allowed)}")
        elif not re.fullmatch(r"\d+", value) or not allowed[0] <= int(value) <= allowed[1]:
            raise ValueError(f"{name}={value}: HCCL takes {kind} from {allowed[0]} to {allowed[1]}")


def make_group(given, options=None):
    """Called by torch for each group of which this process is a member."""
    if options is not None and not isinstance(options, Options):
        raise TypeError(
            f"options of an HCCL group are ProcessGroupHCCL.Options, not {type(options).__name__}"
        )
    check_variables()
    gloo = dist.ProcessGroupGloo(given.store, given.group_rank, given.group_size, given.timeout)
    name = f"hccl_{given.group_id}_{next(_numbers)}"
    communication.groups[name] = gloo
    return ProcessGroupHCCL(gloo, given.group_rank, given.group_size, name)


dist.Backend.register_backend("hccl", make_group, extended_api=True, devices=["npu"])
dist.is_hccl_available = lambda: True
dist.ProcessGroupHCCL = ProcessGroupHCCL

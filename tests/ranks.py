"""Run a function in several processes that form a gloo process group, with the stubs of tests/stubs.

    from ranks import run_ranks
    norms = run_ranks(4, grad_norms, layouts)      # grad_norms(rank, layouts) in each of 4 processes

The function must be importable (top level of a test module); its results come back as a list, by rank. What
the ranks print is shown if one of them fails.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

from warm import PATIENCE_S, Warm

STUBS = Path(__file__).resolve().parent / "stubs"
_newest: list[Warm] = []


def warm(path: str) -> Warm:
    """The process for this PYTHONPATH; that for another one ends."""
    if _newest and not (_newest[0].path == path and _newest[0].alive):
        _newest.pop().stop()
    if not _newest:
        _newest.append(Warm(["verl.models.mcore", "verl.workers.megatron_workers"], path))
    return _newest[0]


def in_group(rank: int, function, args: tuple):
    import torch

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    value = function(rank, *args)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return value


def run_ranks(world: int, function, *args, stubs: tuple[Path, ...] = ()) -> list:
    """Results of ``function(rank, *args)`` by rank.

    PYTHONPATH of the ranks: ``stubs``, tests/stubs, and what it is here, such as a variant of a framework.

    Raises:
        AssertionError: a rank raised (with its traceback), or not all ranks answered in time.
    """
    places = [*stubs, STUBS, *filter(None, [os.environ.get("PYTHONPATH")])]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return warm(os.pathsep.join(map(str, places))).run(
        world,
        in_group,
        function,
        args,
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )

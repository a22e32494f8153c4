"""Run a function in several processes that form a process group.

    from ranks import run_ranks
    norms = run_ranks(4, grad_norms, layouts)      # grad_norms(rank, layouts) in each of 4 processes
    norms = run_ranks(4, grad_norms, layouts, npu=True)     # and each has a software NPU

They have gloo and the stubs of tests/stubs, or an NPU each, gloo and HCCL, and the one of tests/stubs/on_npu.

The function must be importable (top level of a test module); its results come back as a list, by rank. What
the ranks print is shown if one of them fails.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from warm import PATIENCE_S, Warm

from ascend_rl.process.ports import free_port
from ascend_rl.settings import stack

STUBS = Path(__file__).resolve().parent / "stubs"
SITE = STUBS.parents[1] / "software_npu/site"
_newest: list[Warm] = []


def warm(path: str) -> Warm:
    """The process for this PYTHONPATH; that for another one ends."""
    if _newest and _newest[0].path != path:
        _newest.pop().stop()
    if not _newest:
        # The worker first: it imports MindSpeed, if that is on the path, before Megatron.
        worker = "megatron_workers" if stack.NAME == stack.DEFAULT else "engine"
        modules = [f"verl.workers.{worker}", "verl.models.mcore", "megatron_defaults"]
        _newest.append(Warm(modules, path))
    return _newest[0]


def in_group(rank: int, npu: bool, function, args: tuple):
    import torch

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    if npu:
        torch.npu.set_device(rank)
    backend = "cpu:gloo,npu:hccl" if npu else "gloo"
    torch.distributed.init_process_group(backend, timeout=timedelta(seconds=PATIENCE_S))
    value = function(rank, *args)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return value


def run_ranks(world: int, function, *args, stubs: tuple[Path, ...] = (), npu: bool = False) -> list:
    """Results of ``function(rank, *args)`` by rank.

    PYTHONPATH of the ranks: ``stubs``, tests/stubs or the software NPU, and what it is here, such as a
    variant of a framework.

    Raises:
        AssertionError: a rank raised (with its traceback), or not all ranks answered in time.
    """
    own = [STUBS / "on_npu", SITE] if npu else [STUBS]
    places = [*stubs, *own, *filter(None, [os.environ.get("PYTHONPATH")])]
    device = {}
    if npu:
        from wheels import wheels_file

        device = {"SOFTWARE_NPU_WHEELS": str(wheels_file()), "ASCEND_HOME_PATH": str(STUBS)}
        os.environ |= device  # of the process that forks, too: it imports torch
    return warm(os.pathsep.join(map(str, places))).run(
        world,
        in_group,
        npu,
        function,
        args,
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        **device,
    )

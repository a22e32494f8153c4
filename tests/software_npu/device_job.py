"""Tests whose body runs in a process that has the software NPU.

    @on_npu(SOFTWARE_NPU_MEMORY_MB="64")
    def test_it(): ...                   # or test_it(tmp_path): fixtures of the test, which must be picklable

    @on_npu(ranks=2)
    def test_it(rank): ...               # in each of two processes that form a group over gloo and hccl

Each body runs in a fork of one process that has imported torch, which finds the device as any process with
software_npu/site on its PYTHONPATH does.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from datetime import timedelta
from pathlib import Path

from warm import PATIENCE_S, Warm
from wheels import sites, wheels_file

from ascend_rl.process.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SITE = os.pathsep.join(map(str, sites()))
warm = Warm(["torch"], SITE)


def body(number: int, module: str, name: str, ranks: int, args: tuple):
    import torch

    assert hasattr(torch, "npu")
    torch.set_num_threads(1)
    function = getattr(importlib.import_module(module), name).__wrapped__
    if not ranks:
        return function(*args)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    torch.npu.set_device(number)
    torch.distributed.init_process_group("cpu:gloo,npu:hccl", timeout=timedelta(seconds=PATIENCE_S))
    value = function(number, *args)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return value


def on_npu(ranks: int = 0, **environment: str):
    def decorate(function):
        @functools.wraps(function)
        def test(*args, **fixtures):
            place = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks)}
            if ranks:
                place["MASTER_PORT"] = str(free_port())
            job = (function.__module__, function.__name__, ranks, (*args, *fixtures.values()))
            os.environ["SOFTWARE_NPU_WHEELS"] = str(wheels_file())  # of the process that forks, too
            return warm.run(ranks or 1, body, *job, **environment | (place if ranks else {}))[0] and None

        if ranks:  # pytest takes no fixture for the number of the rank
            parameters = list(inspect.signature(function).parameters.values())[1:]
            test.__signature__ = inspect.Signature(parameters)
        return test

    return decorate

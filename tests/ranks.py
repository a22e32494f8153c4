"""Run a function in several processes that form a gloo process group, with the stand-ins of tests/stubs.

    from ranks import run_ranks
    norms = run_ranks(4, grad_norms, layouts, seconds=120)      # grad_norms(rank, layouts) in each of 4
    processes

The function must be importable (top level of a test module); what it returns on each rank comes back as a
list. What the ranks print is shown when one of them fails.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch.multiprocessing as mp

STUBS = Path(__file__).resolve().parent / "stubs"


@contextlib.contextmanager
def stubs_on_path(*directories: Path):
    """PYTHONPATH for new processes: the stand-ins before whatever is on it, such as a variant of a
    framework."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, [*directories, STUBS, before])))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _rank(rank: int, world: int, port: int, function, args, seconds: float, log: str, results) -> None:
    os.setsid()  # so that what a rank starts (megatron-core's writer of checkpoints) can be ended with it
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.path[:0] = os.environ["PYTHONPATH"].split(
        os.pathsep
    )  # multiprocessing has put the parent's path back
    faulthandler.dump_traceback_later(max(1, seconds - 10), exit=True)
    try:
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=seconds))
        value = function(rank, *args)
        torch.distributed.barrier()
        results.put((rank, value, None))
        torch.distributed.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def tail(logs: str, rank: int) -> str:
    return "..." + Path(logs, str(rank)).read_text(errors="replace")[-3000:]


def run_ranks(world: int, function, *args, seconds: float = 120, stubs: tuple[Path, ...] = ()) -> list:
    """Results of ``function(rank, *args)`` by rank.

    Raises:
        AssertionError: a rank raised (with its traceback), or not all ranks answered within ``seconds``.
    """
    from verl.utils.net_utils import get_free_port

    context, (port, _) = mp.get_context("spawn"), get_free_port("127.0.0.1")
    results = context.Queue()
    logs = tempfile.mkdtemp(prefix="ranks-")
    with stubs_on_path(*stubs):
        processes = [
            context.Process(
                target=_rank, args=(rank, world, port, function, args, seconds, f"{logs}/{rank}", results)
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
    values, until = {}, time.monotonic() + seconds
    try:
        while len(values) < world:
            try:
                rank, value, error = results.get(timeout=max(0.1, min(1, until - time.monotonic())))
            except queue.Empty:
                missing = sorted(set(range(world)) - values.keys())
                dead = [r for r in missing if not processes[r].is_alive()]
                assert not dead, f"ranks {dead} died: {tail(logs, dead[0])}"
                assert time.monotonic() < until, (
                    f"no answer from ranks {missing} in {seconds:.0f} s: {tail(logs, missing[0])}"
                )
                continue
            assert error is None, f"rank {rank}: {tail(logs, rank)}\n{error}"
            values[rank] = value
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        shutil.rmtree(logs)
    return [values[rank] for rank in range(world)]

"""The process that a checkpoint's writers report to has no files and no memory of the worker that starts it.

verl's manager saves. What the worker closes afterwards is closed: no other process holds it.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from pathlib import Path

import psutil
from megatron_tiny import Layout, make_checkpoint
from ranks import run_ranks

from ascend_rl.settings import stack

if stack.NAME == stack.DEFAULT:
    from megatron_tiny import make_worker
else:
    from test_megatron import make_worker


def save(rank: int, path, directory) -> dict:
    worker = make_worker(Layout(), path)
    reading, writing = os.pipe()
    memory = directory.with_name("memory of the worker")
    memory.write_bytes(b"\0" * mmap.PAGESIZE)
    with memory.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    before, began, used = set(psutil.Process().children()), time.monotonic(), time.process_time()
    worker.save_checkpoint(str(directory))
    took = f"{time.monotonic() - began:.2f} s, {time.process_time() - used:.2f} s of a core in the worker"
    helpers = set(psutil.Process().children()) - before
    for helper in helpers:
        times = helper.cpu_times()
        took += f", {times.user + times.system:.2f} s in {helper.name()}"
    os.close(writing)
    found = {
        "took": took,
        "helpers": len(helpers),
        "closed": bool(select.select([reading], [], [], 1)[0]) and os.read(reading, 1) == b"",
        "memory": sum(memory.name in Path(f"/proc/{helper.pid}/maps").read_text() for helper in helpers),
    }
    mapped.close()
    return found


def test_it_holds_nothing_of_the_worker(tmp_path):
    path = make_checkpoint("dense", tmp_path / "model", layers=2)
    (found,) = run_ranks(1, save, path, tmp_path / "saved")
    print(f"\nthe first save: {found.pop('took')}")
    assert found.pop("helpers") > 0
    assert found == {"closed": True, "memory": 0}
    assert list((tmp_path / "saved").rglob("*.distcp"))

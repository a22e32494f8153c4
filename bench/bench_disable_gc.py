"""Step times of vLLM's EngineCoreProc with a large heap, with and without garbage collection within steps.

Usage:    python bench/bench_disable_gc.py [--quick] [--objects 200000] [--blocks 14] [--steps 1500]
Example:  python bench/bench_disable_gc.py      # about 2 minutes on 2 idle cores
The step is vLLM's own _process_engine_step; its model allocates as much as 64 requests do in a decode step,
a tenth of it in cycles, and computes for 2 ms. The heap is allocated after vLLM has frozen its own,
as with requests. Blocks of steps with and without ROLLOUT_DISABLE_GC=1 alternate, each starting from a
collected heap, so that neither pays for the other's garbage. The interval between steps, collections
included, is timed too. All times are CPU time of the thread, so that other programs do not count. Bars, with
it on: lower p99/p50 of steps, a shorter longest step, a shorter p99 of intervals, no more total time (within
2%, the noise of this machine), and memory that does not grow over the steps (10,500 by default).
"""

from __future__ import annotations

import collections
import gc
import os
import queue
import sys
import time

import numpy as np
import psutil
from bars import finish, parser_of

recent = collections.deque(maxlen=300)  # what requests hold lives for as many steps


def model():
    """Allocate as a decode step does: outputs of 64 requests, some of them in cycles."""
    outputs = [{"id": i, "tokens": [i], "logprobs": [(j, [j]) for j in range(8)]} for i in range(64)]
    for output in outputs[::10]:
        output["self"] = output
    recent.append([dict(output, self=None) for output in outputs])
    end = time.thread_time() + 0.002
    while time.thread_time() < end:
        pass
    return {0: outputs}, True


def figures(times_ms: np.ndarray) -> dict[str, float]:
    p50, p99 = np.percentile(times_ms, [50, 99])
    return {
        "mean_ms": times_ms.mean(),
        "p50_ms": p50,
        "p99_ms": p99,
        "p99/p50": p99 / p50,
        "max_ms": times_ms.max(),
    }


def main() -> int:
    parser = parser_of(__doc__, "2 blocks")
    parser.add_argument("--objects", type=int, default=200_000, help="lists on the heap")
    parser.add_argument("--blocks", type=int, default=14)
    parser.add_argument("--steps", type=int, default=1500, help="of a block")
    given = parser.parse_args()
    gc.set_threshold(700, 10, 10)  # Python's own; patches/install.py sets others for starting on a CPU

    from vllm.utils.gc_utils import freeze_gc_heap
    from vllm.v1.engine.core import EngineCoreProc

    core = object.__new__(EngineCoreProc)
    core.output_queue, core.post_step = queue.Queue(), lambda executed: None
    step = []

    def timed():
        begin = time.thread_time()
        result = model()
        step.append(time.thread_time() - begin)
        return result

    core.step_fn = timed
    freeze_gc_heap()
    requests = [[i] for i in range(given.objects)]
    kept, resident = {}, []
    for block in range(2 if given.quick else given.blocks):
        switch = ("0", "1")[block % 2]
        gc.collect()
        os.environ["ROLLOUT_DISABLE_GC"] = switch
        for _ in range(given.steps):
            begin = time.thread_time()
            core._process_engine_step()
            core.output_queue.get_nowait()
            kept.setdefault(switch, []).append((step.pop(), time.thread_time() - begin))
        if switch == "1":
            resident.append(psutil.Process().memory_info().rss)
    results = {}
    for switch, name in (("0", "collection in steps"), ("1", "collection between steps")):
        steps, intervals = 1000 * np.array(kept[switch]).T
        results[name] = {"step": figures(steps), "interval": figures(intervals)}
        for what, row in results[name].items():
            print(f"{name:24} {what:8} " + "  ".join(f"{key} {value:8.2f}" for key, value in row.items()))
    off, on = (results[name] for name in ("collection in steps", "collection between steps"))
    bars = []
    for what, key in (("step", "p99/p50"), ("step", "max_ms"), ("interval", "p99_ms")):
        without, value = off[what][key], on[what][key]
        bars.append((f"{key} of {what}s", value, "", f"below {without:.4g}, without", value < without))
    ratio = on["interval"]["mean_ms"] / off["interval"]["mean_ms"]
    bars.append(("time in all, on/off", ratio, "", "at most 1.02", ratio <= 1.02))
    growth, steps = (resident[-1] - resident[0]) / 2**20, len(kept["1"])
    bars.append((f"memory after {steps} steps", growth, "MiB more", "below 8", growth < 8))
    return finish("disable_gc", bars, objects=len(requests), steps=steps, results=results)


if __name__ == "__main__":
    sys.exit(main())

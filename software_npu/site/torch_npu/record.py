"""What a process did on its NPUs, in a file: SOFTWARE_NPU_RECORD names the directory, the file is PID.json.

{"process": its name, "calls": {operator: n}, "graphs": {...}, "collectives": {name: n}, "woken": n,
"peak_bytes": {device: n}, "die_peak_bytes": {die: n}, "allocator": {option: value}}; a die is a device by its
number in the host, and its peak that of all processes that share it. Written each second in which something
changed, since processes are often killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from pathlib import Path

from software_npu import _C
from software_npu.kernels import training

from .npu import memory

PERIOD_S = 1.0
PR_SET_NAME = 15  # of linux/prctl.h
LIBC = ctypes.CDLL(None)


def name() -> str:
    return Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def state() -> dict:
    # Not device_count(): the first who asks settles which devices there are, and ASCEND_RT_VISIBLE_DEVICES
    # may be set later than the first look here.
    peaks = {device: _C.peak_bytes(device) for device in range(_C.MOST_DEVICES)}
    return {
        "calls": dict(training.calls),
        "graphs": _C.graph_counts(),
        "collectives": _C.collective_counts(),
        "woken": _C.woken(),
        "peak_bytes": {device: peak for device, peak in peaks.items() if peak},
        "die_peak_bytes": {
            _C.die(device): _C.die_peak_bytes(device) for device, peak in peaks.items() if peak
        },
        "allocator": memory.allocator_options(),
    }


def write_for_ever(directory: Path) -> None:
    LIBC.prctl(PR_SET_NAME, b"npu-record")  # for those who list the threads of a process
    written: dict = {}
    while True:
        time.sleep(PERIOD_S)
        now = state()
        if now == written or not (now["peak_bytes"] or now["collectives"]):
            continue
        file = directory / f".{os.getpid()}"
        try:
            file.write_text(json.dumps({"process": name(), **now}))
            file.replace(directory / f"{os.getpid()}.json")
        except OSError:
            return  # the directory is gone, and who asked with it
        written = now


def start() -> None:
    if directory := os.environ.get("SOFTWARE_NPU_RECORD"):
        threading.Thread(
            target=write_for_ever, args=[Path(directory)], daemon=True, name="npu-record"
        ).start()


start()
os.register_at_fork(after_in_child=start)

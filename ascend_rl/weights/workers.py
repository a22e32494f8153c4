"""Threads that share a list of work, with progress on stderr and commits of what is finished."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

COMMIT_BYTES = 1 << 30  # finished work is committed after this much of it
REFRESH_SECONDS = 0.2  # of the progress line on a terminal


class Scratch:
    """Memory that a worker uses again and again.

    >>> scratch = Scratch()
    >>> scratch(4).shape, scratch(2).base is scratch(3).base
    ((4,), True)
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def __call__(self, size: int) -> np.ndarray:
        """[size] uint8, valid until the next call."""
        if len(self._memory) < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]


class Progress:
    """Bytes, bytes/s and time left on stderr: a line that changes on a terminal, one every 10 s elsewhere."""

    def __init__(self, what: str, total_bytes: int, done_bytes: int = 0, quiet: bool = False):
        self.what, self.total_bytes, self.first_bytes, self.quiet = what, total_bytes, done_bytes, quiet
        self.started, self.live = time.monotonic(), sys.stderr.isatty()
        self.shown = self.started

    def show(self, done_bytes: int, last: bool = False) -> None:
        now = time.monotonic()
        if self.quiet or (not last and now - self.shown < (REFRESH_SECONDS if self.live else 10)):
            return
        self.shown = now
        rate = (done_bytes - self.first_bytes) / max(now - self.started, 1e-9)
        left = (self.total_bytes - done_bytes) / rate if rate else 0
        share = done_bytes / self.total_bytes if self.total_bytes else 1
        bar = "#" * int(share * 30)
        amount = f"{done_bytes / 1e9:.2f}/{self.total_bytes / 1e9:.2f} GB {rate / 1e9:.2f} GB/s"
        text = f"{self.what} [{bar:<30}] {share:6.1%} {amount} ETA {left:.0f} s"
        print(
            ("\r" if self.live else "") + text,
            end="" if self.live and not last else "\n",
            file=sys.stderr,
            flush=True,
        )


def in_parallel(
    work: Callable[[int, Scratch], None],
    numbers: Sequence[int],
    sizes_bytes: Sequence[int],
    workers: int,
    progress: Progress,
    commit: Callable[[list[int]], None] = lambda finished: None,
) -> None:
    """``work(number, scratch)`` for all ``numbers``, in threads: their time is spent in system calls.

    The first error ends it, after a last commit of what was finished.

    Args:
        sizes_bytes: of each number, for progress and commits.
        commit: called in this thread with finished numbers, each once, as soon as they are COMMIT_BYTES.
    """
    waiting, lock, stop = iter(numbers), threading.Lock(), threading.Event()
    reports: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()

    def worker() -> None:
        scratch, ended_by = Scratch(), None
        try:
            while not stop.is_set():
                with lock:
                    number = next(waiting, None)
                if number is None:
                    break
                work(number, scratch)
                reports.put(number)
        except BaseException as error:
            ended_by = error
            stop.set()
        reports.put(ended_by)  # None: nothing left to do

    threads = [
        threading.Thread(target=worker, daemon=True) for _ in range(max(1, min(workers, len(numbers))))
    ]
    for thread in threads:
        thread.start()
    errors, finished, running = [], [], len(threads)
    done_bytes, finished_bytes = progress.first_bytes, 0

    def note(report: int | BaseException | None) -> None:
        nonlocal running, done_bytes, finished_bytes
        if isinstance(report, int):
            finished.append(report)
            done_bytes += sizes_bytes[report]
            finished_bytes += sizes_bytes[report]
            return
        running -= 1
        if report is not None:
            errors.append(report)

    def flush() -> None:
        nonlocal finished_bytes
        if finished:
            commit(finished)
            finished.clear()
            finished_bytes = 0

    try:
        while running:
            with contextlib.suppress(queue.Empty):
                note(reports.get(timeout=REFRESH_SECONDS))
            progress.show(done_bytes)
            if finished_bytes >= COMMIT_BYTES:
                flush()
    finally:  # also when interrupted
        stop.set()
        for thread in threads:
            thread.join()
        while not reports.empty():
            note(reports.get())
        flush()
    if errors:
        raise errors[0]
    progress.show(done_bytes, last=True)

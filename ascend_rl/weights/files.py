"""Byte ranges of files: where one lies, and reading or writing all of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ascend_rl.settings.switch import CannotWork


@dataclass(frozen=True)
class Place:
    """``length`` bytes of ``file`` from ``offset`` on."""

    file: str
    offset: int
    length: int


def read_exactly(fd: int, buffer: memoryview, offset: int, what: str) -> None:
    """Fill ``buffer``; ``what`` names the file and the tensor in the error.

    Raises:
        CannotWork: the file ends too early.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise CannotWork(f"{what}: the file ends {len(buffer) - done} bytes too early; get it again")
        done += count


def write_exactly(fd: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of ``data``, however little of it a system call takes."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def sync_directory(path: Path) -> None:
    """Bring the names in a directory, new and renamed ones, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

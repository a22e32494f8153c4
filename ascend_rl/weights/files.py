"""Byte ranges of files: where one lies, and reading or writing all of it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from ascend_rl.settings.switch import CannotWork

SAMPLES, SAMPLE_BYTES = 64, 4096


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


def fingerprint(fd: int) -> bytes:
    """What tells a file from another one of the same name, without reading all of it.

    Size and modification time may survive a copy of other weights over these, as tools set times; the change
    time cannot be set, so it tells every write and rename. Samples of the content tell other weights on file
    systems whose change times mean nothing.
    """
    status, content = os.fstat(fd), hashlib.sha256()
    content.update(f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n".encode())
    content.update(samples(fd, status.st_size))
    return content.digest()


def samples(fd: int, size: int) -> bytes:
    """The whole of a small file; of others evenly spaced blocks, the first and the last among them."""
    if size <= SAMPLES * SAMPLE_BYTES:
        return os.pread(fd, size, 0)
    last = size - SAMPLE_BYTES
    return b"".join(os.pread(fd, SAMPLE_BYTES, last * nth // (SAMPLES - 1)) for nth in range(SAMPLES))


def sync_directory(path: Path) -> None:
    """Bring the names in a directory, new and renamed ones, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

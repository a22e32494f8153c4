"""Files that a run writes for its user: never deleted, and never a reason to end the run.

- `set_aside` makes room for a new start's train.log: the old one becomes train.1.log, that of the next start
  train.2.log. Files of one start get one number. No file is ever removed, overwritten or renamed twice.
- `survive` calls a writer of metrics, and continues without it where it fails.
- `LogFile` writes what it can. A full disk or a lost NFS server (ENOSPC, EIO, ESTALE) is reported once on
  stderr; after it the file is reopened every few seconds, and gets a line that says how much is missing. A
  write that blocks forever (a hard NFS mount) blocks here too.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path


def parts(path: Path) -> list[Path]:
    """What was set aside of a file, oldest first: metrics.jsonl -> metrics.1.jsonl, metrics.2.jsonl ..."""
    found = {}
    for each in path.parent.glob(f"{path.stem}.*{path.suffix}"):
        number = each.name[len(path.stem) + 1 : len(each.name) - len(path.suffix)]
        if number.isdigit():
            found[int(number)] = each
    return [found[number] for number in sorted(found)]


def records(path: Path) -> list[dict]:
    """Of a file of JSON lines, if it exists; a line that a killed process did not end is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def by_step(path: Path) -> dict[int, list[dict]]:
    """step -> records of a run that has them by ``step``. Of its starts, each replaces what came before from
    its first step on."""
    found: dict[int, list[dict]] = {}
    for part in (*parts(path), path):
        new = records(part)
        first = min((record["step"] for record in new), default=math.inf)
        found = {step: of for step, of in found.items() if step < first}
        for record in new:
            found.setdefault(record["step"], []).append(record)
    return found


@functools.cache
def _beside_metrics(path: Path) -> LogFile:
    return LogFile(path, whole=True)


def add_record(name: str, record: dict) -> None:
    """Append a JSON line to the file ``name`` beside verl's metrics.jsonl; without that file, do nothing."""
    if metrics := os.environ.get("VERL_FILE_LOGGER_PATH"):
        line = json.dumps(record, ensure_ascii=False) + "\n"
        _beside_metrics(Path(metrics).with_name(name)).write(line.encode())


def set_aside(paths: Iterable[Path]) -> None:
    """Rename those of these files and directories that exist, all with the same new number.

    Raises:
        OSError: one cannot be renamed.
    """
    paths = list(paths)
    taken = [part.name[len(path.stem) + 1 :].partition(".")[0] for path in paths for part in parts(path)]
    number = max(map(int, taken), default=0) + 1
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_name(f"{path.stem}.{number}{path.suffix}"))


class LogFile:
    """A file that lines are appended to; `write` never raises.

    Args:
        whole: for a file that programs read (JSON lines): it gets whole lines, or nothing of them, and no
            line that says how much is missing.
    """

    def __init__(self, path: Path, retry_s: float = 10.0, whole: bool = False):
        self.path, self.retry_s, self.whole = path, retry_s, whole
        self.file = path.open("ab", buffering=0)
        self.lost, self.why, self.again = 0, "", 0.0

    def write(self, line: bytes) -> None:
        if self.why and time.monotonic() < self.again:
            self.lost += 1
            return
        try:
            if self.why:
                self.close()
                self.file = self.path.open("ab", buffering=0)
            if self.lost and not self.whole:
                self._write(f"\n[{self.lost} lines are missing here: {self.why}]\n".encode())
                self.lost = 0
            self._write(line)
            self.lost, self.why = 0, ""
        except OSError as error:
            if not self.why:
                what = f"{self.path} cannot be written ({error.strerror})"
                with contextlib.suppress(OSError):
                    print(f"WARNING: {what}; the run continues without it", file=sys.stderr)
            self.lost, self.why = self.lost + 1, error.strerror or str(error)
            self.again = time.monotonic() + self.retry_s

    def _write(self, data: bytes) -> None:
        before = os.fstat(self.file.fileno()).st_size
        try:
            while data:
                count = self.file.write(data)
                if not count:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                data = data[count:]
        except OSError:
            if self.whole:
                with contextlib.suppress(OSError):
                    self.file.truncate(before)
            raise

    def close(self) -> None:
        with contextlib.suppress(OSError):  # NFS reports a failed write only here
            self.file.close()


_failing: set[str] = set()


def survive(name: str, writer: object, data: dict, step: int) -> None:
    """Let a writer of metrics (``writer.log(data=..., step=...)``) write; whatever it raises ends no run.

    The first error is reported, and again when it has worked meanwhile. TensorBoard's writer never writes
    again after one: it gets a new file.

    Args:
        name: of the writer, for the message.
    """
    try:
        writer.log(data=data, step=step)
        _failing.discard(name)
    except Exception as error:  # noqa: BLE001  (trackers on networks raise anything)
        if name not in _failing:
            _failing.add(name)
            with contextlib.suppress(OSError):
                what = f"step {step} is not in {name} ({type(error).__name__}: {error})"
                print(f"WARNING: {what}; the run continues without it", file=sys.stderr)
        if hasattr(getattr(writer, "writer", None), "all_writers"):
            writer.writer.file_writer = writer.writer.all_writers = None

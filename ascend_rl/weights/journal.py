"""A directory of files that is written in pieces, survives kills and power failures, and appears complete or
not at all.

The files are written in OUTPUT.partial. OUTPUT.partial.journal beside it has a line for the input and the
options, and then the number of each piece that is finished. Data is synced before the journal names it, and
everything before the rename. So the next run writes only the rest, whatever happened.

Invariants (tests/test_journal.py): what the journal names is on the disk; nothing is overwritten; one process
at a time; OUTPUT appears by one rename, after everything in it is on the disk; whatever would stop that
rename is refused before the first byte. Cost: two syncs a commit.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path

from ascend_rl.settings.switch import CannotWork
from ascend_rl.weights.files import Place, sync_directory, write_exactly


def place_of(path: Path, inputs: Iterable[Path]) -> Path:
    """The directory that is meant by ``path``.

    Raises:
        CannotWork: nothing can appear there by a rename.
    """
    place = Path(os.path.realpath(path))
    if path.is_symlink() and not place.parent.is_dir():
        raise CannotWork(
            f"{path} is a link to {place}, where nothing is; make that directory or remove the link"
        )
    if not place.name or (place.is_dir() and place.samefile(".")):
        raise CannotWork(
            f"{path} is the current directory, or the root, which no output can replace; name one in it"
        )
    for directory in inputs:
        if place.is_relative_to(os.path.realpath(directory)):
            raise CannotWork(f"{path} is in {directory}, which is read; choose a place outside of it")
    return place


class Output:
    """A directory that is written as OUTPUT.partial beside a journal, and renamed when everything is on the
    disk. Where OUTPUT is a link, that is its target.

    Args:
        sizes: bytes of each file.
        places: what is written by number.
        inputs: directories that are read; no output belongs into one of them.
    """

    def __init__(
        self,
        path: Path,
        digest: str,
        sizes: dict[str, int],
        places: list[Place],
        inputs: Iterable[Path] = (),
    ):
        self.digest, self.sizes, self.places = digest, sizes, places
        self.path = place_of(path, inputs)
        self.partial = self.path.with_name(self.path.name + ".partial")
        self.journal = self.path.with_name(self.path.name + ".partial.journal")
        self.done: set[int] = set()
        self.complete = False
        self._fds: dict[str, int] = {}

    def __enter__(self) -> Output:
        if os.path.lexists(self.partial) and (self.partial.is_symlink() or not self.partial.is_dir()):
            raise CannotWork(f"{self.partial} is not a directory of a conversion; remove it")
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.journal_fd, self.locked = os.open(self.journal, flags, 0o644), False
            try:
                self._begin()
            except BaseException:
                self.__exit__()
                raise
        except OSError as error:
            raise CannotWork(
                f"{self.path} cannot be written: {error.filename or self.partial}: {error.strerror}; choose "
                "an output directory that can be"
            ) from error
        return self

    def _begin(self) -> None:
        self.locked = self._lock()
        if not self.locked:
            raise CannotWork(f"another conversion is writing {self.partial}; wait for it or stop it")
        content = os.pread(self.journal_fd, os.fstat(self.journal_fd).st_size, 0)
        known = self._read_journal(content)
        if os.path.lexists(self.path) and not (self.path.is_dir() and not any(self.path.iterdir())):
            if not content or known is None or self.partial.exists():
                raise CannotWork(
                    f"{self.path} exists and is not overwritten; remove it or choose another output directory"
                )
            self.complete = True  # killed between the rename and the end
            return
        if known is None and self.partial.exists():
            raise CannotWork(
                f"{self.partial} is half a conversion of other weights or with other options, or files of "
                "the input were copied or changed since; finish that one, or remove "
                f"{self.partial} and {self.journal}"
            )
        self.done = known if known and self.partial.exists() else set()
        self._check_space()
        self._make_room()
        self.partial.mkdir(exist_ok=True)
        for file, size in self.sizes.items():
            fd = self._fds[file] = os.open(self.partial / file, os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(fd, size)
        sync_directory(self.partial)  # else a power cut may take the files whose pieces the journal names
        # Rewritten rather than appended to: a kill may have left half a line at its end.
        lines = [json.dumps({"conversion": self.digest}), *(str(number) for number in sorted(self.done))]
        os.ftruncate(self.journal_fd, 0)
        os.write(self.journal_fd, "".join(line + "\n" for line in lines).encode())
        os.fsync(self.journal_fd)
        sync_directory(self.path.parent)

    def _make_room(self) -> None:
        """Remove an empty directory that is in the place of the output: what can be removed can be replaced.

        Raises:
            CannotWork: it cannot.
        """
        if self.path.is_dir():
            try:
                self.path.rmdir()
            except OSError as error:
                raise CannotWork(
                    f"{self.path} cannot be replaced ({error.strerror}): it is a mount point or belongs to "
                    "somebody else; name a directory in it"
                ) from error

    def _lock(self) -> bool:
        """Whether the journal is ours, and still the one by that name.

        Raises:
            CannotWork: the file system has no locks.
        """
        try:
            fcntl.flock(self.journal_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise CannotWork(
                f"the file system of {self.path.parent} does not lock files ({error.strerror}), so two "
                "conversions could mix their output; mount it with locks (Lustre: -o flock, NFS: without "
                "nolock), or write to another file system and copy the result"
            ) from error
        try:
            return os.path.samestat(os.fstat(self.journal_fd), os.stat(self.journal))
        except FileNotFoundError:  # the conversion that had the lock has just ended
            return False

    def _read_journal(self, content: bytes) -> set[int] | None:
        """Numbers of the finished items; None for the journal of another conversion."""
        head, *lines = content.split(b"\n")[:-1] or [b""]  # what follows the last newline was cut off
        if not head:
            return set()
        try:
            if json.loads(head)["conversion"] != self.digest:
                return None
            return {int(line) for line in lines}
        except (ValueError, KeyError, TypeError):
            return None

    def _check_space(self) -> None:
        there = sum(f.stat().st_blocks * 512 for f in self.partial.glob("*")) if self.partial.exists() else 0
        needed = max(0, sum(self.sizes.values()) - there) + (16 << 20)
        disk = os.statvfs(self.path.parent)
        free = disk.f_bavail * disk.f_frsize
        if free < needed:
            raise CannotWork(
                f"{self.path.parent} has {free / 1e9:.2f} GB free, {needed / 1e9:.2f} GB are needed; "
                "nothing was written"
            )

    def fd(self, file: str) -> int:
        return self._fds[file]

    def commit(self, numbers: list[int]) -> None:
        """Sync what these items wrote, then say so in the journal, then let go of the cached pages."""
        for file in {self.places[number].file for number in numbers}:
            os.fdatasync(self._fds[file])
        os.write(self.journal_fd, "".join(f"{number}\n" for number in numbers).encode())
        os.fdatasync(self.journal_fd)
        self.done.update(numbers)
        for number in numbers:
            place = self.places[number]
            os.posix_fadvise(self._fds[place.file], place.offset, place.length, os.POSIX_FADV_DONTNEED)

    def add_file(self, name: str, content: bytes) -> None:
        """A small file, synced with all others when the output is published."""
        fd = self._fds[name] = os.open(self.partial / name, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(fd, len(content))
        write_exactly(fd, content, 0)

    def publish(self) -> None:
        for fd in self._fds.values():
            os.fsync(fd)
        sync_directory(self.partial)
        os.rename(self.partial, self.path)
        sync_directory(self.path.parent)

    def __exit__(self, *_: object) -> None:
        try:
            if self.locked and not self.partial.exists():  # published, or nothing begun
                self.journal.unlink(missing_ok=True)
        finally:
            for fd in (*self._fds.values(), self.journal_fd):
                os.close(fd)
            self._fds.clear()

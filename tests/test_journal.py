"""weights/journal.py on a disk that loses what was not synced, with the power cut at every step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ascend_rl.weights.files import Place
from ascend_rl.weights.journal import Output

PLACES = [Place("a", 0, 8), Place("a", 8, 8), Place("b", 0, 8), Place("b", 8, 8)]
SIZES = {"a": 16, "b": 16}
EXPECTED = {"a": b"\1" * 8 + b"\2" * 8, "b": b"\3" * 8 + b"\4" * 8, "index": b"complete"}


class PowerCut(BaseException):
    pass


class Disk:
    """Knows what has certainly reached the disk, as POSIX promises it: the content of a file when it was
    synced, the names in a directory when that was. What was not synced may be there or not.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.contents: dict[int, bytes] = {}  # of files, by inode
        self.names: dict[int, dict[str, int]] = {}  # of directories, by inode: inodes by name
        self.steps, self.last_step = 0, -1
        for name in ("pwrite", "write", "ftruncate", "rename", "unlink", "mkdir", "fsync", "fdatasync"):
            patch.setattr(os, name, self._observed(getattr(os, name), name.endswith("sync")))

    def _observed(self, call, syncs: bool):
        def observed(*arguments, **keywords):
            if self.steps == self.last_step:
                raise PowerCut
            self.steps += 1
            result = call(*arguments, **keywords)
            if syncs:
                path = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
                if path.is_dir():
                    self.names[path.stat().st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
                else:
                    self.contents[path.stat().st_ino] = path.read_bytes()
            return result

        return observed

    def kept(self, directory: Path) -> dict[str, bytes]:
        """Files that are certainly there after a power cut, with what is certainly in them."""
        names = self.names.get(directory.stat().st_ino, {}) if directory.exists() else {}
        return {name: self.contents.get(inode, b"") for name, inode in names.items()}

    def forget(self, directory: Path) -> None:
        """Leave of ``directory`` what is kept."""
        kept = self.kept(directory)
        for path in directory.iterdir() if directory.exists() else ():
            path.write_bytes(kept[path.name]) if path.name in kept else path.unlink()


def write_all(root: Path) -> list[int]:
    """What a conversion does, with one commit for each piece; the numbers of the pieces it wrote."""
    written = []
    with Output(root / "out", "these weights", SIZES, PLACES) as output:
        if output.complete:
            return []
        for number, place in enumerate(PLACES):
            if number not in output.done:
                os.pwrite(output.fd(place.file), EXPECTED[place.file][place.offset :][:8], place.offset)
                output.commit([number])
                written.append(number)
        output.add_file("index", b"complete")
        output.publish()
    return written


def journaled(root: Path) -> list[int]:
    journal = root / "out.partial.journal"
    return [int(line) for line in journal.read_bytes().split(b"\n")[1:-1]] if journal.exists() else []


def test_what_the_journal_names_survives_a_power_cut_at_any_step(tmp_path, monkeypatch):
    step, resumed = 0, 0
    while True:
        root = tmp_path / str(step)
        root.mkdir()
        with monkeypatch.context() as patch:
            disk = Disk(patch)
            disk.last_step = step
            try:
                write_all(root)
                break
            except PowerCut:
                pass
        named = journaled(root)
        kept = disk.kept(root / "out.partial")
        if (root / "out").exists():
            assert disk.kept(root / "out") == EXPECTED, f"step {step}: the output may be incomplete"
        else:
            for place in (PLACES[number] for number in named):
                data = kept.get(place.file, b"")[place.offset :][: place.length]
                assert data == EXPECTED[place.file][place.offset :][:8], f"step {step}: {place} may be lost"
            disk.forget(root / "out.partial")
            assert write_all(root) == [number for number in range(len(PLACES)) if number not in named]
            resumed += bool(named)
        write_all(root) if (root / "out.partial.journal").exists() else None  # cut off after the rename
        assert {path.name: path.read_bytes() for path in (root / "out").iterdir()} == EXPECTED
        assert [path.name for path in root.iterdir()] == ["out"]
        step += 1
    assert step > 30 and resumed > 10

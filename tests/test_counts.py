"""What features count for the report of a rehearsal, by processes that share a file."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ascend_rl.process.counts import COUNTED, VARIABLE, count, counted


def test_processes_that_count_together_lose_nothing(tmp_path, counts, root):
    program = "from ascend_rl.process.counts import count\nfor _ in range(3000): count('eplb', 12345)"
    for process in [subprocess.Popen([sys.executable, "-c", program], cwd=root) for _ in range(4)]:
        assert process.wait() == 0
    assert counts() == {"eplb": 4 * 3000 * 12345}


def test_it_writes_only_what_happened_and_where_it_is_asked_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    count("eplb", 3)
    monkeypatch.setenv(VARIABLE, "counts")
    count("eplb", 0)
    assert not list(tmp_path.iterdir()) and set(counted(tmp_path / "counts").values()) == {0}
    count("eplb")
    count("hdp_rings", 2)
    found = counted(tmp_path / "counts")
    assert list(found) == list(COUNTED) and (found["eplb"], found["hdp_rings"]) == (1, 2)
    with pytest.raises(KeyError):
        count("experts")


def test_each_count_has_one_place_and_a_switch_that_a_page_names(root):
    source = "".join(file.read_text() for file in (root / "ascend_rl").rglob("*.py"))
    pages = "".join(file.read_text() for file in (root / "docs").glob("*.md"))
    for name, (what, switch) in COUNTED.items():
        assert len(re.findall(rf'count\(.*"{name}"', source)) == 1 + (name == "gc_within"), name
        assert what and switch.partition("=")[0] in pages, name

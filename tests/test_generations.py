"""Which responses of a step are kept to be read, and what a report finds of them."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from ascend_rl.process.logs import by_step
from ascend_rl.rollout.generations import FILE, KEPT, pick, record, shortened

ROW = st.tuples(st.integers(0, 8), st.sampled_from([0.0, 0.5, 1.0, math.nan]))


@given(st.lists(ROW, min_size=1, max_size=20))
def test_picked_rows_are_those_of_a_search(rows):
    lengths, scores = zip(*rows, strict=True)
    ranked = [-math.inf if math.isnan(score) else score for score in scores]
    of = {kind: row for row, kinds in pick(lengths, scores, 8).items() for kind in kinds}
    assert of["first"] == 0 and lengths[of["longest"]] == max(lengths)
    best, worst = max(ranked), min(ranked)
    assert ranked[of["best"]] == best and ranked[of["worst"]] == worst
    assert lengths[of["best"]] == min(n for n, score in zip(lengths, ranked, strict=True) if score == best)
    assert lengths[of["worst"]] == max(n for n, score in zip(lengths, ranked, strict=True) if score == worst)
    cut = [row for row, length in enumerate(lengths) if length >= 8]
    assert of.get("truncated") == (cut[0] if cut else None)


def test_a_long_text_keeps_both_ends():
    text = "a" * KEPT + "b" * 5 + "c" * KEPT
    assert shortened(text[:-5]) == text[:-5]
    assert shortened(text) == "a" * KEPT + "\n[... 5 characters ...]\n" + "c" * KEPT


def test_a_later_start_replaces_steps_from_its_first_one_on(tmp_path, monkeypatch):
    def start(steps, mark: str) -> None:
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / mark / "metrics.jsonl"))
        (tmp_path / mark).mkdir()
        for step in steps:
            record(step, [3, 5], [0.0, 1.0], 9, lambda rows: [(f"{mark}?", str(row)) for row in rows])

    start((1, 2, 3), "old")
    start((3, 4), "new")
    old, new = (tmp_path / mark / FILE for mark in ("old", "new"))
    old.rename(new.with_name("generations.1.jsonl"))
    with new.open("a") as file:
        file.write('{"step": 5, "ki')  # killed while it wrote
    found = by_step(new)
    assert {step: samples[0]["prompt"] for step, samples in found.items()} == {
        1: "old?", 2: "old?", 3: "new?", 4: "new?",
    }  # fmt: skip
    kinds = {tuple(sample["kinds"]): sample["response"] for sample in found[4]}
    assert kinds == {("first", "worst"): "0", ("longest", "best"): "1"}
    assert len(json.loads(new.read_text().splitlines()[0])) == 6


def test_without_verls_file_logger_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    monkeypatch.chdir(tmp_path)
    record(1, [3], [0.0], 9, lambda rows: [("", "")])
    assert not list(tmp_path.iterdir())

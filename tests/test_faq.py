"""docs/faq.md: every row names the check or test that covers it, and every reported pain has a row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ascend_rl.lint import lint  # noqa: F401  (it fills RULES)
from ascend_rl.lint.setup import RULES

DOCS = Path(__file__).resolve().parent.parent / "docs"
# One report of each of the 25 pains that users of this stack reported.
PAINS = """
    ray#55137 vllm-ascend#3114 verl#3947 vllm-ascend#11968 vllm-ascend#3413
    vllm-ascend#5710 vllm-ascend#977 ms-swift#6636 verl#3902 vllm-ascend#5915 verl#6580
    verl#6527 verl#6691 verl#2932 verl#4399 verl#3045 vllm-ascend#16049 vllm-ascend#1168
    verl#6747 vllm-ascend#14631 verl#2629 vllm-ascend#12890 vllm-ascend#13730 verl#1332
    vllm#57883
""".split()


def rows(name: str) -> list[list[str]]:
    lines = (DOCS / name).read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [row for row in cells if row[0] != "---" and row[2] not in ("found by", "\u68c0\u67e5")]


@pytest.mark.parametrize("name", ["faq.md", "faq.zh.md"])
def test_every_row_links_the_check_or_test_that_covers_it(name):
    documented = {rule.id for rule in RULES} | set(
        re.findall(r"`(\w+\.\w+)`", (DOCS / "preflight.md").read_text())
    )
    assert len(rows(name)) > 40
    for symptom, *_, found, _seen in rows(name):
        links = re.findall(r"\[([^]]+)\]\(([^)#]+)", found)
        covering = [link for _, link in links if "/tests/" in link or link.startswith("preflight.")]
        assert covering and all((DOCS / link).is_file() for _, link in links), symptom
        assert {text.strip("`") for text, _ in links if text.startswith("`")} <= documented, symptom


@pytest.mark.parametrize("name", ["faq.md", "faq.zh.md"])
def test_every_pain_has_a_row(name):
    seen = " ".join(row[-1] for row in rows(name))
    assert [pain for pain in PAINS if not re.search(rf"{re.escape(pain)}\b", seen)] == []


def test_both_languages_have_the_same_rows():
    english, chinese = rows("faq.md"), rows("faq.zh.md")
    assert len(english) == len(chinese)

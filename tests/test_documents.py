"""The pages in English and Chinese: the same structure, one term for one thing, links that lead somewhere."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHINESE = sorted([*ROOT.glob("*.zh.md"), *ROOT.glob("docs/*.zh.md"), *ROOT.glob("patches/*.zh.md")])
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("patches/*.md")])
PAIRS = [path for path in CHINESE if path.parent != ROOT / "patches"]
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.S)

# Other words for what has one term: its comment, or epoch.
OTHER_TERMS = (
    "\u8bad\u7ec3\u65b9\u6848",  # recipe is \u914d\u65b9
    r"\bpreflight\b",  # \u9884\u68c0
    r"\bcheckpoint\b",  # \u68c0\u67e5\u70b9
    "\u54cd\u5e94",  # response is \u56de\u590d
    r"\bhead\b",  # the head node is \u4e3b\u8282\u70b9
    "\u5934\u8282\u70b9",
    "\u9884\u6f14",  # rehearsal is \u6f14\u7ec3
    "\u4e09\u6247\u95e8",  # ways to use it
    "\u5468\u671f\u6570|\u4e16\u4ee3",  # epoch stays epoch
)


def structure(path: Path) -> list[str]:
    """One entry for each heading (its level), table (its rows), code block and picture, in order."""
    found, code, table = [], False, 0
    for line in [*path.read_text(encoding="utf-8").splitlines(), ""]:
        line = line.strip()
        if table and (code or not line.startswith("|")):
            found.append(f"table of {table} rows")
            table = 0
        if line.startswith("```"):
            code = not code
            found += ["code"] * code
        elif not code:
            table += line.startswith("|")
            found += [f"heading {line.partition(' ')[0]}"] * bool(re.match(r"#+ ", line))
            found += [line.partition("](")[2]] * line.startswith("![")
    return found


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = CODE.sub(lambda found: found[0].strip("`"), path.read_text(encoding="utf-8"))
    titles = [title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)]
    kept = [[c for c in title if c in "-_" or unicodedata.category(c)[0] in "LNM"] for title in titles]
    return {"".join(characters) for characters in kept}


@pytest.mark.parametrize("path", PAIRS, ids=lambda path: path.name)
def test_both_languages_have_the_same_structure(path):
    assert structure(path) == structure(path.with_name(path.name.replace(".zh.md", ".md")))


@pytest.mark.parametrize("path", CHINESE, ids=lambda path: path.name)
def test_chinese_pages_use_one_term_for_one_thing(path):
    prose = re.sub(r"\]\([^)]*\)", "]", CODE.sub("", path.read_text(encoding="utf-8")))
    assert re.findall(rf"(?:{'|'.join(OTHER_TERMS)}).{{0,20}}", prose) == []


@pytest.mark.parametrize("path", CHINESE, ids=lambda path: path.name)
def test_links_of_chinese_pages_go_to_chinese_pages(path):
    """But for the English form of the page itself."""
    links = set(re.findall(r"\]\(([^)#:]+(?<!\.zh)\.md)", path.read_text(encoding="utf-8")))
    chinese = [(path.parent / link.replace(".md", ".zh.md")).resolve() for link in sorted(links)]
    assert [other for other in chinese if other.exists() and other != path] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_headings(path):
    links = re.findall(r"\]\(([^)#:]*\.md|)#([^)]+)\)", CODE.sub("", path.read_text(encoding="utf-8")))
    targets = [((path.parent / name) if name else path, anchor) for name, anchor in links]
    assert [anchor for target, anchor in targets if anchor not in anchors(target)] == []

"""The examples in ascend_rl's docstrings are correct."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ascend_rl"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text())


def test_there_are_examples():
    """Guards the test below."""
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_examples_of(path):
    """Each that the text shows is found, and is right."""
    module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    results = doctest.testmod(module)
    assert results.attempted == path.read_text().count(">>> ")
    assert results.failed == 0

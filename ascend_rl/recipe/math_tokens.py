"""The LaTeX of an answer as tokens: numbers, words, commands and all other characters but white space."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ascend_rl.recipe.math_text import TEXT


class NotMath(ValueError):
    """The grammar does not know this text."""


class Token(NamedTuple):
    kind: str  # number, word, text (a word in \text), command, or other
    value: str
    spaced: bool = False  # white space before it


_TOKEN = re.compile(
    rf"(?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE](?:-?\d{{1,4}}|\+\d{{2,4}})(?![\dA-Za-z.]))?)"
    rf"|(?P<text>{TEXT}\s?\{{[^{{}}]*\}})"
    r"|(?P<command>\\(?:[A-Za-z]+|.))|(?P<word>[A-Za-z]+)|(?P<cjk>[\u3400-\u9fff]+)|(?P<space>\s+)|(?P<other>.)",
    re.S,
)


def lex(text: str, thousands: bool) -> list[Token]:
    """The tokens of a cleaned text; ``thousands`` reads 1,234 outside brackets as one number."""
    tokens: list[Token] = []
    spaced = False
    for match in _TOKEN.finditer(text):
        kind, value = match.lastgroup, match[0]
        if kind == "space":
            spaced = True
            continue
        if kind == "text":
            inner = value[value.index("{") + 1 : -1]
            words = lex(inner, False)
            single = len(inner.strip()) == 1 and not value.startswith(("\\text", "\\mbox"))
            for place, token in enumerate(words):
                kind = "text" if token.kind == "word" and not single else token.kind
                tokens.append(Token(kind, token.value, token.spaced or spaced or place == 0))
            spaced = True
            continue
        if kind == "cjk":
            kind = "text"
        tokens.append(Token(kind, value, spaced))
        spaced = False
    return _joined(tokens) if thousands else tokens


def _joined(tokens: list[Token]) -> list[Token]:
    """Tokens with 1 , 234 , 567 outside brackets joined to one number."""
    out: list[Token] = []
    joined = -1  # the place of a number that has three digits after each comma so far
    for depth, token in with_depth(tokens):
        goes_on = (
            depth == 0 and token.kind == "number" and not token.spaced and len(out) > 1
            and out[-1].value == "," and not out[-1].spaced and out[-2].value.isdigit()
            and token.value[:3].isdigit() and len(token.value.partition(".")[0]) == 3
            and (len(out[-2].value) <= 3 or joined == len(out) - 2)
        )  # fmt: skip
        if goes_on:
            out[-2:] = [Token("number", out[-2].value + token.value, out[-2].spaced)]
            joined = len(out) - 1
        else:
            out.append(token)
    return out


OPENING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "\\lbrace": "\\rbrace", "\\langle": "\\rangle",
           "\\lfloor": "\\rfloor", "\\lceil": "\\rceil", "\\lvert": "\\rvert"}  # fmt: skip
CLOSING = set(OPENING.values())


def with_depth(tokens: list[Token]) -> Iterable[tuple[int, Token]]:
    depth = 0
    for token in tokens:
        if token.value in CLOSING:
            depth -= 1
        yield depth, token
        if token.value in OPENING:
            depth += 1


def split(tokens: list[Token], separates: Callable[[Token], bool]) -> tuple[list[list[Token]], list[str]]:
    """The parts outside brackets, and what separates them."""
    parts: list[list[Token]] = [[]]
    found = []
    for depth, token in with_depth(tokens):
        if depth == 0 and separates(token):
            parts.append([])
            found.append(token.value)
        else:
            parts[-1].append(token)
    return parts, found


def whole_bracket(tokens: list[Token]) -> bool:
    """The first token opens a bracket that the last one closes."""
    if len(tokens) < 2 or tokens[0].value not in OPENING or tokens[-1].value not in CLOSING:
        return False
    return all(depth > 0 for depth, _ in list(with_depth(tokens))[1:-1])


def spelled(tokens: Iterable[Token]) -> str:
    """The text of tokens, without white space between symbols."""
    words: list[str] = []
    for token in tokens:
        if words and token.spaced and words[-1][-1].isalnum() and token.value[0].isalnum():
            words.append(" ")
        words.append(token.value)
    text = "".join(words)
    return text.casefold() if any(token.kind == "text" for token in tokens) else text

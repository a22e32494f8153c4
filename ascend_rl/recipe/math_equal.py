r"""Whether two short answers are mathematically equal, decided exactly: 7/4 is 1\frac{3}{4}, not 1.7.

A reward that pays a wrong answer teaches it, so what cannot be proved equal is different. Libraries that
compare with a tolerance pay \frac{1}{2^{91}} for \frac{1}{2^{90}}; those that search an answer for numbers
pay a list for one of its elements.

Idea: an answer is read as a structure: lists, sets, tuples, intervals, inequalities, matrices, equations, the
letter of a multiple choice, a quantity with a unit. Structures are compared part by part; the parts are exact
sympy expressions from a small grammar of LaTeX, and sympy has to prove that their difference is zero. What
the grammar does not know is compared as text.

Invariants (tests/test_math_equal.py): nothing of an answer is dropped but decoration and a unit; there is no
tolerance, except that a decimal with six places may stand for an irrational number. sympy may take forever:
this runs as a child process of the reward (math_reward.py). Cost: some milliseconds an answer.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy

from ascend_rl.recipe.math_expression import FUNCTIONS, LETTERS, Expression, degree_tokens, equal_expressions
from ascend_rl.recipe.math_text import TEXT, clean, quickly
from ascend_rl.recipe.math_tokens import NotMath, Token, lex, spelled, split, whole_bracket, with_depth

MEMORY_BYTES = 4 << 30


@dataclass(frozen=True)
class Number:
    value: Any  # a sympy expression
    unit: str = ""
    percent: bool = False
    places: int = 0  # of a plain decimal


@dataclass(frozen=True)
class Many:
    kind: str  # list, set, dots (in order)
    items: tuple


@dataclass(frozen=True)
class Ordered:
    left: str
    right: str
    items: tuple


@dataclass(frozen=True)
class Matrix:
    kind: str
    rows: tuple[tuple, ...]


@dataclass(frozen=True)
class Named:
    label: str
    value: Any
    symbol: bool  # the label is one variable


@dataclass(frozen=True)
class Each:
    values: tuple[tuple[str, Any], ...]  # x=1, y=2


@dataclass(frozen=True)
class Relation:
    sign: str  # =, >, >=, !=
    difference: Any


@dataclass(frozen=True)
class Word:
    text: str


BOTH = {"and", "\\land", "\\wedge", "\u4e14", "\u548c"}
SEPARATORS = {*BOTH, ",", ";", *"or \\lor \\vee \u6216 \u6216\u8005 \u4e0e \u53ca \u4ee5\u53ca".split()}
DOTS = {"\\ldots", "\\dots", "\\cdots", "\\dotsc"}
LESS = {"<": "<", "\\lt": "<", ">": ">", "\\gt": ">"}
LESS |= dict.fromkeys(("\\le", "\\leq", "\\leqslant"), "<=") | dict.fromkeys(
    ("\\ge", "\\geq", "\\geqslant"), ">="
)
EQUAL = {"=": "=", "\\ne": "!=", "\\neq": "!=", "\\in": "in"}
MATRICES = dict.fromkeys("pmatrix bmatrix matrix smallmatrix array".split(), "matrix")
MATRICES |= {other: other for other in ("vmatrix", "Bmatrix", "Vmatrix")}
_MATRIX = re.compile(
    r"[(\[]?\s?\\begin\s?\{([A-Za-z]+)\}(?:\{[lcr| ]{0,50}\})?(.*)\\end\s?\{([A-Za-z]+)\}\s?[)\]]?", re.S
)


def value(tokens: list[Token]) -> Any:
    """What an answer is: one of the structures above."""
    try:
        return _value(tokens)
    except NotMath:
        return Word(spelled(tokens))


def _value(tokens: list[Token]) -> Any:
    if not tokens:
        raise NotMath
    if tokens[0].value == "{" and whole_bracket(tokens):
        return _value(tokens[1:-1])
    parts, _ = split(tokens, lambda token: token.value == "\\cup")
    if len(parts) > 1:
        return Many("list", tuple(_flat(value(part) for part in parts)))
    parts, joined = split(tokens, _separates)
    if len(parts) > 1:
        return _list([part for part in parts if part], {token for token in joined if token not in ",;"})
    for signs in (EQUAL, LESS):
        parts, found = split(tokens, lambda token, signs=signs: token.kind != "text" and token.value in signs)
        if found:
            return _relation(parts, [signs[sign] for sign in found])
    if any(token.value in ("\\pm", "\\mp") for token in tokens):
        both = [[_signed(token, plus) for token in tokens] for plus in (True, False)]
        return Many("list", tuple(_flat(_value(part) for part in both)))
    if whole_bracket(tokens):
        if (found := _bracketed(tokens)) is not None:
            return found
    words = spelled(tokens)
    if words in ("\\emptyset", "\\varnothing", "empty set", "the empty set", "\u7a7a\u96c6"):
        return Many("set", ())
    if words in ("\\mathbb{R}", "\\mathbb R", "\\mathbbR", "\\R", "all real numbers", "all reals"):
        return Ordered("(", ")", tuple(_value(lex(end, False)) for end in ("-\\infty", "\\infty")))
    parts, colons = split(tokens, lambda token: token.value == ":")
    if colons:
        return _ratio(parts)
    return quantity(tokens)


def _separates(token: Token) -> bool:
    return token.value in SEPARATORS if token.kind != "text" else token.value.casefold() in SEPARATORS


def _signed(token: Token, plus: bool) -> Token:
    if token.value in ("\\pm", "\\mp"):
        return Token("other", "+" if plus == (token.value == "\\pm") else "-")
    return token


def _flat(items: Iterable) -> Iterable:
    for item in items:
        if isinstance(item, Many) and item.kind != "dots" and item.items:
            yield from item.items
        else:
            yield item


def _items(parts: Iterable[list[Token]]) -> list:
    return [Word("...") if len(part) == 1 and part[0].value in DOTS else value(part) for part in parts]


def _list(parts: list[list[Token]], joined: set[str]) -> Any:
    """Several answers; ``joined`` are the words between them."""
    items = _items(parts)
    if Word("...") in items:
        return Many("dots", tuple(items))
    named = [item for item in items if isinstance(item, Named)]
    labels = {item.label for item in named}
    if joined & BOTH and any(isinstance(item.value, Ordered) for item in named):
        return _both(items, labels)
    if len(labels) == 1 and (len(named) == len(items) or items[0] is named[0] and len(named) == 1):
        bare = (item.value if isinstance(item, Named) else item for item in items)
        return Named(named[0].label, Many("list", tuple(_flat(bare))), named[0].symbol)
    if named and len(labels) == len(items):
        return Each(tuple(sorted(((item.label, item.value) for item in named), key=lambda pair: pair[0])))
    return Many("list", tuple(_flat(items)))


def _both(items: list, labels: set[str]) -> Any:
    """x > 2 and x < 5 is (2, 5)."""
    if len(items) != 2 or len(labels) != 1 or not all(isinstance(item, Named) for item in items):
        raise NotMath
    low, high = sorted((item.value for item in items), key=lambda ends: str(ends.items[0].value) == "-oo")
    if (str(low.items[1].value), str(high.items[0].value)) != ("oo", "-oo"):
        raise NotMath
    ends = (low.items[0], high.items[1])
    return Named(items[0].label, Ordered(low.left, high.right, ends), items[0].symbol)


def _relation(parts: list[list[Token]], signs: list[str]) -> Any:
    if set(signs) == {"in"} and len(parts) == 2 and (label := name(parts[0])):
        return Named(label[0], _value(parts[1]), label[1])
    if set(signs) == {"="}:
        if label := name(parts[0]):
            return Named(label[0], value(parts[-1]), label[1])
        if len(parts) == 2 and (label := name(parts[1])):
            return Named(label[0], value(parts[0]), label[1])
        sides = [_value(part) for part in parts]
        if not all(isinstance(side, Number) for side in sides):
            raise NotMath
        if not any(side.value.free_symbols for side in sides):  # 3 * 4 = 12
            if not all(same(sides[0], side) for side in sides[1:]):
                raise NotMath
            return sides[-1]
        if len(sides) == 2:
            return Relation("=", sides[0].value - sides[1].value)
        raise NotMath
    sides = [Expression(part).whole() for part in parts]
    if signs == ["!="]:
        return Relation("!=", sides[0] - sides[1])
    if {sign[0] for sign in signs} == {">"}:
        sides, signs = sides[::-1], [sign.replace(">", "<") for sign in signs[::-1]]
    if {sign[0] for sign in signs} != {"<"} or len(sides) > 3:
        raise NotMath
    low, high = (sides[0], sides[-1])
    first, last = signs[0] == "<=", signs[-1] == "<="
    if len(sides) == 2 and low.is_Symbol and not high.has(low):
        low, middle, high, first = -sympy.oo, low, high, False
    elif len(sides) == 2 and high.is_Symbol and not low.has(high):
        low, middle, high, last = low, high, sympy.oo, False
    elif len(sides) == 3 and sides[1].is_Symbol:
        middle = sides[1]
    elif len(sides) == 2:
        return Relation(">=" if first else ">", high - low)
    else:
        raise NotMath
    ends = (Number(low), Number(high))
    return Named(str(middle), Ordered("[" if first else "(", "]" if last else ")", ends), True)


_NAMING = set(r"\angle \triangle \overline \widehat \vec \mathbf \ell \Delta \measuredangle".split())
QUANTITIES = set(r"\gcd \max \min \det \Pr \lim \sum \prod \int \deg \dim".split())


def name(tokens: list[Token]) -> tuple[str, bool] | None:
    """The label that tokens are, such as x, f(x), AB or Area, and whether it is one variable; else None."""
    if tokens and tokens[0].value == "{" and whole_bracket(tokens):
        return name(tokens[1:-1])
    if [token.value for token in tokens[1:6]] == ["^", "{", "-", "1", "}"]:  # an inverse function
        tokens = [tokens[0], *tokens[6:]]
    if not tokens:
        return None
    first = tokens[0].value
    if first in QUANTITIES or (first in "fghFGPENSVpq" and len(tokens) > 3 and whole_bracket(tokens[1:])):
        return spelled(tokens), False  # f(2), P(X = 1)
    values = {token.value for token in tokens}
    if "|" in values and values & {"x", "y", "t"}:
        return None  # |x| = 5 has two solutions
    main: list[Token] = []
    depth_of_index = None
    for depth, token in with_depth(tokens):
        if token.value == "_" and depth == 0:
            depth_of_index = "next"
        elif depth_of_index == "next":
            depth_of_index = "in" if token.value == "{" else None
        elif depth_of_index == "in":
            depth_of_index = None if depth == 0 and token.value == "}" else "in"
        else:
            main.append(token)
    for token in main:
        known = token.value in "(),|'{}" or token.value in _NAMING or token.value[1:] in LETTERS
        if token.kind == "text" or (token.kind == "command" and known) or (token.kind == "other" and known):
            continue
        text = token.value
        if token.kind != "word" or text in FUNCTIONS:
            return None
        if len(text) > 1 and not text.isupper() and not (len(text) > 2 and set(text) & set("eiou")):
            return None  # a product
    if not any(token.kind in ("word", "text") or token.value[1:] in LETTERS for token in main):
        return None
    symbol = len(main) == 1 and (len(main[0].value) == 1 or main[0].kind == "command")
    return spelled(tokens).replace("{", "").replace("}", ""), symbol


def _bracketed(tokens: list[Token]) -> Any:
    left, right, inside = tokens[0].value, tokens[-1].value, tokens[1:-1]
    parts, _ = split(inside, lambda token: token.value in (",", ";"))
    if left in ("\\lfloor", "\\lceil", "\\lvert"):
        return None
    if left in ("\\{", "\\lbrace"):
        if right not in ("\\}", "\\rbrace"):
            raise NotMath
        sides, bars = split(inside, lambda token: token.value in ("|", "\\mid", ":"))
        if spelled(sides[0][1:]).replace(" ", "") in ("\\in\\mathbb{R}", "\\in\\mathbbR", "\\in\\R"):
            sides[0] = sides[0][:1]
        if len(bars) == 1 and (label := name(sides[0])):
            return Named(label[0], _value(sides[1]), label[1])
        if bars:
            raise NotMath
        items = _items(part for part in parts if part)
        return Many("dots" if Word("...") in items else "set", tuple(items))
    if len(parts) == 1:
        if (left, right) not in (("(", ")"), ("[", "]")):
            raise NotMath
        return _value(inside)
    if not all(parts):
        raise NotMath
    left, right = left.replace("\\langle", "("), right.replace("\\rangle", ")")
    return Ordered(left, right, tuple(value(part) for part in parts))


def _ratio(parts: list[list[Token]]) -> Any:
    """3:4 is 3/4; 10:30 is a time of day."""
    text = re.sub("[ .]", "", ":".join(spelled(part) for part in parts).casefold())
    if time := re.fullmatch(r"0?(\d|1\d|2[0-4])(:[0-5]\d(?:am|pm)?)", text):
        return Word(time[1] + time[2])
    numbers = [Expression(part).whole() for part in parts]
    if 0 in numbers:
        raise NotMath
    if len(numbers) == 2:
        return Number(numbers[0] / numbers[1])
    return Ordered(":", ":", tuple(Number(other / numbers[0]) for other in numbers))


# Quantities.

UNITS = """
mm millimeter millimetre \u6beb\u7c73|cm centimeter centimetre \u5398\u7c73|m meter metre \u7c73
km kilometer kilometre \u5343\u7c73 \u516c\u91cc|in inch inches|ft foot feet|yd yard|mi mile
g gram \u514b|mg milligram|kg kilogram \u5343\u514b \u516c\u65a4|lb lbs pound|oz ounce
s sec second \u79d2|min minute \u5206\u949f|h hr hour \u5c0f\u65f6|day \u5929|week \u5468|month|year \u5e74
dollar usd buck \u7f8e\u5143|cent|euro eur|yuan rmb cny \u5143|deg degree \u5ea6|rad radian \u5f27\u5ea6
celsius|fahrenheit|L l liter litre \u5347|mL ml milliliter millilitre \u6beb\u5347|km/h kmh kph|mph
m^2 \u5e73\u65b9\u7c73|cm^2 \u5e73\u65b9\u5398\u7c73|m^3 \u7acb\u65b9\u7c73|cm^3 \u7acb\u65b9\u5398\u7c73
"""
UNIT_OF = {word: names.split()[0] for names in re.split(r"[|\n]", UNITS.strip()) for word in names.split()}
UNIT_OF |= {f"{word}s": unit for word, unit in list(UNIT_OF.items()) if word.isascii() and len(word) > 2}
TIMES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
TIMES |= {"\u767e": 100, "\u5343": 1000, "\u4e07": 10**4, "\u4ebf": 10**8}
PERCENT = {"percent", "\\%", "%", "\uff05"}
MONEY = {"\\dollar", "\\euro", "\\pound", "\\yuan", "\\cent", "usd"}
ORDINALS = "third fourth fifth sixth seventh eighth ninth tenth hundredth thousandth quarter".split()
NOT_UNITS = set(
    """is are was not no nor or and but if else when where which unless maybe perhaps wrong incorrect false
    true right correct than more less least most over under above below between plus minus times divided by to
    from mod modulo base half halves factorial choose squared cubed power root only otherwise unknown error r
    remainder""".split()
) | {word + end for word in ORDINALS for end in ("", "s")}
LINKS = {"of", "the", "in", "an", "total", "per"}
NEGATIVE_CJK = set("\u4e0d\u975e\u65e0\u6216\u4f59\u534a\u500d\u6210\u591a\u81f3\u5230\u8d1f")


def quantity(tokens: list[Token]) -> Number:
    r"""A number or expression with an optional unit: 5\text{ cm}^2, 18 eggs, \$3, 25\%, 60^\circ."""
    rest, words, guessed, percent = list(tokens), [], False, False
    if rest[0].value.casefold() in MONEY:
        words, rest = [rest[0].value.strip("\\")], rest[1:]
    elif rest[0].value == "-" and len(rest) > 1 and rest[1].value in MONEY:
        words, rest = [rest[1].value.strip("\\")], [rest[0], *rest[2:]]
    money, words = words, []
    while rest:
        power = ""
        body = rest
        if len(body) > 2 and body[-2].value == "^" and body[-1].value in "23":
            power, body = body[-1].value, body[:-2]
        elif len(body) > 4 and body[-4].value == "^" and body[-3].value == "{" and body[-2].value in "23":
            power, body = body[-2].value, body[:-4]
        last = body[-1]
        degree = degree_tokens(rest)
        if degree and not any(token.value.strip("\\") in FUNCTIONS for token in rest):
            words.insert(0, "deg")
            rest = rest[:-degree]
        elif last.value in PERCENT and not power:
            percent, rest = True, body[:-1]
        elif last.value in MONEY and not power:
            words.insert(0, last.value.strip("\\"))
            rest = body[:-1]
        elif last.value == "." and words and body[-2:-1] and body[-2].value in ("sq", "cu"):
            rest = body[:-1]
        elif _compound(body):
            words.insert(0, _compound(body) + (f"^{power}" if power else ""))
            rest = body[:-3]
        elif last.kind == "text" or (last.kind == "word" and _unit_word(body)):
            word = last.value
            if word.casefold() in NOT_UNITS or (set(word) & NEGATIVE_CJK and word not in UNIT_OF):
                raise NotMath
            guessed |= last.kind == "word"
            words.insert(0, word + (f"^{power}" if power else ""))
            rest = body[:-1]
        else:
            break
    if not rest:
        raise NotMath
    expression = Expression(rest).whole()
    if guessed and expression.free_symbols:
        raise NotMath
    while words and words[0].casefold() in TIMES:
        expression *= TIMES[words.pop(0).casefold()]
    digits = [token.value for token in rest if token.value not in "+-"]
    decimal = re.fullmatch(r"0*(\d*)\.(\d+)", digits[0]) if len(digits) == 1 else None
    places = len(decimal[2]) if decimal and len((decimal[1] + decimal[2]).lstrip("0")) >= 6 else 0
    return Number(expression, unit(words or money), percent, places)


def _compound(tokens: list[Token]) -> str:
    """The unit m/s or km/h at the end, if there is one."""
    if len(tokens) < 4 or tokens[-2].value != "/":
        return ""
    above, below = (UNIT_OF.get(token.value, "") for token in (tokens[-3], tokens[-1]))
    return f"{above}/{below}" if above and below and tokens[-3].kind in ("word", "text") else ""


def _unit_word(tokens: list[Token]) -> bool:
    """Whether the plain word at the end may be a unit: letters after a number are mostly variables."""
    word = tokens[-1].value
    if len(tokens) < 2 or len(word) < 2 or word in FUNCTIONS or word in LETTERS or tokens[-2].value == "\\":
        return False
    if tokens[-2].value in ("+", "-", "/", "*", "^", "_", "\\cdot", "\\times"):
        return False
    known = word.casefold() in UNIT_OF or word.casefold() in TIMES
    return known or (tokens[-1].spaced and (len(word) > 2 or word.casefold() in LINKS))


def unit(words: list[str]) -> str:
    """The unit that words name, one spelling for each; empty for any other word, such as eggs.

    >>> unit(["square", "centimeters"]), unit(["cm^2"]), unit(["Dollars"]), unit(["eggs"])
    ('cm^2', 'cm^2', 'dollar', '')
    """
    words = [word for word in words[:-1] if word.casefold() not in LINKS] + words[-1:]
    powers = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
    power = powers.get(words[0].casefold(), "") if words else ""
    last = words[1:] if power else words
    if not last:
        return ""
    base, _, exponent = last[-1].partition("^")
    known = base if "/" in base else UNIT_OF.get(base) or UNIT_OF.get(base.casefold())
    if not known or (len(last) > 1 and not (len(last) == 2 and last[0] == "deg")):
        return known if known in ("celsius", "fahrenheit") else ""
    return f"{known}^{exponent}" if exponent else known + power


def same(one: Any, other: Any) -> bool:
    """Whether two structures are equal."""
    if isinstance(one, Named) or isinstance(other, Named):
        return _same_named(one, other)
    if isinstance(one, Each) or isinstance(other, Each):
        return _same_each(one, other)
    if isinstance(one, Number) and isinstance(other, Number):
        return _same_number(one, other)
    if isinstance(one, Many) and isinstance(other, Many):
        if "dots" in (one.kind, other.kind):
            return one.kind == other.kind and _each_same(one.items, other.items)
        left, right = list(one.items), list(other.items)
        if "set" in (one.kind, other.kind):
            left, right = _distinct(left), _distinct(right)
        return len(left) == len(right) and _matched(left, right)
    if isinstance(one, Many) and one.kind == "set" and len(one.items) == 1 and isinstance(other, Number):
        return same(one.items[0], other)
    if isinstance(other, Many) and other.kind == "set" and len(other.items) == 1 and isinstance(one, Number):
        return same(one, other.items[0])
    if isinstance(one, Ordered) and isinstance(other, Ordered):
        brackets = (one.left, one.right) == (other.left, other.right) or (
            len(one.items) > 2 and one.left != ":" and other.left != ":"
        )
        return brackets and _each_same(one.items, other.items)
    if isinstance(one, Many) and isinstance(other, Ordered):
        one, other = other, one
    if isinstance(one, Ordered) and isinstance(other, Many):  # (1, 2) without its brackets
        return (one.left, one.right, other.kind) == ("(", ")", "list") and _each_same(one.items, other.items)
    if isinstance(one, Matrix) and isinstance(other, Matrix):
        return (
            one.kind == other.kind
            and len(one.rows) == len(other.rows)
            and all(map(_each_same, one.rows, other.rows))
        )
    if isinstance(one, Relation) and isinstance(other, Relation):
        return _same_relation(one, other)
    return isinstance(one, Word) and one == other


def _each_same(one: tuple, other: tuple) -> bool:
    return len(one) == len(other) and all(map(same, one, other))


def _distinct(items: list) -> list:
    kept: list = []
    for item in items:
        if not any(same(item, other) for other in kept):
            kept.append(item)
    return kept


def _matched(left: list, right: list) -> bool:
    """Each of ``left`` equals one of ``right``, which are as many."""
    for item in left:
        place = next((place for place, other in enumerate(right) if same(item, other)), None)
        if place is None:
            return False
        right.pop(place)
    return True


def _same_named(one: Any, other: Any) -> bool:
    if not isinstance(one, Named):
        one, other = other, one
    if not isinstance(other, Named):
        if isinstance(other, Relation):
            return (relation := _as_relation(one)) is not None and _same_relation(relation, other)
        return same(one.value, other)
    if one.label != other.label and one.symbol and other.symbol:
        sides = _as_relation(one), _as_relation(other)
        return None not in sides and _same_relation(*sides)
    return same(one.value, other.value)


def _same_each(one: Any, other: Any) -> bool:
    if not isinstance(one, Each):
        one, other = other, one
    values = tuple(found for _, found in one.values)
    if isinstance(other, Each):
        labels = [[label for label, _ in each.values] for each in (one, other)]
        return labels[0] == labels[1] and _each_same(values, tuple(found for _, found in other.values))
    if isinstance(other, Many) and len({label.partition("_")[0] for label, _ in one.values}) == 1:
        return same(Many("list", values), other)  # x_1 and x_2 are two solutions
    bare = isinstance(other, Many) and other.kind == "list"
    ordered = isinstance(other, Ordered) and other.left + other.right == "()"
    return (bare or ordered) and _each_same(values, other.items)


def _as_relation(named: Named) -> Relation | None:
    if not named.symbol or not isinstance(named.value, Number):
        return None
    label = named.label.removeprefix("\\")
    return Relation("=", sympy.Symbol(label, real=True) - named.value.value)


def _same_relation(one: Relation, other: Relation) -> bool:
    if one.sign != other.sign or one.difference.is_zero or other.difference.is_zero:
        return False
    ratio = sympy.simplify(one.difference / other.difference)
    return bool(ratio.is_number and ratio.is_nonzero and (one.sign in "=!=" or ratio.is_positive))


def _same_number(one: Number, other: Number) -> bool:
    if one.unit and other.unit and one.unit != other.unit:
        return False
    if one.percent == other.percent:
        return equal_expressions(one.value, other.value) or _rounded(one, other) or _rounded(other, one)
    if other.percent:
        one, other = other, one
    if other.unit:
        return False
    omitted = one.value.is_number and abs(one.value) > 1  # 25% may stand for 25, but 0.5% not for 1/2
    return equal_expressions(one.value / 100, other.value) or (
        omitted is sympy.true and equal_expressions(one.value, other.value)
    )


def _rounded(decimal: Number, exact: Number) -> bool:
    """A decimal with six places and digits stands for an irrational number that is rounded to it."""
    if decimal.places < 6 or exact.value.free_symbols or exact.value.is_rational or not exact.value.is_real:
        return False
    if sympy.simplify(exact.value).is_Rational:
        return False
    return bool(abs(decimal.value - exact.value).evalf(30) * 2 <= sympy.Rational(1, 10**decimal.places))


_CHOICE = re.compile(r"(?:\(([A-J])\)|([A-J])(?:[).:](?!\d)|$)) ?(.*)", re.S)
_OTHER_CHOICE = re.compile(r"(?i)^(?:or|and)\b|^[,;/&+\u6216\u548c]|(?-i:\([A-J]\)|\b[A-J][.)])")
_OPTION = re.compile(r"(?i)(?:option|choice|answer) ")


def choice(text: str) -> tuple[str, str] | None:
    r"""The letter of a multiple choice and what follows it.

    >>> choice(r"\textbf{(C)} 12"), choice("B"), choice("(A + B)")
    (('C', '12'), ('B', ''), None)
    """
    flat = re.sub(rf"{TEXT}\s?\{{([^{{}}]*)\}}", r"\1", text, count=1).strip()
    if match := _OPTION.match(flat):
        flat = flat[match.end() :]
    match = _CHOICE.fullmatch(flat)
    if not match or _OTHER_CHOICE.search(match[3]):
        return None
    return match[1] or match[2], match[3].strip()


def matrix(text: str) -> Matrix | None:
    """The matrix that a text is."""
    match = _MATRIX.fullmatch(text)
    if not match or match[1] != match[3] or match[1] not in MATRICES or "\\begin" in match[2]:
        return None
    rows = re.split(r"\\\\(?:\[[^\]]{0,20}\])?", match[2].replace("\\cr", "\\\\"))
    cells = [[value(lex(clean(cell), False)) for cell in row.split("&")] for row in rows if row.strip()]
    return Matrix(MATRICES[match[1]], tuple(map(tuple, cells)))


def equal(truth: str, answer: str) -> bool:
    r"""Whether two answers are equal.

    >>> equal("7/4", "1 3/4"), equal(r"(-\infty, 8)", "x<8"), equal("C", r"\textbf{(C)}\ 12")
    (True, True, True)
    """
    if (quick := quickly(truth, answer)) is not None:
        return quick
    truth, answer = clean(truth), clean(answer)
    if not truth or not answer:
        return False
    if "\\begin" in truth or "\\begin" in answer:
        sides = matrix(truth), matrix(answer)
        return None not in sides and same(*sides)
    letters = choice(truth), choice(answer)
    if any(letters):
        (first, left), (second, right) = (
            found or ("", text) for found, text in zip(letters, (truth, answer), strict=True)
        )
        if first and second:
            return first == second and (not left or not right or equal(left, right))
        if left and right:
            return equal(left, right)
    for thousands in (True, False):
        if same(*(value(lex(text, thousands)) for text in (truth, answer))):
            return True
    return False


def serve() -> None:
    """Answer each line [truths, answer, seconds] with a line, while there is a parent."""
    import logging
    import resource
    import signal

    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print("ready", flush=True)
    for line in sys.stdin:
        truths, answer, seconds = json.loads(line)
        signal.alarm(int(seconds) + 2)  # ends this process if the parent is not there to do it
        found = False
        for truth in truths:
            try:
                found = found or equal(truth, answer)
            except Exception:  # any error of sympy on model output means "not equal"
                continue
        signal.alarm(0)
        print("equal" if found else "different", flush=True)


if __name__ == "__main__":
    serve()

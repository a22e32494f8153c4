r"""Tokens of LaTeX as an exact sympy expression, and whether two of these are equal.

A small grammar, by recursive descent; sums, products, integrals and limits are latex2sympy's. Nothing is
evaluated to a float but to refute that two expressions are equal: that they are has to be proved.
"""

from __future__ import annotations

from typing import Any

import sympy

from ascend_rl.recipe.math_text import GREEK
from ascend_rl.recipe.math_tokens import CLOSING, OPENING, NotMath, Token, spelled

FUNCTIONS = {name: name for name in "sin cos tan cot sec csc sinh cosh tanh exp sqrt asin acos atan".split()}
FUNCTIONS |= {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot"}
FUNCTIONS |= dict.fromkeys(("ln", "log", "lg"), "log")
LETTERS = {*GREEK, *(letter.title() for letter in GREEK), "varepsilon", "varphi", "vartheta", "ell", "hbar"}
INFINITY = {"\\infty", "infty", "infinity", "inf"}
OPAQUE = set(r"\overline \vec \hat \bar \widehat \overrightarrow \mathbf \mathcal \mathbb".split())
CALCULUS = {"\\sum", "\\prod", "\\int", "\\lim"}


class Expression:
    """A sympy expression of tokens, by recursive descent; raises NotMath for what it does not know."""

    def __init__(self, tokens: list[Token]):
        self.tokens = [part for token in tokens for part in _letters(token)]
        self.place, self.bars = 0, 0

    def whole(self) -> Any:
        if any(token.value in CALCULUS for token in self.tokens):
            return _calculus(self.tokens)
        found = self.sum()
        if self.place != len(self.tokens):
            raise NotMath
        return found

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.place + ahead].value if self.place + ahead < len(self.tokens) else ""

    def take(self, *values: str) -> bool:
        if self.peek() in values and self.peek():
            self.place += 1
            return True
        return False

    def need(self, value: str) -> None:
        if not self.take(value):
            raise NotMath

    def sum(self) -> Any:
        negative = self.sign()
        found = -self.product() if negative else self.product()
        while self.peek() in ("+", "-"):
            negative = self.sign()
            other = self.product()
            found = found - other if negative else found + other
        return found

    def sign(self) -> bool:
        negative = False
        while self.peek() in ("+", "-") and self.peek():
            negative ^= self.peek() == "-"
            self.place += 1
        return negative

    def product(self) -> Any:
        found, divided = self.mixed(), False
        while self.place < len(self.tokens):
            if self.take("\\cdot", "\\times", "*", "\\ast"):
                negative = self.sign()
                found, divided = found * self.power() * (-1 if negative else 1), False
            elif self.take("/", "\\div"):
                negative = self.sign()
                below = self.power()
                if below.is_zero:
                    raise NotMath
                found, divided = found / below * (-1 if negative else 1), True
            elif self.starts():
                if divided or self.tokens[self.place].kind == "number":
                    raise NotMath  # 1/2x has two meanings, and so has 2 3
                found *= self.power()
            else:
                break
        return sympy.sympify(found)

    def starts(self) -> bool:
        token = self.tokens[self.place]
        if token.kind == "number" or token.kind == "word":
            return True
        if token.kind == "command":
            return token.value not in CLOSING
        return token.value in ("(", "[", "{") or (token.value == "|" and not self.bars)

    def mixed(self) -> Any:
        r"""A factor, or a mixed number such as 1 3/4 and 1\frac{3}{4}."""
        start, tokens = self.place, list(self.tokens)
        first, second = (tokens[start:] + [Token("", "")] * 2)[:2]
        if first.kind == "number" and first.value.isdigit():
            if second.value == "\\frac":
                self.place += 2
                above, below = self.argument(digit=True), self.argument(digit=True)
                if above.is_Integer and below.is_Integer:
                    if not 0 < above < below:
                        raise NotMath
                    return sympy.Integer(first.value) + above / below
            elif second.kind == "number" and self.peek(2) == "/":
                above, below = self.peek(1), self.peek(3)
                if not (above.isdigit() and below.isdigit() and 0 < int(above) < int(below)):
                    raise NotMath
                self.place += 4
                return sympy.Integer(first.value) + sympy.Rational(int(above), int(below))
            self.place, self.tokens = start, tokens
        return self.power()

    def power(self) -> Any:
        base = self.atom()
        while self.place < len(self.tokens):
            if self.peek() == "!" and self.peek(1) != "!":
                self.place += 1
                base = sympy.factorial(base)
            elif self.peek() == "^":
                degrees = [degree_tokens(self.tokens[self.place : self.place + count]) for count in (2, 4)]
                if degrees[0] == 2 or degrees[1] == 4:
                    self.place += max(degrees)
                    base *= sympy.pi / 180
                    continue
                self.place += 1
                negative = self.sign()
                exponent = self.argument()
                if base.is_zero and exponent.is_zero:
                    raise NotMath
                base = base ** (-exponent if negative else exponent)
                if self.peek() == "^":
                    raise NotMath
            else:
                break
        return base

    def argument(self, digit: bool = False) -> Any:
        """A group in braces or one token; with ``digit`` the first digit of a number, as TeX reads it."""
        if self.take("{"):
            found = self.sum()
            self.need("}")
            return found
        token = self.tokens[self.place] if self.place < len(self.tokens) else Token("", "")
        if token.kind == "number" and digit and len(token.value) > 1:
            if not token.value.isdigit():
                raise NotMath
            self.tokens[self.place] = Token("number", token.value[1:])
            return sympy.Integer(token.value[0])
        return self.atom()

    def atom(self) -> Any:
        if self.place >= len(self.tokens):
            raise NotMath
        kind, text, _ = self.tokens[self.place]
        self.place += 1
        bare = text.removeprefix("\\")
        if kind == "number":
            found = sympy.Rational(text)
            return self.indexed(text) if self.peek() == "_" else found
        if text in ("(", "[", "{"):
            found = self.inside(OPENING[text])
            return found
        if text == "|" and not self.bars:
            self.bars += 1
            found = self.sum()
            self.bars -= 1
            self.need("|")
            return sympy.Abs(found)
        if text in ("\\lvert", "\\lfloor", "\\lceil"):
            found = self.inside(OPENING[text])
            return {"\\lvert": sympy.Abs, "\\lfloor": sympy.floor, "\\lceil": sympy.ceiling}[text](found)
        if text in INFINITY:
            return sympy.oo
        if text == "\\frac":
            above, below = self.argument(digit=True), self.argument(digit=True)
            if below.is_zero:
                raise NotMath
            return above / below
        if text == "\\binom":
            return sympy.binomial(self.argument(digit=True), self.argument(digit=True))
        if bare == "sqrt":
            degree = self.inside("]") if self.take("[") else 2
            return sympy.root(self.argument(), degree)
        if bare in FUNCTIONS and kind in ("word", "command"):
            return self.function(bare)
        if text in OPAQUE:
            start = self.place
            self.need("{")
            depth = 1
            while depth and self.place < len(self.tokens):
                depth += (self.peek() == "{") - (self.peek() == "}")
                self.place += 1
            return sympy.Symbol(text + spelled(self.tokens[start : self.place]), real=True)
        if bare == "pi" and self.peek() != "_":
            return sympy.pi
        if kind == "word" or bare in LETTERS:
            if self.peek() == "_":
                return self.indexed(bare)
            if self.peek() == "'":
                raise NotMath
            return {"e": sympy.E, "i": sympy.I}.get(text) or sympy.Symbol(bare, real=True)
        raise NotMath

    def inside(self, closing: str) -> Any:
        bars, self.bars = self.bars, 0
        found = self.sum()
        self.need(closing)
        self.bars = bars
        return found

    def indexed(self, base: str) -> Any:
        """A symbol with an index, or a number with its base: both are names."""
        self.need("_")
        start = self.place
        if self.take("{"):
            while self.peek() and self.peek() != "}":
                self.place += 1
            index = spelled(self.tokens[start + 1 : self.place])
            self.need("}")
        else:
            index = self.peek()
            self.place += 1
        if not index:
            raise NotMath
        return sympy.Symbol(f"{base}_{index}", real=True)

    def function(self, known: str) -> Any:
        base = sympy.Symbol("base of log", positive=True) if known == "log" else sympy.Integer(10)
        exponent = None
        while self.peek() in ("^", "_") and self.peek():
            if self.take("_"):
                if known != "log":
                    raise NotMath
                base = self.argument()
            else:
                self.place += 1
                negative = self.sign()
                exponent = self.argument() * (-1 if negative else 1)
        if self.take("(", "{", "["):
            inner = self.inside(OPENING[self.tokens[self.place - 1].value])
        else:
            inner = self.power()
            while self.place < len(self.tokens) and self.starts() and self.peek() != "(":
                token = self.tokens[self.place]
                if token.kind == "number" or token.value.removeprefix("\\") in FUNCTIONS:
                    break
                inner *= self.power()
        name = FUNCTIONS[known]
        if exponent == -1 and name in ("sin", "cos", "tan", "cot"):
            name, exponent = f"a{name}", None
        found = getattr(sympy, name)(inner)
        if known in ("log", "lg"):
            found = found / sympy.log(base)
        return found if exponent is None else found**exponent


def _letters(token: Token) -> list[Token]:
    """A word as the product of its letters, where it can be one."""
    text = token.value
    if token.kind != "word" or len(text) == 1 or text in FUNCTIONS or text in LETTERS or text in INFINITY:
        return [token]
    if text[:-1] in FUNCTIONS and text[:-1] != "sqrt":
        return [Token("word", text[:-1], token.spaced), Token("word", text[-1])]
    if text[-2:] == "pi":
        return [*_letters(Token("word", text[:-2], token.spaced)), Token("word", "pi")]
    if len(text) > 2 and set(text.lower()) & set("eiou"):
        raise NotMath
    return [Token("word", letter, token.spaced and not place) for place, letter in enumerate(text)]


def _calculus(tokens: list[Token]) -> Any:
    """Sums, products, integrals and limits: latex2sympy knows them."""
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    config = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
    text = " ".join(token.value for token in tokens)
    if "'" in text or '"' in text:
        raise NotMath
    try:
        found = latex2sympy(text, is_real=True, normalization_config=None, conversion_config=config).doit()
    except Exception as error:
        raise NotMath from error
    return found


def degree_tokens(tokens: list[Token]) -> int:
    """How many tokens at the end are a degree sign."""
    values = [token.value for token in tokens[-4:]]
    if values[-1:] == ["\\degree"]:
        return 1
    if values[-2:] in (["^", "\\circ"], ["^", "o"]):
        return 2
    return 4 if values in (["^", "{", "\\circ", "}"],) else 0


TINY, NOISE = sympy.Float("1e-15"), sympy.Float("1e-20")  # what differs less has to be proved equal


def equal_expressions(one: Any, other: Any) -> bool:
    """Whether the difference is proved to be zero."""
    if one == other:
        return not one.has(sympy.nan, sympy.zoo)
    if one.is_Rational and other.is_Rational:
        return False
    if one.has(sympy.nan, sympy.zoo, sympy.oo) or other.has(sympy.nan, sympy.zoo, sympy.oo):
        return False
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    points = [(7, 11), (13, 5), (3, 17)] if symbols else [(1, 1)]
    for above, below in points:
        place = {symbol: sympy.Rational(above + 2 * n, below + n) for n, symbol in enumerate(symbols)}
        left, right = (side.subs(place).evalf(30) for side in (one, other))
        if left.is_number and right.is_number and left.is_finite and right.is_finite:
            if abs(left - right) > (abs(left) + abs(right)) * TINY + NOISE:
                return False
    difference = one - other
    return sympy.simplify(difference) == 0 or difference.equals(0) is True

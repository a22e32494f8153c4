r"""How answers are spelled: text without decoration, and what spelling and plain numbers alone decide.

The same answer arrives as ``$\dfrac{1}{2}$.``, as a Unicode fraction, in bold, with full-width digits, or as
1,000 and 1{,}000. `clean` gives all of them one form, close to plain LaTeX; `plain` and `number` compare what
then needs no mathematics. The reward (math_reward.py) runs this in its own process, on text of a model.

Invariants (tests/test_math_equal.py): white space between digits counts, so 1 3/4 is not 13/4; numbers are
exact; every pattern is bounded or has one way to match, so the time is linear. Cost: 0.1 ms an answer.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from decimal import Decimal

# Characters -> LaTeX. Fractions, superscripts, subscripts and full-width forms come from Unicode's own table.
SYMBOLS = {
    **dict.fromkeys("\u2212\u2013\u2014\u2010\u2011\ufe63", "-"),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    **dict.fromkeys("\u2009\u202f", r"\,"),
    **dict.fromkeys("\u00d7\u2715\u2a2f", r"\times "),
    **dict.fromkeys("\u00b7\u22c5\u2219\u2217", r"\cdot "),
    **dict.fromkeys("\u2205\u00d8", r"\emptyset "),
    **dict.fromkeys("\u2264\u2a7d", r"\le "),
    **dict.fromkeys("\u2265\u2a7e", r"\ge "),
    **dict.fromkeys("\u2026\u22ef", r"\ldots "),
    **dict.fromkeys("\u2032\u2019", "'"),
    "\u00a0": " ", "\u3000": " ", "\u3001": ",", "\u3002": ".", "\u00f7": "/", "\u2044": "/", "\u2215": "/",
    "\u221e": r"\infty ", "\u221a": r"\sqrt ", "\u00b0": r"^\circ ", "\u00b1": r"\pm ", "\u2213": r"\mp ",
    "\u2260": r"\ne ", "\u2248": r"\approx ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ",
    "\u2223": "|", "\u2236": ":", "\u27e8": r"\langle ", "\u27e9": r"\rangle ", "\u211d": r"\mathbb{R}",
    "\u2124": r"\mathbb{Z}", "\u2192": r"\to ", "\u221b": r"\sqrt[3]",
    "\u20ac": r"\euro ", "\u00a3": r"\pound ", "\u00a5": r"\yuan ", "\u00a2": r"\cent ",
    "\u2103": r"\text{ celsius}", "\u2109": r"\text{ fahrenheit}", "\u2220": r"\angle ", "\u2234": "",
}  # fmt: skip
GREEK = [
    *("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho".split()),
    *("varsigma sigma tau upsilon phi chi psi omega".split()),
]
SYMBOLS |= {chr(0x3B1 + i): f"\\{name} " for i, name in enumerate(GREEK)}
SYMBOLS |= {chr(0x391 + i): f"\\{name.title()} " for i, name in enumerate(GREEK) if name != "varsigma"}

TEXT = (  # commands whose argument is text or a letter in another type
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up|sc)?|math(?:rm|bf|it|sf|tt|normal)|mbox|operatorname|bm|boldsymbol)"
    r"\*?(?![A-Za-z])"
)
_DECORATION = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|boxed|fbox|underline|bf|it|rm)"
    r"(?![A-Za-z])|\\(?:text)?color ?\{[A-Za-z]{1,20}\}|\\[()\[\]!]"
)
_SPACE = re.compile(r"\\(?:quad|qquad|hspace|enspace|thinspace|;|:|,| |>)(?![A-Za-z]{2})|~|[\s]")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\,|,\\!|\\!)(?=\d{3}(?!\d))")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,/] )(?<![\d.,/])(\d{1,3})((?:[ ]\d{3}){1,20})(?![\d/]| \d| ?/)")
_TEMPERATURE = re.compile(
    rf"\^ ?(?:\{{ ?\\circ ?\}}|\\circ) ?(?:{TEXT} ?\{{ ?)?"
    r"(?:([Cc](?:elsius)?)|[Ff](?:ahrenheit)?)\}?(?![A-Za-z])"
)
_MODULO = re.compile(r" ?\\[pb]?mod\b ?\{? ?(\w{1,9}) ?\}?")
_REPEATING = re.compile(r"(\d{1,50})\.(\d{0,50})\\(?:overline|bar|dot|overbrace)\s?\{?(\d{1,50})\}?")
_TIMES_TEN = re.compile(r"(?<=\d)\s?[xX]\s?(?=10\s?\^)")
_ORDINAL = re.compile(rf"(?<=\d)\s?\^?\s?(?:\{{\s?)?(?:{TEXT}\s?\{{)?(?:st|nd|rd|th)(?![A-Za-z])\}}{{0,2}}")
_LEAD = re.compile(
    rf"(?i)(?:{TEXT}\s?\{{\s?)?(?:(?:thus|so|therefore|hence),? )?(?:the )?(?:final )?(?:correct )?"
    r"(?:answer|result|value)(?: is| equals| ?[:=]|\s?:) ?\}? ?"
)
_ABOUT = re.compile(r"(?i)(?:=|:|\\approx|\\sim|approximately|approx\.?|about|exactly) ?")
_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)")


def from_unicode(text: str) -> str:
    r"""LaTeX for the characters that have one.

    >>> from_unicode("x\u00b2 \u2264 1\u00bd\u03c0 \uff08\uff11\uff09")
    'x^{2} \\le  1\\frac{1}{2}\\pi  (1)'
    """
    if text.isascii():
        return text
    found = []
    for char in text:
        if char < "\x80" or char in SYMBOLS:
            found.append(("", SYMBOLS.get(char, char)))
            continue
        kind, _, codes = unicodedata.decomposition(char).partition(" ")
        plain = "".join(chr(int(code, 16)) for code in codes.split()) if kind[:1] == "<" else char
        plain = "".join(SYMBOLS.get(other, other) for other in plain)
        if kind == "<fraction>":
            above, _, below = plain.partition("/")
            plain = f"\\frac{{{above}}}{{{below}}}"
        found.append((kind if kind in ("<super>", "<sub>") else "", plain))
    parts = []
    for kind, run in itertools.groupby(found, lambda pair: pair[0]):
        joined = "".join(piece for _, piece in run)
        parts.append({"<super>": f"^{{{joined}}}", "<sub>": f"_{{{joined}}}"}.get(kind, joined))
    return "".join(parts)


def clean(text: str) -> str:
    r"""The text without decoration: font sizes, delimiters of mathematics, Markdown, thousands separators.

    >>> clean(r"**$\left( 1{,}000, \dfrac12 \right)$**."), clean("$18.90"), clean("1 000 000")
    ('( 1000, \\frac12 )', '\\dollar 18.90', '1000000')
    """
    text = from_unicode(text).replace("...", r"\ldots ").replace("`", "")
    text = text.replace(r"\$", r"\dollar ")
    text = text.replace("$", r"\dollar " if text.count("$") % 2 else "")
    text = _THOUSANDS.sub("", text)
    text = _DECORATION.sub("", text)
    if "\\begin" not in text:
        text = re.sub(" +", " ", _SPACE.sub(" ", text.replace("\\\\", "\n\n")))
    text = text.lstrip(' *_#"\u201c\n').rstrip(' *_#"\u201d\n.')
    if "\\begin" in text and text[0] == "{" and text[-1] == "}":
        text = text[1:-1].strip()
    text = re.sub(r"\\[dtc](?=frac|binom)", r"\\", text.replace("**", "^"))
    text = _REPEATING.sub(_repeating, _TIMES_TEN.sub(r"\\times ", _ORDINAL.sub("", text)))
    text = _TEMPERATURE.sub(lambda match: r"\text{ celsius}" if match[1] else r"\text{ fahrenheit}", text)
    text = _MODULO.sub(r" (mod \1)", text)
    text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)
    for lead in (_LEAD, _ABOUT):
        if match := lead.match(text):
            text = text[match.end() :]
    text = text.strip()
    if text[:1] == text[-1:] == "'":
        text = text[1:-1]
    return text.rstrip(" .;,:").lstrip(" ,;")


def _repeating(match: re.Match) -> str:
    whole, fixed, again = match.groups()
    value = int(whole + fixed + again) - int(whole + fixed)
    return f"\\frac{{{value}}}{{{'9' * len(again) + '0' * len(fixed)}}}"


def plain(text: str) -> str:
    r"""What texts that mean the same have in common, as far as spelling goes.

    >>> plain(r"\text{No  solution}.") == plain("no solution"), plain("1 3/4") == plain("13/4")
    (True, False)
    """
    text = clean(text)
    flat = re.sub(rf"{TEXT}\s?\{{([^{{}}]*)\}}", r"\1", text)
    flat = re.sub(r"(?<=\d)\s+(?=[\d.])", "\0", flat)
    flat = re.sub(r"(?<=\\[A-Za-z])\s+(?=[A-Za-z])", "\0", flat)
    flat = re.sub(r"([A-Za-z])\s+(?=[A-Za-z])", lambda m: m[0] if "\\" in flat else m[1], flat)
    flat = re.sub(r"\s+(?![A-Za-z])|(?<![A-Za-z])\s+", "", flat).replace("\\%", "%")
    flat = re.sub(r"([_^])\{(.)\}", r"\1\2", flat)
    words = flat.replace(" ", "")
    return words.casefold() if words.isalpha() and (len(words) > 2 or words.casefold() == "no") else flat


def number(text: str) -> Decimal | None:
    r"""The exact value of a plain decimal number, with or without thousands separators; else None.

    >>> number("1,234.50"), number("1,23"), number("50%"), number("1e5")
    (Decimal('1234.50'), None, None, None)
    """
    text = clean(text).removeprefix(r"\dollar").strip()
    return Decimal(text.replace(",", "")) if _PLAIN_NUMBER.fullmatch(text) else None


def quickly(truth: str, answer: str) -> bool | None:
    """What spelling and plain numbers decide; None if it takes mathematics."""
    if (text := plain(truth)) and text == plain(answer):
        return True
    values = number(truth), number(answer)
    if None in values:
        return None
    return values[0] == values[1] or (None if "," in truth + answer else False)  # 1,234 may be a list

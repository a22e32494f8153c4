"""Equality of answers: a table of pairs, both ways round; peers; what is read stays whole."""

from __future__ import annotations

import itertools
import math
import random
import runpy
import string
import time
import timeit

import pytest

from ascend_rl.recipe.math_equal import clean, equal, lex, value
from ascend_rl.recipe.math_text import number, plain, quickly


@pytest.fixture(scope="module")
def pairs(root) -> list[tuple[bool, str, str]]:
    lines = (root / "tests/samples/math_answers.txt").read_text().splitlines()[1:]
    return [(line[0] == "=", *line[2:].split(" ~ ")) for line in lines]


def test_pairs_are_equal_or_different_whichever_is_the_truth(pairs):
    assert len(pairs) > 500 and 100 < sum(not right for right, *_ in pairs)
    wrong = [
        (one, other)
        for right, *both in pairs
        for one, other in (both, both[::-1])
        if equal(one, other) != right
    ]
    assert not wrong


def test_every_answer_equals_itself_and_no_answer_of_another_value(pairs):
    """Of all pairs of plain numbers in the table, exactly the equal ones are paid."""
    answers = dict.fromkeys(answer for _, *both in pairs for answer in both)
    assert all(equal(answer, answer) for answer in answers)
    plain_ones = (answer for answer in answers if "," not in answer)  # 1,234 may be a list
    numbers = {answer: value for answer in plain_ones if (value := number(answer)) is not None}
    assert len(numbers) > 40
    for one, other in itertools.combinations(numbers, 2):
        assert equal(one, other) == (numbers[one] == numbers[other]), (one, other)


def test_decoration_does_not_matter(pairs):
    around = (
        "$%s$",
        r"\(%s\)",
        r"\left(%s\right)",
        "**%s**",
        r"\boxed{%s}",
        "%s.",
        r"\displaystyle %s",
        r"{%s}",
        "`%s`",
    )
    for _, answer, _ in pairs[:120]:
        if answer[0] in "(|" or "," in answer or "=" in answer or "<" in answer or "(C)" in answer:
            continue
        for form in around:
            assert equal(answer, form % answer), form % answer


@pytest.mark.parametrize("seed", range(3))
def test_numbers_and_fractions_against_exact_arithmetic(seed):
    """Random rationals in every spelling: equal exactly where the fractions are."""
    from fractions import Fraction

    rng = random.Random(seed)

    def spellings(x: Fraction) -> list[str]:
        p, q = x.numerator, x.denominator
        found = [f"{p}/{q}", rf"\frac{{{p}}}{{{q}}}", rf"\dfrac{{{-p}}}{{{-q}}}", f"{p * 3}/{q * 3}"]
        if p > q > 1:
            found += [f"{p // q} {p % q}/{q}", rf"{p // q}\frac{{{p % q}}}{{{q}}}"]
        if 10**6 % q == 0:
            found += [f"{p * (10**6 // q)}e-6", rf"{p * (10**6 // q)} \times 10^{{-6}}", f"{float(x):.6f}"]
            found += [rf"{p * 100 * (10**6 // q)}\times 10^{{-6}}\%"]
        return found

    values = [
        Fraction(rng.randint(-60, 60), rng.choice([1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 25, 90]))
        for _ in range(12)
    ]
    for one, other in itertools.product(values, values):
        left, right = rng.choice(spellings(one)), rng.choice(spellings(other))
        hundredth = "%" in left + right and one in (other * 100, other / 100)
        assert equal(left, right) == (one == other or hundredth), (left, right)


def test_an_approximation_is_paid_for_an_irrational_number_only():
    for exact, value_of in ((r"\sqrt{2}", 2**0.5), (r"\frac{\pi}{3}", math.pi / 3), ("e^2", math.e**2)):
        for digits in range(1, 9):
            assert equal(exact, f"{value_of:.{digits}f}") == (digits >= 6)
            assert not equal(exact, f"{value_of + 2 * 10**-digits:.{digits}f}")
    assert not equal(r"\frac{1}{7}", "0.142857") and not equal(r"10^{-7}\pi", "0.000000")


def test_powers_differ_however_large_or_small_they_are():
    for power in (90, 1000, 5000):
        assert equal(rf"\frac{{1}}{{2^{{{power}}}}}", rf"2^{{-{power}}}")
        assert not equal(rf"\frac{{1}}{{2^{{{power}}}}}", rf"\frac{{1}}{{2^{{{power + 1}}}}}")
        assert not equal(rf"10^{{{power}}}", rf"10^{{{power}}}+1")


def test_text_is_code_of_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in (
        "__import__('os').system('touch pwned')",
        "exec('1')",
        "().__class__",
        "lambda: 0",
        "import os",
    ):
        for answer in (
            code,
            rf"\begin{{pmatrix}}{code}\\2\end{{pmatrix}}",
            rf"\sum_{{i=1}}^{{{code}}} i",
            rf"\frac{{{code}}}2",
        ):
            assert not equal("5", answer) and not equal(r"\begin{pmatrix}1\\2\end{pmatrix}", answer)
    assert not list(tmp_path.iterdir())


def test_reading_never_fails_in_another_way():
    """Random pieces of LaTeX: a structure or a word, and equal to itself."""
    pieces = [
        *string.ascii_letters,
        *string.punctuation,
        *string.digits,
        " ",
        "\\frac",
        "\\sqrt",
        "{",
        "}",
        "\\text{",
        "\\pm",
    ]
    pieces += [
        "\\left",
        "\\{",
        "\\}",
        "\\cup",
        "\\infty",
        "or",
        "and",
        "\\ldots",
        "\\%",
        "^\\circ",
        "\\begin{pmatrix}",
        "&",
    ]
    rng = random.Random(1)
    for _ in range(500):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 12)))
        try:
            value(lex(clean(text), True))
        except (
            OverflowError,
            RecursionError,
            TypeError,
            ValueError,
            AttributeError,
            ZeroDivisionError,
        ) as error:
            raise AssertionError(text) from error
        assert equal("271828", text) is False


def test_spelling_takes_linear_time():
    """What the parent process does with an answer, and with truths, which have no limit of 500 characters."""
    kinds = [
        *string.printable,
        "1,",
        "1 ",
        "\\text{",
        "{,}",
        "\\,",
        "0.\\overline{",
        "\u00bd",
        "^\\circ",
        "th",
        "x10^",
        "(mod ",
    ]

    def cpu_s(text: str) -> float:
        return min(timeit.repeat(lambda: quickly("1,2", text), timer=time.process_time, repeat=5, number=1))

    for unit in kinds:
        for around in ("", "1"):
            short, long = (cpu_s(around + unit * (n // len(unit)) + around) for n in (500, 4000))
            assert long < 24 * max(short, 1e-3), unit  # 8 is linear, 64 quadratic


def test_white_space_between_digits_counts():
    assert plain("1 3/4") != plain("13/4") and plain("1 2") != plain("12") and number("1 000") == 1000
    assert plain(r"\frac{1}{23}") != plain(r"\frac{12}{3}")


def test_no_peer_is_right_where_this_is_not(root, pairs):
    """math-verify and verl's math_dapo, on the same pairs."""
    from math_verify import parse, verify

    of_dapo = runpy.run_path(root / "frameworks/verl/verl/utils/reward_score/math_dapo.py")
    normalize_final_answer = of_dapo["normalize_final_answer"]

    def by_math_verify(truth: str, answer: str) -> bool:
        sides = [parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer)]
        return all(sides) and verify(*sides, timeout_seconds=None)

    def by_dapo(truth: str, answer: str) -> bool:
        return normalize_final_answer(truth) == normalize_final_answer(answer)

    some = pairs[::10]
    wrong = {
        peer: sum(peer(*both) != right for right, *both in some) for peer in (by_math_verify, by_dapo, equal)
    }
    paid = {peer: sum(peer(*both) and not right for right, *both in some) for peer in wrong}
    assert wrong[equal] == paid[equal] == 0 < min(wrong[by_math_verify], wrong[by_dapo], paid[by_math_verify])
